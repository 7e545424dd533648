"""``sparse_carry`` on a TPU, where it has no kernel."""

from ..sparse.mosaic import supports
from .reference import sparse_carry

__all__ = ['sparse_carry', 'supports']
