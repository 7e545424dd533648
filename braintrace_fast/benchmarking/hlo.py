"""Work counted in a compiled program: it is the same however busy the machine is.

XLA's own cost analysis takes the body of a loop once. Here bodies count as often as they run.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from .instructions import ENTRY, Instruction, arrays, computations

__all__ = ['Work', 'count_work']

Computations = dict[str, list[Instruction]]

FREE = frozenset(
    'parameter constant get-tuple-element tuple bitcast after-all copy-start copy-done'.split()
)
"""What only names a value."""

MOVES = frozenset(
    'broadcast concatenate convert copy dynamic-slice dynamic-update-slice gather iota pad reshape '
    'reverse select slice transpose'.split()
)
"""What computes nothing."""

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
    by_name = computations(text)
    if ENTRY not in by_name:
        raise ValueError('The text has no ENTRY computation; give what compiled.as_text() returns.')
    return _work(by_name, ENTRY, False)


def _work(by_name: Computations, name: str, in_loop: bool) -> Work:
    ops = loop_ops = flops = moved = 0
    shapes = {op.name: op.results for op in by_name[name]}
    for op in by_name[name]:
        if op.opcode in FREE:
            continue
        if op.opcode in ('while', 'call', 'conditional'):
            trips = TRIPS.search(op.attributes)
            times = int(trips[1]) if trips and op.opcode == 'while' else 1
            is_loop = in_loop or op.opcode == 'while'
            bodies = [_work(by_name, called, is_loop) for called in op.called]
            inner = max(bodies, key=lambda body: body.flops + body.bytes)  # one branch is taken
            ops += times * inner.ops
            loop_ops += inner.loop_ops
            flops += times * inner.flops
            moved += times * inner.bytes
            continue
        ops += 1
        loop_ops += in_loop
        moved += _moved(by_name, op, shapes)
        flops += sum(_flops(inner, scope) for inner, scope in _within(by_name, op, shapes))
    return Work(ops, loop_ops, flops, moved)


def _within(
    by_name: Computations, op: Instruction, shapes: dict[str, str]
) -> Iterator[tuple[Instruction, dict[str, str]]]:
    """The operations of a fusion, or the operation itself, with the shapes in sight."""
    if op.opcode != 'fusion':
        yield op, shapes
        return
    body = by_name[op.called[0]]
    scope = {inner.name: inner.results for inner in body}
    for inner in body:
        if inner.opcode not in FREE:
            yield from _within(by_name, inner, scope)


def _flops(op: Instruction, shapes: dict[str, str]) -> int:
    if op.opcode != 'dot':
        return 0 if op.opcode in MOVES else _elements(op.results)
    contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', op.attributes)
    left = next(arrays(shapes[op.operands[0]]))
    axes = [int(axis) for axis in contracted[1].split(',') if axis] if contracted else []
    return 2 * _elements(op.results) * math.prod(left.shape[axis] for axis in axes)


def _moved(by_name: Computations, op: Instruction, shapes: dict[str, str]) -> int:
    """Bytes read and written by one operation."""
    if op.opcode == 'dynamic-slice':
        return 2 * _bytes(op.results)
    if op.opcode == 'dynamic-update-slice':
        return 2 * _bytes(shapes[op.operands[1]])
    if op.opcode == 'fusion':
        return _moved_by_fusion(by_name[op.called[0]])
    return _bytes(op.results) + sum(_bytes(shapes[name]) for name in op.operands)


def _moved_by_fusion(body: list[Instruction]) -> int:
    """Operands and results, where those that are only sliced or updated count by the slice."""
    shapes = {op.name: op.results for op in body}
    total = 0
    for parameter in body:
        if parameter.opcode != 'parameter':
            continue
        readers = [op for op in body if parameter.name in op.operands]
        if readers and all(
            op.opcode in ('dynamic-slice', 'dynamic-update-slice')
            and op.operands[0] == parameter.name
            for op in readers
        ):
            # An updated array stays where it is: what is written counts with the result.
            total += sum(_bytes(op.results) for op in readers if op.opcode == 'dynamic-slice')
        else:
            total += _bytes(parameter.results)
    root = body[-1]
    results = root.operands if root.opcode == 'tuple' else [root.name]
    ops = {op.name: op for op in body}
    for name in results:
        op = ops[name]
        updated = op.opcode == 'dynamic-update-slice'
        total += _bytes(shapes[op.operands[1]] if updated else op.results)
    return total


def _elements(types: str) -> int:
    return sum(math.prod(array.shape) for array in arrays(types))


def _bytes(types: str) -> int:
    return sum(array.bytes for array in arrays(types))
