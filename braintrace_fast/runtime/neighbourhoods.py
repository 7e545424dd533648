"""The trace of what a weight does to its own position and to those that this one reaches (SnAp).

With ``N(p)`` the positions that ``p`` reaches in fewer than ``n`` steps, itself first, each ``p``
has a recurrence of its own whose states are those at ``N(p)``:

    D_g[(k,s), (l,q)][p] = J[s][q][N(p)[k], N(p)[l]]
    f_g[(0,s)][p]        = f[s][p]
    L_g[(k,s)][p]        = L[s][N(p)[k]]

Slots ``(k, s)`` are planes like any others: every window and every kernel serves them. If all
positions are in all neighbourhoods, these recurrences differ in their order only, and without a
trace there is one cotangent for all of them: reverse mode within the group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compiler import ETraceGraph, HiddenGroup
from ..compiler.coupled import CoupledTransition
from ..compiler.neighbours import SnapPattern
from ..errors import NotSupportedError
from ..kernels.planes import Plane, add, times, walk
from .engine import FactorTransform, Steps
from .factors import Factors, GroupPlanes, sum_middle
from .gradient import GradientSum
from .links import group_plane, links_of, links_to
from .materialized import MaterializedEngine, Trace

__all__ = ['Neighbourhood', 'NeighbourhoodEngine', 'Neighbourhoods']

MOST_SLOTS = 64
"""The most planes that a trace is carried in: compiling takes time that grows with its square."""


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The neighbourhoods of one group.

    Parameters
    ----------
    group : HiddenGroup
        The group.
    transition : CoupledTransition
        Its transition, of all positions by all others.
    pattern : SnapPattern
        Which positions are neighbours.
    """

    group: HiddenGroup
    transition: CoupledTransition
    pattern: SnapPattern

    @property
    def members(self) -> np.ndarray:
        """``[p, k]``: the positions in the neighbourhood of ``p``, itself first; -1 for none."""
        return self.pattern.members

    @property
    def size(self) -> int:
        """How many members the largest has."""
        return self.pattern.num_neighbour

    @property
    def is_whole(self) -> bool:
        """Whether all positions are in all neighbourhoods."""
        return self.pattern.is_saturated

    def gathered(self, plane: Plane, k: int) -> Plane:
        """A plane at the ``k``-th neighbour of each position, or zero."""
        if plane is None or k >= self.size:
            return None
        at, inner = self.members[:, k], self.group.varshape[self.transition.num_axes :]
        leading = plane.shape[: plane.ndim - len(inner)]
        flat = plane.reshape(*leading, len(at))[..., np.maximum(at, 0)]
        kept = jnp.where(lax.expand_dims(at >= 0, range(len(leading))), flat, 0)
        return kept.reshape(plane.shape)

    def gathered_pair(self, matrix: Plane, k: int, other: int) -> Plane:
        """``J`` from one neighbour of each position to another one; None if that is never."""
        if matrix is None or max(k, other) >= self.size:
            return None
        to, start = self.members[:, k], self.members[:, other]
        exists = (to >= 0) & (start >= 0)
        if not (exists & self.pattern.links[to, start]).any():
            return None
        num, inner = len(to), self.group.varshape[self.transition.num_axes :]
        whole = jnp.broadcast_to(matrix, (*matrix.shape[:-2], num, num))
        flat = whole[..., np.maximum(to, 0), np.maximum(start, 0)]
        kept = jnp.where(lax.expand_dims(exists, range(flat.ndim - 1)), flat, 0)
        return kept.reshape(*matrix.shape[:-2], *inner)


class Neighbourhoods:
    """Gives every group its planes once per neighbour.

    Parameters
    ----------
    graph : ETraceGraph
        A model that was compiled with a scope ``Neighbourhood``.
    """

    def __init__(self, graph: ETraceGraph) -> None:
        links = links_of(graph)
        self.groups: list[Neighbourhood | None] = []
        for group, transition in zip(graph.hidden_groups, graph.transitions, strict=True):
            if not isinstance(transition, CoupledTransition) or group.snap is None:
                raise ValueError('The model was not compiled with the scope Neighbourhood.')
            own = Neighbourhood(group, transition, group.snap)
            self.groups.append(own if links_to(links, group) else None)
        self.copies = max(own.size for own in self.learned)

    @property
    def learned(self) -> list[Neighbourhood]:
        """Those of the groups that an op reaches."""
        return [own for own in self.groups if own is not None]

    def factors(self, factors: Factors, leading: tuple[int, ...] = ()) -> Factors:
        """``D`` between neighbours, and ``f`` for each position itself."""
        return factors._replace(
            D=tuple(map(self._pairs, self.groups, factors.D)),
            f=tuple((*f, *(None for _ in range((self.copies - 1) * len(f)))) for f in factors.f),
        )

    def _pairs(self, own: Neighbourhood | None, D: GroupPlanes) -> GroupPlanes:
        slots = range(self.copies)
        return tuple(
            tuple(
                None if own is None else own.gathered_pair(matrix, k, other)
                for other in slots
                for matrix in row
            )
            for k in slots
            for row in D
        )

    def planes(self, signals: Sequence[Sequence[Plane]]) -> GroupPlanes:
        """Signals at each neighbour."""
        return tuple(
            tuple(
                None if own is None else own.gathered(plane, k)
                for k in range(self.copies)
                for plane in planes
            )
            for own, planes in zip(self.groups, signals, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Both:
    """Two transforms of factors, one after the other."""

    first: FactorTransform
    second: FactorTransform

    @property
    def copies(self) -> int:
        """How many times as many planes there are."""
        return self.first.copies * self.second.copies

    def factors(self, factors: Factors, leading: tuple[int, ...] = ()) -> Factors:
        """Factors of the second recurrence, made of those of the first."""
        return self.second.factors(self.first.factors(factors, leading), leading)

    def planes(self, signals: Sequence[Sequence[Plane]]) -> GroupPlanes:
        """Signals, as those of the second recurrence."""
        return self.second.planes(self.first.planes(signals))


class NeighbourhoodEngine(MaterializedEngine):
    """Carries the trace of neighbourhoods; fresh windows of whole groups need none of them.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    most_elements : int
        How many elements the Jacobians of a step may have.
    transform : FactorTransform, optional
        What makes of their factors those of another recurrence, such as a :class:`Filter`.
    **options
        More arguments of :class:`MaterializedEngine`.
    """

    def __init__(
        self,
        graph: ETraceGraph,
        most_elements: int,
        transform: FactorTransform | None = None,
        **options: Any,
    ) -> None:
        self.neighbourhoods = Neighbourhoods(graph)
        whole = all(own.is_whole for own in self.neighbourhoods.learned)
        self.is_whole = whole and transform is None
        self.too_many = self._check_size(most_elements)
        both = self.neighbourhoods if transform is None else Both(self.neighbourhoods, transform)
        super().__init__(graph, transform=both, **options)
        if self.too_many is not None:
            self.planes = [planes.not_kept() for planes in self.planes]

    def refuses_carry(self) -> str | None:
        """Traces of too many neighbours are refused, too."""
        return self.too_many or super().refuses_carry()

    def _check_size(self, most: int) -> str | None:
        """Why no trace can be carried; an error if not even fresh sequences can be learned."""
        reason = None
        for own in self.neighbourhoods.learned:
            group, slots = own.group, own.size * own.group.num_state
            positions = math.prod(group.varshape)
            examples = math.prod(group.varshape[: own.transition.num_axes])
            elements = positions * slots**2
            dense = positions * (positions // max(examples, 1)) * group.num_state**2
            least = dense if self.is_whole else max(elements, dense)
            if least > most:
                raise NotSupportedError(
                    f'The Jacobians of {group.hidden_paths} between neighbours have {least} '
                    f'elements in each step, more than snap_max_jacobian_elements={most}. Take '
                    'fewer neurons, a smaller n, OSTLRecurrent, or a higher limit.'
                )
            if elements > most or slots > MOST_SLOTS:
                reason = (
                    f'The trace of {group.hidden_paths} has {slots} planes, one per neighbour and '
                    f'state, and {elements} elements of Jacobians in each step; at most '
                    f'{MOST_SLOTS} can be carried, and snap_max_jacobian_elements={most}. Learn '
                    "whole sequences with etrace_grad(..., trace='fresh'), which carries none, or "
                    'take a smaller n.'
                )
        return reason

    def window(
        self, total: GradientSum | None, steps: Steps, overwrite: bool = True
    ) -> Trace | None:
        """As for :class:`MaterializedEngine`; without a trace, all neighbourhoods may be one."""
        if self.is_whole and steps.entry is None:
            if total is not None:
                self._backwards(total, steps, None)
            return None
        return super().window(total, steps, overwrite)

    def window_before(
        self, total: GradientSum, steps: Steps, later: GroupPlanes | None
    ) -> GroupPlanes:
        """As for :class:`MaterializedEngine`; all neighbourhoods may be one."""
        if self.is_whole:
            return self._backwards(total, steps, later)
        return super().window_before(total, steps, later)

    def _backwards(
        self, total: GradientSum, steps: Steps, later: GroupPlanes | None
    ) -> GroupPlanes:
        """Reverse mode within each group: the products of a window, and ``nu`` at its entry."""
        factors, signals = steps.factors, steps.signals
        if signals is None:
            raise ValueError('There are no signals, without which there is no gradient.')
        past: list[list[Plane]] = [[] for _ in self.relations]
        entries: list[tuple[Plane, ...]] = []
        for own in self.neighbourhoods.groups:
            if own is None:
                entries.append(())
                continue
            index = own.group.index
            links = links_to(self.links, own.group)
            f = [factors.f[link.index] for link in links]
            entry = None if later is None else later[index]
            nu, w = _adjoint(own, factors.D[index], f, signals.L[index], signals.R[index], entry)
            entries.append(nu)
            for link, plane in zip(links, w, strict=True):
                past[link.op].append(plane)
        for op, c in enumerate(signals.c):
            by_groups = add(past[op])
            behind = None if by_groups is None else sum_middle(by_groups, c.ndim)
            total.add_product(op, factors.x[op], add([c, behind]), leading_axes=1)
        return tuple(entries)


def _adjoint(
    own: Neighbourhood,
    D: GroupPlanes,
    f: Sequence[Sequence[Plane]],
    L: Sequence[Plane],
    R: Sequence[Plane],
    later: Sequence[Plane] | None,
) -> tuple[tuple[jax.Array, ...], tuple[Plane, ...]]:
    """``nu`` at the entry, and per op what the steps behind say of its output.

    ``nu[t] = D[t]^T (L[t] + nu[t+1]) + R[t]`` and ``w[t] = sum_s f[t][s] nu[t+1][s]``.
    """
    size, like = range(len(D)), group_plane(own.group)
    zeros = tuple(jnp.zeros(like.shape, like.dtype) for _ in size)
    start = zeros if later is None else tuple(later)
    shape = (*like.shape[: own.transition.num_axes], own.transition.positions)

    def pulled(matrix: Plane, plane: Plane) -> Plane:
        if matrix is None or plane is None:
            return None
        flat = jnp.broadcast_to(plane, like.shape).reshape(shape)
        options: Any = dict(precision=lax.Precision.HIGHEST)
        return jnp.einsum('...rp,...r->...p', matrix, flat, **options).reshape(like.shape)

    def body(nu: Any, step: Any) -> Any:
        D, f, L, R = step
        ahead = [add(parts) for parts in zip(L, nu, strict=True)]
        w = tuple(add(map(times, planes, nu)) for planes in f)
        before = tuple(
            add([zeros[q], R[q], *(pulled(D[s][q], ahead[s]) for s in size)]) for q in size
        )
        return before, w

    return walk(body, start, (D, f, L, R), reverse=True)
