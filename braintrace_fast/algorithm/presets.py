"""The learning rules by name: each is a choice of engine."""

from typing import Any

import brainstate
import jax.numpy as jnp

from ..compiler import ControlFlowPolicy, ETraceGraph
from ..errors import ArgumentError, ArgumentTypeError
from ..runtime.engine import Engine, FactorTransform
from ..runtime.factorized import FactorizedEngine
from ..runtime.filtered import Filter
from ..runtime.materialized import MaterializedEngine
from ..runtime.memory_budget import trace_room
from ..runtime.neighbourhoods import NeighbourhoodEngine
from ..runtime.trace_layout import f_key, trace_key, x_key
from .axes import ETraceConfig
from .base import EligibilityTrace
from .step_hooks import HookedAlgorithm
from .trace_views import views

__all__ = ['D_RTRL', 'ES_D_RTRL', 'IODimVjpAlgorithm', 'ParamDimVjpAlgorithm', 'pp_prop']


class ParamDimVjpAlgorithm(HookedAlgorithm):
    r"""D-RTRL: a trace of the size of the weights, per example and state.

    .. math::

        e_t = D_t e_{t-1} + f_t \otimes x_t, \qquad
        g_t = c_t \otimes x_t + (L_t D_t + R_t) e_{t-1}

    Parameters
    ----------
    model, name, vjp_method, control_flow, config, random_feedback_key, **options
        As for :class:`ETraceVjpAlgorithm`.
    fast_solve, chunked_trace
        Accepted for braintrace's sake. The gradient is the same either way, and there is one way.
    snap_max_jacobian_elements : int
        As for :class:`SnAp`, for configurations with ``recurrence_scope='sparse_n'``.
    trace_dtype : dtype, optional
        The type in which traces are stored; that of the states by default.
    stochastic_rounding : bool
        Whether traces stored in bfloat16 are rounded up or down at random, with the right mean. To
        the nearest, what decays slowly would never fall.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, braintrace.D_RTRL, jnp.ones(2))
    >>> learner(jnp.ones(2)).shape
    (4,)
    """

    trace_factorization = 'per_param'

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = 'single-step',
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        snap_max_jacobian_elements: int = 2**24,
        *,
        stochastic_rounding: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            name,
            vjp_method,
            control_flow,
            config,
            random_feedback_key,
            snap_max_jacobian_elements,
            **options,
        )
        self.stochastic_rounding = stochastic_rounding
        self.fast_solve = fast_solve
        self.trace_dtype = trace_dtype
        self.chunked_trace = chunked_trace

    @property
    def resolved_options(self) -> dict[str, Any]:
        """How traces are stored; their type may have been given in several forms."""
        dtype = None if self.trace_dtype is None else jnp.dtype(self.trace_dtype)
        own = {'trace_dtype': dtype, 'stochastic_rounding': self.stochastic_rounding}
        return super().resolved_options | own

    def make_engine(self, graph: ETraceGraph) -> Engine:
        """The engine that carries the whole trace."""
        options: Any = dict(
            trace_dtype=self.trace_dtype,
            chunks=self.differentiates_calls,
            transform=self.factor_transform(graph),
            stochastic=self.stochastic_rounding,
            whole=self.has_hooks,
            backend=self.resolved_backend,
            room=trace_room(self.memory_budget),
        )
        if self.config.sparse_n is None:
            return MaterializedEngine(graph, **options)
        return NeighbourhoodEngine(graph, self.snap_max_jacobian_elements, **options)

    @property
    def etrace_bwg(self) -> dict[tuple[int, int], EligibilityTrace]:
        """The traces as braintrace shows them, by the keys of :meth:`get_etrace_of`.

        They are views of the state ``trace``, to be read and, where it holds whole planes, written.
        """
        return views(self, trace_key)

    def factor_transform(self, graph: ETraceGraph) -> FactorTransform | None:
        """What the trace is made of, if not of the graph's own factors: of those of a filter."""
        kappa = self.config.kappa
        return None if kappa is None else Filter(kappa, graph.hidden_groups)


class IODimVjpAlgorithm(HookedAlgorithm):
    r"""pp-prop: a trace of the size of inputs and outputs.

    .. math::

        \hat x_t = a_x \hat x_{t-1} + x_t, \qquad
        \hat f_t = a_f D_t \hat f_{t-1} + (1 - a_f) f_t

    Parameters
    ----------
    model, name, vjp_method, control_flow, config, random_feedback_key, **options
        As for :class:`ETraceVjpAlgorithm`.
    decay_or_rank : float, int, or pair of them, optional
        The decays ``a``; an integer rank ``r`` means ``a = (r - 1) / (r + 1)``. A pair gives
        ``(a_x, a_f)``. With a ``config``, those of the latter count.
    fast_solve : bool
        As for :class:`ParamDimVjpAlgorithm`.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(cell, 'pp_prop', jnp.ones(2), decay_or_rank=0.9)
    >>> learner.decay, learner.decay_x, learner.decay_f
    (0.9, 0.9, 0.9)
    """

    trace_factorization = 'io_factorized'

    def __init__(
        self,
        model: brainstate.nn.Module,
        decay_or_rank: float | int | tuple[float | int, float | int] | None = None,
        name: str | None = None,
        vjp_method: str = 'single-step',
        fast_solve: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        **options: Any,
    ) -> None:
        if config is None:
            config = ETraceConfig('io_factorized', decay=_decays(decay_or_rank))
        super().__init__(
            model, name, vjp_method, control_flow, config, random_feedback_key, **options
        )
        self.fast_solve = fast_solve

    @property
    def decay(self) -> float:
        """The decay of both sides, if it is the same."""
        if self.decay_x != self.decay_f:
            raise AttributeError(
                f'The decays are asymmetric: decay_x is {self.decay_x}, and decay_f {self.decay_f}.'
            )
        return self.decay_x

    @property
    def decay_x(self) -> float:
        """``a_x``, the decay of the input side."""
        return self.config.decay_x

    @property
    def decay_f(self) -> float:
        """``a_f``, the decay of the output side."""
        return self.config.decay_f

    @property
    def etrace_xs(self) -> dict[int, EligibilityTrace]:
        """The input sides as braintrace shows them, by the ``id`` of ``x_var``: views."""
        return views(self, x_key, 0)

    @property
    def etrace_dfs(self) -> dict[tuple[int, str], EligibilityTrace]:
        """The output sides likewise, by the ``id`` of ``y_var`` and the group."""
        return views(self, f_key, 1)

    @property
    def resolved_options(self) -> dict[str, Any]:
        """The decays, which may have been given as ranks."""
        return super().resolved_options | {'decay': (self.decay_x, self.decay_f)}

    def make_engine(self, graph: ETraceGraph) -> Engine:
        """The engine that carries the two sides of the trace."""
        chunks = self.vjp_method == 'multi-step'
        return FactorizedEngine(graph, (self.decay_x, self.decay_f), chunks, self.resolved_backend)


def _decays(given: Any) -> tuple[float, float]:
    """The decays of both sides."""
    if given is None:
        raise TypeError('Give decay_or_rank=..., one number or a pair (a_x, a_f), or a config.')
    pair = given if isinstance(given, tuple) else (given,) * 2
    if len(pair) != 2:
        raise ArgumentError(f'decay_or_rank is {given!r}; give one number, or a pair (a_x, a_f).')
    return _decay(pair[0]), _decay(pair[1])


def _decay(value: float | int) -> float:
    """A decay, or the decay of a rank."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(
            f'decay_or_rank is {value!r}; it must be a rank, an int, or a decay, a float in [0, 1).'
        )
    if isinstance(value, int):
        if value < 1:
            raise ArgumentError(f'A rank must be at least 1, not {value}.')
        return (value - 1) / (value + 1)
    if not 0 <= value < 1:
        raise ArgumentError(f'A decay must be in [0, 1), not {value}; a rank must be an integer.')
    return value


class D_RTRL(ParamDimVjpAlgorithm):
    """The usual name of :class:`ParamDimVjpAlgorithm`."""


class pp_prop(IODimVjpAlgorithm):
    """The usual name of :class:`IODimVjpAlgorithm`."""


ES_D_RTRL = pp_prop
