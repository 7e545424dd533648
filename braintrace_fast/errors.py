"""The exceptions of the library."""

__all__ = ['CompilationError', 'NotSupportedError']


class NotSupportedError(Exception):
    """The model or the request is valid, but outside what the library can do."""


class CompilationError(Exception):
    """The model cannot be compiled into an online learner; the message says what to change."""
