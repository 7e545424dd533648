"""The trace of one op across one step."""

from .api import trace_step

__all__ = ['trace_step']
