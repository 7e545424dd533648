"""``y = x @ weight + bias``, for ``x`` with any number of leading batch axes.

Per position, ``d y[o] / d weight[i, o] = x[i]`` and ``d y[o] / d bias[o] = 1``; so the trace of the
weight is ``(..., I, O)``, that of the bias ``(..., O)``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u
from jax import lax

from ..kernels.promotion import common_type, product, promoted
from .primitive import TraceRules, Weights, register_primitive

__all__ = ['matmul', 'matmul_p', 'outer_total']

BLOCK = 16
"""The most examples that are added up at a time when a trace is read."""


def _forward(
    x: jax.Array, weight: jax.Array, *bias: jax.Array, has_bias: bool, precision: str | None
) -> jax.Array:
    y = jnp.dot(x, weight, precision=precision)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _trainable_invars(params: dict[str, Any]) -> dict[str, int]:
    return {'weight': 1, 'bias': 2} if params['has_bias'] else {'weight': 1}


def _weight_vjp(
    x: jax.Array, cotangent: jax.Array, weights: Weights, *, has_bias: bool, precision: str | None
) -> Weights:
    gradients = {'weight': outer_total(x, cotangent, precision=precision)}
    if has_bias:
        gradients['bias'] = cotangent.sum(tuple(range(x.ndim - 1)))
    # A bias that is no parameter has no entry among the weights.
    return {key: gradients[key].astype(weight.dtype) for key, weight in weights.items()}


def outer_total(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """``sum x[i] y[o]`` over all axes but the last, with options of ``lax.dot_general``."""
    on_cpu = functools.partial(_narrow_first, **options)
    return lax.platform_dependent(x, y, cpu=on_cpu, default=functools.partial(_total, **options))


def _total(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    leading = tuple(range(x.ndim - 1))
    return lax.dot_general(x, y, ((leading, leading), ((), ())), **options)


def _narrow_first(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """The same for CPUs.

    XLA is up to ten times faster there if a narrow operand comes first, and need not transpose an
    operand if there is only one axis to sum over.
    """
    x, y = _one_batch(x, 1), _one_batch(y, 1)
    if y.shape[1] * 2 < x.shape[1]:
        return lax.optimization_barrier(_total(y, x, **options)).T
    total = _total(x, y, **options)
    return lax.optimization_barrier(total) if x.shape[1] * 2 < y.shape[1] else total


def _outer(x: jax.Array, plane: jax.Array, *, has_bias: bool, **_: Any) -> Weights:
    trace = {'weight': x[..., :, None] * plane[..., None, :]}
    return trace | {'bias': plane} if has_bias else trace


def _outer_sum(x: jax.Array, plane: jax.Array, *, has_bias: bool, precision: str | None) -> Weights:
    trace = {'weight': jnp.einsum('t...i,t...o->...io', x, plane, precision=precision)}
    return trace | {'bias': plane.sum(0)} if has_bias else trace


def _decay(plane: jax.Array, trace: Weights, *, has_bias: bool, **_: Any) -> Weights:
    decayed = {'weight': product(plane[..., None, :], trace['weight'])}
    return decayed | {'bias': product(plane, trace['bias'])} if has_bias else decayed


def _contract(
    plane: jax.Array, trace: Weights, *, has_bias: bool, precision: str | None
) -> Weights:
    planes, traces = _one_batch(plane, 1), _one_batch(trace['weight'], 2)
    is_narrow = traces.shape[-1] == 1 and len(planes) > 1
    result = {'weight': (_narrow_sum if is_narrow else _weighted_sum)(planes, traces)}
    if has_bias:
        result['bias'] = product(plane, trace['bias']).sum(tuple(range(plane.ndim - 1)))
    return result


def _one_batch(a: jax.Array, own: int) -> jax.Array:
    """All axes but the last few folded into one, which may be empty."""
    return a.reshape(math.prod(a.shape[:-own]), *a.shape[-own:])


def _narrow_sum(planes: jax.Array, traces: jax.Array) -> jax.Array:
    """``sum_b planes[b] * traces[b]`` of traces that are uniform over outputs."""
    inputs, planes = promoted(traces[..., 0], planes)
    return outer_total(inputs, planes, precision=lax.Precision.HIGHEST)


def _weighted_sum(planes: jax.Array, traces: jax.Array) -> jax.Array:
    """``sum_b planes[b] * traces[b]``, in one pass over the traces."""
    return lax.platform_dependent(planes, traces, cpu=_sum_in_blocks, default=_sum_at_once)


def _sum_at_once(planes: jax.Array, traces: jax.Array) -> jax.Array:
    return product(planes[:, None], traces).sum(0)


def _sum_in_blocks(planes: jax.Array, traces: jax.Array) -> jax.Array:
    """The same for CPUs, a few examples at a time.

    XLA takes over a hundred times as long there for a product that it sums over its first axis, and
    five times as long for a dot. For a few examples it may compute the traces twice, from the ones
    before, which then cannot be overwritten; it does not in a loop, nor for a whole block.
    """
    num = len(planes)
    total = jnp.zeros((traces.shape[1], planes.shape[1]), common_type(planes, traces))
    if not num:
        return total

    def add_block(total: jax.Array, first: Any, size: int) -> jax.Array:
        block = [lax.dynamic_slice_in_dim(a, first, size) for a in (planes, traces)]
        return sum((product(p[None], e) for p, e in zip(*block, strict=True)), total)

    size = BLOCK if num >= BLOCK else max(num // 2, 1)
    blocks, rest = divmod(num, size)
    if blocks == 1:
        total = add_block(total, 0, size)
    else:
        total = lax.fori_loop(0, blocks, lambda i, t: add_block(t, i * size, size), total)
    return add_block(total, blocks * size, rest) if rest else total


matmul_p = register_primitive(
    'etp_matmul',
    _forward,
    batched=True,
    trainable_invars_fn=_trainable_invars,
    weight_vjp=_weight_vjp,
    trace_rules=TraceRules(_outer, _outer_sum, _decay, _contract, is_outer=True),
)


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
    x, x_unit = u.split_mantissa_unit(x)
    weight, weight_unit = u.split_mantissa_unit(weight)
    unit = x_unit * weight_unit
    weight = jnp.asarray(weight if weight_fn is None else weight_fn(weight))
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(weight.dtype)
    operands = [x, weight]
    if bias is not None:
        bias = _in_unit(bias, unit)
        operands.append(jnp.asarray(bias if bias_fn is None else bias_fn(bias)))
    _check(*operands)
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    y = matmul_p.bind(*operands, has_bias=bias is not None, precision=precision)
    return u.maybe_decimal(y * unit)


def _in_unit(bias: Any, unit: u.Unit) -> Any:
    own_unit = u.get_unit(bias)
    if not own_unit.has_same_dim(unit):
        raise u.UnitMismatchError(
            f'matmul: the bias has the unit {own_unit}, but x * weight has {unit}. '
            'Give the bias in a unit that converts to it.'
        )
    return u.Quantity(bias).to_decimal(unit)


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
    for name, value in (('weight', weight), ('bias', bias)):
        if value is not None and not jnp.issubdtype(value.dtype, jnp.inexact):
            raise TypeError(
                f'matmul: found a {name} of dtype {value.dtype}, expected floating-point numbers. '
                f'Convert it: {name}.astype(jnp.float32).'
            )
