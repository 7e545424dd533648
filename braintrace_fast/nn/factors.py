"""Fixed factors of what a layer holds: masks, signs, decays."""

from typing import Any

import jax.numpy as jnp
import saiunit as u

__all__ = ['as_factor']


def as_factor(value: Any, array: Any) -> Any:
    """A factor of an array, of its rank; booleans and integers become numbers of its type.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.nn.factors import as_factor
    >>> factor = as_factor(jnp.array([True, False]), jnp.ones((3, 2)))
    >>> factor.shape, factor.dtype
    ((1, 2), dtype('float32'))
    """
    value = u.math.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        value = value.astype(array.dtype)
    return u.math.expand_dims(value, tuple(range(array.ndim - value.ndim)))
