"""``trace_step`` as its formula stands, for the weight of an op whose trace is an outer product."""

import jax
import numpy as np

from ..dense import dense
from ..outer.operands import TraceOperands

__all__ = ['decayed', 'examples', 'outer', 'trace_step']


def trace_step(operands: TraceOperands) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`braintrace_fast.kernels.trace_step.trace_step`.

    Returns the weight's ``e[s]``, with zeros where a plane is absent or not kept, and its ``read``.
    """
    new, read = decayed(operands)
    for s, f in enumerate(operands.fresh):
        if f is not None and operands.trace[s] is not None:
            new[s] += outer(operands.x, f)
    if operands.w is not None:
        read += outer(operands.x, operands.w).sum(examples(operands, new))
    return new, read


def decayed(operands: TraceOperands) -> tuple[np.ndarray, np.ndarray]:
    """``sum_q decay[s][q] e[q]``, and ``sum_q signal[q] . e[q]`` of the old trace."""
    planes = range(len(operands.trace))
    weights = [None if e is None else e['weight'] for e in operands.trace]
    shape = next(e.shape for e in weights if e is not None)
    row = (*shape[:-2], shape[-1])
    decay = dense(operands.decay, row)[..., None, :]
    signal = dense(operands.signal or [None for _ in planes], row)[..., None, :]
    is_live = operands.live is None or bool(operands.live)
    e = dense(weights if is_live else [None for _ in planes], shape)
    new = np.zeros((len(planes), *shape))
    for s in planes:
        if weights[s] is not None:
            new[s] = sum(decay[s, q] * e[q] for q in planes)
    read = np.stack([signal[q] * e[q] for q in planes])
    return new, read.sum((0, *(1 + axis for axis in examples(operands, new))))


def examples(operands: TraceOperands, new: np.ndarray) -> tuple[int, ...]:
    """The axes of one plane of a trace that share the weights."""
    return tuple(range(new.ndim - 3 - operands.rules.groups))


def outer(x: jax.Array, plane: jax.Array) -> np.ndarray:
    """The outer product of an input and a plane, for each example."""
    return np.asarray(x, np.float64)[..., :, None] * np.asarray(plane, np.float64)[..., None, :]
