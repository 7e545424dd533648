"""An engine whose traces and gradients others may change, step by step."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ..kernels.planes import if_live
from .engine import Engine, Steps, Trace
from .factors import Entry, GroupPlanes, Signals, Values
from .gradient import GradientSum

__all__ = ['HookedEngine', 'StepHooks']

Solver = Callable[[GradientSum, jax.Array, Trace, Any], None]
"""Adds a gradient, given the number of steps, the trace and the signals."""


class StepHooks(Protocol):
    """What changes traces and gradients. Each can ask the engine for what it would have made.

    The names and arguments are those of braintrace's hooks.
    """

    def _update_etrace_data(
        self,
        running_index: jax.Array,
        hist_etrace_vals: Trace,
        hid2weight_jac: Any,
        hid2hid_jac: Any,
        weight_vals: Values,
        input_is_multi_step: bool,
    ) -> Trace: ...

    def _solve_weight_gradients(
        self,
        running_index: jax.Array,
        etrace_h2w_at_t: Trace,
        dl_to_hidden_groups: Any,
        weight_vals: Values,
        dl_to_nonetws_at_t: Values,
        dl_to_etws_at_t: Values,
    ) -> Values: ...


class HookedEngine:
    """Another engine, with hooks called in every step.

    Parameters
    ----------
    inner : Engine
        What carries the trace.
    hooks : StepHooks
        What changes it, and the gradient.
    """

    def __init__(self, inner: Engine, hooks: StepHooks) -> None:
        self.inner = inner
        self.hooks = hooks
        self.is_small = inner.is_small
        self._step: Steps | None = None
        self._solver: Solver | None = None

    def refuses_windows(self) -> str:
        """Hooks are called in every step."""
        return f'{type(self.hooks).__name__} has hooks that are called in every step.'

    def refuses_carry(self) -> str | None:
        """What the other engine says."""
        return self.inner.refuses_carry()

    def refuses_restarts(self) -> str | None:
        """What the other engine says."""
        return self.inner.refuses_restarts()

    def trace_shape(self) -> Trace:
        """The shapes and types of the trace."""
        return self.inner.trace_shape()

    def stored_shapes(self) -> list[Trace]:
        """Those of all traces that :meth:`fit` takes."""
        return self.inner.stored_shapes()

    def fit(self, trace: Trace) -> Trace:
        """A trace of another backend in the form of this one."""
        return self.inner.fit(trace)

    def trace_of(self, entry: Entry, params: Values, ops: Collection[int]) -> Any:
        """The part of a trace that belongs to some ops, for people to look at."""
        return self.inner.trace_of(entry, params, ops)

    def with_trace_of(self, trace: Trace, key: tuple[int, int], value: Any) -> Trace:
        """A trace of which one part is what :meth:`trace_of` would show so."""
        inner: Any = self.inner
        return inner.with_trace_of(trace, key, value)

    def window(
        self, total: GradientSum | None, steps: Steps, overwrite: bool = True
    ) -> Trace | None:
        """Not called, because windows are refused."""
        raise NotImplementedError(self.refuses_windows())

    def advance(self, step: Steps) -> Trace:
        """The trace after a step, by the hook."""
        if step.entry is None:
            raise ValueError('There is no trace at the entry.')
        old = if_live(step.entry.live, step.entry.trace)
        factors, self._step = step.factors, step
        sides = factors.x, factors.f
        new = self.hooks._update_etrace_data(
            step.elapsed, old, sides, factors.D, step.params, False
        )
        self._step = None
        return jax.tree.map(lambda a, like: a.astype(like.dtype), new, old)

    def advanced(self, elapsed: jax.Array, old: Trace, sides: Any, D: Any, params: Values) -> Trace:
        """What the other engine makes of what the hook was given, or of what it made of that."""
        if self._step is None:
            raise ValueError('_update_etrace_data is for subclasses to extend, not to be called.')
        x, f = sides
        factors = self._step.factors._replace(x=x, f=f, D=D)
        entry = Entry(old, jnp.ones((), bool))
        return self.inner.advance(
            self._step._replace(entry=entry, factors=factors, elapsed=elapsed, params=params)
        )

    def gradients(self, total: GradientSum, step: Steps, trace: Trace) -> None:
        """Replace the gradient of a step by what the hook makes of it."""

        def solver(total: GradientSum, elapsed: jax.Array, trace: Trace, signals: Signals) -> None:
            changed = step._replace(elapsed=elapsed, signals=signals, params=total.params)
            self.inner.gradients(total, changed, trace)

        self._solve(solver, total, step.elapsed, trace, step.signals)

    def entry_gradients(
        self, total: GradientSum, entry: Entry, signals: GroupPlanes, elapsed: jax.Array
    ) -> None:
        """Replace the gradient of a chunk by what the hook makes of it."""

        def solver(total: GradientSum, elapsed: jax.Array, trace: Trace, signals: Any) -> None:
            self.inner.entry_gradients(total, entry._replace(trace=trace), signals, elapsed)

        self._solve(solver, total, elapsed, entry.trace, signals)

    def _solve(
        self, solver: Solver, total: GradientSum, elapsed: jax.Array, trace: Trace, signals: Any
    ) -> None:
        traced, plain = total.by_whether_traced()
        self._solver = solver
        found = self.hooks._solve_weight_gradients(
            elapsed, trace, signals, total.params, plain, traced
        )
        self._solver = None
        total.replace(found)

    def solved(self, total: GradientSum, elapsed: jax.Array, trace: Trace, signals: Any) -> Values:
        """The gradients that the other engine makes of what the hook was given or has made."""
        if self._solver is None:
            raise ValueError(
                '_solve_weight_gradients is for subclasses to extend, not to be called.'
            )
        self._solver(total, elapsed, trace, signals)
        return total.result()
