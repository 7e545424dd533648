"""What is known of JAX's primitives, by name: the one place for it.

First families of primitives that are alike in every respect, then the sets that other modules read.
"""

import functools
from typing import Any

import jax.numpy as jnp

from .._compat import JaxprEqn
from ..op import ETPPrimitive

__all__ = [
    'CHEAP',
    'CUSTOM_RULES',
    'ELEMENTWISE',
    'FREE',
    'FUSED',
    'INLINED_CALLS',
    'LINEAR',
    'MIXING',
    'NO_DERIVATIVE',
    'REDUCTIONS',
    'SLICES',
    'SUMS',
    'UNIFORM',
    'VIEWS',
    'is_element_wise',
    'is_inexact',
    'is_product',
    'passes_derivative',
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ADDITION = _names('add add_any convert_element_type copy neg sub')
_ARITHMETIC = _names('abs clamp div integer_pow max min mul rsqrt select_n sqrt square')
_FUNCTIONS = _names(
    """
    acos asin atan atan2 cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p logistic pow
    reduce_precision rem sin sinh tan tanh
    """
)
_RARE_FUNCTIONS = _names('acosh asinh atanh complex conj digamma imag lgamma name real')
_LOGIC = _names('and eq ge gt is_finite le lt ne not or sign xor')
_ROUNDING = _names('ceil floor round')
_SHIFTS = _names('shift_left shift_right_arithmetic shift_right_logical')
_RESHAPING = _names('expand_dims reshape squeeze')
_RANDOM = _names('random_bits random_fold_in random_seed random_split random_unwrap random_wrap')
_INTEGER_RESULTS = _names('argmax argmin clz eq_to le_to lt_to population_count')
_SPIKES = _names('heaviside_surrogate_gradient one_minus_square')


ELEMENTWISE = _ADDITION | _ARITHMETIC | _FUNCTIONS | _RARE_FUNCTIONS
"""An element of the result depends on that of each operand, with a derivative."""

NO_DERIVATIVE = (
    _LOGIC | _ROUNDING | _SHIFTS | _RANDOM | _INTEGER_RESULTS | _names('iota stop_gradient')
)
"""No derivative flows into the result."""

UNIFORM = (
    ELEMENTWISE
    | _LOGIC
    | _ROUNDING
    | _RESHAPING
    | _names('broadcast_in_dim exprel slice stop_gradient transpose')
)
"""The result is uniform, that is, one number at all positions, if all operands are."""

SUMS = _ADDITION | _RESHAPING
"""The terms of a sum keep the numbers that they are multiplied by, but for their sign."""

LINEAR = _RESHAPING | _names('broadcast_in_dim copy neg reduce_sum transpose')
"""Linear maps of one operand, which commute with a sum over steps."""

MIXING = _names('cholesky conv_general_dilated fft top_k triangular_solve')
"""Positions are mixed whatever the operands."""

REDUCTIONS = _names('reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum')

SLICES = _names('dynamic_slice gather slice')
"""The result is a copy of a part of the operand."""

VIEWS = _RESHAPING | _names('copy stop_gradient')
"""The result shares the memory of the operand."""

FREE = _names('broadcast_in_dim dynamic_slice iota slice')
"""A compiler fuses it into each of its readers."""

_CHEAP_TO_FUSE = (
    _ADDITION
    | _ARITHMETIC
    | _LOGIC
    | _RESHAPING
    | _names('broadcast_in_dim concatenate iota slice stop_gradient transpose')
)

FUSED = _CHEAP_TO_FUSE | _FUNCTIONS | _ROUNDING | _SHIFTS | _names('dynamic_slice nextafter pad')
"""A compiler fuses it into its only reader, so that it needs no array of its own."""

CHEAP = _CHEAP_TO_FUSE | _SPIKES
"""Computing it again takes one pass over its operands, and is cheaper than keeping it."""

INLINED_CALLS = _names('checkpoint closed_call core_call custom_lin jit pjit remat remat2')
"""Calls of a jaxpr, which mean the same as its equations."""

CUSTOM_RULES = _names('custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr')
"""Calls of a function whose derivative the user has defined."""

_PRODUCTS = _names('conv_general_dilated dot_general')


def is_element_wise(eqn: JaxprEqn) -> bool:
    """Whether the result depends on its operands element by element."""
    return eqn.primitive.name in ELEMENTWISE


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product with a matrix or kernel: mixing that a trace leaves out."""
    return isinstance(eqn.primitive, ETPPrimitive) or eqn.primitive.name in _PRODUCTS


def passes_derivative(eqn: JaxprEqn) -> list[bool]:
    """Per result, whether any derivative can flow into it."""
    stops = eqn.primitive.name in NO_DERIVATIVE
    return [not stops and is_inexact(v.aval) for v in eqn.outvars]


def is_inexact(aval: Any) -> bool:
    """Whether values of a type can carry a derivative."""
    return hasattr(aval, 'dtype') and _is_inexact_type(aval.dtype)


@functools.lru_cache(maxsize=64)
def _is_inexact_type(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
