"""``trace_carry`` on a TPU, for ops whose trace is an outer product.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.outer.mosaic`.
"""

from ..outer import mosaic
from ..outer.passes import entry_points
from . import reference

__all__ = ['supports', 'trace_carry']

supports, trace_carry = entry_points(mosaic, reference.trace_carry, window=True)
