"""K forward steps of the two sides of a factorised trace."""

from .api import factored_trace, smooth

__all__ = ['factored_trace', 'smooth']
