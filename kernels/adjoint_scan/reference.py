"""The definition of ``adjoint_scan`` in plain JAX, which is also what runs without a kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..planes import Plane, add, closure, times

__all__ = ['Adjoint', 'adjoint_scan']

Planes = Sequence[Plane]


class Adjoint(NamedTuple):
    """What a window of K steps says of its entry, of its ops and of its exit.

    Attributes
    ----------
    nu : tuple
        Per plane, the cotangent of the states at the entry; None where it is structurally zero.
    w : tuple
        Per op, of shape ``(K, ...)``, the part of its output's cotangent that comes from later
        steps of the window; None where there is none.
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


def adjoint_scan(
    D: Sequence[Planes],
    f: Sequence[Planes],
    L: Planes | None,
    R: Planes | None,
    carry: bool,
) -> Adjoint:
    """See :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan`."""
    size = range(len(D))
    like = next(plane for planes in (*D, *f, L or ()) for plane in planes if plane is not None)
    zero = jnp.zeros(like.shape[1:], like.dtype)
    pattern = [[plane is not None for plane in row] for row in D]
    alive = [
        L is not None and (any(row[q] for row in pattern) or (R is not None and R[q] is not None))
        for q in size
    ]
    reached = closure(pattern)
    nu = tuple(zero if a else None for a in alive)
    P: Any = ()
    if carry:
        P = tuple(
            tuple(
                (jnp.ones_like(zero) if s == q else zero) if reached[s][q] else None for q in size
            )
            for s in size
        )

    def body(state: Any, step: Any) -> Any:
        nu, P = state
        D, f, L, R = step
        w = tuple(add(map(times, planes, nu)) for planes in f)
        u = tuple(tuple(add(map(times, row, planes)) for row in P) for planes in f)
        if L is not None:
            ahead = [add(parts) for parts in zip(L, nu, strict=True)]
            nu = tuple(
                add([times(D[s][q], ahead[s]) for s in size] + ([] if R is None else [R[q]]))
                if alive[q]
                else None
                for q in size
            )
        if carry:
            P = tuple(
                tuple(
                    _or_zero(add(times(row[r], D[r][q]) for r in size), zero)
                    if reached[s][q]
                    else None
                    for q in size
                )
                for s, row in enumerate(P)
            )
        return (nu, P), (w, u)

    (nu, P), (w, u) = lax.scan(body, (nu, P), (D, f, L, R), reverse=True)
    return Adjoint(nu, w, P, u if carry else ())


def _or_zero(plane: Plane, zero: jax.Array) -> jax.Array:
    return zero if plane is None else plane
