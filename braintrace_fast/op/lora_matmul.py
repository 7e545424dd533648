"""``y = alpha x @ B @ A + bias``: a product with a matrix of low rank, ``W = alpha B A``.

A cotangent ``w`` of ``y`` pulls back to ``alpha x^T (w A^T)`` for ``B`` and to ``alpha (x B)^T w``
for ``A``, at the cost of the low rank. A trace cannot have that cost: it decays by output, so ``B``
has no exact trace of its own shape. The trace is that of ``W``, ``(..., I, O)``, and what is read
of it is pulled back through ``W = alpha B A`` with the present ``B`` and ``A``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .operands import as_floats, check_floats, in_unit, matmul_precision, numbers_of
from .outer import outer_rules, outer_total, own_entries
from .primitive import Weights, register_primitive

__all__ = ['lora_matmul', 'lora_matmul_p']


def _forward(
    x: jax.Array,
    b: jax.Array,
    a: jax.Array,
    *bias: jax.Array,
    alpha: float,
    has_bias: bool,
    precision: str | None,
) -> jax.Array:
    y = alpha * jnp.dot(jnp.dot(x, b, precision=precision), a, precision=precision)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _trainable_invars(params: dict[str, Any]) -> dict[str, int]:
    places = {'lora_b': 1, 'lora_a': 2}
    return places | {'bias': 3} if params['has_bias'] else places


def _weight_vjp(
    x: jax.Array,
    cotangent: jax.Array,
    weights: Weights,
    *,
    alpha: float,
    has_bias: bool,
    precision: str | None,
) -> Weights:
    b, a = weights['lora_b'], weights['lora_a']
    inner = jnp.dot(x, b, precision=precision)
    by_inner = jnp.dot(cotangent, a.T, precision=precision)
    gradients = {
        'lora_b': alpha * outer_total(x, by_inner, precision=precision),
        'lora_a': alpha * outer_total(inner, cotangent, precision=precision),
    }
    if has_bias:
        gradients['bias'] = cotangent.sum(tuple(range(cotangent.ndim - 1)))
    return {key: gradients[key].astype(weight.dtype) for key, weight in weights.items()}


def _weight_view(
    weights: Weights, *, alpha: float, has_bias: bool, precision: str | None
) -> Weights:
    product = jnp.dot(weights['lora_b'], weights['lora_a'], precision=precision)
    return {'weight': alpha * product} | ({'bias': weights['bias']} if has_bias else {})


def _diagonal(weights: Weights, sources: np.ndarray, *, alpha: float, **_: Any) -> jax.Array:
    b, a = weights['lora_b'], weights['lora_a']
    _place, (rows, cols), is_own = own_entries(sources, b.shape[0], a.shape[1])
    return jnp.where(is_own, alpha * (b[rows] * a.T[cols]).sum(-1), jnp.zeros((), b.dtype))


lora_matmul_p = register_primitive(
    'etp_lora_mm',
    _forward,
    batched=True,
    trainable_invars_fn=_trainable_invars,
    weight_vjp=_weight_vjp,
    needs_weights=True,
    linear_in_x=('lora_b', 'lora_a'),
    diagonal=_diagonal,
    trace_rules=outer_rules(weight_view=_weight_view),
)


def lora_matmul(
    x: Any,
    B: Any,
    A: Any,
    *,
    alpha: float = 1.0,
    bias: Any = None,
    b_fn: Callable[[Any], Any] | None = None,
    a_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply by a matrix of low rank whose influence on hidden states is to be traced.

    Computes ``alpha * x @ b_fn(B) @ a_fn(A) + bias_fn(bias)``.

    Parameters
    ----------
    x : ArrayLike
        Shape ``(..., inputs)``. Integers and booleans (spikes) are taken as the dtype of ``B``.
    B : ArrayLike
        Shape ``(inputs, rank)``.
    A : ArrayLike
        Shape ``(rank, outputs)``.
    alpha : float
        Scales the product. It is part of the program: another value compiles anew.
    bias : ArrayLike, optional
        Shape ``(outputs,)``, in a unit that converts to that of ``x * B * A``.
    b_fn, a_fn, bias_fn : Callable, optional
        Applied to ``B``, ``A`` and the bias before the op: to their numbers, without the unit,
        which is put back after. Gradients are those of the raw weights.

    Returns
    -------
    ArrayLike
        Shape ``(..., outputs)``, in the unit of ``x * B * A``.

    Raises
    ------
    ValueError
        If the shapes do not fit.
    TypeError
        If a weight does not consist of floating-point numbers, or ``alpha`` is not a number.
    saiunit.UnitMismatchError
        If the bias has another physical dimension than ``x * B * A``.

    Notes
    -----
    A carried trace is that of the product ``B A``. If the weights change while it is carried, it is
    read with the new ones.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> B, A = jnp.array([[1.0], [2.0]]), jnp.array([[3.0, 4.0]])
    >>> braintrace.lora_matmul(jnp.ones(2), B, A, alpha=0.5).tolist()
    [4.5, 6.0]
    """
    b, b_unit = numbers_of(B, b_fn)
    a, a_unit = numbers_of(A, a_fn)
    x, x_unit = u.split_mantissa_unit(x)
    unit = x_unit * b_unit * a_unit
    operands = [as_floats(x, b.dtype), b, a]
    if bias is not None:
        bias = in_unit('lora_matmul', bias, unit)
        operands.append(jnp.asarray(bias if bias_fn is None else bias_fn(bias)))
    _check(*operands)
    y = lora_matmul_p.bind(
        *operands,
        alpha=_as_float(alpha),
        has_bias=bias is not None,
        precision=matmul_precision(),
    )
    return u.maybe_decimal(y * unit)


def _as_float(alpha: Any) -> float:
    try:
        return float(alpha)
    except (TypeError, ValueError):  # of which a traced value raises the first
        raise TypeError(
            f'lora_matmul: found alpha={alpha!r}, expected a number that is known when the step is '
            'traced. Multiply the result by it instead.'
        ) from None


def _check(x: jax.Array, b: jax.Array, a: jax.Array, bias: jax.Array | None = None) -> None:
    if b.ndim != 2 or a.ndim != 2 or b.shape[1] != a.shape[0]:
        raise ValueError(
            f'lora_matmul: found B of shape {b.shape} and A of shape {a.shape}, expected (inputs, '
            'rank) and (rank, outputs). B is on the side of the inputs.'
        )
    if x.ndim == 0 or x.shape[-1] != b.shape[0]:
        raise ValueError(
            f'lora_matmul: found x of shape {x.shape} and B of shape {b.shape}, expected '
            f'{b.shape[0]} features in the last axis of x. Check the sizes of the layer.'
        )
    if bias is not None and bias.shape != a.shape[1:]:
        raise ValueError(
            f'lora_matmul: found a bias of shape {bias.shape}, expected {a.shape[1:]} for A of '
            f'shape {a.shape}. Give one number per output.'
        )
    check_floats('lora_matmul', B=b, A=a, bias=bias)
