"""What a compiled program does to memory, read off its optimised HLO."""

import math
from collections.abc import Iterator

from braintrace_fast.benchmarking.instructions import (
    ENTRY,
    Instruction,
    arrays,
    computations,
    first_type,
)

__all__ = ['copies', 'moved', 'sizes']

Computations = dict[str, list[Instruction]]

FREE = frozenset(
    """
    after-all async-done bitcast constant copy-done get-tuple-element parameter partition-id
    slice-done tuple
    """.split()
)
"""Instructions that move nothing, or end what another one has begun."""

HIDDEN = frozenset('conditional while'.split())


def sizes(types: str, steps: int = 0) -> Iterator[int]:
    """The bytes of each array of a type, or tuple of types, that is in a device's main memory.

    With ``steps``, of an array that has so many along its first or second axis only one counts.
    """
    for array in arrays(types):
        if 'S(' not in array.layout:  # another memory, such as VMEM
            axes = [*array.shape]
            if steps in axes[:2]:
                axes.remove(steps)
            yield math.prod(axes) * array.width


def moved(text: str, steps: int = 0) -> int:
    """The bytes that a program reads from main memory and writes to it.

    Every instruction reads each of its operands once and writes each of its results once; an array
    of which it updates a part, and uses no more, is not read. Arrays count without the padding of
    their layout. With ``steps``, a loop runs so often and touches, of an array of all steps, one at
    a time.
    """
    return _moved(computations(text), ENTRY, 0, steps)


def _moved(by_name: Computations, computation: str, inside: int, steps: int) -> int:
    total, types = 0, {}
    for instruction in by_name[computation]:
        types[instruction.name] = instruction.results
        if instruction.opcode in HIDDEN and not (instruction.opcode == 'while' and steps):
            raise ValueError(f'{instruction.name}: the bytes of a {instruction.opcode} are unknown')
        if instruction.opcode == 'while':
            total += steps * _moved(by_name, instruction.called[0], steps, steps)
        elif instruction.opcode == 'call':
            total += _moved(by_name, instruction.called[0], inside, steps)
        elif instruction.opcode not in FREE:
            written = instruction.results
            if instruction.opcode.endswith('-start'):  # (destination, source, context)
                written = first_type(written)
            total += sum(sizes(written, inside))
            read = dict.fromkeys(_read(by_name, instruction))
            total += sum(sum(sizes(types[operand], inside)) for operand in read)
    return total


def _read(by_name: Computations, instruction: Instruction) -> list[str]:
    """The operands of an instruction that are not just updated in part."""
    if instruction.opcode == 'dynamic-update-slice':
        return [*instruction.operands[1:]]
    if instruction.opcode == 'fusion':
        numbers = _numbers_read(by_name, instruction.called[0])
        return [name for k, name in enumerate(instruction.operands) if str(k) in numbers]
    return [*instruction.operands]


def _numbers_read(by_name: Computations, computation: str) -> set[str]:
    """Which parameters of a fusion it reads."""
    read: set[str] = set()
    numbers: set[str] = set()
    for instruction in reversed(by_name[computation]):
        if instruction.opcode == 'parameter':
            numbers.update(instruction.operands if instruction.name in read else ())
        elif instruction.opcode not in FREE or instruction.name in read:
            read.update(_read(by_name, instruction))
        if instruction.opcode == 'dynamic-update-slice' and instruction.name in read:
            read.add(instruction.operands[0])
    return numbers


def copies(text: str) -> list[int]:
    """The bytes of each array that is copied from main memory to main memory."""
    copied: list[int] = []
    for instructions in computations(text).values():
        types = {instruction.name: instruction.results for instruction in instructions}
        for instruction in instructions:
            if instruction.opcode in ('copy', 'copy-start'):
                (source,) = instruction.operands
                written = instruction.results
                if instruction.opcode == 'copy-start':
                    written = first_type(written)
                if list(sizes(types[source])):
                    copied += sizes(written)
    return copied
