"""The models that benchmarks run, in the source of either library."""

from collections.abc import Callable
from typing import Any

import brainpy.state as bp
import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

__all__ = ['RecurrentSpikes', 'sequences', 'step_loss']


SCALES = {1: 600.0, 2: 12.0}
"""Variances of the weights at which a few percent of the neurons spike in a step."""


class RecurrentSpikes(brainstate.nn.Module):
    """One layer of recurrent LIF neurons with a plain readout.

    Parameters
    ----------
    library : module
        ``braintrace_fast``, or a library with its names.
    states : {1, 2}
        1 for currents that act at once, 2 for exponential synapses.
    inputs, size, outputs : int
        Sizes.
    """

    def __init__(
        self, library: Any, states: int, inputs: int = 128, size: int = 512, outputs: int = 10
    ) -> None:
        super().__init__()
        if states not in SCALES:
            raise ValueError(f'RecurrentSpikes has 1 or 2 states, not {states}.')
        brainstate.random.seed(0)
        self.num_states = states
        self.neurons = bp.LIF(
            size,
            tau=20 * u.ms,
            V_th=1.0 * u.mV,
            V_reset=0 * u.mV,
            V_rest=0 * u.mV,
            R=1 * u.ohm,
            V_initializer=lambda shape: brainstate.random.uniform(0.0, 1.0, shape) * u.mV,
        )
        spread = (SCALES[states] / (inputs + size)) ** 0.5
        linear = library.nn.Linear(
            inputs + size,
            size,
            w_init=lambda shape: brainstate.random.normal(0.0, spread, shape) * u.mA,
            b_init=None,
        )
        if states == 1:
            self.current = linear
        else:
            self.synapse = bp.AlignPostProj(
                comm=linear,
                syn=bp.Expon(
                    size, tau=10 * u.ms, g_initializer=lambda shape: u.math.zeros(shape) * u.mA
                ),
                out=bp.CUBA(scale=1.0),
                post=self.neurons,
            )
        self.readout = brainstate.nn.Linear(size, outputs)

    def update(self, x: jax.Array) -> jax.Array:
        """One step: spikes in, logits out."""
        seen = u.math.concatenate([x, self.neurons.get_spike()], -1)
        if self.num_states == 1:
            spikes = self.neurons(self.current(seen))
        else:
            self.synapse(seen)
            spikes = self.neurons(0 * u.mA)
        return self.readout(spikes)


def sequences(
    steps: int, batch: int, inputs: int = 128, outputs: int = 10
) -> tuple[jax.Array, jax.Array]:
    """Random spikes, and a random class for every step."""
    spikes, classes = jax.random.split(jax.random.key(0))
    xs = (jax.random.uniform(spikes, (steps, batch, inputs)) < 0.2).astype(
        brainstate.environ.dftype()
    )
    return xs, jax.random.randint(classes, (steps, batch), 0, outputs)


def step_loss(run: Callable[[jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The loss of one step of a model, or of a learner of it."""

    def loss(x: jax.Array, target: jax.Array) -> jax.Array:
        logits = run(x)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], -1)
        return -chosen.mean()

    return loss
