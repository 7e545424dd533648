"""``y[g] = x[g] @ weight[g] + bias[g]``: a matrix product in each of several groups.

Per position, ``d y[g, o] / d weight[g, i, o] = x[g, i]``; so the trace of the weight is
``(..., G, I, O)``, that of the bias ``(..., G, O)``. One group is ``matmul``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .operands import affine
from .outer import affine_primitive

__all__ = ['grouped_matmul', 'grouped_matmul_p']


grouped_matmul_p = affine_primitive('etp_gmm', partial(jnp.einsum, '...gi,gio->...go'), groups=1)


def grouped_matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply each group of inputs by a weight matrix of its own, which is to be traced.

    Computes ``x[..., g, :] @ weight_fn(weight)[g] + bias_fn(bias)[g]`` for every group ``g``.

    Parameters
    ----------
    x : ArrayLike
        Shape ``(..., groups, inputs)``. Integers and booleans (spikes) are taken as the weight's
        dtype.
    weight : ArrayLike
        Shape ``(groups, inputs, outputs)``.
    bias : ArrayLike, optional
        Shape ``(groups, outputs)``, in a unit that converts to that of ``x * weight``.
    weight_fn, bias_fn : Callable, optional
        As of :func:`matmul`.

    Returns
    -------
    ArrayLike
        Shape ``(..., groups, outputs)``, in the unit of ``x * weight``.

    Raises
    ------
    ValueError, TypeError, saiunit.UnitMismatchError
        As by :func:`matmul`, where shapes, types or units do not fit.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> weight = jnp.array([[[1.0], [2.0]], [[3.0], [4.0]]])
    >>> braintrace.grouped_matmul(jnp.ones((2, 2)), weight).tolist()
    [[3.0], [7.0]]
    """
    return affine(
        'grouped_matmul', grouped_matmul_p.bind, _check, x, weight, bias, weight_fn, bias_fn
    )


def _check(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> None:
    if weight.ndim != 3:
        raise ValueError(
            f'grouped_matmul: found a weight of shape {weight.shape}, expected (groups, inputs, '
            'outputs). For a single group use matmul, or weight[None].'
        )
    if x.ndim < 2 or x.shape[-2:] != weight.shape[:2]:
        groups, inputs, _ = weight.shape
        raise ValueError(
            f'grouped_matmul: found x of shape {x.shape} and a weight of shape {weight.shape}, '
            f'expected x of shape (..., {groups}, {inputs}). Give each group its own inputs.'
        )
    if bias is not None and bias.shape != (weight.shape[0], weight.shape[2]):
        raise ValueError(
            f'grouped_matmul: found a bias of shape {bias.shape}, expected '
            f'{(weight.shape[0], weight.shape[2])} for a weight of shape {weight.shape}. '
            'Give one number per group and output.'
        )
