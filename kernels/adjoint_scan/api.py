"""The checked entry point of ``adjoint_scan``."""

from collections.abc import Sequence
from dataclasses import replace

import jax

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..planes import Plane, check_planes, check_shapes
from .operands import AdjointOperands
from .reference import Adjoint

__all__ = ['Adjoint', 'adjoint_scan']

Planes = Sequence[Plane]


def adjoint_scan(
    D: Sequence[Planes],
    f: Sequence[Planes],
    L: Planes | None = None,
    R: Planes | None = None,
    *,
    c: Planes | None = None,
    later: Planes | None = None,
    beyond: Sequence[Planes] | None = None,
    within: Sequence[bool] | None = None,
    carry: bool = False,
    backend: Backend = PLAIN,
) -> Adjoint:
    """Go back through a window of K steps of one group.

    With ``nu[K+1]`` zero or given and ``P[K]`` one or given, for ``t = K .. 1``::

        w[t]   = c[t] + sum_s f[t][s] (nu[t+1][s] + L[t][s] if within)
        u[t]   = P[t] f[t]
        nu[t]  = D[t]^T (L[t] + nu[t+1]) + R[t]
        P[t-1] = P[t] D[t]

    There are products only: a reset makes ``D`` zero or negative.

    Parameters
    ----------
    D : sequence of sequence of array or None
        ``D[s][q]``, of shape ``(K, *varshape)``, or ``(1, *varshape)`` where it is the same in all
        steps; None where it is structurally zero. So are all other planes, and one of them at least
        must have K steps.
    f : sequence of sequence of array or None
        Per op that reaches the group, ``f[s]``.
    L : sequence of array or None, optional
        The learning signal per plane; without it there is no ``nu`` and no ``w``.
    R : sequence of array or None, optional
        The cotangent of the states before the step, past the group, per plane.
    c : sequence of array or None, optional
        Per op, the cotangent of its output by the loss of the same step.
    later : sequence of array or None, optional
        ``nu[K+1]`` per plane, of shape ``varshape``: what losses after the window say of the states
        at its end. Without it there are none.
    beyond : sequence of sequence of array or None, optional
        ``P[K]``, planes of shape ``varshape``, of a window that others follow: how the states at
        the end of the last one depend on those at the end of this one, and so ``P`` and ``u``.
    within : sequence of bool, optional
        Per op, whether that loss reads it by way of the states alone, so that ``L`` counts instead.
    carry : bool
        Whether ``P`` and ``u`` are wanted.
    backend : Backend
        What to run it with.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.adjoint_scan import adjoint_scan
    >>> half, one = jnp.full((3, 1), 0.5), jnp.ones((3, 1))
    >>> adjoint = adjoint_scan([[half]], [[one]], [one], carry=True)
    >>> adjoint.nu[0].tolist(), adjoint.P[0][0].tolist(), adjoint.w[0][:, 0].tolist()
    ([0.875], [0.125], [0.75, 0.5, 0.0])
    """
    flags = None if within is None else tuple(within)
    operands = AdjointOperands(D, f, L, R, c, later, beyond, flags, carry)
    _check(operands)
    adjoint = dispatch.run('adjoint_scan', backend, operands)
    own = [None] * len(f) if c is None else c
    w = (a if w is None else w for w, a in zip(adjoint.w, own, strict=True))
    return adjoint._replace(w=tuple(w))


def _check(operands: AdjointOperands) -> None:
    """Refuse operands whose numbers of planes or shapes do not fit together."""
    size, ops = len(operands.D), len(operands.f)
    check_planes('adjoint_scan', size, D=operands.D, L=operands.L, later=operands.later)
    check_planes('adjoint_scan', size, beyond=operands.beyond)
    for planes in operands.f:
        check_planes('adjoint_scan', size, f=planes)
    if operands.within is not None and len(operands.within) != ops:
        raise ValueError(f'adjoint_scan: within has {len(operands.within)} flags, expected {ops}.')
    later, beyond = jax.tree.map(lambda plane: plane[None], (operands.later, operands.beyond))
    check_shapes('adjoint_scan', replace(operands, later=later, beyond=beyond))
