"""What the runtime knows about JAX's primitives, by name."""

__all__ = ['CHEAP', 'FUSED', 'FREE', 'LINEAR', 'REDUCTIONS', 'SLICES', 'VIEWS']

CHEAP = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp concatenate convert_element_type copy div eq
    expand_dims ge gt heaviside_surrogate_gradient integer_pow iota is_finite le lt max min mul ne
    neg not one_minus_square or reshape rsqrt select_n sign slice sqrt square squeeze stop_gradient
    sub transpose xor
    """.split()
)
"""What a split loop computes again rather than keeps: one pass over operands that are kept anyway.

Spikes are among them for neurons whose spike is read off a state, which leaves nothing to keep.
"""

LINEAR = frozenset('neg transpose reshape reduce_sum squeeze copy broadcast_in_dim'.split())
"""Linear maps of one operand, which commute with a sum over steps."""

FUSED = frozenset(
    """
    abs acos add add_any and asin atan atan2 broadcast_in_dim cbrt ceil clamp concatenate
    convert_element_type copy cos cosh div dynamic_slice eq erf erf_inv erfc exp exp2 expand_dims
    expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg
    nextafter not or pad pow reduce_precision rem reshape round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient
    sub tan tanh transpose xor
    """.split()
)
"""What a compiler fuses into its only reader, so that it needs no array of its own."""

FREE = frozenset('broadcast_in_dim dynamic_slice iota slice'.split())
"""What it fuses into each of its readers."""

REDUCTIONS = frozenset('reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or'.split())

SLICES = frozenset('dynamic_slice gather slice'.split())
"""What copies a part of its operand."""

VIEWS = frozenset('reshape squeeze expand_dims stop_gradient copy'.split())
"""What shares the memory of its operand."""
