"""``adjoint_scan`` as a scan that a kernel can run."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..planes import Plane
from ..scan.window import Scan, mixed
from .reference import Adjoint, recurrence

__all__ = ['as_scan', 'entry_points']

Planes = Sequence[Plane]


def as_scan(
    D: Sequence[Planes],
    f: Sequence[Planes],
    L: Planes | None,
    R: Planes | None,
    carry: bool,
    c: Planes | None = None,
    within: Sequence[bool] | None = None,
) -> Scan:
    """The reverse walk from ``nu`` and ``P`` as constants."""
    body, start = recurrence(D, L, R, carry, within)
    xs = (D, f, L, R, c)
    return Scan('adjoint_scan', body, start, xs, jax.tree.leaves(xs)[0].dtype, reverse=True)


def entry_points(platform: Any) -> tuple[Callable[..., str | None], Callable[..., Adjoint]]:
    """``supports`` and ``adjoint_scan`` on a platform."""

    def supports(
        D: Sequence[Planes],
        f: Sequence[Planes],
        L: Planes | None,
        R: Planes | None,
        carry: bool,
        c: Planes | None = None,
        within: Sequence[bool] | None = None,
    ) -> str | None:
        """Why there is no kernel for these operands, or None."""
        return mixed(D, f, L, R, c) or platform.supports(as_scan(D, f, L, R, carry, c, within))

    def adjoint_scan(
        D: Sequence[Planes],
        f: Sequence[Planes],
        L: Planes | None,
        R: Planes | None,
        carry: bool,
        c: Planes | None = None,
        within: Sequence[bool] | None = None,
        *,
        interpret: Any = False,
    ) -> Adjoint:
        """See :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan`."""
        scan = as_scan(D, f, L, R, carry, c, within)
        (nu, P), (w, u) = platform.run(scan, interpret=interpret)
        return Adjoint(nu, w, P, u)

    return supports, adjoint_scan
