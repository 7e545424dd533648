"""``sparse_carry`` on a GPU.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.sparse.triton`.
"""

from ..outer.passes import entry_points
from ..sparse import triton
from . import reference

__all__ = ['sparse_carry', 'supports']

supports, sparse_carry = entry_points(triton, reference.sparse_carry, window=True)
