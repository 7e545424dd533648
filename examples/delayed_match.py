"""Delayed match-to-sample: a recurrent spiking network learns online to compare over a delay.

A trial shows a sample, A or B; then comes silence; then a test, A or B; then a go signal, during
which the network must say whether sample and test were the same. None of these inputs tells the
answer by itself, so the sample has to be remembered while nothing is shown.

    python examples/delayed_match.py --plot delayed_match.png
"""

from pathlib import Path

import brainpy.state as bp
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from common import make_learner, make_optimizer, parse_arguments, plot_frame, plot_raster, train
from jax.flatten_util import ravel_pytree

import braintrace_fast as braintrace

# The phases of a trial, with their durations in steps of 1 ms.
PHASES = {'sample': 20, 'delay': 100, 'test': 20, 'response': 20}
BEGINS = dict(zip(PHASES, np.cumsum([0, *PHASES.values()])[:-1], strict=True))
NUM_STEPS = sum(PHASES.values())
RESPONSE = jnp.arange(NUM_STEPS) >= BEGINS['response']
# What is shown in a phase: each has a population of input channels, except silence.
A, B, GO, SILENCE = 0, 1, 2, -1
CHANNELS = 8
NUM_INPUTS = 3 * CHANNELS
NUM_NEURONS = 64


def make_trials(key: jax.Array, num_trials: int) -> tuple[jax.Array, jax.Array]:
    """Input spikes of shape (step, trial, channel), and 1 for a match or 0 for none."""
    stimulus_key, spike_key = jax.random.split(key)
    sample, test = jax.random.choice(stimulus_key, jnp.array([A, B]), (2, num_trials))
    phases = [sample, jnp.full_like(sample, SILENCE), test, jnp.full_like(sample, GO)]
    shown = jnp.repeat(jnp.stack(phases), np.array([*PHASES.values()]), axis=0)  # (step, trial)
    population = jnp.repeat(jnp.array([A, B, GO]), CHANNELS)
    # Spikes per step of 1 ms: 200 Hz where something is shown, and 5 Hz of noise elsewhere.
    rate = jnp.where(shown[..., None] == population, 0.2, 0.005)
    spikes = jax.random.bernoulli(spike_key, rate).astype(jnp.float32)
    return spikes, (sample == test).astype(jnp.int32)


def initial_weights() -> jax.Array:
    """Strong inputs, and recurrence too weak to keep the network busy by itself."""
    scale = jnp.where(jnp.arange(NUM_INPUTS + NUM_NEURONS) < NUM_INPUTS, 0.2, 0.05)
    return brainstate.random.normal(size=(len(scale), NUM_NEURONS)) * scale[:, None]


class SpikingNetwork(brainstate.nn.Module):
    """LIF neurons that drive each other by exponential synapses, and a readout."""

    def __init__(self):
        super().__init__()
        self.neurons = bp.LIF(NUM_NEURONS, tau=10.0 * u.ms)
        # The layer comes from braintrace_fast: that is what marks its weights for tracing.
        self.synapses = bp.AlignPostProj(
            comm=braintrace.nn.Linear(
                NUM_INPUTS + NUM_NEURONS, NUM_NEURONS, initial_weights() * u.mS, b_init=None
            ),
            syn=bp.Expon(NUM_NEURONS, tau=50.0 * u.ms),
            out=bp.CUBA(),
            post=self.neurons,
        )
        # The readout sees smoothed spikes, so that its answer does not flicker with each of them.
        self.filter = bp.Expon(
            NUM_NEURONS, tau=20.0 * u.ms, g_initializer=braintools.init.Constant(0.0)
        )
        self.readout = braintrace.nn.Linear(NUM_NEURONS, 2)

    def update(self, x):
        """One step of 1 ms, from input spikes to the logits of (no match, match)."""
        self.synapses(jnp.concatenate([x, self.neurons.get_spike()], axis=-1))
        return self.readout(self.filter(self.neurons(0.0 * u.mA)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of one step, averaged over the batch."""
    return braintools.metric.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """How many trials are answered rightly by the logits summed over the response."""
    answers = jnp.sum(logits[BEGINS['response'] :], axis=0).argmax(axis=-1)
    return jnp.mean(answers == labels)


def online_gradient(learner, spikes: jax.Array, labels: jax.Array):
    """Gradient, loss and logits of a batch, forward in time: the past lives in the traces."""

    def step(x):
        logits = learner(x)
        return cross_entropy(logits, labels), logits

    # A trial starts from a fresh state; this resets the learner's traces as well.
    brainstate.nn.reset_all_states(learner, batch_size=len(labels))
    return learner.etrace_grad(
        spikes, step_fn=step, mask=RESPONSE, has_aux=True, return_value=True, loss_output='scalar'
    )


def bptt_gradient(model, weights, spikes: jax.Array, labels: jax.Array):
    """Gradient of the same loss backward through time, by reverse mode over the whole trial."""

    def loss():
        logits, _ = run(model, spikes)
        losses = jax.vmap(cross_entropy, in_axes=(0, None))(logits, labels)
        return jnp.sum(losses * RESPONSE) / jnp.sum(RESPONSE)

    return brainstate.transform.grad(loss, weights)()


def run(model, spikes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits and the neurons' spikes over a batch of trials, without learning."""
    brainstate.nn.reset_all_states(model, batch_size=spikes.shape[1])
    return brainstate.transform.for_loop(lambda x: (model(x), model.neurons.get_spike()), spikes)


def print_comparison(online, bptt) -> None:
    """Print direction and size of the online gradient relative to BPTT's, weight by weight."""
    print(f'  {"weight":24} {"cosine":>8} {"norm ratio":>12}')
    for path in online:
        ours, exact = ravel_pytree(online[path])[0], ravel_pytree(bptt[path])[0]
        norms = jnp.linalg.norm(ours), jnp.linalg.norm(exact)
        cosine = jnp.vdot(ours, exact) / (norms[0] * norms[1])
        print(f'  {".".join(map(str, path)):24} {cosine:8.3f} {norms[0] / norms[1]:12.3f}')
    print()


def plot(path: Path, accuracies: np.ndarray, inputs, spikes, logits, label) -> None:
    """Draw the learning curve and one trial: input spikes, network spikes, answer."""
    title = f'One trial after training: {"match" if label else "no match"}'
    figure, right = plot_frame(title, accuracies, chance=0.5)
    top, middle, bottom = rows = right.subplots(3, 1, sharex=True, height_ratios=[3, 6, 2])
    plot_raster(top, inputs, np.repeat(['C0', 'C1', 'C2'], CHANNELS))
    plot_raster(middle, spikes[:, np.argsort(spikes.sum(axis=0))])
    bottom.plot(jax.nn.softmax(logits)[:, 1], color='C3')
    bottom.axhline(0.5, color='0.4', linestyle='--', linewidth=1)
    top.set(ylabel='input', yticks=CHANNELS * np.arange(0.5, 3), yticklabels=['A', 'B', 'go'])
    middle.set(ylabel='neuron, by activity')
    bottom.set(ylabel='P(match)', xlabel='time (ms)', ylim=(-0.05, 1.05))
    shades = {'sample': '0.92', 'delay': 'white', 'test': '0.92', 'response': '#e3f1e3'}
    for phase, begin in BEGINS.items():
        end = begin + PHASES[phase]
        top.text((begin + end) / 2, 3 * CHANNELS + 0.5, phase, ha='center')
        for axes in rows:
            axes.axvspan(begin, end, color=shades[phase], zorder=0)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, and show what was learned."""
    args = parse_arguments(__doc__, updates=50, learning_rate=5e-3, decay=0.98)
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(args.seed)
    key = jax.random.key(args.seed)

    model = SpikingNetwork()
    learner = make_learner(model, args, jnp.zeros((args.batch_size, NUM_INPUTS)))
    optimizer = make_optimizer(learner, args)

    @brainstate.transform.jit
    def update(key):
        inputs, labels = make_trials(key, args.batch_size)
        grads, loss, logits = online_gradient(learner, inputs, labels)
        optimizer.update(grads)
        return loss, accuracy(logits, labels)

    @brainstate.transform.jit
    def test(key):
        inputs, labels = make_trials(key, args.batch_size)
        logits, spikes = run(model, inputs)
        return accuracy(logits, labels), (inputs, spikes, logits, labels)

    @brainstate.transform.jit
    def gradients(key):
        inputs, labels = make_trials(key, args.batch_size)
        online, _, _ = online_gradient(learner, inputs, labels)
        return online, bptt_gradient(model, learner.param_states, inputs, labels)

    print('Online gradient against BPTT, on one batch before training\n')
    print_comparison(*gradients(key))
    accuracies = train(update, test, key, args, chance=0.5)
    if args.plot:
        _, batch = test(key)
        inputs, spikes, logits, labels = map(np.asarray, batch)
        plot(args.plot, accuracies, inputs[:, 0], spikes[:, 0], logits[:, 0], labels[0])
        print(f'Wrote {args.plot}')


if __name__ == '__main__':
    main()
