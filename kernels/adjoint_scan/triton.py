"""``adjoint_scan`` on a GPU: the step of the reference, with ``nu`` and ``P`` in registers.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.triton`.
"""

from collections.abc import Sequence

from ..scan import triton
from ..scan.window import mixed
from .operands import Planes, as_scan
from .reference import Adjoint

__all__ = ['adjoint_scan', 'supports']


def supports(
    D: Sequence[Planes],
    f: Sequence[Planes],
    L: Planes | None,
    R: Planes | None,
    carry: bool,
    c: Planes | None = None,
) -> str | None:
    """Why there is no kernel for these operands, or None."""
    return mixed(D, f, L, R, c) or triton.supports(as_scan(D, f, L, R, carry, c))


def adjoint_scan(
    D: Sequence[Planes],
    f: Sequence[Planes],
    L: Planes | None,
    R: Planes | None,
    carry: bool,
    c: Planes | None = None,
    *,
    interpret: bool = False,
) -> Adjoint:
    """See :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan`."""
    (nu, P), (w, u) = triton.run(as_scan(D, f, L, R, carry, c), interpret=interpret)
    return Adjoint(nu, w, P, u)
