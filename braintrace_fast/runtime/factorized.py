"""The trace as a product of an input side and an output side, each smoothed over time.

    xhat_t    = a_x xhat_{t-1} + x_t
    fhat_t[s] = a_f D_t[s,q] fhat_{t-1}[q] + (1 - a_f) f_t[s]
    g_t       = xhat_t (x) fhat_t[s] L_t[s] / b_t  +  x_t (x) (c_t - f_t[s] L_t[s])

with the bias correction ``b_t = 1 - a_f^(n+1)`` after ``n`` steps. The second product holds the
paths of the step that pass no hidden state. Over a window, with ``s_t = fhat_t[s] L_t[s] / b_t``,

    sum_t xhat_t (x) s_t = sum_t x_t (x) back_t + xhat_0 (x) a_x back_1
    back_t               = a_x back_{t+1} + s_t

so both products are one, and inputs are not smoothed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compiler import ETraceGraph, HiddenParamOpRelation
from ..compiler.transition import Plane
from ..errors import NotSupportedError
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.factored_trace import factored_trace, smooth
from ..kernels.planes import add, times
from .factors import (
    Entry,
    Factors,
    Signals,
    Values,
    group_plane,
    places_of,
    sum_leading,
    sum_middle,
    x_shape,
)
from .gradient import GradientSum
from .materialized import bypasses

__all__ = ['FactorizedEngine']

Trace = tuple[tuple[jax.Array | None, ...], tuple[tuple[tuple[jax.Array, ...], ...], ...]]
"""``xhat`` per relation, and ``fhat`` per relation, group and plane."""


class FactorizedEngine:
    """Carries ``xhat`` and ``fhat``.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    decay : tuple of float
        ``a_x`` and ``a_f``.
    windows : bool
        Whether the gradient of windows is asked for.
    backend : Backend
        What to run kernels with.

    Raises
    ------
    NotSupportedError
        If it is, and a weight varies in time: nothing says what it was before the window.
    """

    is_small = True
    restarts = False

    def __init__(
        self,
        graph: ETraceGraph,
        decay: tuple[float, float],
        windows: bool = False,
        backend: Backend = PLAIN,
    ) -> None:
        self.graph = graph
        self.backend = backend
        self.decay_x, self.decay_f = decay
        self.relations = list(graph.hidden_param_op_relations)
        self.bypasses = bypasses(graph)
        varying = [relation for relation in self.relations if not relation.is_static]
        if windows and varying:
            raise NotSupportedError(
                f'{varying[0].source}: the weight {varying[0].path} varies in time, which the '
                'factorised trace cannot carry from window to window. Use '
                "vjp_method='single-step', or D_RTRL."
            )

    def trace_shape(self) -> Trace:
        """The shapes and types of the trace."""
        xs: Any = tuple(
            None if x is None else jax.ShapeDtypeStruct(x.shape, _inexact(x))
            for x in map(x_shape, self.relations)
        )
        fs: Any = tuple(
            tuple((group_plane(group),) * group.num_state for group in relation.hidden_groups)
            for relation in self.relations
        )
        return xs, fs

    def stored_shapes(self) -> list[Trace]:
        """Those of all traces that :meth:`fit` takes: there is one form."""
        return [self.trace_shape()]

    def fit(self, trace: Trace) -> Trace:
        """A trace of another backend, which is as it is here."""
        return trace

    def advance(self, entry: Entry, factors: Factors, params: Values, step: jax.Array) -> Trace:
        """The trace after a step."""
        xs, fs = entry.trace
        new_xs = tuple(
            None if old is None or x is None else self.decay_x * old + x
            for old, x in zip(xs, factors.x, strict=True)
        )
        return new_xs, tuple(
            tuple(
                self._advance_planes(planes, factors.D[group.index], f)
                for group, planes, f in zip(
                    relation.hidden_groups, fs[r], factors.f[r], strict=True
                )
            )
            for r, relation in enumerate(self.relations)
        )

    def _advance_planes(
        self, old: Sequence[jax.Array], D: Sequence[Sequence[Plane]], f: Sequence[Plane]
    ) -> tuple[jax.Array, ...]:
        new = []
        for s, row in enumerate(D):
            past, now = add(map(times, row, old)), f[s]
            total = add(
                [
                    None if past is None else self.decay_f * past,
                    None if now is None else (1 - self.decay_f) * now,
                ]
            )
            new.append(jnp.zeros_like(old[s]) if total is None else total)
        return tuple(new)

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
        xs, fs = trace
        for r, relation in enumerate(self.relations):
            c = signals.c[r]
            smoothed: list[Plane] = []
            present: list[Plane] = []
            for group, fhat, f in zip(relation.hidden_groups, fs[r], factors.f[r], strict=True):
                L = signals.L[group.index]
                smoothed += map(times, fhat, L)
                present += map(times, f, L)
            signal = add(smoothed)
            if signal is not None:
                signal = sum_leading(signal / self.bias(step), c.ndim)
                total.add_product(r, xs[r], signal, factors.varying[r])
            if self.bypasses[r] or not relation.is_static:
                total.add_present(r, factors, c, add(present))
        self._add_entry(total, entry, signals.R, step - 1, factors.varying)

    def entry_gradients(
        self,
        total: GradientSum,
        entry: Entry,
        signals: Sequence[Sequence[Plane]],
        step: jax.Array,
    ) -> None:
        """Add ``signals[g][q] . e[q]``, for cotangents of the states after step ``step``."""
        self._add_entry(total, entry, signals, step, ({},) * len(self.relations))

    def _add_entry(
        self,
        total: GradientSum,
        entry: Entry,
        signals: Sequence[Sequence[Plane]],
        step: jax.Array,
        varying: Sequence[Mapping[str, tuple[jax.Array, ...]]],
    ) -> None:
        xs, fs = entry.trace
        for r, relation in enumerate(self.relations):
            signal = add(
                plane
                for group, planes in zip(relation.hidden_groups, fs[r], strict=True)
                for plane in map(times, signals[group.index], planes)
            )
            if signal is not None:
                signal = sum_leading(signal / self.bias(step), relation.y_var.aval.ndim)
                total.add_product(r, xs[r], signal, varying[r])

    def window(
        self,
        total: GradientSum | None,
        entry: Entry | None,
        factors: Factors,
        signals: Signals | None,
        step: jax.Array,
        overwrite: bool = True,
    ) -> Trace | None:
        """Add the gradient of K steps at once, and carry the trace past them.

        As :meth:`MaterializedEngine.window`.
        """
        xs, fs = jax.tree.map(jnp.zeros_like, self.trace_shape()) if entry is None else entry.trace
        smoothed: list[list[Any]] = [list(own) for own in fs]
        ends: list[list[Any]] = [list(own) for own in fs]
        for group in self.graph.hidden_groups:
            feeding = places_of(self.relations, group)
            if feeding:
                last, found = factored_trace(
                    factors.D[group.index],
                    [factors.f[r][place] for r, place in feeding],
                    [fs[r][place] for r, place in feeding],
                    self.decay_f,
                    backend=self.backend,
                )
                for (r, place), end, planes in zip(feeding, last, found, strict=True):
                    ends[r][place], smoothed[r][place] = end, planes
        x_ends = []
        for r, x in enumerate(factors.x):
            start = None if entry is None else xs[r]
            if total is not None and signals is not None:
                self._add_window(total, r, factors, signals, smoothed[r], start, fs[r], step)
            x_ends.append(self._last_x(x, start))
        return None if entry is None else (tuple(x_ends), tuple(map(tuple, ends)))

    def _add_window(
        self,
        total: GradientSum,
        r: int,
        factors: Factors,
        signals: Signals,
        fhat: Sequence[Sequence[jax.Array]],
        x_start: jax.Array | None,
        f_start: Sequence[Sequence[jax.Array]],
        step: jax.Array,
    ) -> None:
        """Add ``sum_t xhat_t (x) read_t + x_t (x) now_t``.

        Where the product is linear in ``x``, that is ``sum_t x_t (x) (back_t + now_t)``, with
        ``read`` smoothed in place of ``x``, back in time: one product, and nothing of the size of
        the inputs.
        """
        x, c, relation = factors.x[r], signals.c[r], self.relations[r]
        steps = step + jnp.arange(c.shape[0])

        def weighted(planes: Sequence[Sequence[Plane]], by: Sequence[Sequence[Plane]]) -> Plane:
            pairs = zip(relation.hidden_groups, planes, strict=True)
            found = add(p for group, own in pairs for p in map(times, own, by[group.index]))
            return None if found is None else sum_middle(found, c.ndim)

        def corrected(plane: Plane, steps: jax.Array) -> Plane:
            if plane is None:
                return None
            bias = self.bias(steps).astype(plane.dtype)
            return plane / bias.reshape(-1, *[1] * (plane.ndim - 1))

        now: Plane = None
        if self.bypasses[r]:
            in_trace = weighted(factors.f[r], signals.L)
            now = c if in_trace is None else c - in_trace
        read = corrected(weighted(fhat, signals.L), steps)
        before = [
            [jnp.concatenate([start[None], plane[:-1]]) for start, plane in zip(*pair, strict=True)]
            for pair in zip(f_start, fhat, strict=True)
        ]
        passing = corrected(weighted(before, signals.R), steps - 1)
        if passing is not None:  # it reads the trace of the step before
            read = add([read, jnp.concatenate([passing[1:], jnp.zeros_like(passing[:1])])])
            if x is None or x_start is not None:
                total.add_product(r, x_start, passing[0])
        if x is None or read is None:
            total.add_product(r, x, add([read, now]), leading_axes=1)
        elif _is_linear(relation):
            left, back = smooth(read, None, self.decay_x, reverse=True, backend=self.backend)
            total.add_product(r, x, add([back, now]), leading_axes=1, only=_reads_x)
            rest = add([read, now])
            total.add_product(r, x, rest, leading_axes=1, only=lambda key: not _reads_x(key))
            if x_start is not None:
                total.add_product(r, x_start, left, only=_reads_x)
        else:
            past = None if x_start is None else self.decay_x * x_start
            xhat = smooth(x.astype(_inexact(x)), past, self.decay_x, backend=self.backend)[1]
            total.add_product(r, xhat, read, leading_axes=1)
            total.add_product(r, x, now, leading_axes=1)

    def _last_x(self, x: jax.Array | None, start: jax.Array | None) -> jax.Array | None:
        """``xhat`` after the last step of a window."""
        if x is None or start is None:
            return None
        weights = self.decay_x ** np.arange(len(x) - 1, -1, -1)
        recent = jnp.tensordot(
            jnp.asarray(weights, start.dtype), x.astype(start.dtype), 1, precision='highest'
        )
        return self.decay_x ** len(x) * start + recent

    def trace_of(self, trace: Trace, relations: list[int]) -> tuple[dict, dict]:
        """The input sides by relation, and the output sides by relation and group."""
        xs, fs = trace
        return {r: xs[r] for r in relations}, {
            (r, group.index): planes
            for r in relations
            for group, planes in zip(self.relations[r].hidden_groups, fs[r], strict=True)
        }

    def bias(self, step: jax.Array) -> jax.Array:
        """The correction for the steps that the smoothing has not yet seen."""
        correction = jnp.maximum(1 - self.decay_f ** (step + 1.0), 1e-8)
        return jnp.where(step < 1000, correction, 1.0)


def _is_linear(relation: HiddenParamOpRelation) -> bool:
    """Whether the gradient of the op's ``'weight'`` is linear in ``x``, and no other reads it."""
    rules = relation.primitive.trace_rules
    return rules is not None and rules.is_outer


def _reads_x(key: str) -> bool:
    return key == 'weight'


def _inexact(x: Any) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
