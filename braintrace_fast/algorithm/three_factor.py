"""Three-factor learning: the trace times a modulator that the user gives."""

from typing import Any

import brainstate
import jax

from ..compiler import ControlFlowPolicy
from ..kernels.promotion import product
from ..runtime.factors import Factors, Signals
from .presets import ParamDimVjpAlgorithm
from .signals import check_modulator, modulated

__all__ = ['ThreeFactor']

NONE = ()
"""The value of a state without one; brainstate refuses None."""


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
        snap_max_jacobian_elements: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model, name, vjp_method, fast_solve, trace_dtype, chunked_trace, control_flow, **options
        )
        if vjp_method != 'single-step':
            raise ValueError(
                f"vjp_method is {vjp_method!r}; ThreeFactor needs 'single-step', because within a "
                'chunk the loss alone would count, and not the modulator.'
            )
        self.snap_max_jacobian_elements = snap_max_jacobian_elements
        self._modulator = brainstate.ShortTermState(NONE)
        self.modulator = modulator

    @property
    def modulator(self) -> Any:
        """The standing modulator, or None. It is kept in a state, so that jit sees a new one."""
        value = self._modulator.value
        return None if isinstance(value, tuple) else value

    @modulator.setter
    def modulator(self, value: Any) -> None:
        groups = self.graph.hidden_groups if self.is_compiled else ()
        self._modulator.value = NONE if value is None else check_modulator(value, groups)

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for inputs like these, and make a zero trace."""
        super().compile_graph(*args)
        self.modulator = self.modulator  # its shape can be checked now

    @property
    def own_states(self) -> list[brainstate.State]:
        """The states that belong to the learner and not to the model."""
        return [*super().own_states, self._modulator]

    def modulator_of(self, given: Any) -> jax.Array | None:
        """The modulator of a call, weighed by a mask: what was given, or else what stands."""
        modulator = self.modulator if given is None else given
        if modulator is None:
            return None
        checked = check_modulator(modulator, self.graph.hidden_groups)
        return checked if self.step_weight is None else product(checked, self.step_weight)

    def learning_signals(self, factors: Factors, signals: Signals, modulator: Any) -> Signals:
        """The modulator as the signal of every state."""
        if modulator is None:
            raise RuntimeError(
                'There is no modulator, which is the learning signal of ThreeFactor. Give it in '
                'the call, learner(x, modulator=m), or set learner.modulator = m.'
            )
        return modulated(self.graph, factors, signals, modulator)
