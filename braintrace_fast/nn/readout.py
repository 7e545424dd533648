"""Readouts on the ``matmul`` op."""

from collections.abc import Callable
from typing import Any

import brainstate
import saiunit as u
from brainstate.nn import init
from brainstate.typing import Size

from ..op import matmul
from .factors import as_factor
from .initializers import KAIMING_NORMAL, ZERO

__all__ = ['LeakyRateReadout']


class LeakyRateReadout(brainstate.nn.Module):
    """A leaky integrator of weighted inputs: ``r = exp(-dt / tau) r + x W``.

    The time step ``dt`` is that of ``brainstate.environ`` when the readout is made.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        The sizes of the input and the output.
    tau : ArrayLike
        The time constant, in the unit of ``dt``. Default 5 ms.
    w_init, r_init : Callable
        Make the weight (Kaiming normal) and the state (zeros).
    name : str, optional
        The name of the module.

    Raises
    ------
    ValueError
        If ``dt`` is not set.

    Examples
    --------
    >>> import brainstate
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     readout = braintrace.nn.LeakyRateReadout(3, 2, tau=5.0 * u.ms)
    >>> readout.init_state(batch_size=4)
    >>> readout(jnp.ones((4, 3))).shape
    (4, 2)
    """

    in_size: Any
    out_size: Any
    r: brainstate.HiddenState

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Any = 5.0 * u.ms,
        w_init: Callable[..., Any] = KAIMING_NORMAL,
        r_init: Callable[..., Any] = ZERO,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)  # type: ignore[call-arg]
        self.in_size = in_size
        self.out_size = out_size
        self.tau = init.param(tau, self.out_size)
        self.decay = u.math.exp(-u.maybe_decimal(_time_step() / self.tau))
        self.r_init = r_init
        self.W = brainstate.ParamState(init.param(w_init, (self.in_size[-1], self.out_size[-1])))

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Make the state."""
        self.r = brainstate.HiddenState(init.param(self.r_init, self.out_size, batch_size))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Give the state its initial value again."""
        self.r.value = init.param(self.r_init, self.out_size, batch_size)

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``r``."""
        r = self.r.value
        self.r.value = as_factor(self.decay, r) * r + matmul(x, self.W.value)
        return self.r.value


def _time_step() -> Any:
    dt = brainstate.environ.get('dt', default=None)
    if dt is None:
        raise ValueError(
            'LeakyRateReadout: the time step dt is not set. Set it before making the readout, '
            'for example by brainstate.environ.set(dt=0.1 * saiunit.ms).'
        )
    return dt
