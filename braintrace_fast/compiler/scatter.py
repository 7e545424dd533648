"""``a.at[..., 3:].add(b)`` in pieces: an update at a fixed index, position by position."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax

from .._compat import JaxprEqn

__all__ = ['SCATTERS', 'scatter_in_pieces', 'update_in_pieces']

Pieces = Callable[[jax.Array, jax.Array], jax.Array]

SCATTERS: dict[str, Pieces] = {
    'scatter': lambda here, update: update,
    'scatter-add': lax.add,
    'scatter-sub': lax.sub,
    'scatter-mul': lax.mul,
    'scatter-min': lax.min,
    'scatter-max': lax.max,
}
"""By primitive, how values and their update combine."""


def scatter_in_pieces(eqn: JaxprEqn, index: np.ndarray) -> Pieces | None:
    """A scatter of one window at a known index, by slices or padding.

    Returns the function of the array and the update, or None for any other scatter.
    """
    numbers = eqn.params['dimension_numbers']
    array, _, update = (v.aval.shape for v in eqn.invars)
    if (
        index.ndim != 1
        or numbers.operand_batching_dims
        or len(update) != len(numbers.update_window_dims)
    ):
        return None
    inserted = numbers.inserted_window_dims
    sizes = iter(update)
    window = [1 if axis in inserted else next(sizes) for axis in range(len(array))]
    starts = [0] * len(array)
    for axis, start in zip(numbers.scatter_dims_to_operand_dims, index, strict=True):
        starts[axis] = int(start)
    if any(s < 0 or s + w > n for s, w, n in zip(starts, window, array, strict=True)):
        return None
    name = eqn.primitive.name

    def pieces(a: jax.Array, b: jax.Array) -> jax.Array:
        middle = lax.expand_dims(b, inserted) if inserted else b
        if name == 'scatter-add':
            places = zip(starts, window, array, strict=True)
            around = [(start, n - start - size, 0) for start, size, n in places]
            return a + lax.pad(middle, lax.full_like(middle, 0, shape=()), around)
        return update_in_pieces(a, middle, starts, SCATTERS[name])

    return pieces


def update_in_pieces(
    array: jax.Array,
    update: jax.Array,
    starts: Sequence[int],
    combine: Pieces = SCATTERS['scatter'],
) -> jax.Array:
    """An array with the part of it that starts at an index combined with an update."""
    for axis, start in enumerate(starts):
        end, size = start + update.shape[axis], array.shape[axis]
        if update.shape[axis] != size:
            here = lax.slice_in_dim(array, start, end, axis=axis)
            parts = [
                lax.slice_in_dim(array, 0, start, axis=axis),
                update_in_pieces(here, update, [*[0] * (axis + 1), *starts[axis + 1 :]], combine),
                lax.slice_in_dim(array, end, size, axis=axis),
            ]
            return lax.concatenate([part for part in parts if part.shape[axis]], axis)
    return combine(array, update)
