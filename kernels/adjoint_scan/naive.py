"""``adjoint_scan`` as its formula stands, one step after the other: what tests compare with."""

from dataclasses import replace

import jax
import numpy as np

from ..dense import dense
from .operands import AdjointOperands

__all__ = ['adjoint_scan']

Arrays = tuple[np.ndarray, ...]


def adjoint_scan(operands: AdjointOperands) -> Arrays:
    """See :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan`.

    Returns ``nu[s]``, ``w[op]``, ``P[s, q]`` and ``u[op, s]``, with zeros where planes are absent;
    the last two are empty without ``carry``.
    """
    states, ops = range(len(operands.D)), range(len(operands.f))
    planes = jax.tree.leaves(replace(operands, later=None, beyond=None))
    steps, *shape = window = np.broadcast_shapes(*(a.shape for a in planes))
    D, f = dense(operands.D, window), dense(operands.f, window)
    L = dense(operands.L or [None for _ in states], window)
    R = dense(operands.R or [None for _ in states], window)
    c = dense(operands.c or [None for _ in ops], window)
    within = operands.within or [False for _ in ops]

    nu = dense(operands.later or [None for _ in states], tuple(shape))
    P = np.stack([[np.full(shape, float(s == q)) for q in states] for s in states])
    if operands.beyond is not None:
        P = dense(operands.beyond, tuple(shape))
    w, u = np.zeros((len(ops), *window)), np.zeros((len(ops), len(states), *window))
    for t in reversed(range(steps)):
        for k in ops:
            ahead = nu + L[:, t] if within[k] else nu
            w[k, t] = c[k, t] + sum(f[k, s, t] * ahead[s] for s in states)
            for s in states:
                u[k, s, t] = sum(P[s, r] * f[k, r, t] for r in states)
        later = L[:, t] + nu
        nu = np.stack([sum(D[s, q, t] * later[s] for s in states) + R[q, t] for q in states])
        P = np.stack([[sum(P[s, r] * D[r, q, t] for r in states) for q in states] for s in states])
    return (nu, w, P, u) if operands.carry else (nu, w, P[:0], u[:0])
