"""The checked entry point of ``adjoint_scan``."""

from collections.abc import Sequence
from typing import Any

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..planes import Plane, check_shapes
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
    within: Sequence[bool] | None = None,
    carry: bool = False,
    backend: Backend = PLAIN,
) -> Adjoint:
    """Go back through a window of K steps of one group.

    With ``nu[K+1] = 0`` and ``P[K] = 1``, for ``t = K .. 1``::

        w[t]   = c[t] + sum_s f[t][s] (nu[t+1][s] + L[t][s] if within)
        u[t]   = P[t] f[t]
        nu[t]  = D[t]^T (L[t] + nu[t+1]) + R[t]
        P[t-1] = P[t] D[t]

    There are products only: a reset makes ``D`` zero or negative.

    Parameters
    ----------
    D : sequence of sequence of array or None
        ``D[s][q]``, of shape ``(K, *varshape)``, or ``(1, *varshape)`` where it is the same in all
        steps; None where it is structurally zero. The same goes for all other planes, of which one
        at least must have K steps.
    f : sequence of sequence of array or None
        Per op that reaches the group, ``f[s]``.
    L : sequence of array or None, optional
        The learning signal per plane; without it there is no ``nu`` and no ``w``.
    R : sequence of array or None, optional
        What the loss reads of the states before the step, per plane.
    c : sequence of array or None, optional
        Per op, what the loss of a step says of the op's output in that step.
    within : sequence of bool, optional
        Per op, whether it says that by way of the states alone, so that ``L`` counts instead.
    carry : bool
        Whether ``P`` and ``u`` are wanted.
    backend : Backend
        What to run it with.

    Returns
    -------
    Adjoint

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.adjoint_scan import adjoint_scan
    >>> half, one = jnp.full((3, 1), 0.5), jnp.ones((3, 1))
    >>> found = adjoint_scan([[half]], [[one]], [one], carry=True)
    >>> found.nu[0].tolist(), found.P[0][0].tolist(), found.w[0][:, 0].tolist()
    ([0.875], [0.125], [0.75, 0.5, 0.0])
    """
    size = len(D)
    for name, planes in (('D', D), *(('f', p) for p in f), ('L', L or [None] * size)):
        if len(planes) != size:
            raise ValueError(f'adjoint_scan: {name} has {len(planes)} planes, expected {size}.')
    if within is not None and len(within) != len(f):
        raise ValueError(f'adjoint_scan: within has {len(within)} flags, expected {len(f)}.')
    given = (*D, *f, L or (), R or (), c or ())
    check_shapes('adjoint_scan', given)

    def bind(function: Any) -> Any:
        return lambda D, f, L, R, c: function(D, f, L, R, carry, c, within)

    found = dispatch.run('adjoint_scan', backend, bind, D, f, L, R, c)
    own = [None] * len(f) if c is None else c
    return found._replace(w=tuple(a if w is None else w for w, a in zip(found.w, own, strict=True)))
