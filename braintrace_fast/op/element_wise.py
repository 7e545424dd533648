"""``y = weight``: marks a weight that acts position by position (a gain, a time constant, a bias).

``d y / d weight`` is the identity, so trace and plane are the same thing. The weight may have fewer
leading axes than the group that it feeds, down to a single number; then the trace is kept per
position of the group and summed over the positions that share a weight when it is read. An axis of
size one is not spread over the group's: pass ``w.reshape(())``, not a weight of shape ``(1,)``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

from ..kernels.promotion import product
from .primitive import TraceRules, Weights, register_primitive

__all__ = ['element_wise', 'element_wise_p']


def _forward(weight: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return weight


def _sum_to_shape(plane: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    extra = plane.ndim - len(shape)
    plane = plane.sum(tuple(range(extra)))
    shared = tuple(i for i, size in enumerate(shape) if size == 1 != plane.shape[i])
    return plane.sum(shared, keepdims=True)


def _weight_vjp(
    x: None, cotangent: jax.Array, weights: Weights, *, shape: tuple[int, ...]
) -> Weights:
    return {'weight': _sum_to_shape(cotangent, shape).astype(weights['weight'].dtype)}


def _outer(x: None, plane: jax.Array, **_: Any) -> Weights:
    return {'weight': plane}


def _outer_sum(x: None, plane: jax.Array, **_: Any) -> Weights:
    return {'weight': plane.sum(0)}


def _decay(plane: jax.Array, trace: Weights, **_: Any) -> Weights:
    return {'weight': product(plane, trace['weight'])}


def _contract(plane: jax.Array, trace: Weights, *, shape: tuple[int, ...]) -> Weights:
    return {'weight': _sum_to_shape(product(plane, trace['weight']), shape)}


element_wise_p = register_primitive(
    'etp_elemwise',
    _forward,
    gradient_enabled=True,
    trainable_invars_fn=lambda params: {'weight': 0},
    x_invar_index=None,
    weight_vjp=_weight_vjp,
    trace_rules=TraceRules(_outer, _outer_sum, _decay, _contract),
)


def element_wise(weight: Any, *, weight_fn: Callable[[Any], Any] | None = None) -> Any:
    """Mark a weight whose influence on hidden states is to be traced position by position.

    Parameters
    ----------
    weight : ArrayLike
        The weight, with or without a unit.
    weight_fn : Callable, optional
        Applied to the weight before the op: to its numbers, without the unit, which is put back
        after. Gradients are those of the raw weight.

    Returns
    -------
    ArrayLike
        ``weight_fn(weight)``.

    Raises
    ------
    TypeError
        If the weight does not consist of floating-point numbers.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> braintrace.element_wise(jnp.array([1.0, -2.0]), weight_fn=jnp.abs).tolist()
    [1.0, 2.0]
    """
    weight, unit = u.split_mantissa_unit(weight)
    weight = jnp.asarray(weight if weight_fn is None else weight_fn(weight))
    if not jnp.issubdtype(weight.dtype, jnp.inexact):
        raise TypeError(
            f'element_wise: found a weight of dtype {weight.dtype}, expected floating-point '
            'numbers. Convert it: weight.astype(jnp.float32).'
        )
    return u.maybe_decimal(element_wise_p.bind(weight, shape=weight.shape) * unit)
