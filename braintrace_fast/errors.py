"""The exceptions and the warning of the library."""

from .kernels.dispatch import FallbackError

__all__ = [
    'ArgumentError',
    'ArgumentTypeError',
    'CheckpointError',
    'CompilationError',
    'FallbackError',
    'NotCompiledError',
    'NotSupportedError',
    'UntracedWarning',
]


class NotSupportedError(Exception):
    """The model or the request is valid, but outside what the library can do."""


class CompilationError(Exception):
    """The model cannot be compiled into an online learner; the message says what to change."""


class ArgumentError(ValueError, AssertionError):
    """An argument has a value that it cannot have; braintrace asserts that it has not."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a type that it cannot be of."""


class NotCompiledError(ValueError, RuntimeError):
    """Something was asked of a model that is not compiled yet."""


class CheckpointError(ValueError):
    """A file does not hold the state of this learner; the message says what differs."""


class UntracedWarning(UserWarning):
    """Weights are left out of the trace, or counted only in part, where the model could be changed.

    It is given once per compilation. Where that is meant, silence it by
    ``warnings.filterwarnings('ignore', category=braintrace_fast.UntracedWarning)``.
    """
