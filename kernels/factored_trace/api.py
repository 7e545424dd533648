"""The checked entry points of ``factored_trace``."""

from collections.abc import Sequence

import jax

from ..planes import Plane
from . import reference

__all__ = ['factored_trace', 'smooth']


def smooth(x: jax.Array, start: jax.Array, decay: float) -> jax.Array:
    """``xhat_t = decay xhat_{t-1} + x_t`` for K steps.

    Parameters
    ----------
    x : array
        Shape ``(K, ...)``.
    start : array
        ``xhat_0``, of shape ``(...)``.
    decay : float
        How much is kept from step to step.

    Returns
    -------
    array
        ``xhat_1 .. xhat_K``, of shape ``(K, ...)``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.factored_trace import smooth
    >>> smooth(jnp.ones((3, 1)), jnp.zeros(1), 0.5)[:, 0].tolist()
    [1.0, 1.5, 1.75]
    """
    if x.shape[1:] != start.shape:
        raise ValueError(f'smooth: x has shape {x.shape}, expected (steps, *{start.shape}).')
    return reference.smooth(x, start, decay)


def factored_trace(
    D: Sequence[Sequence[Plane]],
    f: Sequence[Plane],
    start: Sequence[jax.Array],
    decay: float,
) -> tuple[jax.Array, ...]:
    """``fhat_t[s] = decay sum_q D_t[s][q] fhat_{t-1}[q] + (1 - decay) f_t[s]`` for K steps.

    Parameters
    ----------
    D : sequence of sequence of array or None
        ``D[s][q]``, of shape ``(K, *varshape)``; None where it is structurally zero.
    f : sequence of array or None
        ``f[s]``, likewise.
    start : sequence of array
        ``fhat_0[s]``, of shape ``varshape``.
    decay : float
        How much is kept from step to step.

    Returns
    -------
    tuple of array
        ``fhat_1[s] .. fhat_K[s]``, each of shape ``(K, *varshape)``.
    """
    for name, found in (('D', D), ('f', f)):
        if len(found) != len(start):
            raise ValueError(
                f'factored_trace: {name} has {len(found)} planes, expected {len(start)}.'
            )
    return reference.factored_trace(D, f, start, decay)
