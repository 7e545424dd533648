"""``trace_carry`` as its formula stands, one step after the other."""

import numpy as np

from ..outer.operands import TraceOperands
from ..trace_step.naive import decayed, examples, outer

__all__ = ['trace_carry']


def trace_carry(operands: TraceOperands) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`.

    Returns the weight's ``e[s]``, with zeros where a plane is absent or not kept, and its ``read``.
    """
    new, read = decayed(operands)
    for t, x in enumerate(operands.x):
        for s, u in enumerate(operands.fresh):
            if u is not None and operands.trace[s] is not None:
                new[s] += outer(x, u[t])
        if operands.w is not None:
            read += outer(x, operands.w[t]).sum(examples(operands, new))
    return new, read
