"""What a compiled program does to memory, read off its optimised HLO."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ['Instruction', 'computations', 'copies', 'moved', 'sizes']

FREE = frozenset(
    """
    after-all async-done bitcast constant copy-done get-tuple-element parameter partition-id
    slice-done tuple
    """.split()
)
"""Instructions that move nothing, or end what another one has begun."""

HIDDEN = frozenset('conditional while'.split())
ARRAY = re.compile(r'\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?')


class Instruction(NamedTuple):
    """An instruction of HLO: the types of its results and operands are as they are written.

    A parameter has its number for an operand.
    """

    name: str
    opcode: str
    results: str
    operands: tuple[str, ...]
    calls: str | None


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation; those of the whole program are ``'ENTRY'``."""
    found: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if line.endswith('{') and not line.startswith(' '):
            name = 'ENTRY' if line.startswith('ENTRY') else line.split()[0].lstrip('%')
            found[name] = []
        elif line.startswith('  ') and ' = ' in line and found:
            found[name].append(_instruction(line))
    return found


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix('ROOT ').partition(' = ')
    results, rest = _balanced(rest)
    opcode, _, rest = rest.partition('(')
    operands, rest = _balanced('(' + rest)
    calls = re.search(r'(?:calls|to_apply|body)=%?([\w.-]+)', rest)
    names = (operands[1:-1],) if opcode == 'parameter' else re.findall(r'%([\w.-]+)', operands)
    return Instruction(name.lstrip('%'), opcode, results, tuple(names), calls and calls[1])


def _balanced(text: str) -> tuple[str, str]:
    """Text up to the first space or comma that no bracket holds, and what is behind it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in '([{') - (letter in ')]}')
        if depth == 0 and letter in ' ,':
            return text[:place], text[place + 1 :]
    return text, ''


def sizes(types: str, steps: int = 0) -> Iterator[int]:
    """The bytes of each array of a type, or tuple of types, that is in a device's main memory.

    With ``steps``, of an array that has so many along its first or second axis only one counts.
    """
    for name, bits, shape, layout in ARRAY.findall(types):
        if 'S(' not in layout:  # another memory, such as VMEM
            axes = [int(size) for size in filter(None, shape.split(','))]
            if steps in axes[:2]:
                axes.remove(steps)
            yield math.prod(axes) * (1 if name == 'pred' else int(bits) // 8)


def moved(text: str, steps: int = 0) -> int:
    """The bytes that a program reads from main memory and writes to it.

    Every instruction reads each of its operands once and writes each of its results once; an array
    of which it updates a part, and uses no more, is not read. Arrays count without the padding of
    their layout. With ``steps``, a loop runs so often and touches, of an array of all steps, one at
    a time.
    """
    return _moved(computations(text), 'ENTRY', 0, steps)


def _moved(found: dict[str, list[Instruction]], computation: str, inside: int, steps: int) -> int:
    total, types = 0, {}
    for instruction in found[computation]:
        types[instruction.name] = instruction.results
        if instruction.opcode in HIDDEN and not (instruction.opcode == 'while' and steps):
            raise ValueError(f'{instruction.name}: the bytes of a {instruction.opcode} are unknown')
        if instruction.opcode == 'while':
            total += steps * _moved(found, instruction.calls or '', steps, steps)
        elif instruction.opcode == 'call':
            total += _moved(found, instruction.calls or '', inside, steps)
        elif instruction.opcode not in FREE:
            written = instruction.results
            if instruction.opcode.endswith('-start'):  # (destination, source, context)
                written = _balanced(written[1:])[0]
            total += sum(sizes(written, inside))
            read = dict.fromkeys(_read(found, instruction))
            total += sum(sum(sizes(types[operand], inside)) for operand in read)
    return total


def _read(found: dict[str, list[Instruction]], instruction: Instruction) -> list[str]:
    """The operands of an instruction that are not just updated in part."""
    if instruction.opcode == 'dynamic-update-slice':
        return [*instruction.operands[1:]]
    if instruction.opcode == 'fusion':
        numbers = _numbers_read(found, instruction.calls or '')
        return [name for k, name in enumerate(instruction.operands) if str(k) in numbers]
    return [*instruction.operands]


def _numbers_read(found: dict[str, list[Instruction]], computation: str) -> set[str]:
    """Which parameters of a fusion it reads."""
    read: set[str] = set()
    numbers: set[str] = set()
    for instruction in reversed(found[computation]):
        if instruction.opcode == 'parameter':
            numbers.update(instruction.operands if instruction.name in read else ())
        elif instruction.opcode not in FREE or instruction.name in read:
            read.update(_read(found, instruction))
        if instruction.opcode == 'dynamic-update-slice' and instruction.name in read:
            read.add(instruction.operands[0])
    return numbers


def copies(text: str) -> list[int]:
    """The bytes of each array that is copied from main memory to main memory."""
    found: list[int] = []
    for instructions in computations(text).values():
        types = {instruction.name: instruction.results for instruction in instructions}
        for instruction in instructions:
            if instruction.opcode in ('copy', 'copy-start'):
                (source,) = instruction.operands
                written = instruction.results
                if instruction.opcode == 'copy-start':
                    written = _balanced(written[1:])[0]
                if list(sizes(types[source])):
                    found += sizes(written)
    return found
