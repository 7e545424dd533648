"""Work counted in a compiled program: it is the same however busy the machine is.

XLA's own cost analysis takes the body of a loop once. Here bodies count as often as they run.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ['Work', 'count_work']

FREE = frozenset(
    'parameter constant get-tuple-element tuple bitcast after-all copy-start copy-done'.split()
)
"""What only names a value."""

MOVES = frozenset(
    'broadcast concatenate convert copy dynamic-slice dynamic-update-slice gather iota pad reshape '
    'reverse select slice transpose'.split()
)
"""What computes nothing."""

WIDTHS = {'pred': 1, 'c64': 8, 'c128': 16}
"""Bytes of an element where the number in the type does not tell its bits."""

INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$')
COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) \(.*\{$')
ARRAY = re.compile(r'\b([a-z]+\d*\w*)\[([\d,]*)\]')
CALLED = re.compile(r'(?:calls|to_apply|body|(?:true|false)_computation)=%?([\w.-]+)')
BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Work(NamedTuple):
    """What a program does when it runs once.

    Attributes
    ----------
    ops : int
        Operations that are run, a fusion being one.
    loop_ops : int
        Operations in the bodies of loops, each counted once.
    flops : int
        Multiplications and additions of matrix products, and one per element of other arithmetic.
    bytes : int
        Bytes that the operations read and write; a slice of an array counts as such.
    """

    ops: int = 0
    loop_ops: int = 0
    flops: int = 0
    bytes: int = 0


class _Op(NamedTuple):
    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str


def count_work(text: str) -> Work:
    """Count the work of an optimised program, given as text.

    Parameters
    ----------
    text : str
        What ``compiled.as_text()`` gives.

    Returns
    -------
    Work

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from braintrace_fast.benchmarking import count_work
    >>> def product(x, w):
    ...     return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=10)[0]
    >>> compiled = jax.jit(product).lower(jnp.ones((4, 8)), jnp.ones((8, 8))).compile()
    >>> count_work(compiled.as_text()).flops >= 10 * 2 * 4 * 8 * 8
    True
    """
    computations, entry = _parse(text)
    return _work(computations, entry, False)


def _parse(text: str) -> tuple[dict[str, list[_Op]], str]:
    computations: dict[str, list[_Op]] = {}
    entry, current = '', None
    for line in text.splitlines():
        head = COMPUTATION.match(line)
        if head:
            current = computations.setdefault(head[1], [])
            entry = head[1] if line.startswith('ENTRY') else entry
        elif current is not None:
            found = INSTRUCTION.match(line)
            if found:
                name, shape, kind, rest = found.groups()
                arguments = rest.split('), ')[0]
                current.append(_Op(name, shape, kind, re.findall(r'%([\w.-]+)', arguments), rest))
    if not entry:
        raise ValueError('The text has no ENTRY computation; give what compiled.as_text() returns.')
    return computations, entry


def _work(computations: dict[str, list[_Op]], name: str, in_loop: bool) -> Work:
    ops = loop_ops = flops = moved = 0
    shapes = {op.name: op.shape for op in computations[name]}
    for op in computations[name]:
        if op.kind in FREE:
            continue
        if op.kind in ('while', 'call', 'conditional'):
            trips = TRIPS.search(op.rest)
            times = int(trips[1]) if trips and op.kind == 'while' else 1
            is_loop = in_loop or op.kind == 'while'
            bodies = [_work(computations, called, is_loop) for called in _called(op)]
            inner = max(bodies, key=lambda body: body.flops + body.bytes)  # one branch is taken
            ops += times * inner.ops
            loop_ops += inner.loop_ops
            flops += times * inner.flops
            moved += times * inner.bytes
            continue
        ops += 1
        loop_ops += in_loop
        moved += _moved(computations, op, shapes)
        flops += sum(_flops(inner, scope) for inner, scope in _within(computations, op, shapes))
    return Work(ops, loop_ops, flops, moved)


def _called(op: _Op) -> list[str]:
    """The computations that an operation may run."""
    branches = BRANCHES.search(op.rest)
    named = re.findall(r'[\w.-]+', branches[1]) if branches else []
    return [*CALLED.findall(op.rest), *named]


def _within(
    computations: dict[str, list[_Op]], op: _Op, shapes: dict[str, str]
) -> Iterator[tuple[_Op, dict[str, str]]]:
    """The operations of a fusion, or the operation itself, with the shapes in sight."""
    if op.kind != 'fusion':
        yield op, shapes
        return
    body = computations[_called(op)[0]]
    scope = {inner.name: inner.shape for inner in body}
    for inner in body:
        if inner.kind not in FREE:
            yield from _within(computations, inner, scope)


def _flops(op: _Op, shapes: dict[str, str]) -> int:
    if op.kind != 'dot':
        return 0 if op.kind in MOVES else _elements(op.shape)
    contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', op.rest)
    sizes = _dimensions(shapes[op.operands[0]])
    axes = [int(axis) for axis in contracted[1].split(',') if axis] if contracted else []
    return 2 * _elements(op.shape) * math.prod(sizes[axis] for axis in axes)


def _moved(computations: dict[str, list[_Op]], op: _Op, shapes: dict[str, str]) -> int:
    """Bytes read and written by one operation."""
    if op.kind == 'dynamic-slice':
        return 2 * _bytes(op.shape)
    if op.kind == 'dynamic-update-slice':
        return 2 * _bytes(shapes[op.operands[1]])
    if op.kind == 'fusion':
        return _moved_by_fusion(computations[_called(op)[0]])
    return _bytes(op.shape) + sum(_bytes(shapes[name]) for name in op.operands)


def _moved_by_fusion(body: list[_Op]) -> int:
    """Operands and results, where those that are only sliced or updated count by the slice."""
    shapes = {op.name: op.shape for op in body}
    total = 0
    for parameter in body:
        if parameter.kind != 'parameter':
            continue
        readers = [op for op in body if parameter.name in op.operands]
        if readers and all(
            op.kind in ('dynamic-slice', 'dynamic-update-slice')
            and op.operands[0] == parameter.name
            for op in readers
        ):
            # An updated array stays where it is: what is written counts with the result.
            total += sum(_bytes(op.shape) for op in readers if op.kind == 'dynamic-slice')
        else:
            total += _bytes(parameter.shape)
    root = body[-1]
    results = root.operands if root.kind == 'tuple' else [root.name]
    ops = {op.name: op for op in body}
    for name in results:
        op = ops[name]
        updated = op.kind == 'dynamic-update-slice'
        total += _bytes(shapes[op.operands[1]] if updated else op.shape)
    return total


def _dimensions(shape: str) -> list[int]:
    found = ARRAY.search(shape)
    return [int(size) for size in found[2].split(',') if size] if found else []


def _elements(shape: str) -> int:
    return sum(
        math.prod(int(size) for size in sizes.split(',') if size)
        for _, sizes in ARRAY.findall(shape)
    )


def _bytes(shape: str) -> int:
    return sum(
        _width(kind) * math.prod(int(size) for size in sizes.split(',') if size)
        for kind, sizes in ARRAY.findall(shape)
    )


def _width(kind: str) -> int:
    bits = re.match(r'[a-z]+(\d+)', kind)
    return WIDTHS.get(kind, math.ceil(int(bits[1]) / 8) if bits else 0)
