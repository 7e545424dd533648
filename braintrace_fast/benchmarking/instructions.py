"""The instructions of a compiled program, read off the text of its optimised HLO."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ['ENTRY', 'Array', 'Instruction', 'arrays', 'computations', 'first_type']

ENTRY = 'ENTRY'
"""The name of the computation that is the whole program."""

ARRAY = re.compile(r'\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?')
CALLED = re.compile(r'(?:calls|to_apply|body|(?:true|false)_computation)=%?([\w.-]+)')
BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')


class Instruction(NamedTuple):
    """An instruction, whose types are as they are written.

    Attributes
    ----------
    name, opcode : str
        What it is called, and what it does.
    results : str
        The type of its result, or of its results in brackets.
    operands : tuple of str
        The names of its operands; a parameter has its number for an operand.
    attributes : str
        What follows the operands.
    """

    name: str
    opcode: str
    results: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> list[str]:
        """The computations that it may run: a fusion's one, a loop's body, branches."""
        branches = BRANCHES.search(self.attributes)
        named = re.findall(r'[\w.-]+', branches[1]) if branches else []
        return [*CALLED.findall(self.attributes), *named]


class Array(NamedTuple):
    """An array of a type.

    Attributes
    ----------
    dtype : str
        The type of its elements.
    shape : tuple of int
        Its axes.
    layout : str
        Its layout, in curly brackets; empty if there is none.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def width(self) -> int:
        """The bytes of an element."""
        bits = re.match(r'[a-z]+(\d+)', self.dtype)
        return 1 if self.dtype == 'pred' else math.ceil(int(bits[1]) / 8) if bits else 0

    @property
    def bytes(self) -> int:
        """The bytes of all elements, without the padding of the layout."""
        return self.width * math.prod(self.shape)


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation; those of the whole program are ``'ENTRY'``."""
    by_name: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if line.endswith('{') and not line.startswith(' '):
            name = ENTRY if line.startswith(ENTRY) else line.split()[0].lstrip('%')
            by_name[name] = []
        elif line.startswith('  ') and ' = ' in line and by_name:
            by_name[name].append(_instruction(line))
    return by_name


def arrays(types: str) -> Iterator[Array]:
    """The arrays of a type, or of a tuple of types."""
    for dtype, shape, layout in ARRAY.findall(types):
        yield Array(dtype, tuple(int(size) for size in shape.split(',') if size), layout)


def first_type(types: str) -> str:
    """The first type of a tuple of types."""
    return _balanced(types[1:])[0]


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix('ROOT ').partition(' = ')
    results, rest = _balanced(rest)
    opcode, _, rest = rest.partition('(')
    operands, rest = _balanced('(' + rest)
    names = (operands[1:-1],) if opcode == 'parameter' else re.findall(r'%([\w.-]+)', operands)
    return Instruction(name.lstrip('%'), opcode, results, tuple(names), rest)


def _balanced(text: str) -> tuple[str, str]:
    """Text up to the first space or comma outside all brackets, and what is behind it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in '([{') - (letter in ')]}')
        if depth == 0 and letter in ' ,':
            return text[:place], text[place + 1 :]
    return text, ''
