"""Moving bars: a convolutional spiking network learns online in which direction bars move.

A bar crosses a square of pixels, wrapped around its edges, and every pixel reports when its
brightness changes, as those of an event camera do, with some noise. Events at one time show the two
edges of the bar, which look the same. So they say how the bar lies, but not where it goes: that
takes memory.

The trace of a convolution has a copy of the kernel per example and position. Trials are independent
here, so the learner carries none: `trace='fresh'`.

    python examples/moving_bars.py --plot moving_bars.png
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
    train,
)

import braintrace_fast as braintrace

SIDE = 16
NUM_STEPS = 24  # of 1 ms
STEPS_PER_PIXEL = 2
WIDTH = 3
NOISE = 0.02
DIRECTIONS = ('right', 'left', 'down', 'up')
CHANNELS = (8, 16)


def make_trials(key: jax.Array, num_trials: int) -> tuple[jax.Array, jax.Array]:
    """Events of shape (step, trial, row, column, 1), and the direction of each trial."""
    label_key, place_key, noise_key = jax.random.split(key, 3)
    labels = jax.random.randint(label_key, (num_trials,), 0, len(DIRECTIONS))
    start = jax.random.randint(place_key, (num_trials,), 0, SIDE)
    # One step more than is shown: events are differences.
    moved = jnp.arange(NUM_STEPS + 1)[:, None] // STEPS_PER_PIXEL
    first = start + jnp.where(labels % 2 == 0, moved, -moved)
    along = (jnp.arange(SIDE) - first[..., None]) % SIDE < WIDTH  # (step, trial, pixel)
    lies = jnp.where((labels < 2)[:, None, None], along[..., None, :], along[..., :, None])
    bright = jnp.broadcast_to(lies, (*first.shape, SIDE, SIDE))[..., None]
    events = bright[1:] ^ bright[:-1]
    return (events | jax.random.bernoulli(noise_key, NOISE, events.shape)) * 1.0, labels


class Layer(brainstate.nn.Module):
    """LIF neurons in a square, driven through a convolution of the spikes of the layer below."""

    def __init__(self, in_size: tuple[int, ...], channels: int, stride: int):
        super().__init__()
        inputs = 5 * 5 * in_size[-1]
        weights = braintools.init.Normal(0.0 * u.mA, 50.0 / np.sqrt(inputs) * u.mA)
        self.conv = braintrace.nn.Conv2d(in_size, channels, 5, stride=stride, w_init=weights)
        self.neurons = bp.LIF(self.conv.out_size, tau=10.0 * u.ms)

    def update(self, spikes):
        """One step of 1 ms, from spikes to spikes."""
        return self.neurons(self.conv(spikes))


class Classifier(brainstate.nn.Module):
    """Two convolutional layers under a leaky readout."""

    def __init__(self):
        super().__init__()
        # A list, so that the learner sees states of different layers as different groups.
        first = Layer((SIDE, SIDE, 1), CHANNELS[0], stride=1)
        self.layers = [first, Layer(first.conv.out_size, CHANNELS[1], stride=2)]
        size = int(np.prod(self.layers[-1].conv.out_size))
        self.readout = braintrace.nn.LeakyRateReadout(size, len(DIRECTIONS), tau=20.0 * u.ms)

    def update(self, spikes):
        """One step of 1 ms, from events to the logits of the directions."""
        for layer in self.layers:
            spikes = layer(spikes)
        return self.readout(spikes.reshape(len(spikes), -1))


def plot(path: Path, accuracies: np.ndarray, images: np.ndarray, logits, label: int) -> None:
    """Draw the learning curve and one trial: what is seen, what neurons do, and the answer."""
    figure, right = plot_frame(
        f'One trial after training: {DIRECTIONS[label]} (red)', accuracies, 1 / len(DIRECTIONS)
    )
    top, bottom = right.subfigures(2, 1, height_ratios=[3, 2])
    shown = np.linspace(0, NUM_STEPS - 1, 5).astype(int)
    for row, (axes, name) in enumerate(
        zip(top.subplots(2, len(shown)), ('events', 'layer 1'), strict=True)
    ):
        for axis, step in zip(axes, shown, strict=True):
            axis.imshow(images[row][step], cmap='gray_r', vmin=0)
            axis.set(xticks=[], yticks=[], title=f'{step} ms' if row == 0 else None)
        axes[0].set(ylabel=name)
    axis = bottom.subplots()
    for i, probability in enumerate(jax.nn.softmax(logits).T):
        axis.plot(probability, color='C3' if i == label else '0.7')
    axis.set(ylabel='P(direction)', xlabel='time (ms)', ylim=(-0.05, 1.05))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, and show what was learned."""
    args = parse_arguments(__doc__, updates=150, learning_rate=4e-3, decay=0.9)
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(args.seed)
    model = Classifier()
    learner = make_learner(model, args, jnp.zeros((args.batch_size, SIDE, SIDE, 1)))
    optimizer = make_optimizer(learner, args)

    @brainstate.transform.jit
    def update(key):
        events, labels = make_trials(key, args.batch_size)
        brainstate.nn.reset_all_states(model, batch_size=args.batch_size)
        loss, logits = learn_labels(learner, optimizer, events, labels, trace='fresh')
        return loss, accuracy_of(logits, labels)

    @brainstate.transform.jit
    def test(key):
        events, labels = make_trials(key, args.batch_size)
        brainstate.nn.reset_all_states(model, batch_size=args.batch_size)

        def step(x):
            return model(x), model.layers[0].neurons.get_spike()

        logits, spikes = brainstate.transform.for_loop(step, events)
        return accuracy_of(logits, labels), (labels, logits, [events, spikes])

    accuracies = train(update, test, jax.random.key(args.seed), args, 1 / len(DIRECTIONS))
    if args.plot:
        _, (labels, logits, layers) = test(jax.random.key(args.seed))
        images = [np.asarray(layer[:, 0]).sum(-1) for layer in layers]
        plot(args.plot, accuracies, images, logits[:, 0], int(labels[0]))
        print(f'Wrote {args.plot}')


if __name__ == '__main__':
    main()
