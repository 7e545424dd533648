"""What ops share whose weight Jacobian is an outer product.

In canonical coordinates they all are, with ``a`` any axes that share a weight and ``g`` groups,

    y[a, g, o] = sum_i X[a, g, i] W[g, i, o],          d y[a, g, o] / d W[g, i, o] = X[a, g, i]

so the trace of the weight is ``(a, g, i, o)``, and that of a bias ``(a, g, o)``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..kernels.promotion import common_type, product, promoted
from .primitive import (
    ETPPrimitive,
    TraceRules,
    Weights,
    register_primitive,
    weight_and_bias,
)

__all__ = [
    'affine_primitive',
    'outer_rules',
    'outer_total',
    'outer_vjp',
    'own_entries',
    'weighted_sum',
]

BLOCK = 16
"""The most examples that are added up at a time when a trace is read."""


def outer_rules(groups: int = 0, **views: Any) -> TraceRules:
    """The trace rules of an op in canonical coordinates.

    Parameters
    ----------
    groups : int
        How many axes (0 or 1) number groups, in front of the last axes.
    **views
        ``operand``, ``plane_view``, ``weight_view`` and ``keeps_input`` of :class:`TraceRules`, for
        an op that has other coordinates of its own.
    """
    contract = functools.partial(_contract, groups=groups)
    return TraceRules(_outer, _outer_sum, _decay, contract, is_outer=True, groups=groups, **views)


def affine_primitive(name: str, product: Callable[..., jax.Array], groups: int = 0) -> ETPPrimitive:
    """The op ``product(x, weight) + bias``, where the bias may be missing.

    ``product`` is one of canonical coordinates, and takes a ``precision``.
    """

    def forward(
        x: jax.Array, weight: jax.Array, *bias: jax.Array, has_bias: bool, precision: str | None
    ) -> jax.Array:
        y = product(x, weight, precision=precision)
        return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y

    return register_primitive(
        name,
        forward,
        batched=True,
        trainable_invars_fn=weight_and_bias,
        weight_vjp=functools.partial(outer_vjp, groups=groups),
        linear_in_x=('weight',),
        trace_rules=outer_rules(groups),
        diagonal=_diagonal,
    )


def _diagonal(weights: Weights, sources: np.ndarray, **_: Any) -> jax.Array:
    """``W[g, i, o]`` where input ``(a, g, i)`` belongs to output ``(a, g, o)``, else zero."""
    weight = weights['weight']
    place, entry, is_own = own_entries(sources, *weight.shape[-2:])
    group = (place % weight.shape[0],) if weight.ndim > 2 else ()
    return jnp.where(is_own, weight[(*group, *entry)], jnp.zeros((), weight.dtype))


def own_entries(
    sources: np.ndarray, num_inputs: int, num_outputs: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Where the diagonal of a product of the last axes is, for ``sources`` in flat order.

    Returns, per output, the place of all axes in front of the last one, the entry of the matrix,
    and whether it exists: an input that belongs to the output, and lies at the same place.
    """
    places, outputs = np.divmod(np.arange(len(sources)), num_outputs)
    its_places, inputs = np.divmod(sources, num_inputs)
    is_own = (sources >= 0) & (its_places == places)
    return places, (np.where(is_own, inputs, 0), outputs), is_own


def outer_vjp(
    x: jax.Array,
    cotangent: jax.Array,
    weights: Weights,
    *,
    groups: int = 0,
    has_bias: bool = False,
    precision: str | None = None,
) -> Weights:
    """Pull a cotangent back to the weight and the bias, in canonical coordinates."""
    gradients = {'weight': outer_total(x, cotangent, groups, precision=precision)}
    if has_bias:
        gradients['bias'] = _sum_leading(cotangent, 1 + groups)
    # A bias that is no parameter has no entry among the weights.
    return {key: gradients[key].astype(weight.dtype) for key, weight in weights.items()}


def outer_total(x: jax.Array, y: jax.Array, groups: int = 0, **options: Any) -> jax.Array:
    """``sum x[g, i] y[g, o]`` over all axes in front, with options of ``lax.dot_general``."""
    on_cpu = functools.partial(_narrow_first, groups=groups, **options)
    default = functools.partial(_total, groups=groups, **options)
    return lax.platform_dependent(x, y, cpu=on_cpu, default=default)


def _total(x: jax.Array, y: jax.Array, *, groups: int, **options: Any) -> jax.Array:
    split = x.ndim - 1 - groups
    summed, kept = tuple(range(split)), tuple(range(split, x.ndim - 1))
    return lax.dot_general(x, y, ((summed, summed), (kept, kept)), **options)


def _narrow_first(x: jax.Array, y: jax.Array, *, groups: int, **options: Any) -> jax.Array:
    """The same for CPUs.

    XLA is up to ten times faster there if a narrow operand comes first, and need not transpose an
    operand if there is only one axis to sum over.
    """
    x, y = _one_batch(x, 1 + groups), _one_batch(y, 1 + groups)
    if y.shape[-1] * 2 < x.shape[-1]:
        return lax.optimization_barrier(_total(y, x, groups=groups, **options)).swapaxes(-1, -2)
    total = _total(x, y, groups=groups, **options)
    return lax.optimization_barrier(total) if x.shape[-1] * 2 < y.shape[-1] else total


def _outer(x: jax.Array, plane: jax.Array, *, has_bias: bool = False, **_: Any) -> Weights:
    x = lax.expand_dims(x, range(plane.ndim - x.ndim))  # of an op that all examples share
    trace = {'weight': product(x[..., :, None], plane[..., None, :])}
    return trace | {'bias': plane} if has_bias else trace


def _outer_sum(
    x: jax.Array,
    plane: jax.Array,
    *,
    has_bias: bool = False,
    precision: str | None = None,
    **_: Any,
) -> Weights:
    trace = {'weight': jnp.einsum('t...i,t...o->...io', x, plane, precision=precision)}
    return trace | {'bias': plane.sum(0)} if has_bias else trace


def _decay(plane: jax.Array, trace: Weights, *, has_bias: bool = False, **_: Any) -> Weights:
    decayed = {'weight': product(plane[..., None, :], trace['weight'])}
    return decayed | {'bias': product(plane, trace['bias'])} if has_bias else decayed


def _contract(
    plane: jax.Array, trace: Weights, *, groups: int, has_bias: bool = False, **_: Any
) -> Weights:
    planes, traces = _one_batch(plane, 1 + groups), _one_batch(trace['weight'], 2 + groups)
    if traces.shape[-1] == 1 and len(planes) > 1:
        result = {'weight': _narrow_sum(planes, traces, groups)}
    else:
        result = {'weight': weighted_sum(planes, traces)}
    if has_bias:
        result['bias'] = _sum_leading(product(plane, trace['bias']), 1 + groups)
    return result


def _sum_leading(a: jax.Array, own: int) -> jax.Array:
    return a.sum(tuple(range(a.ndim - own)))


def _one_batch(a: jax.Array, own: int) -> jax.Array:
    """All axes but the last few folded into one, which may be empty."""
    return a.reshape(math.prod(a.shape[:-own]), *a.shape[-own:])


def _narrow_sum(planes: jax.Array, traces: jax.Array, groups: int) -> jax.Array:
    """``sum_b planes[b] * traces[b]`` of traces that are uniform over outputs."""
    inputs, planes = promoted(traces[..., 0], planes)
    return outer_total(inputs, planes, groups, precision=lax.Precision.HIGHEST)


def weighted_sum(planes: jax.Array, traces: jax.Array) -> jax.Array:
    """``sum_b planes[b] * traces[b]``, in one pass over the traces."""
    return lax.platform_dependent(planes, traces, cpu=_sum_in_blocks, default=_sum_at_once)


def _sum_at_once(planes: jax.Array, traces: jax.Array) -> jax.Array:
    return product(planes[..., None, :], traces).sum(0)


def _sum_in_blocks(planes: jax.Array, traces: jax.Array) -> jax.Array:
    """The same for CPUs, a few examples at a time.

    XLA takes over a hundred times as long there for a product that it sums over its first axis, and
    five times as long for a dot. For a few examples it may compute the traces twice, from the ones
    before, which then cannot be overwritten; it does not in a loop, nor for a whole block.
    """
    num = len(planes)
    total = jnp.zeros((*traces.shape[1:-1], planes.shape[-1]), common_type(planes, traces))
    if not num:
        return total

    def add_block(total: jax.Array, first: Any, size: int) -> jax.Array:
        block = [lax.dynamic_slice_in_dim(a, first, size) for a in (planes, traces)]
        return sum((product(p[..., None, :], e) for p, e in zip(*block, strict=True)), total)

    size = BLOCK if num >= BLOCK else max(num // 2, 1)
    blocks, rest = divmod(num, size)
    if blocks == 1:
        total = add_block(total, 0, size)
    else:
        total = lax.fori_loop(0, blocks, lambda i, t: add_block(t, i * size, size), total)
    return add_block(total, blocks * size, rest) if rest else total
