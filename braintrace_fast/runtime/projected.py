"""The trace of a group as the product of two vectors, drawn at random with the right mean (UORO).

    p        = nu J_t,  d = D_t s                      nu of random signs, J_t = d h(t) / d theta
    rho0     = sqrt((|theta| + eps) / (|d| + eps)),    rho1 = sqrt((|p| + eps) / (|nu| + eps))
    s'       = rho0 d + rho1 nu,                       theta' = theta / rho0 + p / rho1

The mean of ``s' theta'`` over the signs is ``D_t s theta + J_t``, the exact trace after the step.
``D`` is the whole Jacobian of the group's new states by its old ones, recurrent ops included. It is
never built: both products are pull-backs of the step, ``d`` of a transposed one, because
surrogate spikes have no forward mode.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import build_jaxpr
from .._typing import Path
from ..compiler import ETraceGraph, HiddenGroup
from ..compiler.liveness import needed_equations
from ..compiler.primitives import is_inexact
from ..errors import NotSupportedError
from ..kernels.planes import Plane, add, if_live, times
from ..kernels.promotion import common_type, promoted
from .engine import Steps
from .factors import Entry, GroupPlanes, StepRunner, Values, join_planes, kept, split_planes
from .gradient import GradientSum
from .links import Link, group_plane, links_of, links_to

__all__ = ['Draw', 'ProjectedEngine', 'ProjectedTrace']

Draw = Callable[[jax.Array, int, tuple[int, ...], Any], jax.Array]
"""From the number of a step, that of a group, a shape and a type to random signs."""

Leaves = tuple[tuple[jax.Array, ...], ...]
"""Per parameter, its leaves that are floats."""


class ProjectedTrace(NamedTuple):
    """What is carried from step to step.

    Attributes
    ----------
    s : tuple
        Per group and plane, the side of the states.
    theta : tuple
        Per group and parameter, the side of the parameters, shaped like them.
    step : jax.Array
        How many times signs were drawn.
    """

    s: tuple[tuple[jax.Array, ...], ...]
    theta: tuple[Leaves, ...]
    step: jax.Array


class ProjectedEngine:
    """Carries one product of vectors per hidden group.

    Where steps are differentiated in full by whoever runs them, only what came before is read off
    the trace, by :meth:`entry_gradients`.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    draw : Draw
        Draws the signs.
    eps : float
        Added to each norm.

    Raises
    ------
    NotSupportedError
        If a hidden state passes through a loop that has no reverse mode.
    """

    is_small = True

    def __init__(self, graph: ETraceGraph, draw: Draw, eps: float) -> None:
        if any(transition.forward_only for transition in graph.transitions):
            raise NotSupportedError(
                'A hidden state passes through a while loop, which UORO would have to '
                'differentiate in reverse. Use D_RTRL, or lax.scan or lax.fori_loop with a fixed '
                'number of steps.'
            )
        self.runner = StepRunner(graph)
        self.draw, self.eps = draw, eps
        self.links = links_of(graph)
        self.moves = [
            _Move(graph, group, links_to(self.links, group)) for group in graph.hidden_groups
        ]

    def refuses_windows(self) -> str:
        """They are refused: the signs of a step are scaled by the trace before it."""
        return 'The random signs of a step are scaled by the trace before it'

    def refuses_carry(self) -> None:
        """Nothing is refused: the trace is no larger than the parameters."""

    def refuses_restarts(self) -> None:
        """Nothing is refused: each example has a part of ``s`` of its own."""

    def trace_shape(self) -> ProjectedTrace:
        """The shapes and types of the trace."""
        s: Any = tuple((group_plane(m.group),) * m.group.num_state for m in self.moves)
        theta: Any = tuple(move.leaf_shapes for move in self.moves)
        step: Any = jax.ShapeDtypeStruct((), jnp.int32)
        return ProjectedTrace(s, theta, step)

    def stored_shapes(self) -> list[ProjectedTrace]:
        """Those of all traces that :meth:`fit` takes: there is one form."""
        return [self.trace_shape()]

    def fit(self, trace: ProjectedTrace) -> ProjectedTrace:
        """A trace of another backend, which is as it is here."""
        return trace

    def advance(self, step: Steps) -> ProjectedTrace:
        """The trace after a step."""
        if step.entry is None or step.inputs is None:
            raise ValueError('A step needs the trace before it, and its inputs.')
        old: ProjectedTrace = step.entry.trace
        args, hidden, others = lax.stop_gradient(step.inputs)
        flat = self.runner.flat_inputs(args, lax.stop_gradient(step.params), hidden, others)
        keep = step.factors.keep
        new = [
            self._advance_group(move, flat, s if keep is None else kept(s, keep), theta, old.step)
            for move, s, theta in zip(self.moves, old.s, old.theta, strict=True)
        ]
        return ProjectedTrace(tuple(s for s, _ in new), tuple(t for _, t in new), old.step + 1)

    def _advance_group(
        self,
        move: '_Move',
        flat: Sequence[jax.Array],
        s: tuple[jax.Array, ...],
        theta: Leaves,
        step: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], Leaves]:
        """``s`` and ``theta`` of one group after a step."""
        if not theta:
            return s, theta
        shape, dtype = (*move.group.varshape, move.group.num_state), s[0].dtype
        signs = self.draw(step, move.group.index, shape, dtype)
        nu = tuple(split_planes(signs.astype(dtype), shape[-1]))
        d, p = move(flat, s, nu)
        rho0, rho1 = self._scale(theta, d), self._scale(p, nu)
        new_s = tuple(_mixed(rho0, a, rho1, b, dtype) for a, b in zip(d, nu, strict=True))
        new_theta = jax.tree.map(lambda a, b: _mixed(1 / rho0, a, 1 / rho1, b, a.dtype), theta, p)
        return new_s, new_theta

    def _scale(self, above: Any, below: Any) -> jax.Array:
        """The square root of a ratio of norms."""
        above, below = promoted(_norm(above), _norm(below))
        return jnp.sqrt((above + self.eps) / (below + self.eps))

    def gradients(self, total: GradientSum, step: Steps, trace: ProjectedTrace) -> None:
        """Add ``(c - L f) (x) x + (L . s) theta``, and what old states say of the trace before."""
        if step.entry is None or step.signals is None:
            raise ValueError('A gradient needs the trace before the step, and signals.')
        factors, signals = step.factors, step.signals
        in_trace: list[list[Plane]] = [[] for _ in signals.c]
        for link in self.links:
            L = signals.L[link.group.index]
            in_trace[link.op] += map(times, L, factors.f[link.index])
        for op, counted in enumerate(in_trace):
            total.add_present(op, factors, signals.c[op], add(counted))
        self._read(total, signals.L, trace)
        self._read(total, signals.R, step.entry.trace)

    def entry_gradients(
        self, total: GradientSum, entry: Entry, signals: GroupPlanes, elapsed: jax.Array
    ) -> None:
        """Add ``(signals . s) theta`` per group: cotangents of the states at the entry."""
        self._read(total, signals, entry.trace)

    def _read(self, total: GradientSum, signals: GroupPlanes, trace: ProjectedTrace) -> None:
        for move, planes, s, theta in zip(self.moves, signals, trace.s, trace.theta, strict=True):
            pairs = [(a, b) for a, b in zip(planes, s, strict=True) if a is not None]
            if not theta or not pairs:
                continue
            signal = _dot(*zip(*pairs, strict=True))
            for path, places, leaves in zip(move.paths, move.leaves, theta, strict=True):
                for place, leaf in zip(places, leaves, strict=True):
                    total.add_leaf(path, place, signal.astype(leaf.dtype) * leaf)

    def window(
        self, total: GradientSum | None, steps: Steps, overwrite: bool = True
    ) -> ProjectedTrace | None:
        """Not there; see :meth:`refuses_windows`."""
        raise NotSupportedError(f'{self.refuses_windows()}, so that there are no windows.')

    def trace_of(
        self, entry: Entry, params: Values, ops: Collection[int]
    ) -> dict[tuple[int, Path], tuple[jax.Array, ...]]:
        """By group and parameter, the side of the parameters, as leaves."""
        trace: ProjectedTrace = if_live(entry.live, entry.trace)
        return {
            (move.group.index, path): leaves
            for move, theta in zip(self.moves, trace.theta, strict=True)
            for path, ways, leaves in zip(move.paths, move.ops, theta, strict=True)
            if not ways.isdisjoint(ops)
        }


class _Move:
    """The whole step of one group: from its old states, and the parameters traced, to new states.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    group : HiddenGroup
        The group.
    links : sequence of Link
        The links that reach it.
    """

    def __init__(self, graph: ETraceGraph, group: HiddenGroup, links: Sequence[Link]) -> None:
        info = graph.module_info
        self.group = group
        ops: dict[Path, set[int]] = {}
        for link in links:
            for way in link.relation.weight_ways.values():
                for place in way.traced:
                    ops.setdefault(way.paths[place], set()).add(link.op)
        self.paths, self.ops = tuple(ops), tuple(ops.values())
        variables = [info.weight_path_to_invars[path] for path in self.paths]
        self.leaves = [[k for k, v in enumerate(own) if is_inexact(v.aval)] for own in variables]
        weights = [
            [own[k] for k in places] for own, places in zip(variables, self.leaves, strict=True)
        ]
        jaxpr = info.jaxpr
        at = {v: place for place, v in enumerate(jaxpr.invars)}
        self._old = [at[v] for v in group.hidden_invars]
        self._weights = [at[v] for own in weights for v in own]
        eqns = needed_equations(jaxpr.eqns, group.hidden_outvars)  # no side effect a second time
        self._jaxpr = build_jaxpr(jaxpr.constvars, jaxpr.invars, group.hidden_outvars, eqns)
        self._consts = info.consts
        self.leaf_shapes = tuple(
            tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in own) for own in weights
        )

    def __call__(
        self, flat: Sequence[jax.Array], s: Sequence[jax.Array], nu: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], Leaves]:
        """``D s`` as planes, and ``nu J``, at the inputs of a step."""

        def step(old: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
            values = list(flat)
            for place, value in zip(self._old + self._weights, [*old, *weights], strict=True):
                values[place] = value
            return jax.core.eval_jaxpr(self._jaxpr, self._consts, *values)

        old, weights = ([flat[k] for k in places] for places in (self._old, self._weights))
        new, pull_back = jax.vjp(step, old, weights)
        to_old = jax.linear_transpose(lambda ct: pull_back(ct)[0], new)
        (pushed,) = to_old(self._states(s, old))
        pulled = iter(pull_back(self._states(nu, new))[1])
        widths = self.group.widths
        d = [p for a, width in zip(pushed, widths, strict=True) for p in split_planes(a, width)]
        return d, tuple(tuple(next(pulled) for _ in own) for own in self.leaves)

    def _states(self, planes: Sequence[jax.Array], like: Sequence[jax.Array]) -> list[jax.Array]:
        """Planes as the values of the group's states."""
        joined = join_planes(planes, self.group.widths)
        return [a.astype(b.dtype) for a, b in zip(joined, like, strict=True)]


def _norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all arrays together."""
    leaves = jax.tree.leaves(tree)
    return jnp.sqrt(_dot(leaves, leaves))


def _dot(a: Sequence[Any], b: Sequence[jax.Array]) -> jax.Array:
    """The inner product of arrays, in float32 at least."""
    dtype = common_type(jnp.float32, *(x.dtype for x in (*a, *b)))
    pairs = zip(a, b, strict=True)
    return sum((jnp.sum(x.astype(dtype) * y.astype(dtype)) for x, y in pairs), jnp.zeros((), dtype))


def _mixed(a: jax.Array, x: jax.Array, b: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """``a x + b y``, computed in float32 at least."""
    wide = common_type(dtype, jnp.float32)
    a, x, b, y = (value.astype(wide) for value in (a, x, b, y))
    return (a * x + b * y).astype(dtype)
