"""What the public functions of several ops do with their operands before they bind."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

__all__ = ['affine', 'as_floats', 'check_floats', 'in_unit', 'matmul_precision', 'numbers_of']

Hook = Callable[[Any], Any] | None
"""A function that a user has applied to a weight, to its numbers without the unit."""


def affine(
    op: str,
    bind: Callable[..., jax.Array],
    check: Callable[..., None],
    x: Any,
    weight: Any,
    bias: Any,
    weight_fn: Hook,
    bias_fn: Hook,
) -> Any:
    """Bind an op of a weight and perhaps a bias, after ``check(x, weight, bias)`` of numbers."""
    weight, weight_unit = numbers_of(weight, weight_fn)
    x, x_unit = u.split_mantissa_unit(x)
    unit = x_unit * weight_unit
    operands = [as_floats(x, weight.dtype), weight]
    if bias is not None:
        bias = in_unit(op, bias, unit)
        operands.append(jnp.asarray(bias if bias_fn is None else bias_fn(bias)))
    check(*operands)
    check_floats(op, weight=weight, bias=None if bias is None else operands[2])
    y = bind(*operands, has_bias=bias is not None, precision=matmul_precision())
    return u.maybe_decimal(y * unit)


def numbers_of(weight: Any, hook: Hook = None) -> tuple[jax.Array, u.Unit]:
    """A weight's numbers, after its hook, and its unit."""
    numbers, unit = u.split_mantissa_unit(weight)
    return jnp.asarray(numbers if hook is None else hook(numbers)), unit


def matmul_precision() -> str | None:
    """The precision of products in the block where an op is called."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def as_floats(x: Any, dtype: Any) -> jax.Array:
    """An op's input, in the given type if it consists of integers or booleans (spikes)."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(dtype)


def in_unit(op: str, bias: Any, unit: u.Unit) -> Any:
    """The numbers of a bias in the unit of ``x * weight``; refuses another dimension."""
    own_unit = u.get_unit(bias)
    if not own_unit.has_same_dim(unit):
        raise u.UnitMismatchError(
            f'{op}: the bias has the unit {own_unit}, but x * weight has {unit}. '
            'Give the bias in a unit that converts to it.'
        )
    return u.Quantity(bias).to_decimal(unit)


def check_floats(op: str, **weights: jax.Array | None) -> None:
    """Refuse weights that do not consist of floating-point numbers."""
    for name, value in weights.items():
        if value is not None and not jnp.issubdtype(value.dtype, jnp.inexact):
            raise TypeError(
                f'{op}: found a {name} of dtype {value.dtype}, expected floating-point numbers. '
                f'Convert it: {name}.astype(jnp.float32).'
            )
