"""``hidden_jacobian`` on a GPU: all derivatives of a position in the registers of one thread.

Arrays are ``(rows, columns)``; a program owns ``BLOCK`` columns of a row. Operands with one number
per column, per row or in all are read as they are; without the first two, all positions make one
row. Lanes past the last column load ones and store nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .._pallas import result, split
from ..planes import Plane
from .operands import JacobianOperands
from .program import COMMON, evaluate, kind_of, program_of, reason
from .tiling import as_rows

__all__ = ['hidden_jacobian', 'redundant', 'supports']

BLOCK = 128
WARPS = 4
KNOWN = COMMON | {
    *('acos', 'acosh', 'asin', 'asinh', 'atan', 'atan2', 'atanh', 'cbrt', 'cosh', 'erf_inv'),
    *('expm1', 'nextafter', 'sinh'),
}
"""The primitives that Triton evaluates position by position."""


def redundant(operands: JacobianOperands) -> str | None:
    """Why plain JAX moves as few bytes as the kernel."""
    return 'XLA moves as few bytes: it makes one pass of all derivatives too'


def supports(operands: JacobianOperands) -> str | None:
    """Why there is no kernel for this transition, or None."""
    size = operands.inputs[0].size
    if size >= 2**31:
        return f'there are {size} positions, and offsets have 32 bits'
    return reason(operands, 'triton', KNOWN)


def hidden_jacobian(operands: JacobianOperands, *, interpret: bool = False) -> list[list[Plane]]:
    """See :func:`braintrace_fast.kernels.hidden_jacobian.hidden_jacobian`."""
    program = program_of(operands)
    kinds = [kind_of(a.shape, program.varshape) for a in program.operands]
    rows, columns = as_rows(program.varshape, flat=not {'row', 'column'} & {*kinds})
    shapes = {'one': (1,), 'row': (columns,), 'column': (rows,), 'full': (rows, columns)}
    specs = {
        'one': pl.BlockSpec((1,), lambda i, j: (0,)),
        'row': pl.BlockSpec((BLOCK,), lambda i, j: (j,)),
        'column': pl.BlockSpec((1,), lambda i, j: (i,)),
        'full': pl.BlockSpec((None, BLOCK), lambda i, j: (i, j)),
    }
    arrays = [a.reshape(shapes[k]) for a, k in zip(program.operands, kinds, strict=True)]
    dtypes = [v.aval.dtype for v in program.jaxpr.outvars]

    def kernel(*refs: Any) -> None:
        given, planes = split(refs, len(arrays))
        inside = pl.program_id(1) * BLOCK + lax.iota(jnp.int32, BLOCK) < columns
        tiles = [
            ref[0] if kind in ('one', 'column') else plgpu.load(ref, mask=inside, other=1)
            for ref, kind in zip(given, kinds, strict=True)
        ]
        values = evaluate(program, 'triton', tiles)
        for ref, value in zip(planes, values, strict=True):
            plgpu.store(ref, jnp.broadcast_to(value, (BLOCK,)), mask=inside)

    planes = pl.pallas_call(
        kernel,
        name='hidden_jacobian',
        grid=(rows, pl.cdiv(columns, BLOCK)),
        in_specs=[specs[kind] for kind in kinds],
        out_specs=[specs['full']] * len(dtypes),
        out_shape=[result((rows, columns), dtype, arrays) for dtype in dtypes],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
    )(*arrays)
    return jax.tree.unflatten(program.structure, [p.reshape(program.varshape) for p in planes])
