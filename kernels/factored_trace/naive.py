"""``factored_trace`` and ``smooth`` as their formulas stand, one step after the other."""

import jax
import numpy as np

from ..dense import dense
from .operands import FactoredOperands, SmoothOperands

__all__ = ['factored_trace', 'smooth']


def smooth(operands: SmoothOperands) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`braintrace_fast.kernels.factored_trace.smooth`."""
    x = np.asarray(operands.x, np.float64)
    left = dense(operands.left, x.shape[1:])
    xhat = np.zeros(x.shape)
    steps = range(len(x))
    for t in reversed(steps) if operands.reverse else steps:
        xhat[t] = left + x[t]
        left = operands.decay * xhat[t]
    return left, xhat


def factored_trace(operands: FactoredOperands) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`braintrace_fast.kernels.factored_trace.factored_trace`.

    Returns ``fhat_K[op, s]`` and ``fhat[op, s]`` of all steps.
    """
    decay, states, ops = operands.decay, range(len(operands.D)), range(len(operands.f))
    leaves = jax.tree.leaves((operands.D, operands.f))
    steps, *shape = window = np.broadcast_shapes(*(a.shape for a in leaves))
    D, f = dense(operands.D, window), dense(operands.f, window)
    last = dense(operands.start, shape)
    fhat = np.zeros((len(ops), len(states), *window))
    for t in range(steps):
        for k in ops:
            for s in states:
                past = sum(D[s, q, t] * last[k, q] for q in states)
                fhat[k, s, t] = decay * past + (1 - decay) * f[k, s, t]
        last = fhat[:, :, t]
    return last, fhat
