"""The trace together with a low-pass filter of it.

    ebar_t[s] = kappa ebar_{t-1}[s] + e_t[s]
    g_t       = c_t (x) x_t + L_t[s] D_t[s,q] e_{t-1}[q] + (kappa L_t[q] + R_t[q]) ebar_{t-1}[q]

The filtered planes are states like any others: with them, a group has ``2 S`` planes, of which the
loss reads the second half. So every kernel of the trace, and every window, serves the filter too.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compiler import ETraceGraph
from ..compiler.transition import Plane
from ..kernels.dispatch import PLAIN, Backend
from .factors import Entry, Factors, Signals, Values, group_plane, per_example
from .gradient import GradientSum
from .materialized import MaterializedEngine, Trace

__all__ = ['FilteredEngine']


class FilteredEngine:
    """Carries the whole trace and its filter.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    kappa : float
        How much of the filtered trace is kept from step to step.
    trace_dtype : dtype, optional
        The type in which traces are stored; that of the factors by default.
    stochastic : bool
        Whether traces in bfloat16 are rounded at random, with the right mean.
    backend : Backend
        What to run kernels with.
    """

    is_small = False
    restarts = True

    def __init__(
        self,
        graph: ETraceGraph,
        kappa: float,
        trace_dtype: Any = None,
        stochastic: bool = False,
        backend: Backend = PLAIN,
    ) -> None:
        self.graph = graph
        self.kappa = kappa
        self.engine = MaterializedEngine(
            graph, trace_dtype, filtered=True, stochastic=stochastic, backend=backend
        )

    def trace_shape(self) -> Trace:
        """The shapes and types of the trace."""
        return self.engine.trace_shape()

    def stored_shapes(self) -> list[Trace]:
        """Those of all traces that :meth:`fit` takes."""
        return self.engine.stored_shapes()

    def fit(self, trace: Trace) -> Trace:
        """A trace of another backend in the form of this one."""
        return self.engine.fit(trace)

    def advance(self, entry: Entry, factors: Factors, params: Values, step: jax.Array) -> Trace:
        """The traces after a step."""
        return self.engine.advance(entry, self._with_filter(factors), params, step)

    def gradients(
        self,
        total: GradientSum,
        entry: Entry,
        trace: Trace,
        factors: Factors,
        signals: Signals,
        step: jax.Array,
    ) -> None:
        """Add the gradient of a step, given the traces before and after it."""
        factors, signals = self._with_filter(factors), _read_filtered(signals)
        self.engine.gradients(total, entry, trace, factors, signals, step)

    def entry_gradients(
        self,
        total: GradientSum,
        entry: Entry,
        signals: Sequence[Sequence[Plane]],
        step: jax.Array,
    ) -> None:
        """Add ``signals[g][q] . ebar[q]``."""
        self.engine.entry_gradients(total, entry, second_half(signals), step)

    def window(
        self,
        total: GradientSum | None,
        entry: Entry | None,
        factors: Factors,
        signals: Signals | None,
        step: jax.Array,
        overwrite: bool = True,
    ) -> Trace | None:
        """Add the gradient of K steps at once, and carry the traces past them.

        As :meth:`MaterializedEngine.window`.
        """
        factors = self._with_filter(factors, (1,))
        signals = None if signals is None else _read_filtered(signals)
        return self.engine.window(total, entry, factors, signals, step, overwrite)

    def trace_of(self, trace: Trace, relations: list[int]) -> dict[tuple[int, int], Any]:
        """The traces of some relations, by relation and group; filtered planes come second."""
        return self.engine.trace_of(trace, relations)

    def _with_filter(self, factors: Factors, leading: tuple[int, ...] = ()) -> Factors:
        """``D = [[D, 0], [D, kappa]]`` and ``f = [f, f]``, with leading axes for ``kappa``."""
        keep = [
            jnp.full((*leading, *plane.shape), self.kappa, plane.dtype)
            for plane in map(group_plane, self.graph.hidden_groups)
        ]
        if factors.keep is not None:
            keep = [per_example(factors.keep, plane) * plane for plane in keep]
        return factors._replace(
            D=tuple(map(with_filter, factors.D, keep)),
            f=tuple(tuple((*f, *f) for f in groups) for groups in factors.f),
        )


def with_filter(D: Sequence[Sequence[Plane]], keep: Plane) -> tuple[tuple[Plane, ...], ...]:
    """``[[D, 0], [D, keep]]``."""
    places = range(len(D))
    return (
        *((*row, *(None for _ in places)) for row in D),
        *((*row, *(keep if q == s else None for q in places)) for s, row in enumerate(D)),
    )


def _read_filtered(signals: Signals) -> Signals:
    return signals._replace(L=second_half(signals.L), R=second_half(signals.R))


def second_half(planes: Sequence[Sequence[Plane]]) -> tuple[tuple[Plane, ...], ...]:
    """Per group, no signal for the trace, and these for its filter."""
    return tuple((*(None for _ in own), *own) for own in planes)
