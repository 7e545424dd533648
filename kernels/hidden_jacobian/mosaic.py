"""``hidden_jacobian`` on a TPU: all derivatives of a tile of positions while it is in VMEM.

Arrays are ``(rows, columns)`` with the columns, the last axis of the positions, on lanes. What lies
past an edge is read as it comes and never written: no position reads another.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._pallas import result, split
from ..planes import Plane
from .operands import JacobianOperands
from .program import COMMON, evaluate, kind_of, program_of, reason
from .tiling import as_rows

__all__ = ['hidden_jacobian', 'redundant', 'supports', 'tile_of']

BUFFERS = 8 * 2**20
"""What the blocks of a tile may take, of the 16 MiB of VMEM."""
KNOWN = COMMON | {'atan2', 'erf', 'erf_inv', 'nextafter', 'round'}
"""The primitives that Mosaic evaluates position by position."""
ROWS, LANES = 16, 512
ARRAYS = BUFFERS // (2 * 4 * ROWS * LANES)
"""How many arrays there may be: two buffers of the smallest tile of each fit."""


def redundant(operands: JacobianOperands) -> str | None:
    """Why plain JAX moves as few bytes as the kernel, or None."""
    states, ops = len(operands.transition.widths), len(operands.transition.shared)
    if states == 1 or (ops == 1 and states <= 3):
        return 'XLA moves as few bytes for one state, and for up to three that one op feeds'
    return None


def supports(operands: JacobianOperands) -> str | None:
    """Why there is no kernel for this transition, or None."""
    return reason(operands, 'mosaic', KNOWN, ARRAYS)


def tile_of(rows: int, columns: int, arrays: int) -> tuple[int, int]:
    """Rows and columns of a tile of which so many arrays, each with two buffers, fit into VMEM."""
    most = BUFFERS // (2 * 4 * max(arrays, 1))
    lanes = min(columns, LANES)
    sublanes = max(ROWS, min(256, most // max(lanes, 128) // ROWS * ROWS))
    return min(rows, sublanes), lanes


def hidden_jacobian(operands: JacobianOperands, *, interpret: Any = False) -> list[list[Plane]]:
    """See :func:`braintrace_fast.kernels.hidden_jacobian.hidden_jacobian`."""
    program = program_of(operands)
    kinds = [kind_of(a.shape, program.varshape) for a in program.operands]
    rows, columns = as_rows(program.varshape)
    dtypes = [v.aval.dtype for v in program.jaxpr.outvars]
    tile = tile_of(rows, columns, program.full_arrays)
    shapes = {'one': (1, 1), 'row': (1, columns), 'column': (rows, 1), 'full': (rows, columns)}
    specs = {
        'one': pl.BlockSpec((1, 1), lambda i, j: (0, 0)),
        'row': pl.BlockSpec((1, tile[1]), lambda i, j: (0, j)),
        'column': pl.BlockSpec((tile[0], 1), lambda i, j: (i, 0)),
        'full': pl.BlockSpec(tile, lambda i, j: (i, j)),
    }
    arrays = [a.reshape(shapes[k]) for a, k in zip(program.operands, kinds, strict=True)]

    def kernel(*refs: Any) -> None:
        given, planes = split(refs, len(arrays))
        tiles = evaluate(program, 'mosaic', [ref[...] for ref in given])
        for ref, value in zip(planes, tiles, strict=True):
            ref[...] = jnp.broadcast_to(value, tile)

    planes = pl.pallas_call(
        kernel,
        name='hidden_jacobian',
        grid=(pl.cdiv(rows, tile[0]), pl.cdiv(columns, tile[1])),
        in_specs=[specs[kind] for kind in kinds],
        out_specs=[specs['full']] * len(dtypes),
        out_shape=[result((rows, columns), dtype, arrays) for dtype in dtypes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel')),
        interpret=interpret,
    )(*arrays)
    return jax.tree.unflatten(program.structure, [p.reshape(program.varshape) for p in planes])
