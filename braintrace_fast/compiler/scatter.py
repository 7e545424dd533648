"""``a.at[..., 3:].add(b)`` in pieces: a scatter at a fixed place, position by position."""

from collections.abc import Callable

import jax
from jax import lax

from .._compat import JaxprEqn

__all__ = ['scatter_in_pieces']

Pieces = Callable[[jax.Array, jax.Array], jax.Array]


def scatter_in_pieces(eqn: JaxprEqn, index: int) -> Pieces | None:
    """A scatter of one window at a known index along one axis, by slices or padding.

    Returns the function of the array and the update, or None for any other scatter.
    """
    numbers = eqn.params['dimension_numbers']
    array, indices, update = (v.aval.shape for v in eqn.invars)
    if (
        indices != (1,)
        or numbers.operand_batching_dims
        or len(update) != len(numbers.update_window_dims)
    ):
        return None
    (axis,) = numbers.scatter_dims_to_operand_dims
    inserted = numbers.inserted_window_dims
    sizes = iter(update)
    window = [1 if a in inserted else next(sizes) for a in range(len(array))]
    end = index + window[axis]
    partial = [a for a, n in enumerate(array) if window[a] != n and a != axis]
    if partial or index < 0 or end > array[axis]:
        return None

    def pieces(a: jax.Array, b: jax.Array) -> jax.Array:
        middle = lax.expand_dims(b, inserted) if inserted else b
        if eqn.primitive.name == 'scatter-add':
            around = [(0, 0, 0)] * len(array)
            around[axis] = (index, array[axis] - end, 0)
            return a + lax.pad(middle, lax.full_like(middle, 0, shape=()), around)
        before = lax.slice_in_dim(a, 0, index, axis=axis)
        after = lax.slice_in_dim(a, end, array[axis], axis=axis)
        parts = [part for part in (before, middle, after) if part.shape[axis]]
        return lax.concatenate(parts, axis) if len(parts) > 1 else middle

    return pieces
