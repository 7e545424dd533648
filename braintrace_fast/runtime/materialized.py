"""The trace as it is defined: one array per weight, position and state plane.

e_t[s] = D_t[s,q] e_{t-1}[q] + f_t[s] (x) x_t
g_t    = c_t (x) x_t + (L_t[s] D_t[s,q] + R_t[q]) e_{t-1}[q]
       = (c_t - L_t[s] f_t[s]) (x) x_t + L_t[s] e_t[s] + R_t[q] e_{t-1}[q]

Where ``D[s,q]`` and ``f[s]`` are uniform, as those of a synapse with one time constant, ``e[s]`` is
the same for all outputs of an op, and is kept once. Kernels take whole planes. Some ops keep such a
plane as a filtered input instead (:mod:`.input_planes`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import PyTree
from ..compiler import ETraceGraph
from ..errors import NotSupportedError
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.planes import Plane, add, if_live, read_trace, times
from ..kernels.trace_carry import trace_carry
from ..kernels.trace_step import trace_step
from . import input_planes, trace_layout
from .adjoint import Adjoint, adjoint_of, in_one_axis
from .engine import FactorTransform, Later, Steps
from .factors import Entry, Factors, GroupPlanes, Signals, Values
from .gradient import GradientSum, slopes_of
from .links import Link, group_plane, links_of, x_shape
from .op_rules import bound_rules, lacking_rules, operand, plane_views, varying_weights, weights_of
from .trace_planes import direct_ops, trace_planes
from .trace_room import too_large
from .window_memory import tree_bytes

__all__ = ['MaterializedEngine']

Trace = tuple[tuple[Any, ...], ...]
"""Per link and plane, the op's trace; None for planes that are not kept."""


class MaterializedEngine:
    """Carries the whole trace.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    trace_dtype : dtype, optional
        The type in which traces are stored; that of the factors by default.
    chunks : bool
        Whether chunks of steps are differentiated in full: that reads every plane at their entry.
    transform : FactorTransform, optional
        What makes of the model's factors those of another recurrence, such as a :class:`Filter`.
    stochastic : bool
        Whether traces in bfloat16 are rounded at random, with the right mean.
    backend : Backend
        What to run kernels with.
    room : int, optional
        The most bytes that the trace may take. A larger one is neither made nor carried.
    whole : bool
        Whether every plane is kept as it is defined, because something else may change it, and
        gradients are read off what it made of it.
    """

    is_small = False

    def __init__(
        self,
        graph: ETraceGraph,
        trace_dtype: Any = None,
        chunks: bool = False,
        transform: FactorTransform | None = None,
        stochastic: bool = False,
        backend: Backend = PLAIN,
        room: int | None = None,
        whole: bool = False,
    ) -> None:
        self.graph = graph
        self.trace_dtype = trace_dtype
        self.transform = transform
        self.stochastic = stochastic
        self.backend = backend
        self.relations = list(graph.hidden_param_op_relations)
        self.links = links_of(graph)
        self.direct = direct_ops(graph)
        self.reads_entry = chunks
        copies = 1 if transform is None else transform.copies
        # Kernels take planes of one shape, and every element draws its own random bits.
        by_input = not (stochastic or whole)
        self.compresses = backend.name == 'jax' and by_input
        self.planes = [
            trace_planes(graph, link, chunks or whole, copies, by_input) for link in self.links
        ]
        self.too_large = too_large(self.relations, self.links, self.trace_shape(), room)
        if self.too_large is not None:
            self.planes = [planes.not_kept() for planes in self.planes]

    def refuses_windows(self) -> str | None:
        """Weights that vary in time are refused: they cannot be pulled back once per window."""
        return varying_weights(self.relations)

    def refuses_carry(self) -> str | None:
        """Ops without trace rules are refused, and traces that there is no room for."""
        return lacking_rules(self.relations) or self.too_large

    def refuses_restarts(self) -> None:
        """Nothing is refused."""

    def trace_shape(self) -> Trace:
        """The shapes and types of the trace."""
        return self._trace_shape(self.compresses)

    def stored_shapes(self) -> list[Trace]:
        """Those of all traces that :meth:`fit` takes, of this backend or another."""
        return [self._trace_shape(compressed) for compressed in (False, True)]

    def fit(self, trace: Trace) -> Trace:
        """A trace of another backend in the form of this one."""
        return jax.tree.map(_with_outputs, trace, self.trace_shape())

    def advance(self, step: Steps) -> Trace:
        """The trace after a step."""
        self._check_carry()
        entry, factors = _entry(step), self._factors(step.factors)
        new = []
        for link in self.links:
            slopes = slopes_of(link.relation, step.params, factors.varying[link.op])
            rules = bound_rules(link.relation, slopes, step.params)
            D, f = factors.D[link.group.index], factors.f[link.index]
            x, old = factors.x[link.op], entry.trace[link.index]
            options: Any = dict(
                seed=self._seed(step.elapsed, link), live=entry.live, backend=self.backend
            )
            if link.relation.substeps:
                planes, _ = trace_carry(
                    rules,
                    operand(rules, x),
                    plane_views(rules, D),
                    plane_views(rules, f),
                    old,
                    None,
                    **options,
                )
            elif inputs := self._inputs(link, old, entry.live):
                one_step = jax.tree.map(lambda a: a[None], (f, x))
                planes, _ = self._past(link, inputs, old, D, *one_step, **options)
            else:
                planes, _ = trace_step(
                    rules,
                    operand(rules, x),
                    plane_views(rules, self._compressed(link, D)),
                    plane_views(rules, self._compressed(link, f)),
                    old,
                    **options,
                )
            new.append(planes)
        return tuple(new)

    def gradients(self, total: GradientSum, step: Steps, trace: Trace) -> None:
        """Add the gradient of a step; ``trace`` is the one after it.

        It is read off that one, ``g = (c - L f) (x) x + L e_t``, so that the one before can be
        overwritten; or off the one before, if that after lacks something.
        """
        entry, factors = _entry(step), self._factors(step.factors)
        signals = self._signals(step.signals)
        in_trace: list[list[Plane]] = [[] for _ in self.relations]
        elsewhere = [
            self.reads_entry or direct or not relation.is_static
            for direct, relation in zip(self.direct, self.relations, strict=True)
        ]
        for link in self.links:
            L, R = signals.L[link.group.index], signals.R[link.group.index]
            if self._is_whole(link, L, R) and not link.relation.substeps:
                self._read(total, link, L, trace)
                in_trace[link.op] += map(times, L, factors.f[link.index])
            else:
                elsewhere[link.op] = True
                before = signals_before(factors.D[link.group.index], L, R)
                self._read(total, link, before, entry.trace, entry.live)
        for op, counted in enumerate(in_trace):
            if elsewhere[op]:  # otherwise the trace holds all that the op does
                total.add_present(op, factors, signals.c[op], add(counted))

    def entry_gradients(
        self, total: GradientSum, entry: Entry, signals: GroupPlanes, elapsed: jax.Array
    ) -> None:
        """Add ``signals[g][q] . e[q]``: cotangents of the states to which the trace belongs."""
        signals = signals if self.transform is None else self.transform.planes(signals)
        for link in self.links:
            self._read(total, link, signals[link.group.index], entry.trace, entry.live)

    def window(
        self, total: GradientSum | None, steps: Steps, overwrite: bool = True
    ) -> Trace | None:
        """Add the gradient of K steps at once, and carry the trace past them.

        Without signals there is no gradient. All weights must be static.
        """
        factors = self._factors(steps.factors, (1,))
        signals = None if steps.signals is None else self._signals(steps.signals)
        carries = steps.entry is not None
        if carries:
            self._check_carry()
        adjoint = self._adjoint(factors, signals, carries)
        if carries:
            entry, x = _entry(steps), factors.x
            return self._carry(total, adjoint, x, entry, steps.elapsed, steps.params, overwrite)
        if total is not None:
            _add_products(total, factors, adjoint)
        return None

    def window_before(
        self, total: GradientSum, steps: Steps, later: Later | None, carries: bool = False
    ) -> tuple[Later, PyTree]:
        """Add the gradient of K steps, and of what they do to steps that follow.

        What a trace is carried past them by are the inputs of the ops, and ``u`` by link.
        """
        factors, signals = self._factors(steps.factors, (1,)), self._signals(steps.signals)
        adjoint = self._adjoint(factors, signals, carries, later)
        _add_products(total, factors, adjoint)
        nu, P = (
            tuple(planes.get(group.index, ()) for group in self.graph.hidden_groups)
            for planes in (adjoint.nu, adjoint.P)
        )
        return Later(nu, P if carries else None), (factors.x, adjoint.u) if carries else None

    def carried_bytes(self) -> int:
        """Those of the inputs of ops, and of ``u``."""
        u = [
            [group_plane(link.group)] * len(self.planes[link.index].kept)
            for link in self.links
            for _ in range(link.relation.substeps or 1)
        ]
        return tree_bytes((u, [x_shape(relation) for relation in self.relations]))

    def carry_past(
        self,
        total: GradientSum,
        entry: Entry,
        steps: PyTree,
        later: Later,
        elapsed: jax.Array,
        params: Values,
        overwrite: bool = True,
    ) -> Trace:
        """The trace after all steps, made in one pass over the one before them."""
        x, u = steps
        nu, P = (dict(enumerate(planes or ())) for planes in later)
        adjoint = Adjoint([None for _ in self.relations], u, P, nu)
        return self._carry(total, adjoint, x, entry, elapsed, params, overwrite)

    def trace_of(
        self, entry: Entry, params: Values, ops: Collection[int]
    ) -> dict[tuple[int, int], Any]:
        """The traces of some ops in braintrace's layout; filtered planes come last."""
        self._check_carry()
        whole = jax.tree.map(_with_outputs, entry.trace, self._trace_shape(False))
        return {
            trace_layout.trace_key(link): trace_layout.on_states(
                [
                    self._shown(link, s, if_live(entry.live, e), entry.live, params)
                    for s, e in enumerate(planes)
                ]
            )
            for link, planes in zip(self.links, whole, strict=True)
            if link.op in ops
        }

    def with_trace_of(self, trace: Trace, key: tuple[int, int], value: Any) -> Trace:
        """A trace of which one part is what :meth:`trace_of` would show so."""
        return tuple(
            tuple(
                e and trace_layout.stored(e, {k: a[..., s] for k, a in value.items()})
                for s, e in enumerate(planes)
            )
            if trace_layout.trace_key(link) == key
            else planes
            for link, planes in zip(self.links, trace, strict=True)
        )

    def _shown(self, link: Link, s: int, e: Any, live: Any, params: Values) -> Any:
        """A plane of a link's trace in braintrace's layout, but for the axis of states."""
        rules, planes = bound_rules(link.relation), self.planes[link.index]
        shapes = self._plane_shape(link, compressed=False, is_input=False)
        if e is None:
            e = trace_layout.unseen(shapes, planes.alive[s], live)
        elif planes.inputs[s]:
            e = input_planes.expanded(link, rules, e)
        e = {key: a.astype(shapes[key].dtype) for key, a in e.items()}
        if rules.weight_view is None:
            return e
        return trace_layout.without_view(rules.weight_view, weights_of(link.relation, params), e)

    def _adjoint(
        self,
        factors: Factors,
        signals: Signals | None,
        carries: bool,
        later: Later | None = None,
    ) -> Adjoint:
        groups = self.graph.hidden_groups
        return adjoint_of(
            groups, self.links, self.direct, factors, signals, carries, later, self.backend
        )

    def _carry(
        self,
        total: GradientSum | None,
        adjoint: Adjoint,
        inputs_of: Sequence[Any],
        entry: Entry,
        elapsed: jax.Array,
        params: Values,
        overwrite: bool,
    ) -> Trace:
        """Read the gradient off the trace at the entry of a window, and carry it to the exit."""
        new = []
        for link in self.links:
            rules = bound_rules(link.relation, values=params)
            x = inputs_of[link.op]
            P, u = adjoint.P[link.group.index], adjoint.u[link.index]
            nu, old = adjoint.nu[link.group.index], entry.trace[link.index]
            x, u = in_one_axis(link.relation, (x, u))
            inputs = self._inputs(link, old, entry.live)
            w = adjoint.w[link.op] if link.is_first and total is not None else None
            w = in_one_axis(link.relation, w)
            product = None
            if total is not None and w is not None:
                if rules.weight_view is None and not inputs:
                    product = total.product(link.op, x, w, leading_axes=1)
                else:  # it has other coordinates than the trace, or other steps
                    total.add_product(link.op, x, w, leading_axes=1)
                    w = None
            options: Any = dict(
                seed=self._seed(elapsed, link),
                live=entry.live,
                overwrite=overwrite,
                backend=self.backend,
            )
            if inputs:
                planes, read = self._past(link, inputs, old, P, u, x, nu, **options)
                if total is not None:
                    input_planes.read(total, link, inputs, nu)
            else:
                planes, read = trace_carry(
                    rules,
                    operand(rules, x),
                    plane_views(rules, self._compressed(link, P)),
                    plane_views(rules, self._compressed(link, u)),
                    old,
                    plane_views(rules, nu),
                    w=w,
                    total=product,
                    **options,
                )
            new.append(planes)
            if total is not None:
                total.add_past(link.op, read)
        return tuple(new)

    def _past(
        self,
        link: Link,
        inputs: Mapping[int, input_planes.InputPlane],
        old: tuple[Any, ...],
        P: Sequence[Sequence[Plane]],
        u: Sequence[Plane],
        x: jax.Array | None,
        nu: Sequence[Plane] | None = None,
        **options: Any,
    ) -> tuple[tuple[Any, ...], Any]:
        """As :func:`trace_carry`, for a link of which some planes are filtered inputs."""
        rules = bound_rules(link.relation)
        all_x, all_u = input_planes.with_inputs(link, inputs, P, u, x)
        whole, read = trace_carry(
            rules,
            operand(rules, all_x),
            plane_views(rules, P),
            plane_views(rules, all_u),
            input_planes.without(self.planes[link.index].inputs, old),
            None if nu is None else plane_views(rules, nu),
            **options,
        )
        biases = [
            e and {key: if_live(options['live'], a) for key, a in e.items() if key != 'weight'}
            for e in old
        ]
        whole = input_planes.with_biases(rules, biases, inputs, P, u, whole)
        new = input_planes.advanced(link, inputs, P, u, x)
        planes = tuple(new.get(s, e) for s, e in enumerate(whole))
        return jax.tree.map(lambda a, b: a.astype(b.dtype), planes, old), read

    def _inputs(
        self, link: Link, trace: Sequence[Any], live: Any = None
    ) -> dict[int, input_planes.InputPlane]:
        return input_planes.live_inputs(link, self.planes[link.index].inputs, trace, live)

    def _read(
        self,
        total: GradientSum,
        link: Link,
        signal: Sequence[Plane],
        trace: Trace,
        live: jax.Array | None = None,
    ) -> None:
        """Add what a signal reads of a trace."""
        rules, own = bound_rules(link.relation), trace[link.index]
        whole = input_planes.without(self.planes[link.index].inputs, own)
        total.add_past(link.op, read_trace(rules, plane_views(rules, signal), whole, live=live))
        input_planes.read(total, link, self._inputs(link, own, live), signal)

    def _factors(self, factors: Factors, leading: tuple[int, ...] = ()) -> Factors:
        return factors if self.transform is None else self.transform.factors(factors, leading)

    def _signals(self, signals: Signals | None) -> Signals:
        if signals is None:
            raise ValueError('There are no signals, without which there is no gradient.')
        if self.transform is None:
            return signals
        planes = self.transform.planes
        return signals._replace(L=planes(signals.L), R=planes(signals.R))

    def _is_whole(self, link: Link, L: Sequence[Plane], R: Sequence[Plane]) -> bool:
        """Whether the trace after a step holds all that the loss of the step reads of the past."""
        planes = self.planes[link.index]
        lacks = zip(L, planes.alive, planes.kept, strict=True)
        return all(plane is None for plane in R) and not any(
            plane is not None and alive and not kept for plane, alive, kept in lacks
        )

    def _compressed(self, link: Link, rows: Sequence[Any]) -> list[Any]:
        """What makes the planes of a trace, per plane, for one output where they are uniform."""
        if not self.compresses:
            return list(rows)
        return [
            jax.tree.map(_first_output, row) if uniform else row
            for row, uniform in zip(rows, self.planes[link.index].uniform, strict=True)
        ]

    def _trace_shape(self, compressed: bool) -> Trace:
        return tuple(
            tuple(
                self._plane_shape(link, compressed and uniform, is_input) if kept else None
                for kept, uniform, is_input in zip(
                    planes.kept, planes.uniform, planes.inputs, strict=True
                )
            )
            for link, planes in zip(self.links, self.planes, strict=True)
        )

    def _plane_shape(self, link: Link, compressed: bool, is_input: bool) -> Any:
        """The shapes of one plane of a link's trace."""
        if is_input:
            return input_planes.input_shape(link, self.trace_dtype)
        plane, relation = group_plane(link.group), link.relation
        if compressed:
            plane = plane.update(shape=(*plane.shape[:-1], 1))
        rules = bound_rules(relation)
        shapes = jax.eval_shape(
            lambda x, plane: rules.outer(operand(rules, x), plane_views(rules, plane)),
            x_shape(relation),
            plane,
        )
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, self.trace_dtype or a.dtype), shapes
        )

    def _seed(self, step: jax.Array, link: Link) -> jax.Array | None:
        """A number for each time that a trace is written."""
        if not self.stochastic:
            return None
        groups = len(self.graph.hidden_groups)
        return step * (len(self.relations) * groups) + link.op * groups + link.group.index

    def _check_carry(self) -> None:
        reason = self.refuses_carry()
        if reason is not None:
            raise NotSupportedError(reason)


def _add_products(total: GradientSum, factors: Factors, adjoint: Adjoint) -> None:
    """Add what the inputs of a window and the cotangents of its ops make."""
    for op, w in enumerate(adjoint.w):
        total.add_product(op, factors.x[op], w, leading_axes=1)


def _entry(steps: Steps) -> Entry:
    if steps.entry is None:
        raise ValueError('There is no trace at the entry.')
    return steps.entry


def signals_before(
    D: Sequence[Sequence[Plane]], L: Sequence[Plane], R: Sequence[Plane]
) -> list[Plane]:
    """``L D + R``: what the loss of a step says of the states before it."""
    return [add([R[q], *(times(L[s], row[q]) for s, row in enumerate(D))]) for q in range(len(D))]


def _first_output(plane: jax.Array) -> jax.Array:
    return lax.slice_in_dim(plane, 0, 1, axis=-1)


def _with_outputs(a: jax.Array, like: Any) -> jax.Array:
    """A trace with as many outputs as another, if that has one, or this."""
    if a.shape == like.shape:
        return a
    return jnp.broadcast_to(a[..., : like.shape[-1]], like.shape)
