"""The neurons that workloads share."""

from typing import Any

import brainpy.state as bp
import brainstate
import jax.numpy as jnp
import saiunit as u

__all__ = ['alif', 'lif', 'own']


def own(size: int, low: float, high: float) -> Any:
    """Numbers between two others, one for each neuron: no two neurons are alike."""
    return jnp.linspace(low, high, size)


ONE_MILLIVOLT = dict(V_th=1.0 * u.mV, V_reset=0 * u.mV, V_rest=0 * u.mV, R=1 * u.ohm)


def _voltages(shape: Any) -> Any:
    """Some neurons are about to spike."""
    return brainstate.random.uniform(0.0, 1.2, shape) * u.mV


def lif(size: int, tau: u.Quantity = 20 * u.ms) -> bp.LIF:
    """LIF neurons with a threshold of 1 mV."""
    return bp.LIF(size, tau=tau, V_initializer=_voltages, **ONE_MILLIVOLT)


def alif(size: int, tau: u.Quantity, tau_a: u.Quantity) -> bp.ALIF:
    """The same with a threshold that adapts."""
    return bp.ALIF(
        size, tau=tau, tau_a=tau_a, beta=0.2 * u.mV, V_initializer=_voltages, **ONE_MILLIVOLT
    )
