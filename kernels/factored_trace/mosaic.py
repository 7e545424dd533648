"""``factored_trace`` and ``smooth`` on a TPU: the steps of the reference, on state in VMEM.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.mosaic`.
"""

from ..scan import mosaic
from .scanned import entry_points

__all__ = ['factored_trace', 'smooth', 'supports', 'supports_smooth']

supports, factored_trace, supports_smooth, smooth = entry_points(mosaic)
