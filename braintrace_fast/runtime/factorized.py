"""The trace as a product of an input side and an output side, each smoothed over time.

    xhat_t    = a_x xhat_{t-1} + x_t
    fhat_t[s] = a_f D_t[s,q] fhat_{t-1}[q] + (1 - a_f) f_t[s]
    g_t       = xhat_t (x) fhat_t[s] L_t[s] / b_t  +  x_t (x) (c_t - f_t[s] L_t[s])

with the bias correction ``b_t = 1 - a_f^(n+1)`` after ``n`` steps. The second product holds the
paths of the step that pass no hidden state. Over a window, with ``s_t = fhat_t[s] L_t[s] / b_t``,

    sum_t xhat_t (x) s_t = sum_t x_t (x) back_t + xhat_0 (x) a_x back_1
    back_t               = a_x back_{t+1} + s_t

so both products are one, and inputs are not smoothed.

Where ``n`` substeps of a scan share an op, time is counted in substeps. Since the loss reads the
states after the last of them, ``f_t[l]`` being the derivatives of those,

    xhat_t    = a_x^n xhat_{t-1} + sum_l a_x^(n-1-l) x_t[l]
    fhat_t[s] = a_f^n D_t[s,q] fhat_{t-1}[q] + (1 - a_f) sum_l a_f^(n-1-l) f_t[s][l]
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compiler import ETraceGraph, HiddenParamOpRelation
from ..errors import NotSupportedError
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.factored_trace import factored_trace, smooth
from ..kernels.planes import Plane, add, if_live, times
from .adjoint import in_one_axis
from .engine import Steps
from .factors import Entry, GroupPlanes, Values, sum_leading, sum_middle
from .gradient import GradientSum
from .links import Link, group_plane, links_of, links_to, x_shape
from .op_rules import varying_weights, weight_shapes
from .trace_layout import f_key, on_states, stored, x_key
from .trace_planes import direct_ops

__all__ = ['FactorizedEngine']

LinkPlanes = Sequence[Sequence[Plane]]
Trace = tuple[tuple[jax.Array | None, ...], tuple[tuple[jax.Array, ...], ...]]
"""``xhat`` per op, and ``fhat`` per link and plane."""


class FactorizedEngine:
    """Carries ``xhat`` and ``fhat``.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    decay : tuple of float
        ``a_x`` and ``a_f``.
    chunks : bool
        Whether chunks of steps are differentiated in full.
    backend : Backend
        What to run kernels with.

    Raises
    ------
    NotSupportedError
        If they are, and a weight varies in time: nothing says what it was before the chunk.
    """

    is_small = True

    def __init__(
        self,
        graph: ETraceGraph,
        decay: tuple[float, float],
        chunks: bool = False,
        backend: Backend = PLAIN,
    ) -> None:
        self.graph = graph
        self.backend = backend
        self.decay_x, self.decay_f = decay
        self.relations = list(graph.hidden_param_op_relations)
        self.links = links_of(graph)
        self.direct = direct_ops(graph)
        for relation in self.relations:
            rules = relation.primitive.example_rules
            if rules and 'pp_x_repr' in rules.given and 'xy_to_dw' not in rules.given:
                raise NotSupportedError(
                    f'{relation.source}: {relation.primitive} has a pp_x_repr, and no rule that '
                    'takes what it gives. Register one by register_xy_to_dw(...).'
                )
        varying = self.refuses_windows()
        if chunks and varying is not None:
            raise NotSupportedError(
                f'{varying}, which the factorised trace cannot carry from window to window. Use '
                "vjp_method='single-step', or D_RTRL."
            )

    def refuses_windows(self) -> str | None:
        """Weights that vary in time are refused: they cannot be pulled back once per window."""
        return varying_weights(self.relations)

    def refuses_carry(self) -> None:
        """Nothing is refused: the trace is small."""

    def refuses_restarts(self) -> str:
        """They are refused: one count of steps serves all examples."""
        return (
            'its bias correction counts the steps of all examples together. Reset the states '
            'inside the model, which takes the flag as an input, or use D_RTRL, EProp or '
            "ThreeFactor. Between sequences, trace='fresh' or reset_state() starts anew."
        )

    def trace_shape(self) -> Trace:
        """The shapes and types of the trace."""
        xs: Any = tuple(
            None if x is None else jax.eval_shape(partial(_step_x, relation), x)
            for relation, x in zip(self.relations, map(x_shape, self.relations), strict=True)
        )
        fs: Any = tuple((group_plane(link.group),) * link.group.num_state for link in self.links)
        return xs, fs

    def stored_shapes(self) -> list[Trace]:
        """Those of all traces that :meth:`fit` takes: there is one form."""
        return [self.trace_shape()]

    def fit(self, trace: Trace) -> Trace:
        """A trace of another backend, which is as it is here."""
        return trace

    def advance(self, step: Steps) -> Trace:
        """The trace after a step."""
        (xs, fs), factors = self._entry_trace(step), step.factors
        new_xs = tuple(
            self._last_x(relation, x, old)
            if relation.substeps
            else None
            if old is None or x is None
            else self.decay_x * old + _step_x(relation, x)
            for relation, old, x in zip(self.relations, xs, factors.x, strict=True)
        )
        return new_xs, tuple(
            self._advance_planes(
                fs[link.index],
                factors.D[link.group.index],
                self._total_f(link.relation, factors.f[link.index], 0),
                self.decay_f ** max(link.relation.substeps, 1),
            )
            for link in self.links
        )

    def _total_f(
        self, relation: HiddenParamOpRelation, f: Sequence[Plane], axis: int
    ) -> Sequence[Plane]:
        """``f``, summed over substeps as far as they are forgotten at the end of a step."""
        n, a = relation.substeps, self.decay_f
        if not n:
            return f
        scales = a ** np.arange(n - 1, -1, -1) * ((1 - a) / (1 - a**n))

        def total(plane: jax.Array) -> jax.Array:
            own = jnp.asarray(scales, plane.dtype)
            return jnp.tensordot(plane, own, ((axis,), (0,)), precision='highest')

        return [None if plane is None else total(plane) for plane in f]

    def _advance_planes(
        self,
        old: Sequence[jax.Array],
        D: Sequence[Sequence[Plane]],
        f: Sequence[Plane],
        decay: float,
    ) -> tuple[jax.Array, ...]:
        new = []
        for s, row in enumerate(D):
            past, now = add(map(times, row, old)), f[s]
            total = add(
                [
                    None if past is None else decay * past,
                    None if now is None else (1 - decay) * now,
                ]
            )
            new.append(jnp.zeros_like(old[s]) if total is None else total)
        return tuple(new)

    def gradients(self, total: GradientSum, step: Steps, trace: Trace) -> None:
        """Add the gradient of a step; ``trace`` is the one after it."""
        (xs, fs), factors, signals = trace, step.factors, step.signals
        if signals is None or step.entry is None:
            raise ValueError('There are no signals, or no trace at the entry.')
        for op, relation in enumerate(self.relations):
            c = signals.c[op]
            signal = self._weighted(op, fs, signals.L)
            if signal is not None:
                bias = self.bias(step.elapsed, signal.dtype, relation.substeps)
                signal = sum_leading(signal / bias, c.ndim)
                total.add_product(op, xs[op], signal, factors.varying[op])
            if self.direct[op] or not relation.is_static:
                total.add_present(op, factors, c, self._in_trace(op, factors.f, signals.L, 0))
        self._add_entry(total, step.entry, signals.R, step.elapsed - 1, factors.varying)

    def entry_gradients(
        self, total: GradientSum, entry: Entry, signals: GroupPlanes, elapsed: jax.Array
    ) -> None:
        """Add ``signals[g][q] . e[q]``: cotangents of the states after step ``elapsed``."""
        self._add_entry(total, entry, signals, elapsed, ({},) * len(self.relations))

    def _add_entry(
        self,
        total: GradientSum,
        entry: Entry,
        signals: GroupPlanes,
        elapsed: jax.Array,
        varying: Sequence[Mapping[str, tuple[jax.Array, ...]]],
    ) -> None:
        xs, fs = entry.trace
        for op, relation in enumerate(self.relations):
            signal = self._weighted(op, fs, signals)
            if signal is not None:
                bias = self.bias(elapsed, signal.dtype, relation.substeps)
                signal = sum_leading(signal / bias, relation.y_var.aval.ndim)
                total.add_product(op, xs[op], signal, varying[op])

    def _weighted(self, op: int, planes: LinkPlanes, by: GroupPlanes) -> Plane:
        """The planes of an op's links, times those of their groups, added up."""
        links = (link for link in self.links if link.op == op)
        return add(
            plane
            for link in links
            for plane in map(times, planes[link.index], by[link.group.index])
        )

    def _in_trace(self, op: int, f: LinkPlanes, L: GroupPlanes, axis: int) -> Plane:
        """``sum_s f[s] L[s]``, where ``f`` may have an axis of substeps at that place."""
        if self.relations[op].substeps:
            L = jax.tree.map(lambda plane: jnp.expand_dims(plane, axis), L)
        return self._weighted(op, f, L)

    def window(
        self, total: GradientSum | None, steps: Steps, overwrite: bool = True
    ) -> Trace | None:
        """Add the gradient of K steps at once, and carry the trace past them."""
        xs, fs = self._entry_trace(steps)
        ends: list[Any] = list(fs)
        smoothed: list[Any] = list(fs)
        for group in self.graph.hidden_groups:
            for n, links in _by_substeps(links_to(self.links, group)).items():
                f = steps.factors.f
                last, fhat = factored_trace(
                    steps.factors.D[group.index],
                    [self._total_f(link.relation, f[link.index], 1) for link in links],
                    [fs[link.index] for link in links],
                    self.decay_f ** max(n, 1),
                    backend=self.backend,
                )
                for link, end, planes in zip(links, last, fhat, strict=True):
                    ends[link.index], smoothed[link.index] = end, planes
        if total is not None and steps.signals is not None:
            for op in range(len(self.relations)):
                self._add_window(total, op, steps, (xs, fs), smoothed)
        if steps.entry is None:
            return None
        inputs = map(in_one_axis, self.relations, steps.factors.x)
        return tuple(map(self._last_x, self.relations, inputs, xs)), tuple(ends)

    def _entry_trace(self, steps: Steps) -> Trace:
        if steps.entry is None:
            return jax.tree.map(jnp.zeros_like, self.trace_shape())
        return steps.entry.trace

    def _add_window(
        self, total: GradientSum, op: int, steps: Steps, start: Trace, fhat: Sequence[Any]
    ) -> None:
        """Add ``sum_t xhat_t (x) read_t + x_t (x) now_t``.

        Where the product is linear in ``x``, that is ``sum_t x_t (x) (back_t + now_t)``, with
        ``read`` smoothed in place of ``x``, back in time: one product, and nothing of the size of
        the inputs.
        """
        x, x_start = steps.factors.x[op], None if steps.entry is None else start[0][op]
        read, now, first = self._window_signals(op, steps, start, fhat)
        x, now = in_one_axis(self.relations[op], (x, now))
        read = _at_last_substep(self.relations[op], read)
        if first is not None and (x is None or x_start is not None):
            total.add_product(op, x_start, first)
        if x is None or read is None or not self.decay_x:  # there is one input to multiply
            total.add_product(op, x, add([read, now]), leading_axes=1)
        elif linear := self.relations[op].primitive.linear_in_x:
            left, back = smooth(read, None, self.decay_x, reverse=True, backend=self.backend)
            total.add_product(op, x, add([back, now]), leading_axes=1, only=linear.__contains__)
            rest = add([read, now])
            total.add_product(op, x, rest, leading_axes=1, only=lambda key: key not in linear)
            if x_start is not None:
                total.add_product(op, x_start, left, only=linear.__contains__)
        else:
            past = None if x_start is None else self.decay_x * x_start
            X = _represented(self.relations[op], x)
            xhat = smooth(X.astype(_inexact(X)), past, self.decay_x, backend=self.backend)[1]
            total.add_product(op, xhat, read, leading_axes=1)
            total.add_product(op, x, now, leading_axes=1)

    def _window_signals(
        self, op: int, steps: Steps, start: Trace, fhat: Sequence[Any]
    ) -> tuple[Plane, Plane, Plane]:
        """What is multiplied with ``xhat``, with ``x``, and with ``xhat`` before the window."""
        factors, signals = steps.factors, steps.signals
        if signals is None:
            return None, None, None
        c = signals.c[op]
        indices = steps.elapsed + jnp.arange(c.shape[0], dtype=steps.elapsed.dtype)

        def weighted(planes: LinkPlanes, by: GroupPlanes) -> Plane:
            plane = self._weighted(op, planes, by)
            return None if plane is None else sum_middle(plane, c.ndim)

        now: Plane = None
        if self.direct[op]:
            in_trace = self._in_trace(op, factors.f, signals.L, 1)
            in_trace = None if in_trace is None else sum_middle(in_trace, c.ndim)
            now = c if in_trace is None else c - in_trace
        n = self.relations[op].substeps
        read = self._corrected(weighted(fhat, signals.L), indices, n)
        before = [
            [jnp.concatenate([first[None], plane[:-1]]) for first, plane in zip(*pair, strict=True)]
            for pair in zip(start[1], fhat, strict=True)
        ]
        passing = self._corrected(weighted(before, signals.R), indices - 1, n)
        if passing is None:
            return read, now, None
        # It reads the trace of the step before.
        read = add([read, jnp.concatenate([passing[1:], jnp.zeros_like(passing[:1])])])
        return read, now, passing[0]

    def _corrected(self, plane: Plane, indices: jax.Array, substeps: int) -> Plane:
        """A plane of all steps, each divided by its bias."""
        if plane is None:
            return None
        bias = self.bias(indices, plane.dtype, substeps)
        return plane / bias.reshape(-1, *[1] * (plane.ndim - 1))

    def _last_x(
        self, relation: HiddenParamOpRelation, x: jax.Array | None, start: jax.Array | None
    ) -> jax.Array | None:
        """``xhat`` after the last step of a window."""
        if x is None or start is None:
            return None
        scales = jnp.asarray(self.decay_x ** np.arange(len(x) - 1, -1, -1), start.dtype)
        return self.decay_x ** len(x) * start + _total_x(relation, x, scales)

    def trace_of(self, entry: Entry, params: Values, ops: Collection[int]) -> tuple[dict, dict]:
        """The input sides and the output sides of some ops, in braintrace's layout."""
        xs, fs = if_live(entry.live, entry.trace)
        links = [link for link in self.links if link.op in ops]
        inputs = {key: xs[link.op] for link in links if (key := x_key(link)) is not None}
        return inputs, {f_key(link): on_states(fs[link.index]) for link in links}

    def with_trace_of(self, trace: Trace, key: Any, value: Any) -> Trace:
        """A trace of which one part is what :meth:`trace_of` would show so."""
        xs, fs = trace
        x_keys = {link.op: x_key(link) for link in self.links}
        return tuple(
            e if e is None or x_keys[op] != key else stored(e, value) for op, e in enumerate(xs)
        ), tuple(
            tuple(stored(e, value[..., s]) for s, e in enumerate(planes))
            if f_key(link) == key
            else planes
            for link, planes in zip(self.links, fs, strict=True)
        )

    def bias(self, step: jax.Array, dtype: Any, substeps: int = 0) -> jax.Array:
        """The correction for the steps that the smoothing has not yet seen."""
        if substeps:
            step = (step + 1) * substeps - 1
        elapsed = jnp.asarray(step).astype(float)
        correction = jnp.maximum(1 - self.decay_f ** (elapsed + 1.0), 1e-8)
        return jnp.where(step < 1000, correction, 1.0).astype(dtype)


def _by_substeps(links: Sequence[Link]) -> dict[int, list[Link]]:
    """Links by the number of their op's substeps."""
    numbers = dict.fromkeys(link.relation.substeps for link in links)
    return {n: [link for link in links if link.relation.substeps == n] for n in numbers}


def _at_last_substep(relation: HiddenParamOpRelation, read: Plane) -> Plane:
    """What is read after the steps of a window, at the last substep of each, in one axis."""
    if read is None or not relation.substeps:
        return read
    before = jnp.zeros((len(read), relation.substeps - 1, *read.shape[1:]), read.dtype)
    return in_one_axis(relation, jnp.concatenate([before, read[:, None]], 1))


def _total_x(relation: HiddenParamOpRelation, x: jax.Array, scales: jax.Array) -> jax.Array:
    """``sum_t scales[t] x_t``, or the same of that in which the op's gradients are linear."""
    if relation.primitive.x_total is not None:
        return relation.primitive.x_total(x, scales, **relation.rule_params)
    X = _represented(relation, x)
    return jnp.tensordot(scales, X.astype(scales.dtype), 1, precision='highest')


def _step_x(relation: HiddenParamOpRelation, x: jax.Array) -> jax.Array:
    """What a step adds to ``xhat``."""
    if relation.primitive.x_total is not None:
        return _total_x(relation, x[None], jnp.ones(1, relation.y_var.aval.dtype))
    X = _represented(relation, x[None])[0]
    return X.astype(_inexact(X))


def _represented(relation: HiddenParamOpRelation, x: jax.Array) -> jax.Array:
    """What is smoothed of the inputs of a window, for an op whose ``pp_x_repr`` says so."""
    rules = relation.primitive.example_rules
    if rules is None or 'pp_x_repr' not in rules.given:
        return x
    shapes = weight_shapes(relation)
    return jax.vmap(lambda x: rules.given['pp_x_repr'](x, shapes))(x)


def _inexact(x: Any) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
