"""``adjoint_scan`` as a scan that a kernel can run."""

from collections.abc import Callable
from typing import Any

import jax

from ..scan.window import Scan, mixed
from .operands import AdjointOperands
from .reference import Adjoint, recurrence, steps_of

__all__ = ['as_scan', 'entry_points']


def as_scan(operands: AdjointOperands) -> Scan:
    """The reverse walk from ``nu`` and ``P`` as constants."""
    body, start = recurrence(operands)
    dtype = jax.tree.leaves(operands)[0].dtype
    return Scan('adjoint_scan', body, start, steps_of(operands), dtype, reverse=True)


def entry_points(platform: Any) -> tuple[Callable[..., str | None], Callable[..., Adjoint]]:
    """``supports`` and ``adjoint_scan`` on a platform."""

    def supports(operands: AdjointOperands) -> str | None:
        """Why there is no kernel for these operands, or None."""
        return mixed(operands) or platform.supports(as_scan(operands))

    def adjoint_scan(operands: AdjointOperands, *, interpret: Any = False) -> Adjoint:
        """See :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan`."""
        (nu, P), (w, u) = platform.run(as_scan(operands), interpret=interpret)
        return Adjoint(nu, w, P, u)

    return supports, adjoint_scan
