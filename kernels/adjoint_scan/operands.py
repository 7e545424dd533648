"""``adjoint_scan`` as a scan that a kernel can run."""

from collections.abc import Sequence

import jax

from ..planes import Plane
from ..scan.window import Scan
from .reference import recurrence

__all__ = ['Planes', 'as_scan']

Planes = Sequence[Plane]


def as_scan(
    D: Sequence[Planes],
    f: Sequence[Planes],
    L: Planes | None,
    R: Planes | None,
    carry: bool,
    c: Planes | None = None,
) -> Scan:
    """The reverse walk from ``nu`` and ``P`` as constants."""
    body, start = recurrence(D, L, R, carry)
    xs = (D, f, L, R, c)
    return Scan('adjoint_scan', body, start, xs, jax.tree.leaves(xs)[0].dtype, reverse=True)
