"""The checked entry points of ``factored_trace``."""

from collections.abc import Sequence
from typing import Any

import jax

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..planes import Plane, check_planes, check_shapes
from .operands import FactoredOperands, SmoothOperands

__all__ = ['factored_trace', 'smooth']


def smooth(
    x: jax.Array,
    left: jax.Array | None,
    decay: float,
    *,
    reverse: bool = False,
    backend: Backend = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """``xhat_t = decay xhat_{t-1} + x_t`` for K steps.

    Parameters
    ----------
    x : array
        Shape ``(K, ...)``.
    left : array or None
        ``decay xhat_0``, of shape ``(...)``, which the steps before have left; None for zeros.
    decay : float
        How much is kept from step to step.
    reverse : bool
        Whether to go back from the last step: ``xhat_t = decay xhat_{t+1} + x_t``.
    backend : Backend
        What to run it with.

    Returns
    -------
    tuple of array
        ``decay xhat_K``, which is left for the step after the last, or in reverse ``decay xhat_1``
        for the one before the first; and ``xhat_1 .. xhat_K``, of shape ``(K, ...)``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.factored_trace import smooth
    >>> left, xhat = smooth(jnp.ones((3, 1)), None, 0.5)
    >>> xhat[:, 0].tolist(), left.tolist()
    ([1.0, 1.5, 1.75], [0.875])
    """
    if left is not None and x.shape[1:] != left.shape:
        raise ValueError(f'smooth: x has shape {x.shape}, expected (steps, *{left.shape}).')
    operands = SmoothOperands(x, left, decay, reverse)
    return dispatch.run('factored_trace.smooth', backend, operands)


def factored_trace(
    D: Sequence[Sequence[Plane]],
    f: Sequence[Sequence[Plane]],
    start: Sequence[Sequence[jax.Array]],
    decay: float,
    *,
    backend: Backend = PLAIN,
) -> tuple[Any, Any]:
    """``fhat_t[s] = decay sum_q D_t[s][q] fhat_{t-1}[q] + (1 - decay) f_t[s]`` for K steps, per op.

    Parameters
    ----------
    D : sequence of sequence of array or None
        ``D[s][q]``, of shape ``(K, *varshape)``, or ``(1, *varshape)`` where it is the same in all
        steps; None where it is structurally zero.
    f : sequence of sequence of array or None
        Per op that reaches the group, ``f[s]``, likewise. One plane at least must have K steps.
    start : sequence of sequence of array
        Per op, ``fhat_0[s]``, of shape ``varshape``.
    decay : float
        How much is kept from step to step.
    backend : Backend
        What to run it with.

    Returns
    -------
    tuple
        Per op, ``fhat_K[s]``, of shape ``varshape``; and ``fhat_1[s] .. fhat_K[s]``, each of shape
        ``(K, *varshape)``.
    """
    for planes, begin in zip(f, start, strict=True):
        check_planes('factored_trace', len(begin), D=D, f=planes)
    check_shapes('factored_trace', (D, f))
    return dispatch.run('factored_trace', backend, FactoredOperands(D, f, start, decay))
