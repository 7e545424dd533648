"""What the public functions of several ops do with their operands before they bind."""

from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

__all__ = ['as_floats', 'check_floats', 'in_unit']


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
