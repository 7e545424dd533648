"""Arithmetic on planes, of which some are structurally zero."""

from collections.abc import Iterable, Sequence

import jax

__all__ = ['Plane', 'add', 'closure', 'times']

Plane = jax.Array | None
"""An array, or ``None`` where it is structurally zero: it is neither stored nor multiplied."""


def add(parts: Iterable[Plane]) -> Plane:
    """The sum of what is there; None if nothing is."""
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def times(a: Plane, b: Plane) -> Plane:
    """The product of two planes; None if either is zero."""
    return None if a is None or b is None else a * b


def closure(pattern: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """Which products of any number of matrices of a pattern, none included, can be non-zero."""
    size = range(len(pattern))
    reached = [[s == q for q in size] for s in size]
    for _ in size:
        reached = [
            [reached[s][q] or any(reached[s][r] and pattern[r][q] for r in size) for q in size]
            for s in size
        ]
    return reached
