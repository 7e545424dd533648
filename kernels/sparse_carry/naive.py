"""``sparse_carry`` as its formula stands, one entry after the other."""

import jax
import numpy as np

from ..dense import dense
from ..outer.operands import TraceOperands

__all__ = ['sparse_carry']


def sparse_carry(operands: TraceOperands) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`.

    Returns the weight's ``e[s]``, with zeros where a plane is absent or not kept, and its ``read``.
    """
    weights = [None if e is None else e['weight'] for e in operands.trace]
    planes, shape = range(len(weights)), next(e.shape for e in weights if e is not None)
    absent = [None for _ in planes]
    rows, cols = np.asarray(operands.places)
    row = jax.tree.leaves((operands.decay, operands.signal))[0].shape
    x = np.asarray(operands.x, np.float64)
    decay, signal = dense(operands.decay, row), dense(operands.signal or absent, row)
    u, w = (dense(planes, (len(x), *row)) for planes in (operands.fresh, operands.w))
    is_live = operands.live is None or bool(operands.live)
    e = dense(weights if is_live else absent, shape)
    new, read = np.zeros((len(planes), *shape)), np.zeros(shape[-1])
    for p, (i, o) in enumerate(zip(rows, cols, strict=True)):
        for s in (s for s in planes if weights[s] is not None):
            new[s][..., p] = sum(decay[s, q][..., o] * e[q][..., p] for q in planes)
            new[s][..., p] += sum(u[s, t][..., o] * x[t][..., i] for t in range(len(x)))
        read[p] = sum((signal[q][..., o] * e[q][..., p]).sum() for q in planes)
        read[p] += (w[..., o] * x[..., i]).sum()
    return new, read
