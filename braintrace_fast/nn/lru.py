"""The linear recurrent unit, on the ``matmul`` and ``element_wise`` ops."""

from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import saiunit as u
from brainstate.nn import init

from ..op import element_wise
from .factors import as_factor
from .initializers import ZERO
from .linear import Linear

__all__ = ['LRUCell']


class LRUCell(brainstate.nn.Module):
    """The linear recurrent unit [1]_: complex states that turn and decay, each on its own.

    With ``a = exp(-exp(nu_log))``, ``b = exp(theta_log)`` and ``c = exp(gamma_log)``:
    ``h_re = a cos(b) h_re - a sin(b) h_im + c B_re x``,
    ``h_im = a sin(b) h_re + a cos(b) h_im + c B_im x``, and the output is
    ``C_re h_re - C_im h_im + D x`` of the new states.

    Parameters
    ----------
    d_model : int
        The size of the input and of the output.
    d_hidden : int
        The size of the hidden states, which is the cell's ``out_size``.
    r_min, r_max : float
        Between which ``a`` is drawn, such that the numbers ``a exp(ib)`` are uniform in a ring.
    max_phase : float
        The largest ``b`` that is drawn.

    References
    ----------
    .. [1] Orvieto et al., https://arxiv.org/abs/2303.06349

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.LRUCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.h_re.value.shape
    ((2, 3), (2, 4))
    """

    in_size: Any
    out_size: Any
    h_re: brainstate.HiddenState
    h_im: brainstate.HiddenState

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
    ) -> None:
        super().__init__()
        self.in_size = d_model
        self.out_size = d_hidden
        self.d_model = d_model
        self.d_hidden = d_hidden
        self.r_min = r_min
        self.r_max = r_max
        self.max_phase = max_phase
        theta_log = u.math.log(max_phase * brainstate.random.uniform(size=d_hidden))
        area = brainstate.random.uniform(size=d_hidden) * (r_max**2 - r_min**2) + r_min**2
        self.theta_log = brainstate.ParamState(theta_log)
        self.nu_log = brainstate.ParamState(u.math.log(-0.5 * u.math.log(area)))
        self.gamma_log = brainstate.ParamState(0.5 * u.math.log(1 - area))
        self.B_re = Linear(d_model, d_hidden, w_init=_scaled_normal, b_init=None)
        self.B_im = Linear(d_model, d_hidden, w_init=_scaled_normal, b_init=None)
        self.C_re = Linear(d_hidden, d_model, w_init=_scaled_normal, b_init=None)
        self.C_im = Linear(d_hidden, d_model, w_init=_scaled_normal, b_init=None)
        self.D = brainstate.ParamState(brainstate.random.randn(d_model))

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Make the hidden states."""
        self.h_re = brainstate.HiddenState(init.param(ZERO, self.d_hidden, batch_size))
        self.h_im = brainstate.HiddenState(init.param(ZERO, self.d_hidden, batch_size))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the hidden states to zero."""
        self.h_re.value = init.param(ZERO, self.d_hidden, batch_size)
        self.h_im.value = init.param(ZERO, self.d_hidden, batch_size)

    def update(self, inputs: Any) -> Any:
        """Take one step with inputs of shape ``(..., d_model)``; returns outputs of that shape."""
        re, im = self.h_re.value, self.h_im.value
        nu, b, gamma = (
            as_factor(element_wise(parameter.value), re)
            for parameter in (self.nu_log, self.theta_log, self.gamma_log)
        )
        a, b, c = u.math.exp(-u.math.exp(nu)), u.math.exp(b), u.math.exp(gamma)
        cos, sin = a * u.math.cos(b), a * u.math.sin(b)
        self.h_re.value = cos * re - sin * im + c * self.B_re(inputs)
        self.h_im.value = sin * re + cos * im + c * self.B_im(inputs)
        output = self.C_re(self.h_re.value) - self.C_im(self.h_im.value)
        return output + inputs * as_factor(self.D.value, output)


def _scaled_normal(shape: Sequence[int]) -> jax.Array:
    """Normal numbers, divided by the root of the number of inputs."""
    return brainstate.random.randn(*shape) / shape[0] ** 0.5
