"""K reverse steps through the planes of one group."""

from .api import Adjoint, adjoint_scan

__all__ = ['Adjoint', 'adjoint_scan']
