"""The trace as it is defined: one array per weight, position and state plane.

e_t[s] = D_t[s,q] e_{t-1}[q] + f_t[s] (x) x_t
g_t    = c_t (x) x_t + (L_t[s] D_t[s,q] + R_t[q]) e_{t-1}[q]
       = (c_t - L_t[s] f_t[s]) (x) x_t + L_t[s] e_t[s] + R_t[q] e_{t-1}[q]

Where ``D[s,q]`` and ``f[s]`` are one number at all positions, as those of a synapse with one time
constant, ``e[s]`` is the same for all outputs of an op, and is kept once: it is *narrow*. Kernels
take whole planes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compiler import ETraceGraph, HiddenGroup, HiddenParamOpRelation
from ..errors import NotSupportedError
from ..kernels.adjoint_scan import adjoint_scan
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.planes import Plane, add, read_trace, times
from ..kernels.trace_carry import trace_carry
from ..kernels.trace_step import trace_step
from ..op import TraceRules
from .factors import Entry, Factors, Signals, Values, group_plane, places_of, sum_middle, x_shape
from .gradient import GradientSum, slopes_of

__all__ = ['MaterializedEngine']

Trace = tuple[tuple[tuple[Any, ...], ...], ...]
"""Per relation, group and plane, the op's trace; None for planes that are not kept."""


class MaterializedEngine:
    """Carries the whole trace.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    trace_dtype : dtype, optional
        The type in which traces are stored; that of the factors by default.
    windows : bool
        Whether the gradient of windows is asked for: it reads every plane at the window's entry.
    filtered : bool
        Whether every group has its planes a second time, filtered.
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
        trace_dtype: Any = None,
        windows: bool = False,
        filtered: bool = False,
        stochastic: bool = False,
        backend: Backend = PLAIN,
    ) -> None:
        self.graph = graph
        self.trace_dtype = trace_dtype
        self.stochastic = stochastic
        self.backend = backend
        self.relations = list(graph.hidden_param_op_relations)
        self.passes = bypasses(graph)  # and not by way of states alone
        self.bypasses = [True] * len(self.relations) if windows else self.passes
        self.alive, self.kept = (
            [
                [
                    kept_planes(graph, group.index, f, every)
                    + (kept_planes(graph, group.index, f, True) if filtered else [])
                    for group, f in _reached(relation)
                ]
                for relation in self.relations
            ]
            for every in (True, windows)
        )
        for relation, kept in zip(self.relations, self.kept, strict=True):
            if relation.primitive.trace_rules is None:  # it may be learned in fresh windows
                kept[:] = [[False] * len(planes) for planes in kept]
        # Kernels take planes of one shape, and every element draws its own random bits.
        self.narrows = backend.name == 'jax' and not stochastic

    @cached_property
    def _even(self) -> list[list[list[bool]]]:
        """Per relation, group and plane, whether the trace is the same for all outputs."""
        return [
            [
                even_planes(self.graph, relation, group, alive)
                for group, alive in zip(relation.hidden_groups, groups, strict=True)
            ]
            for relation, groups in zip(self.relations, self.alive, strict=True)
        ]

    def _cut(self, r: int, place: int, rows: Sequence[Any]) -> list[Any]:
        """What makes the planes of a trace, per plane, of one output where they are narrow."""
        if not self.narrows:
            return list(rows)
        return [
            jax.tree.map(_first_output, row) if even else row
            for row, even in zip(rows, self._even[r][place], strict=True)
        ]

    def _check_rules(self) -> None:
        for relation in self.relations:
            if relation.primitive.trace_rules is None:
                raise NotSupportedError(
                    f'{relation.source}: {relation.primitive} has no trace rules, so its trace '
                    'cannot be carried from step to step. Register them with '
                    "register_primitive(trace_rules=...), or use etrace_grad(..., trace='fresh') "
                    'with all steps in one window.'
                )

    def trace_shape(self) -> Trace:
        """The shapes and types of the trace."""
        return self._trace_shape(self.narrows)

    def stored_shapes(self) -> list[Trace]:
        """Those of all traces that :meth:`fit` takes, of this backend or another."""
        return [self._trace_shape(narrows) for narrows in (False, True)]

    def fit(self, trace: Trace) -> Trace:
        """A trace of another backend in the form of this one."""
        return jax.tree.map(_with_outputs, trace, self.trace_shape())

    def _trace_shape(self, narrows: bool) -> Trace:
        def shape(r: int, group: HiddenGroup, narrow: bool) -> Any:
            relation = self.relations[r]
            plane = group_plane(group)
            if narrow:
                plane = plane.update(shape=(*plane.shape[:-1], 1))
            outer = partial(relation.primitive.trace_rules.outer, **relation.rule_params)
            shapes = jax.eval_shape(outer, x_shape(relation), plane)
            return jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, self.trace_dtype or a.dtype), shapes
            )

        return tuple(
            tuple(
                tuple(
                    shape(r, group, narrows and self._even[r][place][s]) if kept else None
                    for s, kept in enumerate(self.kept[r][place])
                )
                for place, group in enumerate(relation.hidden_groups)
            )
            for r, relation in enumerate(self.relations)
        )

    def advance(self, entry: Entry, factors: Factors, params: Values, step: jax.Array) -> Trace:
        """The trace after a step."""
        self._check_rules()
        new = []
        for r, relation in enumerate(self.relations):
            rules = bound_rules(relation, slopes_of(relation, params, factors.varying[r]))
            groups = []
            for place, group in enumerate(relation.hidden_groups):
                planes, _ = trace_step(
                    rules,
                    factors.x[r],
                    self._cut(r, place, factors.D[group.index]),
                    self._cut(r, place, factors.f[r][place]),
                    entry.trace[r][place],
                    seed=self._seed(step, r, group.index),
                    live=entry.live,
                    backend=self.backend,
                )
                groups.append(planes)
            new.append(tuple(groups))
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
        """Add the gradient of a step, given the traces before and after it.

        It is read off the trace after the step, ``g = (c - L f) (x) x + L e_t``, so that the one
        before can be overwritten; or off the one before, if that after lacks something.
        """
        for r, relation in enumerate(self.relations):
            in_trace: list[Plane] = []
            elsewhere = self.bypasses[r] or not relation.is_static
            for place, group in enumerate(relation.hidden_groups):
                L, R = signals.L[group.index], signals.R[group.index]
                if self._is_whole(r, place, L, R):
                    read = read_trace(bound_rules(relation), L, trace[r][place])
                    in_trace += map(times, L, factors.f[r][place])
                else:
                    elsewhere = True
                    past, old = signals_before(factors.D[group.index], L, R), entry.trace[r][place]
                    read = read_trace(bound_rules(relation), past, old, live=entry.live)
                total.add_past(r, read)
            if elsewhere:  # otherwise the trace holds all that the op does
                total.add_present(r, factors, signals.c[r], add(in_trace))

    def _is_whole(self, r: int, place: int, L: Sequence[Plane], R: Sequence[Plane]) -> bool:
        """Whether the trace after a step holds all that the loss of the step reads of the past."""
        lacks = zip(L, self.alive[r][place], self.kept[r][place], strict=True)
        return all(plane is None for plane in R) and not any(
            plane is not None and alive and not kept for plane, alive, kept in lacks
        )

    def entry_gradients(
        self,
        total: GradientSum,
        entry: Entry,
        signals: Sequence[Sequence[Plane]],
        step: jax.Array,
    ) -> None:
        """Add ``signals[g][q] . e[q]``, for cotangents of the states to which the trace belongs."""
        for r, relation in enumerate(self.relations):
            for place, group in enumerate(relation.hidden_groups):
                planes, old = signals[group.index], entry.trace[r][place]
                read = read_trace(bound_rules(relation), planes, old, live=entry.live)
                total.add_past(r, read)

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

        ``factors`` and ``signals`` have a leading axis of steps; without ``signals`` there is no
        gradient. ``entry`` is the trace before the first step; the one after the last is returned.
        Without it, the trace is zero before and not wanted after. All weights must be static.
        ``overwrite`` says whether nobody else wants the trace at the entry.
        """
        if entry is not None:
            self._check_rules()
        backs: list[list[Plane]] = [[] for _ in self.relations]
        left: list[Plane] = []  # what the loss says of an op in its step, in no walk so far
        if signals is not None:
            left = [c if p else None for c, p in zip(signals.c, self.passes, strict=True)]
        walks: dict[tuple[int, int], Any] = {}
        for group in self.graph.hidden_groups:
            feeding = places_of(self.relations, group)
            if not feeding:
                continue
            own: list[Plane] = [None] * len(feeding)
            for k, (r, _) in enumerate(feeding):
                if left and _is_window_of(group, left[r]):
                    own[k], left[r] = left[r], None
            found = adjoint_scan(
                factors.D[group.index],
                [factors.f[r][place] for r, place in feeding],
                None if signals is None else signals.L[group.index],
                None if signals is None else signals.R[group.index],
                c=None if signals is None else own,
                within=[not self.passes[r] for r, _ in feeding],
                carry=entry is not None,
                backend=self.backend,
            )
            for k, (r, place) in enumerate(feeding):
                backs[r].append(found.w[k])
                walks[r, place] = found, k
        new: list[list[Any]] = [[] for _ in self.relations]
        for r, relation in enumerate(self.relations):
            w: Plane = None
            if total is not None and signals is not None:
                back = add(backs[r])
                past = None if back is None else sum_middle(back, signals.c[r].ndim)
                w = add([left[r], past])
            if entry is None:
                if total is not None:
                    total.add_product(r, factors.x[r], w, leading_axes=1)
                continue
            grads: Any = None
            if total is not None and w is not None:
                grads = total.product(r, factors.x[r], w, leading_axes=1)
            for place, group in enumerate(relation.hidden_groups):
                found, k = walks[r, place]
                planes, read = trace_carry(
                    bound_rules(relation),
                    factors.x[r],
                    self._cut(r, place, found.P),
                    self._cut(r, place, found.u[k]),
                    entry.trace[r][place],
                    found.nu,
                    seed=self._seed(step, r, group.index),
                    live=entry.live,
                    w=w if place == 0 else None,
                    total=grads if place == 0 else None,
                    overwrite=overwrite,
                    backend=self.backend,
                )
                new[r].append(planes)
                if total is not None:
                    total.add_past(r, read)
        return None if entry is None else tuple(map(tuple, new))

    def _seed(self, step: jax.Array, relation: int, group: int) -> jax.Array | None:
        """A number for each time that a trace is written."""
        if not self.stochastic:
            return None
        traces = len(self.relations) * len(self.graph.hidden_groups)
        return step * traces + relation * len(self.graph.hidden_groups) + group

    def trace_of(self, trace: Trace, relations: list[int]) -> dict[tuple[int, int], Any]:
        """The traces of some relations, by relation and group, with all outputs."""
        whole = jax.tree.map(_with_outputs, trace, self._trace_shape(False))
        return {
            (r, group.index): planes
            for r in relations
            for group, planes in zip(self.relations[r].hidden_groups, whole[r], strict=True)
        }


def _is_window_of(group: HiddenGroup, c: Plane) -> bool:
    """Whether ``c`` is there, and its steps are like the planes of a group."""
    plane = group_plane(group)
    return c is not None and (c.shape[1:], c.dtype) == (plane.shape, plane.dtype)


def signals_before(
    D: Sequence[Sequence[Plane]], L: Sequence[Plane], R: Sequence[Plane]
) -> list[Plane]:
    """``L D + R``: what the loss of a step says of the states before it."""
    return [add([R[q], *(times(L[s], row[q]) for s, row in enumerate(D))]) for q in range(len(D))]


def bound_rules(
    relation: HiddenParamOpRelation, slopes: Mapping[str, jax.Array] = MappingProxyType({})
) -> TraceRules:
    """The trace rules of a relation's op, with the parameters of its equation.

    With ``slopes``, new traces are in the coordinates of the parameter, not of the op's weight.
    """
    rules, params = relation.primitive.trace_rules, relation.rule_params

    def outer(x: Any, plane: jax.Array) -> Any:
        trace = rules.outer(x, plane, **params)
        return {k: leaf * slopes[k] if k in slopes else leaf for k, leaf in trace.items()}

    return dataclasses.replace(
        rules,
        outer=outer,
        outer_sum=partial(rules.outer_sum, **params),
        decay=partial(rules.decay, **params),
        contract=partial(rules.contract, **params),
        is_outer=rules.is_outer and not slopes,
    )


def bypasses(graph: ETraceGraph) -> Sequence[bool]:
    """Per relation, whether its op reaches the loss other than by hidden states."""
    perturb = graph.exit_perturb
    return [True] * len(graph.hidden_param_op_relations) if perturb is None else perturb.y_bypasses


def kept_planes(
    graph: ETraceGraph, group: int, f_pattern: Sequence[bool], windows: bool
) -> list[bool]:
    """Which planes of a trace can be non-zero and are read again."""
    pattern = graph.hidden_groups[group].pattern
    alive = list(f_pattern)
    for _ in pattern:
        alive = [a or any(map(_both, row, alive)) for a, row in zip(alive, pattern, strict=True)]
    if windows:
        return alive
    bypassed = set() if graph.exit_perturb is None else set(graph.exit_perturb.bypass_invars)
    owner = graph.hidden_groups[group]
    read_past = [
        old in bypassed
        for old, width in zip(owner.hidden_invars, owner.widths, strict=True)
        for _ in range(width or 1)
    ]
    read = [any(column) for column in zip(*pattern, strict=True)]
    return [a and (r or p) for a, r, p in zip(alive, read, read_past, strict=True)]


def even_planes(
    graph: ETraceGraph, relation: HiddenParamOpRelation, group: HiddenGroup, alive: Sequence[bool]
) -> list[bool]:
    """Which planes of a trace are the same for all outputs of an op."""
    rules, shape = relation.primitive.trace_rules, group.varshape
    is_outer = rules is not None and rules.is_outer and relation.is_static
    if not is_outer or relation.y_var.aval.shape != shape or shape[-1] == 1:
        return [False] * len(alive)
    even = graph.transitions[group.index].even
    for _ in even:
        uneven = [a and not e for a, e in zip(alive, even, strict=False)]
        even = [
            own and not any(map(_both, row, uneven))
            for own, row in zip(even, group.pattern, strict=True)
        ]
    return even * (len(alive) // len(even))  # a filter's planes are like those that it filters


def _first_output(plane: jax.Array) -> jax.Array:
    return lax.slice_in_dim(plane, 0, 1, axis=-1)


def _with_outputs(a: jax.Array, like: Any) -> jax.Array:
    """A trace with as many outputs as another, if that has one, or this."""
    if a.shape == like.shape:
        return a
    return jnp.broadcast_to(a[..., : like.shape[-1]], like.shape)


def _both(a: bool, b: bool) -> bool:
    return a and b


def _reached(relation: HiddenParamOpRelation) -> list[tuple[Any, Sequence[bool]]]:
    return list(zip(relation.hidden_groups, relation.f_patterns, strict=True))
