"""``sparse_step`` on a TPU, where it has no kernel."""

from ..sparse.mosaic import supports
from .reference import sparse_step

__all__ = ['sparse_step', 'supports']
