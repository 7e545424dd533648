"""What a case must keep on a device, and what was measured there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from braintrace_fast.kernels.dispatch import on_tpu

from .blocks import block_bytes
from .cases import Case, floor, implementation, plain_formula, redundant
from .gpu import GPUS, compile_for_gpu
from .hlo import copies, moved
from .tpu import TPUS, VMEM, compile_for_tpu, device_kind

__all__ = ['TARGETS', 'Row', 'check', 'faults_of_comparison', 'measure', 'taken']

TARGETS = (*GPUS, *TPUS)
MOST = 1.05
"""Times the floor, that a bounded case may move."""

LEAST = 2.0
"""Times what a kernel moves, that XLA moves for stacked planes."""

RESERVE = 2 * 2**20
"""A program for a TPU with any temporary takes some of this at once; copies show smaller ones."""


ADDRESSES = 64
"""A program for a GPU keeps the addresses of its results, 8 bytes each, however small the trace."""


class Row(NamedTuple):
    """A case on a target.

    Attributes
    ----------
    op, dtype, shape, target : str
        Which.
    registers : int or None
        Per thread, on a GPU.
    memory : int
        Bytes of shared memory, or of VMEM.
    moved, floor, blocks : int
        The bytes that the program moves, those that it must, and those of all blocks.
    planes, stacked : int
        The bytes that the plain formula moves, for planes by themselves and in one array; 0 if it
        was not compiled.
    auto : str
        What ``backend='auto'`` runs, ``'kernel'`` or, where that moves as few bytes, ``'jax'``.
    faults : tuple of str
        What is wrong.
    """

    op: str
    dtype: str
    shape: str
    target: str
    registers: int | None = None
    memory: int = 0
    moved: int = 0
    floor: int = 1
    blocks: int = 0
    planes: int = 0
    stacked: int = 0
    auto: str = ''
    faults: tuple[str, ...] = ()


def check(make: Callable[[], Case], targets: tuple[str, ...] = TARGETS) -> list[Row]:
    """Compile a case for each target."""
    case = make()
    return [measure(case, target) for target in targets if kind_of(target) in case.kinds]


def kind_of(target: str) -> str:
    """The kind of kernel that a target takes."""
    return 'triton' if target in GPUS else 'mosaic'


def measure(case: Case, target: str, *, donate: bool = True) -> Row:
    """Compile a case for a target, measure it and find its faults."""
    row = Row(case.op, case.dtype, case.shape, target)
    donated = case.trace if donate else ()
    kind = kind_of(target)
    f = implementation(case, kind)
    try:
        if kind == 'triton':
            compiled, kernels = compile_for_gpu(target, f, case.operands, donated)
            row = row._replace(
                registers=max(k.registers for k in kernels), memory=max(k.shared for k in kernels)
            )
            faults = [f'{k.name} spills {k.spilled} bytes' for k in kernels if k.spilled]
        else:
            compiled, used = compile_for_tpu(target, f, case.operands, donated)
            row = row._replace(memory=used)
            faults = [f'it takes {used} bytes of VMEM'] if used > VMEM else []
    except Exception as error:  # whatever a compiler refuses is a fault of the kernel
        return row._replace(faults=(f'it does not compile: {_first_line(error)}',))
    row = row._replace(
        moved=moved(compiled.as_text()),
        floor=floor(case),
        blocks=0 if case.gathers else block_bytes(f, case.operands, kept=kind == 'mosaic'),
    )
    least = row.floor + 2 * _copied(case)
    if case.bounded and row.moved > MOST * least:
        faults.append(f'it moves {row.moved} bytes and must move {least}')
    if kind in case.compared:
        row = row._replace(
            planes=_plain(case, target, False),
            stacked=_plain(case, target, True),
            auto=taken(case, target),
        )
        faults += faults_of_comparison(row, kind in case.halved)
    if case.trace:
        faults += _faults_of_trace(case, compiled, kind)
    return row._replace(faults=tuple(faults))


def _bytes(arrays: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def _copied(case: Case) -> int:
    """The bytes of what is transposed first."""
    return _bytes([case.operands[place] for place in case.copied])


def taken(case: Case, target: str) -> str:
    """What ``backend='auto'`` runs on a target."""
    if target in GPUS:
        return 'jax' if redundant(case, 'triton') else 'kernel'
    with on_tpu(device_kind(target)):
        return 'jax' if redundant(case, 'mosaic') else 'kernel'


def _plain(case: Case, target: str, stacked: bool) -> int:
    """What XLA moves for the plain formula; 0 if there is none."""
    plain = plain_formula(case, stacked=stacked)
    if plain is None:
        return 0
    compile_for = compile_for_gpu if target in GPUS else compile_for_tpu
    compiled, _ = compile_for(target, *plain, case.trace)
    return moved(compiled.as_text(), case.steps)


def faults_of_comparison(row: Row, halved: bool) -> list[str]:
    """Whether a kernel is worth it, and ``auto`` takes it where it is."""
    as_few = row.planes <= MOST * row.moved
    if row.auto == 'jax':
        wrong = f'auto takes plain JAX, which moves {row.planes} bytes, not {row.moved}'
        return [] if as_few else [wrong]
    faults = []
    if as_few:
        faults.append(f'auto takes it, and plain JAX moves {row.planes} bytes, no more')
    if halved and 0 < row.stacked < LEAST * row.moved:
        faults.append(f'it moves {row.moved} bytes, and XLA for stacked planes {row.stacked}')
    return faults


def _faults_of_trace(case: Case, compiled: Any, kind: str) -> list[str]:
    """Whether the trace is anywhere but in place."""
    planes = jax.tree.leaves([case.operands[place] for place in case.trace])
    largest = max(planes, key=lambda plane: plane.size)
    size = largest.size * largest.dtype.itemsize
    memory = compiled.memory_analysis()
    least = max(size, 8)  # a single number may be the flag of the trace
    faults = [f'it copies {n} bytes' for n in copies(compiled.as_text()) if n >= least]
    room = max(ADDRESSES, size) if kind == 'triton' else max(RESERVE, _tiled(largest))
    if memory.temp_size_in_bytes >= room + _copied(case):
        faults.append(f'it takes {memory.temp_size_in_bytes} bytes beside a trace of {size}')
    total = _bytes(planes)
    if memory.alias_size_in_bytes < total:
        faults.append(f'it updates {memory.alias_size_in_bytes} of {total} bytes in place')
    return faults


def _tiled(array: Any) -> int:
    """The bytes of an array on a TPU, which stores whole tiles."""
    *lead, rows, lanes = array.shape
    packed = 32 // array.dtype.itemsize
    size = -(-rows // packed) * packed * -(-lanes // 128) * 128 * array.dtype.itemsize
    for axis in lead:
        size *= axis
    return size


def _first_line(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
