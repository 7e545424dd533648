"""``sparse_step`` as its formula stands: a window of one step."""

from dataclasses import replace

import jax
import numpy as np

from ..outer.operands import TraceOperands
from ..sparse_carry.naive import sparse_carry

__all__ = ['sparse_step']


def sparse_step(operands: TraceOperands) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`braintrace_fast.kernels.trace_step.trace_step`.

    Returns the weight's ``e[s]``, with zeros where a plane is absent or not kept, and its ``read``.
    """
    given = operands.x, operands.fresh, operands.w
    x, f, w = jax.tree.map(lambda a: np.asarray(a)[None], given)
    return sparse_carry(replace(operands, x=x, fresh=f, w=w))
