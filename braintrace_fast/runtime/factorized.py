"""The trace as a product of an input side and an output side, each smoothed over time.

    xhat_t    = a_x xhat_{t-1} + x_t
    fhat_t[s] = a_f D_t[s,q] fhat_{t-1}[q] + (1 - a_f) f_t[s]
    g_t       = xhat_t (x) fhat_t[s] L_t[s] / b_t  +  x_t (x) (c_t - f_t[s] L_t[s])

with the bias correction ``b_t = 1 - a_f^(n+1)`` after ``n`` steps. The second product holds the
paths of the step that pass no hidden state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compiler import ETraceGraph
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
    first_step,
    group_plane,
    sum_leading,
    sum_middle,
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

    def init(self, factors: Factors) -> Trace:
        """A zero trace, from factors or their shapes."""
        xs = tuple(None if x is None else jnp.zeros(x.shape, _inexact(x)) for x in factors.x)
        fs = tuple(
            tuple(
                (zeros_like(group_plane(group)),) * group.num_state
                for group in relation.hidden_groups
            )
            for relation in self.relations
        )
        return xs, fs

    def advance(self, entry: Entry, factors: Factors, params: Values, step: jax.Array) -> Trace:
        """The trace after a step."""
        xs, fs = _entered(entry)
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
        xs, fs = _entered(entry)
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
    ) -> Trace | None:
        """Add the gradient of K steps at once, and carry the trace past them.

        As :meth:`MaterializedEngine.window`.
        """
        xs, fs = self.init(first_step(factors)) if entry is None else _entered(entry)
        smoothed_x = [
            None
            if x is None or start is None
            else smooth(x, start, self.decay_x, backend=self.backend)
            for x, start in zip(factors.x, xs, strict=True)
        ]
        smoothed_f: list[list[Any]] = [list(own) for own in fs]
        for group in self.graph.hidden_groups:
            feeding = [
                (r, place)
                for r, relation in enumerate(self.relations)
                for place, reached in enumerate(relation.hidden_groups)
                if reached.index == group.index
            ]
            if feeding:
                found = factored_trace(
                    factors.D[group.index],
                    [factors.f[r][place] for r, place in feeding],
                    [fs[r][place] for r, place in feeding],
                    self.decay_f,
                    backend=self.backend,
                )
                for (r, place), planes in zip(feeding, found, strict=True):
                    smoothed_f[r][place] = planes
        if total is not None and signals is not None:
            for r in range(len(self.relations)):
                self._add_window(
                    total, r, factors, signals, smoothed_x[r], smoothed_f[r], xs[r], fs[r], step
                )
        if entry is None:
            return None
        return jax.tree.map(lambda a: a[-1], (tuple(smoothed_x), tuple(map(tuple, smoothed_f))))

    def _add_window(
        self,
        total: GradientSum,
        r: int,
        factors: Factors,
        signals: Signals,
        xhat: jax.Array | None,
        fhat: Sequence[Sequence[jax.Array]],
        x_start: jax.Array | None,
        f_start: Sequence[Sequence[jax.Array]],
        step: jax.Array,
    ) -> None:
        c, groups = signals.c[r], self.relations[r].hidden_groups
        steps = step + jnp.arange(c.shape[0])

        def weighted(planes: Sequence[Sequence[Plane]], by: Sequence[Sequence[Plane]]) -> Plane:
            pairs = zip(groups, planes, strict=True)
            found = add(p for group, own in pairs for p in map(times, own, by[group.index]))
            return None if found is None else sum_middle(found, c.ndim)

        def corrected(plane: jax.Array, steps: jax.Array) -> jax.Array:
            bias = self.bias(steps).astype(plane.dtype)
            return plane / bias.reshape(-1, *[1] * (plane.ndim - 1))

        past = weighted(fhat, signals.L)
        if past is not None:
            total.add_product(r, xhat, corrected(past, steps), leading_axes=1)
        if self.bypasses[r]:
            now = weighted(factors.f[r], signals.L)
            total.add_product(r, factors.x[r], c if now is None else c - now, leading_axes=1)
        before = [
            [jnp.concatenate([start[None], plane[:-1]]) for start, plane in zip(*pair, strict=True)]
            for pair in zip(f_start, fhat, strict=True)
        ]
        bypassing = weighted(before, signals.R)
        if bypassing is not None:
            x_before = None
            if xhat is not None and x_start is not None:
                x_before = jnp.concatenate([x_start[None], xhat[:-1]])
            total.add_product(r, x_before, corrected(bypassing, steps - 1), leading_axes=1)

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


def _entered(entry: Entry) -> Trace:
    """The trace, or zeros if it is not live."""
    return jax.tree.map(lambda a: jnp.where(entry.live, a, jnp.zeros_like(a)), entry.trace)


def zeros_like(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of zeros of a shape and type."""
    return jnp.zeros(struct.shape, struct.dtype)


def _inexact(x: Any) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
