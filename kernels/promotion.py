"""Arithmetic on arrays of two types: planes of float32 and a trace that is stored in bfloat16.

It promotes explicitly, by JAX's standard rules, also where ``jax_numpy_dtype_promotion`` forbids to
do so implicitly.
"""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ['common_type', 'product', 'promoted']


def common_type(*values: Any) -> jnp.dtype:
    """The type of a sum of arrays or of numbers of some types.

    Examples
    --------
    >>> from braintrace_fast.kernels.promotion import common_type
    >>> common_type('bfloat16', 'float32')
    dtype('float32')
    """
    with jax.numpy_dtype_promotion('standard'):
        return jnp.result_type(*values)


def promoted(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays in their common type.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.promotion import promoted
    >>> [a.dtype.name for a in promoted(jnp.ones(2, 'bfloat16'), jnp.ones(3))]
    ['float32', 'float32']
    """
    dtype = common_type(*arrays)
    return [array.astype(dtype) for array in arrays]


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Their product, in their common type.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.promotion import product
    >>> product(jnp.ones(2, 'bfloat16'), jnp.ones(2)).dtype
    dtype('float32')
    """
    a, b = promoted(a, b)
    return a * b
