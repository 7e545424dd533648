"""``y = weight[indices]``: the rows of a table. A product with one-hot rows that are never made.

``d y[f] / d weight[v, f]`` is 1 where ``v`` is the index, so the trace of the table is
``(..., V, F)``, with all axes of a row folded into one. Gradients add what a cotangent says to the
row of its index.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .operands import check_floats, matmul_precision, numbers_of
from .outer import outer_rules, outer_total
from .primitive import TraceRules, Weights, register_primitive

__all__ = ['embedding', 'embedding_p']


def _forward(indices: jax.Array, weight: jax.Array, **_: Any) -> jax.Array:
    return jnp.take(weight, indices, axis=0, mode='fill')


def _weight_vjp(
    x: jax.Array, cotangent: jax.Array, weights: Weights, *, precision: str | None, **_: Any
) -> Weights:
    weight = weights['weight']
    if jnp.issubdtype(x.dtype, jnp.inexact):  # a sum of one-hot rows
        folded = _plane_view(cotangent, row=weight.shape[1:])
        total = outer_total(x, folded, precision=precision).reshape(weight.shape)
    else:
        total = jnp.zeros(weight.shape, cotangent.dtype).at[x].add(cotangent, mode='drop')
    return {'weight': total.astype(weight.dtype)}


def _plane_view(plane: jax.Array, *, row: tuple[int, ...], **_: Any) -> jax.Array:
    return plane.reshape(*plane.shape[: plane.ndim - len(row)], math.prod(row))


def _weight_view(weights: Weights, *, rows: int, row: tuple[int, ...], **_: Any) -> Weights:
    return {'weight': weights['weight'].reshape(rows, math.prod(row))}


def _one_hot(indices: jax.Array, rows: int, dtype: Any) -> jax.Array:
    wrapped = jnp.where(indices < 0, indices + rows, indices)
    return jax.nn.one_hot(wrapped, rows, dtype=dtype)


def _outer(x: jax.Array, plane: jax.Array, *, rows: int, **_: Any) -> Weights:
    return {'weight': _one_hot(x, rows, plane.dtype)[..., :, None] * plane[..., None, :]}


def _outer_sum(x: jax.Array, plane: jax.Array, *, rows: int, **_: Any) -> Weights:
    return {'weight': _scattered(x, plane, plane.shape[1:-1], rows)}


def _x_total(x: jax.Array, scales: jax.Array, *, rows: int, **_: Any) -> jax.Array:
    """``sum_t scales[t] one_hot(x[t])``, with no array of all steps and rows."""
    scales = jnp.broadcast_to(scales.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
    return _scattered(x, scales, x.shape[1:], rows)


def _scattered(x: jax.Array, values: jax.Array, lead: tuple[int, ...], rows: int) -> jax.Array:
    """For every example of ``lead``, what each step adds to the row of its index, summed."""
    steps, tail = len(values), values.shape[1 + len(lead) :]
    shared = [1] * (1 + len(lead) - x.ndim)  # axes of the states that the indices do not have
    x = jnp.broadcast_to(x.reshape(steps, *shared, *x.shape[1:]), (steps, *lead))
    _, *places = jnp.indices((steps, *lead), sparse=True)
    zeros = jnp.zeros((*lead, rows, *tail), values.dtype)
    return zeros.at[(*places, x)].add(values, mode='drop')


embedding_p = register_primitive(
    'etp_emb',
    _forward,
    batched=True,
    weight_vjp=_weight_vjp,
    linear_in_x=('weight',),
    x_total=_x_total,
    trace_rules=TraceRules(
        _outer,
        _outer_sum,
        outer_rules().decay,
        outer_rules().contract,
        plane_view=_plane_view,
        weight_view=_weight_view,
    ),
)


def embedding(indices: Any, weight: Any, *, weight_fn: Callable[[Any], Any] | None = None) -> Any:
    """Look up rows of a table whose influence on hidden states is to be traced.

    Computes ``weight_fn(weight)[indices]``.

    Parameters
    ----------
    indices : ArrayLike
        Integers of any shape, at least ``-rows`` and less than ``rows``; -1 is the last row.
    weight : ArrayLike
        Shape ``(rows, features)``, or of rows with several axes, ``(rows, ...)``.
    weight_fn : Callable, optional
        Applied to the table before the op: to its numbers, without the unit, which is put back
        after. Gradients are those of the raw table.

    Returns
    -------
    ArrayLike
        Shape ``(*indices.shape, *weight.shape[1:])``, in the unit of the table.

    Raises
    ------
    TypeError
        If the indices are not integers, or the table does not consist of floating-point numbers.
    ValueError
        If the table has no rows of at least one axis.
    IndexError
        If an index is out of range and its value is known. Under ``jit`` it is not: such an index
        then gives NaN, and no gradient to any row.

    Notes
    -----
    The trace of a table that reaches hidden states has its size for every example. ``pp_prop`` and
    ``etrace_grad(..., trace='fresh')`` have none.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> braintrace.embedding(jnp.array([2, 0, -1]), table).tolist()
    [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    """
    weight, unit = numbers_of(weight, weight_fn)
    indices = jnp.asarray(indices)
    _check(indices, weight)
    rows, *row = weight.shape
    y = embedding_p.bind(indices, weight, rows=rows, row=tuple(row), precision=matmul_precision())
    return u.maybe_decimal(y * unit)


def _check(indices: jax.Array, weight: jax.Array) -> None:
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f'embedding: found indices of dtype {indices.dtype}, expected integers. '
            'Convert them: indices.astype(jnp.int32).'
        )
    if weight.ndim < 2:
        raise ValueError(
            f'embedding: found a weight of shape {weight.shape}, expected (rows, features). '
            'For rows of one number use weight[:, None].'
        )
    check_floats('embedding', weight=weight)
    rows = len(weight)
    if isinstance(indices, jax.core.Tracer) or not indices.size:
        return
    numbers = np.asarray(indices)  # jnp would make tracers of them where a function is traced
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < -rows or highest >= rows:
        raise IndexError(
            f'embedding: found indices from {lowest} to {highest}, expected {-rows} to {rows - 1} '
            f'for a weight of {rows} rows. Check the vocabulary.'
        )
