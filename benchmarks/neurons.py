"""The neurons that workloads share."""

import brainpy.state as bp
import brainstate
import saiunit as u

__all__ = ['lif']


def lif(size: int, tau: u.Quantity = 20 * u.ms) -> bp.LIF:
    """LIF neurons with a threshold of 1 mV, of which some are about to spike."""
    return bp.LIF(
        size,
        tau=tau,
        V_th=1.0 * u.mV,
        V_reset=0 * u.mV,
        V_rest=0 * u.mV,
        R=1 * u.ohm,
        V_initializer=lambda shape: brainstate.random.uniform(0.0, 1.2, shape) * u.mV,
    )
