"""``y = x @ weight + bias``, for ``x`` with any number of leading batch axes.

Per position, ``d y[o] / d weight[i, o] = x[i]`` and ``d y[o] / d bias[o] = 1``; so the trace of the
weight is ``(..., I, O)``, that of the bias ``(..., O)``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .operands import affine
from .outer import affine_primitive

__all__ = ['matmul', 'matmul_p']


matmul_p = affine_primitive('etp_mm', jnp.dot)


def matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply by a weight matrix whose influence on hidden states is to be traced.

    Computes ``x @ weight_fn(weight) + bias_fn(bias)``.

    Parameters
    ----------
    x : ArrayLike
        Shape ``(..., inputs)``. Integers and booleans (spikes) are taken as the weight's dtype.
    weight : ArrayLike
        Shape ``(inputs, outputs)``.
    bias : ArrayLike, optional
        Shape ``(outputs,)``, in a unit that converts to that of ``x * weight``.
    weight_fn, bias_fn : Callable, optional
        Applied to the weight and to the bias before the op: to their numbers, without the unit,
        which is put back after. Gradients are those of the raw weight and bias.

    Returns
    -------
    ArrayLike
        Shape ``(..., outputs)``, in the unit of ``x * weight``.

    Raises
    ------
    ValueError
        If the shapes do not fit.
    TypeError
        If the weight or the bias does not consist of floating-point numbers.
    saiunit.UnitMismatchError
        If the bias has another physical dimension than ``x * weight``.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> weight = jnp.array([[1.0, -2.0], [3.0, 4.0]])
    >>> braintrace.matmul(jnp.array([1.0, 1.0]), weight, jnp.array([0.5, 0.5])).tolist()
    [4.5, 2.5]
    """
    return affine('matmul', matmul_p.bind, _check, x, weight, bias, weight_fn, bias_fn)


def _check(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> None:
    if weight.ndim != 2:
        raise ValueError(
            f'matmul: found a weight of shape {weight.shape}, expected (inputs, outputs). '
            'Reshape it, or use an op made for such weights.'
        )
    if x.ndim == 0:
        raise ValueError(
            f'matmul: found x without axes, expected shape (..., {weight.shape[0]}). '
            'For a single input use x[None].'
        )
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f'matmul: found x of shape {x.shape} and a weight of shape {weight.shape}, expected '
            f'{weight.shape[0]} features in the last axis of x. Check the sizes of the layer.'
        )
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ValueError(
            f'matmul: found a bias of shape {bias.shape}, expected {weight.shape[1:]} for a weight '
            f'of shape {weight.shape}. Give one number per output.'
        )
