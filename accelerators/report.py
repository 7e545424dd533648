"""The table of what was measured."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from .checks import Row
from .windows import MOST, WindowRow

__all__ = ['HEADER', 'as_line', 'document', 'window_line']

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
    'auto',
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
  and writes its results once; an array of which it only overwrites a part is not read.
- *ratio to the floor*: of them, to the bytes of all operands that results depend on and of all
  results, each once; a trace that is updated in place is read once and written once. For
  `trace_step`, `trace_carry` and `adjoint_scan` of 512 neurons it must be at most 1.05, but for
  windows of *groups*: on TPUs, their inputs and planes are transposed first. So are those of
  `sparse_step` and `sparse_carry`, which have kernels for GPUs alone: the limit is then 1.05 times
  the floor and what transposing moves.
- *ratio of blocks*: the bytes of the blocks of all cells of the grid, to the same floor. On a GPU
  what is above 1 is for its caches; a TPU fetches a block if the cell before had another. It is not
  given for sparse weights, of whose inputs and planes a cell takes what its entries need.
- *XLA*: bytes moved by what XLA makes of the plain formula, without a kernel, to the same floor: of
  planes that are arrays of their own, as `backend='jax'` has them, or stacked in one array. Of a
  loop, every step counts, with one step of the arrays of all steps.
- *auto*: what `backend='auto'` runs. Where plain JAX moves as few bytes it must run that; where it
  runs the kernel of `trace_step` or `trace_carry` with 64 examples, or on a GPU of `adjoint_scan`,
  that must move at most half of what XLA moves for stacked planes; of `hidden_jacobian` there is
  nothing to stack. It is not asked of
  - 8 examples: a TPU has room for them in VMEM, where what XLA keeps between its passes is free.
    `trace_carry` has only these on TPUs: for more, XLA takes minutes to compile the plain formula;
  - `adjoint_scan` on TPUs: XLA too keeps the state of a loop in VMEM there and, except on a v5p,
    the results while there is room; of stacked planes it then moves at most 1.6 times the floor,
    and of one or two states that are separate planes often no more than that. There `auto` takes
    plain JAX, by the kind of the process's first TPU. *Within* are ops that read the learning
    signal, as the state does; if there is only one, XLA reads it twice.
"""


WINDOWS = f"""
## Launches of a window

What D-RTRL launches for a window after its forward scan: all thunks of the compiled program
(fusions, kernels, products, copies), with those of a loop as often as it runs. The layer has two
relations, for its input and for its own spikes, or one for both, put together; the trace is
carried, and the loss is the mean square of the spikes. There may be {MOST} per relation, and their
number may not depend on that of the steps; plain JAX, which loops over the steps, must fail. One
relation has for itself what two share; besides, it launches what puts its input together, and what
advances the learner's counter, where XLA has that behind the scan. Not held to the limit, for
comparison: a readout in front of the loss, which launches what its own gradient takes.

"""
WINDOW_HEADER = (
    'model',
    'target',
    'relations',
    'steps: launches',
    'per relation',
    'with a readout',
    'launched',
)


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
        row.auto,
    ]


def window_line(row: WindowRow) -> str:
    """A row of the table of launches, or what is wrong with it."""
    if row.faults:
        return f'{row.model}, {row.target}: FAILED, {"; ".join(row.faults)}'
    most = max(len(names) for names in row.launched.values())
    return _join(
        [
            row.model,
            row.target,
            str(row.relations),
            ', '.join(f'{steps}: {len(names)}' for steps, names in row.launched.items()),
            f'{most / row.relations:.1f}',
            str(row.with_readout),
            ', '.join(next(iter(row.launched.values()))),
        ]
    )


def _join(cells: Sequence[str]) -> str:
    return f'| {" | ".join(cells)} |'


def document(rows: Iterable[Row], windows: Iterable[WindowRow]) -> str:
    """The page that the documentation keeps."""
    parts = [PREAMBLE]
    for op, group in groupby(rows, lambda row: row.op):
        lines = [_join([*cells[1:]]) for cells in [HEADER, ['---'] * len(HEADER)]]
        for row in group:
            lines.append(_join([row.dtype, row.shape, row.target, *_figures(row)]))
            lines[-1] += ''.join(f' **{fault}**' for fault in row.faults)
        parts.append(f'\n## {op}\n\n' + '\n'.join(lines) + '\n')
    lines = [_join(WINDOW_HEADER), _join(['---'] * len(WINDOW_HEADER)), *map(window_line, windows)]
    return ''.join([*parts, WINDOWS, '\n'.join(lines), '\n'])
