"""Three-factor learning: the trace times a modulator that the user gives."""

from typing import Any

import brainstate

from ..compiler import ControlFlowPolicy
from .axes import ETraceConfig
from .presets import ParamDimVjpAlgorithm

__all__ = ['ThreeFactor']


class ThreeFactor(ParamDimVjpAlgorithm):
    r"""A trace of inputs and states, times a third factor: reward, surprise, dopamine.

    .. math::

        e_t = D_t e_{t-1} + f_t \otimes x_t, \qquad g_t = m_t e_t

    The modulator ``m`` takes the place of the learning signal for all traced weights. Weights that
    are not traced, such as those of a readout, get the gradient of the step's loss. The modulator
    is given in the call, ``learner(x, modulator=m)``, or stands until it is set anew,
    ``learner.modulator = m``; the former goes first. It is needed for gradients only.

    Parameters
    ----------
    model, name, control_flow, **options
        As for :class:`ETraceVjpAlgorithm`.
    vjp_method : {'single-step'}
        Chunks are refused: within one, the loss alone would count.
    modulator : number or array, optional
        The standing modulator: a number, an array like the states (``varshape``) of a hidden group,
        or one that broadcasts to ``(*varshape, num_state)``, for every group.
    trace_dtype : dtype, optional
        The type in which traces are stored.
    fast_solve, chunked_trace, snap_max_jacobian_elements
        Accepted for braintrace's sake, as for :class:`ParamDimVjpAlgorithm`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, 'three_factor', jnp.ones(2))
    >>> xs, rewards = jnp.ones((10, 2)), jnp.linspace(-1, 1, 10)
    >>> def step_loss(x, reward):
    ...     return jnp.mean(learner(x, modulator=reward) ** 2)
    >>> grads = learner.etrace_grad(xs, rewards, step_fn=step_loss)
    >>> grads['W', 'weight']['weight'].shape
    (6, 4)
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = 'single-step',
        modulator: Any = None,
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        snap_max_jacobian_elements: int = 2**24,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            trace_dtype,
            chunked_trace,
            control_flow,
            config=ETraceConfig(learning_signal='modulatory'),
            snap_max_jacobian_elements=snap_max_jacobian_elements,
            **options,
        )
        self.modulator = modulator
