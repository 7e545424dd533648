"""The reverse scans over a window: what losses say of ops, and of the states at its entry.

An op that all substeps of a scan share has an axis of them in its factors, behind that of steps:

    w_t[l] = c_t[l] + sum_s f_t[s][l] nu_{t+1}[s]
    u_t[l] = P_t f_t[l]

so ``nu`` and ``P`` of all steps are asked for, as ``w`` and ``u`` of ops whose ``f`` are ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._typing import PyTree
from ..compiler import HiddenGroup, HiddenParamOpRelation
from ..kernels.adjoint_scan import adjoint_scan
from ..kernels.dispatch import Backend
from ..kernels.planes import Plane, add, times
from .engine import Later
from .factors import Factors, Signals, sum_middle
from .links import Link, group_plane, links_to

__all__ = ['Adjoint', 'adjoint_of', 'in_one_axis']


class Adjoint(NamedTuple):
    """What the reverse scans over a window leave.

    Attributes
    ----------
    w : list of Plane
        Per op, the cotangent of its output by all steps of the window.
    u : dict
        By link, what makes the trace at the end of the window out of inputs.
    P, nu : dict
        By group, what makes it out of the trace at the entry, and the cotangent of the latter.
    """

    w: list[Plane]
    u: dict[int, Any]
    P: dict[int, Any]
    nu: dict[int, Any]


def adjoint_of(
    groups: Sequence[HiddenGroup],
    links: Sequence[Link],
    direct: Sequence[bool],
    factors: Factors,
    signals: Signals | None,
    carries: bool,
    later: Later | None,
    backend: Backend,
) -> Adjoint:
    """Scan every group backwards, from the last step of a window to its first.

    ``direct`` says per op whether the loss of a step reads it other than by hidden states;
    ``carries``, whether ``u`` and ``P`` are wanted; ``later`` is what follows, if anything does.
    """
    # What the loss says of an op in its step, until the scan of a group takes it along.
    pending: list[Plane] = [None] * len(direct)
    if signals is not None:
        pending = [c if d else None for c, d in zip(signals.c, direct, strict=True)]
    past: list[list[Plane]] = [[] for _ in direct]
    adjoint = Adjoint(pending, {}, {}, {})
    for group in groups:
        own = links_to(links, group)
        if not own:
            continue
        plain = [link for link in own if not link.relation.substeps]
        inner = [link for link in own if link.relation.substeps]
        units = _unit_planes(group, len(factors.D[group.index]), _steps(factors, inner))
        scanned = adjoint_scan(
            factors.D[group.index],
            [*(factors.f[link.index] for link in plain), *units],
            None if signals is None else signals.L[group.index],
            None if signals is None else signals.R[group.index],
            c=None
            if signals is None
            else [*(_taken(pending, link) for link in plain), *(None for _ in units)],
            later=None if later is None else later.nu[group.index],
            beyond=None if later is None or later.P is None else later.P[group.index],
            within=[*(not direct[link.op] for link in plain), *(False for _ in units)],
            carry=carries,
            backend=backend,
        )
        adjoint.P[group.index], adjoint.nu[group.index] = scanned.P, scanned.nu
        for place, link in enumerate(plain):
            past[link.op].append(scanned.w[place])
            adjoint.u[link.index] = scanned.u[place] if carries else None
        for link in inner:
            L: Any = (None,) * len(units)
            if signals is not None and not direct[link.op]:
                L = signals.L[group.index]
            told = [add(pair) for pair in zip(scanned.w[len(plain) :], L, strict=True)]
            past[link.op].append(_dot(factors.f[link.index], told))
            if carries:
                columns = scanned.u[len(plain) :]
                adjoint.u[link.index] = [
                    _dot(factors.f[link.index], row) for row in zip(*columns, strict=True)
                ]
    if signals is None:
        return adjoint
    return adjoint._replace(w=[*map(_total_cotangent, pending, past, signals.c)])


def in_one_axis(relation: HiddenParamOpRelation, tree: PyTree) -> PyTree:
    """Arrays of a window with steps and substeps in one axis, if the op has the latter."""
    if not relation.substeps:
        return tree
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)


def _steps(factors: Factors, links: Sequence[Link]) -> int:
    """The number of steps, from ops with substeps; 0 if there are none."""
    return next((len(x) for link in links for x in [factors.x[link.op]] if x is not None), 0)


def _unit_planes(group: HiddenGroup, num: int, steps: int) -> list[list[Plane]]:
    """Per plane, the ``f`` of an op that is that plane; none for no steps."""
    plane, places = group_plane(group), range(num)
    ones = jnp.ones((steps, *plane.shape), plane.dtype)
    return [[ones if s == q else None for s in places] for q in places] if steps else []


def _dot(f: Sequence[Plane], planes: Sequence[Plane]) -> Plane:
    """``sum_q f[q][l] planes[q]`` of all steps and substeps."""
    spread = (None if plane is None else plane[:, None] for plane in planes)
    return add(map(times, f, spread))


def _taken(pending: list[Plane], link: Link) -> Plane:
    """What is pending of an op, if it is shaped like the planes of the group; then it is taken."""
    c, plane = pending[link.op], group_plane(link.group)
    if c is None or (c.shape[1:], c.dtype) != (plane.shape, plane.dtype):
        return None
    pending[link.op] = None
    return c


def _total_cotangent(pending: Plane, past: Sequence[Plane], c: jax.Array) -> Plane:
    """The cotangent of an op's output, shaped like ``c``, from what each group says of it."""
    by_groups = add(past)
    return add([pending, None if by_groups is None else sum_middle(by_groups, c.ndim)])
