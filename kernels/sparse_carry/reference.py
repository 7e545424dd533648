"""``sparse_carry`` in plain JAX, which is also what runs without a kernel."""

from typing import Any

from ..outer.operands import TraceOperands
from ..trace_carry.reference import trace_carry

__all__ = ['sparse_carry']


def sparse_carry(operands: TraceOperands) -> tuple[tuple[Any, ...], Any]:
    """The same as ``trace_carry``: the rules know where the entries are."""
    return trace_carry(operands)
