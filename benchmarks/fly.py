"""A recurrent network in the shape of a fly's brain: sparse, with a trained low-rank correction."""

from typing import Any

import brainevent
import brainpy.state as bp
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .neurons import lif

__all__ = ['FlyBrain', 'random_connectome']


def random_connectome(size: int, density: float, scale: float) -> brainevent.CSR:
    """As many synapses as the density says, between neurons that are drawn at random."""
    rng = np.random.default_rng(0)
    number = round(size * size * density)
    sources, targets = np.sort(rng.integers(0, size, number)), rng.integers(0, size, number)
    weights = scale / np.sqrt(size * density) * rng.normal(size=number)
    starts = np.searchsorted(sources, np.arange(size + 1))
    data = jnp.asarray(weights, brainstate.environ.dftype())
    return brainevent.CSR(data, targets, starts, shape=(size, size))


class FlyBrain(brainstate.nn.Module):
    """LIF neurons with decaying currents; inputs are spikes of the first neurons.

    With ``dense``, the same network as a matrix with a mask, which is how one does without sparse
    weights.
    """

    def __init__(
        self,
        library: Any,
        inputs: int,
        size: int,
        outputs: int,
        rate: float,
        density: float,
        rank: int,
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.dense = dense
        matrix = random_connectome(size, density, scale=1.2 / rate**0.5)
        if dense:
            whole = matrix.todense()
            mask = whole != 0
            self.connectome = library.nn.Linear(size, size, whole, b_init=None, w_mask=mask)
        else:
            self.connectome = library.nn.SparseLinear(matrix)
        self.correction = library.nn.LoRA(size, rank, size)
        self.current = bp.Expon(size, tau=5 * u.ms, g_initializer=lambda shape: jnp.zeros(shape))
        self.neurons = lif(size, tau=10 * u.ms)
        self.readout = brainstate.nn.Linear(size, outputs)

    def update(self, x: jax.Array) -> jax.Array:
        """One step: spikes of the senses in, logits out."""
        spikes = self.neurons.get_spike()
        senses = jnp.maximum(spikes[..., : x.shape[-1]], x)
        spikes = jnp.concatenate([senses, spikes[..., x.shape[-1] :]], -1)
        recurrent = self.connectome(spikes if self.dense else brainevent.BinaryArray(spikes))
        return self.readout(self.neurons(self.current(recurrent + self.correction(spikes)) * u.mA))
