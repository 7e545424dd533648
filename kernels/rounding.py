"""Stochastic rounding of what is stored in bfloat16: right on average, whatever the backend.

A value is rounded up with the probability of the part that is cut off. The bits come from a hash of
a counter, in uint32 arithmetic alone, so that every backend draws the same for the same element:
``counter`` is the place of an element in its array, ``key`` is one number per array and step.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ['keys', 'round_to', 'store', 'stochastic']

GOLDEN = np.uint32(0x9E3779B9)
FIRST, SECOND = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
CUT = np.uint32(0xFFFF)


def keys(seed: Any, count: int) -> jax.Array:
    """A key for each of some arrays, from the seed of a step.

    Examples
    --------
    >>> from braintrace_fast.kernels.rounding import keys
    >>> keys(7, 3).dtype, keys(7, 3).shape
    (dtype('uint32'), (3,))
    """
    streams = lax.iota(jnp.uint32, count) + np.uint32(1)
    return _mix(_mix(jnp.asarray(seed).astype(jnp.uint32)) + GOLDEN * streams)


def stochastic(value: jax.Array, key: jax.Array, counter: jax.Array) -> jax.Array:
    """Round float32 to one of the two bfloat16 next to it; also inside kernels."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    draw = _mix(_mix(counter ^ key) + key) & CUT
    rounded = lax.bitcast_convert_type((bits + draw) & ~CUT, jnp.float32)
    finite = jnp.abs(value) < np.float32(np.inf)  # the bits of a NaN would overflow
    return jnp.where(finite, rounded, value).astype(jnp.bfloat16)


def round_to(value: jax.Array, dtype: Any, key: jax.Array | None) -> jax.Array:
    """An array in another type: rounded stochastically from a key, or to the nearest.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.rounding import keys, round_to
    >>> thirds = jnp.full(10_000, 1 / 3)
    >>> near = round_to(thirds, jnp.bfloat16, None)
    >>> drawn = round_to(thirds, jnp.bfloat16, keys(0, 1)[0])
    >>> abs(near.astype('float32').mean() - 1 / 3) > 6e-4
    Array(True, dtype=bool)
    >>> abs(drawn.astype('float32').mean() - 1 / 3) < 5e-5
    Array(True, dtype=bool)
    """
    if key is None or jnp.dtype(dtype) != jnp.bfloat16:
        return value.astype(dtype)
    counter = lax.iota(jnp.uint32, value.size).reshape(value.shape)
    return stochastic(value.astype(jnp.float32), key, counter)


def store(new: Any, trace: Sequence[Any], plane: int, seed: Any) -> Any:
    """A plane's new trace, or None, in the types of the old: stochastically from a seed."""
    if new is None:
        return None
    names = ['weight', *sorted(name for name in new if name != 'weight')]
    drawn = None if seed is None else keys(seed, len(names) * len(trace))

    def rounded(name: str) -> jax.Array:
        key = None if drawn is None else drawn[names.index(name) * len(trace) + plane]
        return round_to(new[name], trace[plane][name].dtype, key)

    return {name: rounded(name) for name in new}


def _mix(bits: jax.Array) -> jax.Array:
    """Spread every bit of a word over all others, one to one."""
    for shift, factor in ((16, FIRST), (13, SECOND)):
        bits = (bits ^ lax.shift_right_logical(bits, jnp.full_like(bits, shift))) * factor
    return bits ^ lax.shift_right_logical(bits, jnp.full_like(bits, 16))
