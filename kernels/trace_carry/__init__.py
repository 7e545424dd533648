"""The trace of one op across a window: read once, written once."""

from .api import trace_carry

__all__ = ['trace_carry']
