"""``sparse_step`` on a GPU.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.sparse.triton`.
"""

import math

from ..outer.operands import TraceOperands
from ..outer.passes import entry_points
from ..sparse import triton
from . import reference

__all__ = ['redundant', 'sparse_step', 'supports']

supports, sparse_step = entry_points(triton, reference.sparse_step, window=False)


def redundant(operands: TraceOperands) -> str | None:
    """Why plain JAX moves as few bytes as the kernel, or None."""
    if all(plane is None for plane in operands.signal or ()):
        return 'XLA moves as few bytes where nothing is read of the old trace'
    if math.prod(operands.x.shape[:-1]) == 1:
        return 'XLA moves as few bytes for a batch of 1'
    return None
