"""Spike-train classification: two stacked spiking layers learn online to tell patterns in time.

Each class is a pattern of spike times, drawn once. A trial is the pattern of its class with every
spike moved at random by a few milliseconds. All classes have the same number of spikes in every
channel, so the classes differ in timing alone.

    python examples/spike_classifier.py --plot spike_classifier.png
"""

from pathlib import Path

import brainpy.state as bp
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from common import (
    accuracy_of,
    learn_labels,
    make_learner,
    make_optimizer,
    parse_arguments,
    plot_frame,
    plot_raster,
    train,
)

import braintrace_fast as braintrace

NUM_CLASSES = 8
NUM_CHANNELS = 40
SPIKES_PER_CHANNEL = 2
NUM_STEPS = 60  # of 1 ms
JITTER = 4.0
LAYER_SIZES = (64, 64)


def make_patterns(key: jax.Array) -> jax.Array:
    """The spike times that define the classes: (class, channel, spike)."""
    shape = (NUM_CLASSES, NUM_CHANNELS, SPIKES_PER_CHANNEL)
    return jax.random.uniform(key, shape, minval=0, maxval=NUM_STEPS)


def make_trials(
    key: jax.Array, patterns: jax.Array, num_trials: int
) -> tuple[jax.Array, jax.Array]:
    """Spikes of shape (step, trial, channel), and the class of each trial."""
    label_key, jitter_key = jax.random.split(key)
    labels = jax.random.randint(label_key, (num_trials,), 0, NUM_CLASSES)
    times = patterns[labels]
    times = times + JITTER * jax.random.normal(jitter_key, times.shape)
    # Wrapped around the ends, so that jitter changes no spike count.
    steps = jnp.floor(times).astype(jnp.int32) % NUM_STEPS
    spikes = jax.nn.one_hot(steps, NUM_STEPS).sum(axis=-2)  # (trial, channel, step)
    return jnp.moveaxis(spikes, -1, 0), labels


class Layer(brainstate.nn.Module):
    """LIF neurons driven by the spikes of the layer below through exponential synapses."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.neurons = bp.LIF(num_out, tau=10.0 * u.ms)
        weights = braintools.init.Normal(0.0 * u.mS, 4.0 / np.sqrt(num_in) * u.mS)
        self.synapses = bp.AlignPostProj(
            comm=braintrace.nn.Linear(num_in, num_out, weights, b_init=None),
            syn=bp.Expon(num_out, tau=5.0 * u.ms),
            out=bp.CUBA(),
            post=self.neurons,
        )

    def update(self, spikes):
        """One step of 1 ms, from spikes to spikes."""
        self.synapses(spikes)
        return self.neurons(0.0 * u.mA)


class Classifier(brainstate.nn.Module):
    """A stack of spiking layers under a leaky readout."""

    def __init__(self):
        super().__init__()
        sizes = (NUM_CHANNELS, *LAYER_SIZES)
        # A list, so that the learner sees states of different layers as different groups.
        self.layers = [Layer(*pair) for pair in zip(sizes[:-1], sizes[1:], strict=True)]
        self.readout = braintrace.nn.LeakyRateReadout(sizes[-1], NUM_CLASSES, tau=20.0 * u.ms)

    def update(self, spikes):
        """One step of 1 ms, from input spikes to the logits of the classes."""
        for layer in self.layers:
            spikes = layer(spikes)
        return self.readout(spikes)


def plot(path: Path, accuracies: np.ndarray, rasters, logits, label) -> None:
    """Draw the learning curve and one trial: spikes of input and layers, and the answer."""
    figure, right = plot_frame(
        f'One trial after training: class {label} (red)', accuracies, chance=1 / NUM_CLASSES
    )
    *rows, bottom = right.subplots(len(rasters) + 1, 1, sharex=True)
    names = ['input', *(f'layer {i + 1}' for i in range(len(LAYER_SIZES)))]
    for axes, raster, name in zip(rows, rasters, names, strict=True):
        plot_raster(axes, raster)
        axes.set(ylabel=name)
    for i, probability in enumerate(jax.nn.softmax(logits).T):
        bottom.plot(probability, color='C3' if i == label else '0.7', label=f'class {i}')
    bottom.set(ylabel='P(class)', xlabel='time (ms)', ylim=(-0.05, 1.05))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, and show what was learned."""
    args = parse_arguments(__doc__, updates=100, learning_rate=2e-3, decay=0.9)
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(args.seed)
    key, pattern_key = jax.random.split(jax.random.key(args.seed))
    patterns = make_patterns(pattern_key)

    model = Classifier()
    learner = make_learner(model, args, jnp.zeros((args.batch_size, NUM_CHANNELS)))
    optimizer = make_optimizer(learner, args)

    @brainstate.transform.jit
    def update(key):
        spikes, labels = make_trials(key, patterns, args.batch_size)
        # A trial starts from a fresh state; this resets the learner's traces as well.
        brainstate.nn.reset_all_states(learner, batch_size=args.batch_size)
        loss, logits = learn_labels(learner, optimizer, spikes, labels)
        return loss, accuracy_of(logits, labels)

    @brainstate.transform.jit
    def test(key):
        spikes, labels = make_trials(key, patterns, args.batch_size)
        brainstate.nn.reset_all_states(model, batch_size=args.batch_size)

        def step(x):
            logits = model(x)
            return logits, [layer.neurons.get_spike() for layer in model.layers]

        logits, layers = brainstate.transform.for_loop(step, spikes)
        return accuracy_of(logits, labels), (labels, logits, [spikes, *layers])

    accuracies = train(update, test, key, args, chance=1 / NUM_CLASSES)
    if args.plot:
        _, (labels, logits, rasters) = test(key)
        first_trial = [np.asarray(raster[:, 0]) for raster in rasters]
        plot(args.plot, accuracies, first_trial, logits[:, 0], labels[0])
        print(f'Wrote {args.plot}')


if __name__ == '__main__':
    main()
