"""Primitives that a kernel language lacks, in terms of those that it has.

Each expansion is a function of the operands, with the parameters of the primitive as keywords; in a
kernel it is evaluated on tiles. Primitives of other libraries are expanded in every kind of kernel,
those of JAX only where the kernel language lacks them.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ['EXPANSIONS', 'register_expansion']

EXPANSIONS: dict[str, dict[str, Callable[..., Any]]] = {'triton': {}, 'mosaic': {}}
"""By kind of kernel and name of primitive."""


def register_expansion(
    primitive: str, function: Callable[..., Any], kinds: Collection[str] | None = None
) -> None:
    """Let kernels evaluate a primitive that they lack.

    Parameters
    ----------
    primitive : str
        The primitive's name.
    function : callable
        ``(*operands, **params)``, in position-wise JAX that kernels have; returns the result, or a
        tuple or list of results if the primitive has several.
    kinds : collection of str, optional
        For which kinds of kernels, such as ``'triton'`` and ``'mosaic'``; all of them if left out.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.expand import register_expansion
    >>> register_expansion('my_spike', lambda v: jnp.where(v >= 0, 1.0, 0.0))
    """
    unknown = {*(kinds or ())} - {*EXPANSIONS}
    if unknown:
        raise ValueError(f'There are no {sorted(unknown)} kernels; choose among {[*EXPANSIONS]}.')
    for kind in EXPANSIONS if kinds is None else kinds:
        EXPANSIONS[kind][primitive] = function


def _heaviside(x: jax.Array, dx: jax.Array | None = None, **_: Any) -> tuple[jax.Array]:
    """The spike: 1 from the threshold on; the surrogate of its gradient is not evaluated."""
    return (jnp.where(x >= 0, 1, 0).astype(x.dtype),)


def _exprel(x: jax.Array, **_: Any) -> tuple[jax.Array]:
    """``(exp(x) - 1) / x``, by its series where that cancels."""
    near = jnp.abs(x) < 0.1
    apart = jnp.where(near, 1, x)
    series = 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6))))
    return (jnp.where(near, series, (jnp.exp(apart) - 1) / apart),)


def _expm1(x: jax.Array, **_: Any) -> jax.Array:
    """By its series near zero, where ``exp(x) - 1`` cancels."""
    near = jnp.abs(x) < 0.1
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return jnp.where(near, series, jnp.exp(x) - 1)


def _cbrt(x: jax.Array, **_: Any) -> jax.Array:
    size = jnp.where(x == 0, 1, jnp.abs(x))
    root = jnp.exp(jnp.log(size) / 3)
    root = root - (root - size / (root * root)) / 3  # one step of Newton's method
    return jnp.where(x == 0, 0, jnp.sign(x) * root)


def _atan(x: jax.Array, **_: Any) -> jax.Array:
    return lax.atan2(x, jnp.ones_like(x))


def _sinh(x: jax.Array) -> jax.Array:
    rise = _expm1(jnp.abs(x))
    return jnp.sign(x) * (rise + rise / (rise + 1)) / 2


def _cosh(x: jax.Array) -> jax.Array:
    rise = jnp.exp(jnp.abs(x))
    return (rise + 1 / rise) / 2


def _erf(x: jax.Array, **_: Any) -> jax.Array:
    """Its Taylor series near zero, else Abramowitz and Stegun 7.1.26: off by at most 2e-7."""
    size = jnp.abs(x)
    t = 1 / (1 + 0.3275911 * size)
    tail = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    square = x * x
    series = 1 - square * (1 / 3 - square * (0.1 - square * (1 / 42 - square / 216)))
    near = 1.1283791670955126 * x * series
    return jnp.where(size < 0.5, near, jnp.sign(x) * (1 - tail * jnp.exp(-square)))


def _round(x: jax.Array, *, rounding_method: Any = 0, **_: Any) -> jax.Array:
    """By the part of the magnitude above its floor, which is exact; ``floor(x + 0.5)`` is not.

    Halves are rounded away from zero, or to even.
    """
    size = jnp.abs(x)
    below = jnp.floor(size)
    rest = size - below
    is_odd = below - 2 * jnp.floor(below / 2) == 1
    up = rest > 0.5
    up |= (rest == 0.5) & is_odd if int(rounding_method) == 1 else rest == 0.5
    rounded = jnp.where(up, below + 1, below).astype(x.dtype)
    return jnp.where(x < 0, -rounded, rounded)


def _one_minus_square(x: jax.Array, **_: Any) -> jax.Array:
    return 1 - x * x


def _select_n(which: jax.Array, *cases: jax.Array) -> jax.Array:
    """By comparisons, for kernels that can select by booleans only."""
    chosen = cases[0]
    for number, case in enumerate(cases[1:], start=1):
        chosen = jnp.where(which if which.dtype == bool else which == number, case, chosen)
    return chosen


_ON_ALL: dict[str, Callable[..., Any]] = {
    'heaviside_surrogate_gradient': _heaviside,
    'exprel': _exprel,
    'one_minus_square': _one_minus_square,
}
_MISSING: dict[str, dict[str, Callable[..., Any]]] = {
    'triton': {'erf': _erf, 'round': _round, 'select_n': _select_n},
    'mosaic': {'expm1': _expm1, 'cbrt': _cbrt, 'atan': _atan, 'sinh': _sinh, 'cosh': _cosh},
}
for _kind, _functions in _MISSING.items():
    EXPANSIONS[_kind].update(_ON_ALL | _functions)
