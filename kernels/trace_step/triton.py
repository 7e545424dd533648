"""``trace_step`` on a GPU, for ops whose trace is an outer product.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.outer.triton`.
"""

import math

from ..outer import triton
from ..outer.operands import TraceOperands
from ..outer.passes import entry_points
from . import reference

__all__ = ['redundant', 'supports', 'trace_step']

supports, trace_step = entry_points(triton, reference.trace_step, window=False)


def redundant(operands: TraceOperands) -> str | None:
    """Why plain JAX moves as few bytes as the kernel, or None."""
    batch = math.prod(operands.x.shape[: -1 - operands.rules.groups])
    planes = sum(e is not None for e in operands.trace)
    if operands.seed is not None:
        return None
    if all(plane is None for plane in operands.signal or ()):
        return 'XLA moves as few bytes where nothing is read of the old trace'
    if planes == 1 and (batch == 1 or batch >= 32):
        return 'XLA moves as few bytes for one plane and a batch of 1, or of 32 and more'
    return None
