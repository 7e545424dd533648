"""``factored_trace`` and ``smooth`` on a GPU: the steps of the reference, on state in registers.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.triton`.
"""

from ..scan import triton
from .scanned import entry_points

__all__ = ['factored_trace', 'smooth', 'supports', 'supports_smooth']

supports, factored_trace, supports_smooth, smooth = entry_points(triton)
