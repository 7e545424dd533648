"""``adjoint_scan`` on a GPU: the step of the reference, with ``nu`` and ``P`` in registers.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.triton`.
"""

from ..scan import triton
from .scanned import entry_points

__all__ = ['adjoint_scan', 'supports']

supports, adjoint_scan = entry_points(triton)
