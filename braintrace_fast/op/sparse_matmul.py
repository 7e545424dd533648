"""``y = x @ W + bias`` for a matrix ``W`` of which only some entries are there.

With entries ``p`` in row ``i_p`` and column ``o_p``, ``y[o] = sum_{p: o_p = o} x[i_p] weight[p]``.
Per position ``d y[o_p] / d weight[p] = x[i_p]``; so the trace of the weight has one number per
entry, ``(..., entries)``, and decays with its column:

    e[s][p] <- sum_q D[s,q][o_p] e[q][p] + f[s][o_p] x[i_p]

Entries at the same place add up.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..kernels.promotion import product
from .matmul import matmul
from .operands import affine
from .primitive import TraceRules, Weights, register_primitive, weight_and_bias
from .sparse_pattern import Pattern, format_of, pattern_of
from .sparse_sums import EXAMPLES, computed, in_blocks, one_batch, sample, spread, take, zeros_for

__all__ = ['sparse_matmul', 'sparse_matmul_p']


def _forward(
    x: jax.Array, weight: jax.Array, *others: jax.Array, has_bias: bool, size: int
) -> jax.Array:
    *bias, rows, cols = others
    y = spread(x, weight, rows, cols, size=size)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _places(params: dict[str, Any]) -> dict[str, int]:
    first = 2 + params['has_bias']
    return {'rows': first, 'cols': first + 1}


def _weight_vjp(
    x: jax.Array,
    cotangent: jax.Array,
    weights: Weights,
    *,
    has_bias: bool,
    rows: jax.Array,
    cols: jax.Array,
    **_: Any,
) -> Weights:
    gradients = {'weight': sample(x, cotangent, rows, cols)}
    if has_bias:
        gradients['bias'] = one_batch(cotangent).sum(0)
    # A bias that is no parameter has no entry among the weights.
    return {key: gradients[key].astype(weight.dtype) for key, weight in weights.items()}


def _outer(x: jax.Array, plane: jax.Array, **params: Any) -> Weights:
    return _products(computed(x), computed(plane), **params)


def _products(
    x: jax.Array,
    plane: jax.Array,
    *,
    has_bias: bool,
    rows: jax.Array,
    cols: jax.Array,
    **_: Any,
) -> Weights:
    trace = {'weight': take(x, rows) * take(plane, cols)}
    return trace | {'bias': plane} if has_bias else trace


def _outer_sum(x: jax.Array, plane: jax.Array, **params: Any) -> Weights:
    """Step by step, so that only one trace is there at a time."""

    def add(total: Weights, step: tuple[jax.Array, jax.Array]) -> tuple[Weights, None]:
        return jax.tree.map(jnp.add, total, _products(*step, **params)), None

    return lax.scan(add, _outer(x[0], plane[0], **params), (x[1:], plane[1:]))[0]


def _decay(
    plane: jax.Array, trace: Weights, *, has_bias: bool, cols: jax.Array, **_: Any
) -> Weights:
    decayed = {'weight': product(take(computed(plane), cols), trace['weight'])}
    return decayed | {'bias': product(plane, trace['bias'])} if has_bias else decayed


def _contract(
    plane: jax.Array, trace: Weights, *, has_bias: bool, cols: jax.Array, **_: Any
) -> Weights:
    planes, traces = computed(one_batch(plane)), one_batch(trace['weight'])

    def add_examples(total: jax.Array, first: Any, num: int) -> jax.Array:
        some = (lax.dynamic_slice_in_dim(a, first, num) for a in (planes, traces))
        return sum((product(take(p, cols), e) for p, e in zip(*some, strict=True)), total)

    start = zeros_for(cols.shape, planes, traces)
    result = {'weight': in_blocks(add_examples, start, len(planes), EXAMPLES)}
    if has_bias:
        result['bias'] = one_batch(product(plane, trace['bias'])).sum(0)
    return result


def _entries(*, rows: jax.Array, cols: jax.Array, **_: Any) -> tuple[jax.Array, jax.Array]:
    return rows, cols


def _diagonal(
    weights: Weights,
    sources: np.ndarray,
    *,
    rows: jax.Array,
    cols: jax.Array,
    size: int,
    **_: Any,
) -> jax.Array | None:
    if len(sources) != size:  # the positions of an example have more axes than the op
        return None
    weight = weights['weight']
    is_own = rows == jnp.asarray(sources, rows.dtype)[cols]
    own = jnp.where(is_own, weight, jnp.zeros_like(weight))
    return jnp.zeros(size, weight.dtype).at[cols].add(own)


sparse_matmul_p = register_primitive(
    'etp_sp_mm',
    _forward,
    batched=True,
    trainable_invars_fn=weight_and_bias,
    aux_invars_fn=_places,
    weight_vjp=_weight_vjp,
    linear_in_x=('weight',),
    diagonal=_diagonal,
    trace_rules=TraceRules(
        _outer, _outer_sum, _decay, _contract, entries=_entries, keeps_input=True
    ),
)


def sparse_matmul(
    x: Any,
    weight: Any,
    *,
    sparse_mat: Any,
    bias: Any = None,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply by a sparse matrix whose influence on hidden states is to be traced.

    Computes ``x @ sparse_mat.with_data(weight_fn(weight)) + bias_fn(bias)``.

    Parameters
    ----------
    x : ArrayLike
        Shape ``(..., inputs)``. Integers and booleans (spikes) are taken as the weight's dtype,
        event arrays of brainevent (``BinaryArray``) as their values.
    weight : ArrayLike
        One number per entry of ``sparse_mat``, in the shape of its ``data``; or a single number
        that all entries share.
    sparse_mat : sparse matrix
        Shape ``(inputs, outputs)``; says where the entries are, and must not change. ``CSR``,
        ``CSC``, ``FixedNumPerPre``, ``FixedNumPerPost`` or ``Dense`` of brainevent, ``CSR``,
        ``CSC`` or ``COO`` of ``saiunit.sparse``, ``BCOO`` or ``BCSR`` of
        ``jax.experimental.sparse``. Its own data is not read.
    bias, weight_fn, bias_fn : optional
        As :func:`matmul` takes them.

    Returns
    -------
    ArrayLike
        Shape ``(..., outputs)``, in the unit of ``x * weight``.

    Raises
    ------
    ValueError
        If the shapes do not fit, or an index lies outside of the matrix.
    TypeError
        If ``sparse_mat`` is of another kind, its indices are not constants, or the weight or the
        bias does not consist of floating-point numbers.
    saiunit.UnitMismatchError
        If the bias has another physical dimension than ``x * weight``.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp, saiunit as u
    >>> matrix = u.sparse.CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> x = jnp.array([1.0, 10.0])
    >>> braintrace.sparse_matmul(x, matrix.data, sparse_mat=matrix).tolist()
    [30.0, 2.0]
    """
    # An event array says that its values are spikes, which nothing here makes use of.
    if any(cls.__name__ == 'EventRepresentation' for cls in type(x).__mro__):
        x = x.value
    if format_of(sparse_mat) == 'Dense':
        return matmul(x, weight, bias, weight_fn=weight_fn, bias_fn=bias_fn)
    pattern = pattern_of(sparse_mat)

    def check(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> None:
        _check(pattern, x, weight, bias)

    def bind(
        x: jax.Array, weight: jax.Array, *bias: jax.Array, has_bias: bool, **_: Any
    ) -> jax.Array:
        weight = jnp.broadcast_to(weight.reshape(-1), pattern.rows.shape)
        indices, size = (pattern.rows, pattern.cols), pattern.shape[1]
        return sparse_matmul_p.bind(x, weight, *bias, *indices, has_bias=has_bias, size=size)

    return affine('sparse_matmul', bind, check, x, weight, bias, weight_fn, bias_fn)


def _check(
    pattern: Pattern, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> None:
    inputs, outputs = pattern.shape
    if weight.shape not in (pattern.entries, (1,), ()):
        raise ValueError(
            f'sparse_matmul: found a weight of shape {weight.shape}, expected {pattern.entries}: '
            'one number per entry of sparse_mat; or (1,) for one that all share.'
        )
    if x.ndim == 0 or x.shape[-1] != inputs:
        raise ValueError(
            f'sparse_matmul: found x of shape {x.shape} and a sparse_mat of shape {pattern.shape}, '
            f'expected {inputs} features in the last axis of x. Check the sizes of the layer.'
        )
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(
            f'sparse_matmul: found a bias of shape {bias.shape}, expected {(outputs,)}. Give one '
            'number per output.'
        )
