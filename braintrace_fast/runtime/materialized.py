"""The trace as it is defined: one array per weight, position and state plane.

e_t[s] = D_t[s,q] e_{t-1}[q] + f_t[s] (x) x_t
g_t    = c_t (x) x_t + (L_t[s] D_t[s,q] + R_t[q]) e_{t-1}[q]
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compiler import ETraceGraph, HiddenGroup, HiddenParamOpRelation
from ..errors import NotSupportedError
from ..kernels.adjoint_scan import adjoint_scan
from ..kernels.planes import Plane, add, times
from ..kernels.trace_carry import trace_carry
from ..op import TraceRules
from .factors import Entry, Factors, Signals, Values, first_step, group_plane, sum_middle
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
    """

    def __init__(
        self,
        graph: ETraceGraph,
        trace_dtype: Any = None,
        windows: bool = False,
        filtered: bool = False,
    ) -> None:
        self.graph = graph
        self.trace_dtype = trace_dtype
        self.relations = list(graph.hidden_param_op_relations)
        self.kept = [
            [kept_planes(graph, group.index, f, windows) for group, f in _reached(relation)]
            for relation in self.relations
        ]
        if filtered:
            self.kept = [
                [
                    planes + kept_planes(graph, group.index, f, windows=True)
                    for planes, (group, f) in zip(kept, _reached(relation), strict=True)
                ]
                for kept, relation in zip(self.kept, self.relations, strict=True)
            ]
        for relation, kept in zip(self.relations, self.kept, strict=True):
            if relation.primitive.trace_rules is None:  # it may be learned in fresh windows
                kept[:] = [[False] * len(planes) for planes in kept]

    def _check_rules(self) -> None:
        for relation in self.relations:
            if relation.primitive.trace_rules is None:
                raise NotSupportedError(
                    f'{relation.source}: {relation.primitive} has no trace rules, so its trace '
                    'cannot be carried from step to step. Register them with '
                    "register_primitive(trace_rules=...), or use etrace_grad(..., trace='fresh') "
                    'with all steps in one window.'
                )

    def init(self, factors: Factors) -> Trace:
        """A zero trace, from factors or their shapes."""

        def zeros(r: int, group: HiddenGroup) -> Any:
            relation = self.relations[r]
            plane = group_plane(group)
            outer = functools.partial(relation.primitive.trace_rules.outer, **relation.eqn_params)
            shapes = jax.eval_shape(outer, factors.x[r], plane)
            return jax.tree.map(lambda a: jnp.zeros(a.shape, self.trace_dtype or a.dtype), shapes)

        return tuple(
            tuple(
                tuple(zeros(r, group) if kept else None for kept in planes)
                for group, planes in zip(relation.hidden_groups, self.kept[r], strict=True)
            )
            for r, relation in enumerate(self.relations)
        )

    def advance(self, entry: Entry, factors: Factors, params: Values, step: jax.Array) -> Trace:
        """The trace after a step."""
        self._check_rules()
        fresh = self._fresh(factors, params)
        new = []
        for r, relation in enumerate(self.relations):
            rules, eqn_params = relation.primitive.trace_rules, relation.eqn_params
            groups = []
            for g, group in enumerate(relation.hidden_groups):
                D = [list(map(entry.zero_or, row)) for row in factors.D[group.index]]
                old = entry.trace[r][g]
                planes = []
                for s, kept in enumerate(self.kept[r][g]):
                    parts = [fresh[r][g][s]] + [
                        rules.decay(D[s][q], old[q], **eqn_params)
                        for q in range(len(old))
                        if kept and D[s][q] is not None and old[q] is not None
                    ]
                    planes.append(_sum(parts, self.trace_dtype) if kept else None)
                groups.append(tuple(planes))
            new.append(tuple(groups))
        return tuple(new)

    def gradients(
        self,
        total: GradientSum,
        entry: Entry,
        factors: Factors,
        signals: Signals,
        params: Values,
        step: jax.Array,
    ) -> None:
        """Add the gradient of a step, given the trace before it."""
        for index, c in enumerate(signals.c):
            total.add_step(index, factors, c)
        past = [
            [
                add([signals.R[g][q]] + [times(L, D[s][q]) for s, L in enumerate(signals.L[g])])
                for q in range(len(D))
            ]
            for g, D in enumerate(factors.D)
        ]
        self.entry_gradients(total, entry, past, step)

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
                self._add_entry(total, entry, r, place, signals[group.index])

    def _add_entry(
        self, total: GradientSum, entry: Entry, r: int, place: int, signals: Sequence[Plane]
    ) -> None:
        rules = bound_rules(self.relations[r])
        for signal, plane in zip(map(entry.zero_or, signals), entry.trace[r][place], strict=True):
            if signal is not None and plane is not None:
                total.add_past(r, rules.contract(signal, plane))

    def window(
        self,
        total: GradientSum | None,
        entry: Entry | None,
        factors: Factors,
        signals: Signals | None,
        step: jax.Array,
        carry: bool,
    ) -> Trace | None:
        """Add the gradient of K steps at once, and carry the trace past them.

        ``factors`` and ``signals`` have a leading axis of steps; without ``signals`` there is no
        gradient. ``entry`` is the trace before the first step, None for zeros. Returns the trace
        after the last step, or None without ``carry``. All weights must be static.
        """
        if carry:
            self._check_rules()
        backs: list[list[Plane]] = [[] for _ in self.relations]
        exits: list[list[tuple[Any, Any]]] = [[] for _ in self.relations]
        for group in self.graph.hidden_groups:
            feeding = [
                (r, place)
                for r, relation in enumerate(self.relations)
                for place, reached in enumerate(relation.hidden_groups)
                if reached.index == group.index
            ]
            if not feeding:
                continue
            found = adjoint_scan(
                factors.D[group.index],
                [factors.f[r][place] for r, place in feeding],
                None if signals is None else signals.L[group.index],
                None if signals is None else signals.R[group.index],
                carry=carry,
            )
            for k, (r, place) in enumerate(feeding):
                backs[r].append(found.w[k])
                if carry:
                    exits[r].append((found.P, found.u[k]))
                if total is not None and entry is not None:
                    self._add_entry(total, entry, r, place, found.nu)
        if total is not None and signals is not None:
            for r, c in enumerate(signals.c):
                back = add(backs[r])
                w = c if back is None else c + sum_middle(back, c.ndim)
                total.add_product(r, factors.x[r], w, leading_axes=1)
        if not carry:
            return None
        zeros = None
        new = []
        for r, relation in enumerate(self.relations):
            rules = bound_rules(relation)
            groups = []
            for g, (P, u) in enumerate(exits[r]):
                old = None
                if entry is not None:
                    old, P = entry.trace[r][g], [list(map(entry.zero_or, row)) for row in P]
                planes = trace_carry(rules, factors.x[r], P, u, old, self.kept[r][g])
                if any(k and p is None for k, p in zip(self.kept[r][g], planes, strict=True)):
                    zeros = self.init(first_step(factors)) if zeros is None else zeros
                    planes = tuple(
                        z if k and p is None else p
                        for k, p, z in zip(self.kept[r][g], planes, zeros[r][g], strict=True)
                    )
                groups.append(tuple(_sum([p], self.trace_dtype) if p else None for p in planes))
            new.append(tuple(groups))
        return tuple(new)

    def trace_of(self, trace: Trace, relations: list[int]) -> dict[tuple[int, int], Any]:
        """The traces of some relations, by relation and group."""
        return {
            (r, group.index): planes
            for r in relations
            for group, planes in zip(self.relations[r].hidden_groups, trace[r], strict=True)
        }

    def _fresh(self, factors: Factors, params: Values) -> Trace:
        """``f (x) x``, in the coordinates of the parameter where the weight varies in time."""
        result = []
        for r, relation in enumerate(self.relations):
            rules, eqn_params = relation.primitive.trace_rules, relation.eqn_params
            slopes = slopes_of(relation, params, factors.varying[r])
            groups = []
            for kept, f in zip(self.kept[r], factors.f[r], strict=True):
                planes = []
                for keep, plane in zip(kept, f, strict=True):
                    outer = None
                    if keep and plane is not None:
                        outer = rules.outer(factors.x[r], plane, **eqn_params)
                        outer = {
                            k: outer[k] * slopes[k] if k in slopes else outer[k] for k in outer
                        }
                    planes.append(outer)
                groups.append(tuple(planes))
            result.append(tuple(groups))
        return tuple(result)


def bound_rules(relation: HiddenParamOpRelation) -> TraceRules:
    """The trace rules of a relation's op, with the parameters of its equation."""
    rules = dataclasses.asdict(relation.primitive.trace_rules)
    return TraceRules(
        **{name: functools.partial(rule, **relation.eqn_params) for name, rule in rules.items()}
    )


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


def _both(a: bool, b: bool) -> bool:
    return a and b


def _reached(relation: HiddenParamOpRelation) -> list[tuple[Any, Sequence[bool]]]:
    return list(zip(relation.hidden_groups, relation.f_patterns, strict=True))


def _sum(parts: Sequence[Any], dtype: Any) -> Any:
    trees = [part for part in parts if part is not None]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)
    return total if dtype is None else jax.tree.map(lambda a: a.astype(dtype), total)
