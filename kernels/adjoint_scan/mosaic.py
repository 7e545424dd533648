"""``adjoint_scan`` on a TPU: the step of the reference, with ``nu`` and ``P`` in VMEM.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.mosaic`.
"""

from ..scan import mosaic
from .operands import entry_points

__all__ = ['adjoint_scan', 'supports']

supports, adjoint_scan = entry_points(mosaic)
