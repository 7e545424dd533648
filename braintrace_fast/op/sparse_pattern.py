"""Where the entries of a sparse matrix are, whichever library and format it is in."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['Pattern', 'format_of', 'pattern_of']


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """The places of a sparse matrix's entries. Entries at the same place add up.

    Attributes
    ----------
    rows, cols : jax.Array
        Of every entry, in the order of the weights.
    shape : tuple of int
        The matrix's: (inputs, outputs).
    entries : tuple of int
        The shape of the weights, one per entry.
    """

    rows: jax.Array
    cols: jax.Array
    shape: tuple[int, int]
    entries: tuple[int, ...]


class _Format(NamedTuple):
    """How a format tells the places: ``places(matrix)`` has the shape of the weights."""

    fields: tuple[str, ...]
    places: Callable[..., tuple[np.ndarray, np.ndarray]]


def _by_row(shape: tuple[int, int], indices: np.ndarray, indptr: np.ndarray) -> Any:
    return _owners(indices, indptr, shape[0], 'row'), indices


def _by_column(shape: tuple[int, int], indices: np.ndarray, indptr: np.ndarray) -> Any:
    return indices, _owners(indices, indptr, shape[1], 'column')


def _owners(indices: np.ndarray, indptr: np.ndarray, num: int, name: str) -> np.ndarray:
    """The row (or column) of each entry of a compressed format."""
    counts = np.diff(indptr)
    whole = indptr.shape == (num + 1,) and indptr[0] == 0 and indptr[-1] == indices.size
    if not whole or np.any(counts < 0) or indices.ndim != 1:
        raise ValueError(
            f'sparse_matmul: found an indptr of shape {indptr.shape} for {num} {name}s and indices '
            f'of shape {indices.shape}, expected {num + 1} numbers that rise from 0 to the number '
            'of entries. Build the matrix anew, for example with its fromdense.'
        )
    return np.repeat(np.arange(num), counts)


def _fixed_per_row(shape: tuple[int, int], indices: np.ndarray) -> Any:
    return _numbered(indices, shape[0], 'row'), indices


def _fixed_per_column(shape: tuple[int, int], indices: np.ndarray) -> Any:
    return indices, _numbered(indices, shape[1], 'column')


def _numbered(indices: np.ndarray, num: int, name: str) -> np.ndarray:
    """The row (or column) of each entry of a format with a fixed number of them in each."""
    if indices.ndim != 2 or len(indices) != num:
        raise ValueError(
            f'sparse_matmul: found indices of shape {indices.shape}, expected ({num}, n) for a '
            f'matrix of {num} {name}s with n entries each.'
        )
    return np.broadcast_to(np.arange(num)[:, None], indices.shape)


def _coordinates(shape: tuple[int, int], row: np.ndarray, col: np.ndarray) -> Any:
    return row, col


def _pairs(shape: tuple[int, int], indices: np.ndarray) -> Any:
    if indices.ndim != 2 or indices.shape[1] != 2:
        raise ValueError(
            f'sparse_matmul: found indices of shape {indices.shape}, expected (entries, 2): a '
            'matrix without batch or dense axes. Use BCOO.fromdense(matrix).'
        )
    return indices[:, 0], indices[:, 1]


FORMATS = {
    'CSR': _Format(('indices', 'indptr'), _by_row),
    'BCSR': _Format(('indices', 'indptr'), _by_row),
    'CSC': _Format(('indices', 'indptr'), _by_column),
    'COO': _Format(('row', 'col'), _coordinates),
    'BCOO': _Format(('indices',), _pairs),
    'FixedNumPerPre': _Format(('indices',), _fixed_per_row),
    'FixedPostNumConn': _Format(('indices',), _fixed_per_row),
    'FixedNumPerPost': _Format(('indices',), _fixed_per_column),
    'FixedPreNumConn': _Format(('indices',), _fixed_per_column),
}
"""By the names of classes: brainevent need not be there, and libraries agree on what they mean."""


def format_of(matrix: Any) -> str:
    """The name of a matrix's format, one of ``FORMATS`` or ``'Dense'``.

    Raises
    ------
    TypeError
        If it is none of them.
    """
    names = [cls.__name__ for cls in type(matrix).__mro__]
    known = [name for name in names if name in FORMATS or name == 'Dense']
    if known and hasattr(matrix, 'shape'):
        return known[0]
    if 'JITCMatrix' in names:
        raise TypeError(
            f'sparse_matmul: found a {names[0]}, whose entries are drawn just in time and have no '
            'weights of their own to train. Store them, for example as '
            'brainevent.CSR.fromdense(matrix.todense()).'
        )
    raise TypeError(
        f'sparse_matmul: found a sparse_mat of type {names[0]}, expected a '
        'brainevent.DataRepresentation (CSR, CSC, FixedNumPerPre, FixedNumPerPost or Dense), CSR, '
        'CSC or COO of saiunit.sparse, or BCOO or BCSR of jax.experimental.sparse. Convert it to '
        'one of them.'
    )


_patterns: dict[int, Pattern] = {}
"""By the identity of a matrix, for as long as it lives: matrices have no hash."""


def pattern_of(matrix: Any) -> Pattern:
    """The pattern of a matrix in one of ``FORMATS``, found once per object.

    Raises
    ------
    ValueError
        If its indices lie outside of the matrix, or do not fit together.
    TypeError
        If its indices are traced: they must be constants of the step.
    """
    found = _patterns.get(id(matrix))
    if found is None:
        found = _patterns[id(matrix)] = _read(matrix)
        weakref.finalize(matrix, _patterns.pop, id(matrix), None)
    return found


def _read(matrix: Any) -> Pattern:
    shape = tuple(matrix.shape)
    if len(shape) != 2:
        raise ValueError(
            f'sparse_matmul: found a sparse_mat of shape {shape}, expected (inputs, outputs).'
        )
    fields, places = FORMATS[format_of(matrix)]
    arrays = [_values(name, getattr(matrix, name)) for name in fields]
    rows, cols = places(shape, *arrays)
    if rows.shape != cols.shape:
        raise ValueError(
            f'sparse_matmul: found rows of shape {rows.shape} and columns of shape {cols.shape}, '
            'expected one of each per entry.'
        )
    _check_range('row', rows, shape[0])
    _check_range('column', cols, shape[1])
    # Even while a function around is traced, these are constants.
    with jax.ensure_compile_time_eval():
        return Pattern(_flat(rows), _flat(cols), shape, rows.shape)


def _values(name: str, indices: Any) -> np.ndarray:
    if isinstance(indices, jax.core.Tracer):
        raise TypeError(
            f'sparse_matmul: the {name} of sparse_mat are traced, expected constants. Do not pass '
            'the matrix as an argument of a transformed function: pass its weights, and let the '
            'function close over the matrix.'
        )
    values = np.asarray(indices)
    if not np.issubdtype(values.dtype, np.integer):
        raise TypeError(
            f'sparse_matmul: found {name} of dtype {values.dtype} in sparse_mat, expected integers.'
        )
    return values


def _check_range(name: str, indices: np.ndarray, size: int) -> None:
    wrong = indices[(indices < 0) | (indices >= size)]
    if wrong.size:
        raise ValueError(
            f'sparse_matmul: found {wrong.size} entries of sparse_mat outside of it, for example '
            f'in {name} {wrong.flat[0]}, expected 0 to {size - 1}. Leave them out.'
        )


def _flat(indices: np.ndarray) -> jax.Array:
    return jnp.asarray(indices.reshape(-1), jnp.int32)
