"""Why there is no pass over the trace of a sparse weight on a TPU."""

from ..outer.operands import TraceOperands

__all__ = ['supports']


def supports(operands: TraceOperands) -> str:
    """Why there is no kernel, for any operands."""
    return 'the entries of a sparse weight are gathered by index, at which TPUs are slow'
