"""``trace_step`` on a TPU, for ops whose trace is an outer product.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.outer.mosaic`.
"""

from ..outer import mosaic
from ..outer.operands import TraceOperands
from ..outer.passes import entry_points
from . import reference

__all__ = ['redundant', 'supports', 'trace_step']

supports, trace_step = entry_points(mosaic, reference.trace_step, window=False)


def redundant(operands: TraceOperands) -> str | None:
    """Why plain JAX moves as few bytes as the kernel, or None."""
    if operands.seed is None and sum(e is not None for e in operands.trace) <= 2:
        return 'XLA moves as few bytes for up to two planes'
    return None
