"""What the blocks of kernels move, by their specifications."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

__all__ = ['block_bytes']


def block_bytes(f: Callable[..., Any], operands: Any, *, kept: bool) -> int:
    """The bytes of all blocks that the kernels of a function take and give.

    A cell of a grid takes all of its blocks; if blocks are ``kept``, as on a TPU, only those that
    the cell before it had not. What lies past the edge of an array does not count.
    """
    closed = jax.make_jaxpr(f)(*operands)
    return sum(
        _bytes(mapping, grid, kept) for grid, mappings in _kernels(closed) for mapping in mappings
    )


def _kernels(closed: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == 'pallas_call':
            mapping = eqn.params['grid_mapping']
            yield mapping.grid, mapping.block_mappings
        elif hasattr(eqn.params.get('jaxpr'), 'jaxpr'):
            yield from _kernels(eqn.params['jaxpr'])


def _bytes(mapping: Any, grid: tuple[int, ...], kept: bool) -> int:
    array = mapping.array_aval
    shape = [_size(block) for block in mapping.block_shape]
    cells = [a.reshape(-1).astype('int32') for a in np.indices(grid)]
    index = jax.vmap(jaxpr_as_fun(mapping.index_map_jaxpr))(*cells)
    places = np.stack([np.broadcast_to(np.asarray(i), cells[0].shape) for i in index])
    if kept:
        changes = np.any(np.diff(places, axis=1, prepend=-1) != 0, axis=0)
        places = places[:, changes]
    inside = [
        np.minimum(size, full - place * size)
        for size, full, place in zip(shape, array.shape, places, strict=True)
    ]
    return int(np.prod(inside, axis=0, dtype=np.int64).sum()) * array.dtype.itemsize


def _size(block: Any) -> int:
    """An axis of a block: a number, something that holds one, or an axis that is left out."""
    if isinstance(block, int):
        return block
    return getattr(block, 'block_size', 1)
