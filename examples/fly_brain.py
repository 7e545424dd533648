"""A sparse brain: a large spiking network with a fixed wiring learns online which smell it meets.

The wiring is a sparse matrix, as a connectome gives it: 8,192 neurons, of whose pairs one in a
thousand is connected; with --full as many neurons and synapses as a fly has. A smell excites some
of the sensory neurons. Trained are the synapses that exist, a correction of low rank that may
connect all neurons, and the readout of a few neurons that lead out of the brain. Neither traces nor
gradients are ever larger than the number of synapses.

    python examples/fly_brain.py --plot fly_brain.png
"""

from pathlib import Path

import brainevent
import brainpy.state as bp
import brainstate
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

NUM_STEPS = 40  # of 1 ms
NUM_SMELLS = 4
NUM_SENSORY = 400
NUM_READ = 200
RANK = 4
SIZES = {False: (8_192, 67_000), True: (138_639, 15_000_000)}
"""Neurons and synapses; by default, and in full."""


def make_trials(key: jax.Array, num_trials: int) -> tuple[jax.Array, jax.Array]:
    """Spikes of the sensory neurons, (step, trial, neuron), and the smell of each trial."""
    smell_key, spike_key = jax.random.split(key)
    smells = jax.random.randint(smell_key, (num_trials,), 0, NUM_SMELLS)
    # Smells overlap: each sensory neuron likes one of them, and responds to the next one too.
    distance = (jnp.arange(NUM_SENSORY) - smells[:, None]) % NUM_SMELLS
    rate = jnp.array([0.12, 0.06, 0.02, 0.02])[distance]
    spikes = jax.random.bernoulli(spike_key, rate, (NUM_STEPS, *rate.shape))
    return spikes.astype(jnp.float32), smells


def random_wiring(num_neurons: int, num_synapses: int, seed: int) -> brainevent.CSR:
    """Synapses between random neurons; one neuron in five inhibits, with stronger synapses."""
    rng = np.random.default_rng(seed)
    before = np.sort(rng.integers(0, num_neurons, num_synapses))
    after = rng.integers(0, num_neurons, num_synapses)
    strength = rng.lognormal(0.0, 0.5, num_synapses) * np.sqrt(num_neurons / num_synapses)
    sign = np.where(before % 5 == 0, -4.0, 1.0)
    first = np.searchsorted(before, np.arange(num_neurons + 1))
    data = jnp.asarray(3.0 * sign * strength, jnp.float32)
    return brainevent.CSR(data, after, first, shape=(num_neurons, num_neurons))


class Synapses(brainstate.nn.Module):
    """What is wired, and a correction of low rank."""

    def __init__(self, wiring: brainevent.CSR):
        super().__init__()
        num_neurons = wiring.shape[0]
        self.wired = braintrace.nn.SparseLinear(wiring)
        self.correction = braintrace.nn.LoRA(num_neurons, RANK, num_neurons)

    def update(self, spikes):
        """The conductance that the spikes of one step add."""
        conductance = self.wired(brainevent.BinaryArray(spikes)) + self.correction(spikes)
        return conductance * u.mS


class Brain(brainstate.nn.Module):
    """LIF neurons that drive each other through the synapses; some are read."""

    def __init__(self, wiring: brainevent.CSR):
        super().__init__()
        num_neurons = wiring.shape[0]
        self.neurons = bp.LIF(num_neurons, tau=10.0 * u.ms)
        self.synapses = bp.AlignPostProj(
            comm=Synapses(wiring),
            syn=bp.Expon(num_neurons, tau=5.0 * u.ms),
            out=bp.CUBA(),
            post=self.neurons,
        )
        self.readout = braintrace.nn.LeakyRateReadout(NUM_READ, NUM_SMELLS, tau=20.0 * u.ms)

    def update(self, sensed):
        """One step of 1 ms, from spikes of the senses to the logits of the smells."""
        spikes = self.neurons.get_spike()
        senses = jnp.maximum(spikes[..., :NUM_SENSORY], sensed)
        self.synapses(jnp.concatenate([senses, spikes[..., NUM_SENSORY:]], axis=-1))
        return self.readout(self.neurons(0.0 * u.mA)[..., -NUM_READ:])


def plot(path: Path, accuracies: np.ndarray, sensed, spikes, logits, smell) -> None:
    """Draw the learning curve and one trial: the senses, neurons that are read, the answer."""
    title = f'One trial after training: smell {smell} (red)'
    figure, right = plot_frame(title, accuracies, chance=1 / NUM_SMELLS)
    top, middle, bottom = right.subplots(3, 1, sharex=True)
    plot_raster(top, sensed)
    plot_raster(middle, spikes)
    for i, probability in enumerate(jax.nn.softmax(logits).T):
        bottom.plot(probability, color='C3' if i == smell else '0.7')
    top.set(ylabel='senses')
    middle.set(ylabel='neurons that are read')
    bottom.set(ylabel='P(smell)', xlabel='time (ms)', ylim=(-0.05, 1.05))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, and show what was learned."""
    full = "a brain of the size of a fly's: 139 thousand neurons, 15 million synapses"
    args = parse_arguments(
        __doc__, updates=40, learning_rate=5e-3, decay=0.9, batch_size=8, full=full
    )
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(args.seed)
    model = Brain(random_wiring(*SIZES[args.full], args.seed))
    learner = make_learner(model, args, jnp.zeros((args.batch_size, NUM_SENSORY)))
    optimizer = make_optimizer(learner, args)

    @brainstate.transform.jit
    def update(key):
        sensed, smells = make_trials(key, args.batch_size)
        # Trials have nothing to do with each other, and no trace is kept of them: that of the
        # correction would be as large as a dense matrix, per trial. So the model alone is reset.
        brainstate.nn.reset_all_states(model, batch_size=args.batch_size)
        loss, logits = learn_labels(learner, optimizer, sensed, smells, trace='fresh')
        return loss, accuracy_of(logits, smells)

    @brainstate.transform.jit
    def test(key):
        sensed, smells = make_trials(key, args.batch_size)
        brainstate.nn.reset_all_states(model, batch_size=args.batch_size)
        logits, spikes = brainstate.transform.for_loop(
            lambda x: (model(x), model.neurons.get_spike()[..., -NUM_READ:]), sensed
        )
        return accuracy_of(logits, smells), (sensed, spikes, logits, smells)

    key = jax.random.key(args.seed)
    accuracies = train(update, test, key, args, chance=1 / NUM_SMELLS)
    if args.plot:
        _, batch = test(key)
        sensed, spikes, logits, smells = map(np.asarray, batch)
        plot(args.plot, accuracies, sensed[:, 0], spikes[:, 0], logits[:, 0], smells[0])
        print(f'Wrote {args.plot}')


if __name__ == '__main__':
    main()
