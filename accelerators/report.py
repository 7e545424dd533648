"""The table of what was measured."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from .checks import Row

__all__ = ['HEADER', 'as_line', 'document']

COMMAND = 'make accelerators'
HEADER = (
    'kernel',
    'type',
    'operands',
    'target',
    'registers',
    'shared memory or VMEM',
    'bytes moved',
    'ratio to the floor',
    'ratio of blocks',
    'XLA: planes',
    'XLA: stacked',
)

PREAMBLE = f"""# The kernels, compiled

Made by `{COMMAND}`, which compiles every kernel for GPUs and TPUs on a machine that has neither.
It fails if a kernel spills registers, copies its trace, takes a temporary of the size of the trace
or exceeds the default limit of VMEM; kernels that are broken on purpose must fail in the same run.
On TPUs, operands and results are kept row-major: left to itself, XLA transposes small arrays at the
call of a compiled function, and back. Nothing here was run on a GPU or TPU, nothing here is a time.

- *registers*: per thread, as `ptxas` assigns them.
- *shared memory or VMEM*: bytes, per block of a GPU, or as the compiler reserves them on a TPU.
- *bytes moved*: by all instructions of the compiled program, each of which reads its operands once
  and writes its results once.
- *ratio to the floor*: of them, to the bytes of all operands that results depend on and of all
  results, each once; a trace that is updated in place is read once and written once. For
  `trace_step`, `trace_carry` and `adjoint_scan` of 512 neurons it must be at most 1.05.
- *ratio of blocks*: the bytes of the blocks of all cells of the grid, to the same floor. On a GPU
  what is above 1 is for its caches; a TPU fetches a block if the cell before had another.
- *XLA*: bytes moved by what XLA makes of the plain formula, without a kernel, to the same floor: of
  planes that are arrays of their own, as `backend='jax'` has them, or stacked in one array. Where
  planes show 1.00, plain JAX moves as little as the kernel.
"""


def as_line(row: Row) -> str:
    """A row of a table, or what is wrong with it."""
    cells = [row.op, row.dtype, row.shape, row.target]
    if row.faults:
        return f'{", ".join(cells)}: FAILED, {"; ".join(row.faults)}'
    return _join([*cells, *_figures(row)])


def _figures(row: Row) -> list[str]:
    return [
        '' if row.registers is None else str(row.registers),
        f'{row.memory:,}',
        f'{row.moved:,}',
        f'{row.moved / row.floor:.2f}',
        *(f'{n / row.floor:.2f}' if n else '' for n in (row.blocks, row.planes, row.stacked)),
    ]


def _join(cells: Sequence[str]) -> str:
    return f'| {" | ".join(cells)} |'


def document(rows: Iterable[Row]) -> str:
    """The page that the documentation keeps."""
    parts = [PREAMBLE]
    for op, group in groupby(rows, lambda row: row.op):
        lines = [_join([*cells[1:]]) for cells in [HEADER, ['---'] * len(HEADER)]]
        for row in group:
            lines.append(_join([row.dtype, row.shape, row.target, *_figures(row)]))
            lines[-1] += ''.join(f' **{fault}**' for fault in row.faults)
        parts.append(f'\n## {op}\n\n' + '\n'.join(lines) + '\n')
    return ''.join(parts)
