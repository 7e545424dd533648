"""The definition of ``adjoint_scan`` in plain JAX, which is also what runs without a kernel."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import tree

from ..planes import Plane, add, closure, times, walk
from .operands import AdjointOperands

__all__ = ['Adjoint', 'adjoint_scan', 'recurrence', 'steps_of']

Planes = Sequence[Plane]


class Adjoint(NamedTuple):
    """The cotangents of a window of K steps, and how its exit depends on what came before.

    Attributes
    ----------
    nu : tuple
        Per plane, the cotangent of the states at the entry; None where it is structurally zero.
    w : tuple
        Per op, of shape ``(K, ...)``, the cotangent of its output: what comes from later steps of
        the window, and ``c``; None where there is none.
    P : tuple of tuple
        ``P[s][q]``, how the exit depends on the entry; empty without ``carry``.
    u : tuple of tuple
        Per op and plane, of shape ``(K, ...)``, how the exit depends on the op's output at each
        step; empty without ``carry``.
    """

    nu: tuple[Plane, ...]
    w: tuple[Plane, ...]
    P: tuple[tuple[Plane, ...], ...]
    u: tuple[tuple[Plane, ...], ...]


def adjoint_scan(operands: AdjointOperands) -> Adjoint:
    """See :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan`."""
    leaves = tree.leaves((operands.D, operands.f, operands.L))
    like = max(leaves, key=lambda plane: plane.size)
    body, start = recurrence(operands)
    start = tree.map(lambda value: jnp.full_like(like, value, shape=like.shape[1:]), start)
    (nu, P), (w, u) = walk(body, start, steps_of(operands), reverse=True)
    return Adjoint(nu, w, P, u)


def steps_of(operands: AdjointOperands) -> tuple[Any, ...]:
    """What a step reads, ``(D, f, L, R, c)``, with all steps along the leading axis."""
    return operands.D, operands.f, operands.L, operands.R, operands.c


def recurrence(operands: AdjointOperands) -> tuple[Callable[[Any, Any], Any], Any]:
    """One step back, as ``lax.scan`` wants it, and ``nu`` and ``P`` before it.

    The step is from ``(nu, P)`` and ``(D, f, L, R, c)`` to ``(nu, P)`` and ``(w, u)``. The start
    has a number or an array per plane, None where the plane is structurally zero. Of the planes of
    all steps, only which of them are None matters here.
    """
    carry, within = operands.carry, operands.within
    size = range(len(operands.D))
    later = operands.later or [None for _ in size]
    pattern = [[plane is not None for plane in row] for row in operands.D]
    reached = closure(pattern)
    alive = [
        operands.L is not None
        and (
            _is_read(q, pattern, reached, operands.L, operands.R)
            or any(plane is not None and reached[s][q] for s, plane in enumerate(later))
        )
        for q in size
    ]

    def body(state: Any, step: Any) -> Any:
        nu, P = state
        D, f, L, R, c = step
        ahead = nu if L is None else [add(parts) for parts in zip(L, nu, strict=True)]
        reads = [ahead if own else nu for own in within or [False] * len(f)]
        w = tuple(add(map(times, *pair)) for pair in zip(f, reads, strict=True))
        if c is not None:  # nobody writes it where it is all that there is
            w = tuple(None if a is None else add([own, a]) for own, a in zip(c, w, strict=True))
        u = tuple(tuple(add(map(times, row, planes)) for row in P) for planes in f)
        if L is not None:
            nu = tuple(
                _or_zero(
                    add([times(D[s][q], ahead[s]) for s in size] + ([] if R is None else [R[q]])),
                    nu[q],
                )
                if alive[q]
                else None
                for q in size
            )
        if carry:
            P = tuple(
                tuple(
                    _or_zero(add(times(row[r], D[r][q]) for r in size), row[s])
                    if reached[s][q]
                    else None
                    for q in size
                )
                for s, row in enumerate(P)
            )
        return (nu, P), (w, u if carry else ())

    nu = tuple(_number_if_none(plane) if a else None for a, plane in zip(alive, later, strict=True))
    beyond: Any = operands.beyond or [[float(s == q) for q in size] for s in size]
    P = tuple(
        tuple(_number_if_none(beyond[s][q]) if reached[s][q] else None for q in size)
        for s in size
        if carry
    )
    return body, (nu, P)


def _is_read(
    q: int,
    pattern: Sequence[Sequence[bool]],
    reached: Sequence[Sequence[bool]],
    L: Planes,
    R: Planes | None,
) -> bool:
    """Whether the loss of this step or a later one reads plane ``q`` of the step before."""
    size = range(len(pattern))
    later = [s for s in size if any(reached[s][r] and pattern[r][q] for r in size)]
    before = [] if R is None else [R[s] for s in {q, *later}]
    return any(plane is not None for plane in (*before, *(L[s] for s in later)))


def _number_if_none(plane: Any) -> Any:
    return 0.0 if plane is None else plane


def _or_zero(plane: Plane, like: Any) -> Plane:
    return jnp.zeros_like(like) if plane is None else plane
