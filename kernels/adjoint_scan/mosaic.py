"""``adjoint_scan`` on a TPU: the step of the reference, with ``nu`` and ``P`` in VMEM.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.mosaic`.
"""

from collections.abc import Sequence
from typing import Any

from ..scan import mosaic
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
    return mixed(D, f, L, R, c) or mosaic.supports(as_scan(D, f, L, R, carry, c))


def adjoint_scan(
    D: Sequence[Planes],
    f: Sequence[Planes],
    L: Planes | None,
    R: Planes | None,
    carry: bool,
    c: Planes | None = None,
    *,
    interpret: Any = False,
) -> Adjoint:
    """See :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan`."""
    (nu, P), (w, u) = mosaic.run(as_scan(D, f, L, R, carry, c), interpret=interpret)
    return Adjoint(nu, w, P, u)
