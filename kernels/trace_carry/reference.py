"""The definition of ``trace_carry`` in plain JAX, which is also what runs without a kernel."""

from typing import Any

from ..outer.operands import TraceOperands
from ..planes import add_trees, if_live, read_trace
from ..rounding import store

__all__ = ['trace_carry']


def trace_carry(operands: TraceOperands) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`.

    With a ``seed``, planes of bfloat16 are rounded stochastically. The product with ``w`` is in
    ``total``.
    """
    rules, trace, live = operands.rules, operands.trace, operands.live

    def new(s: int) -> Any:
        u = operands.fresh[s]
        fresh = [] if u is None else [rules.outer_sum(operands.x, u)]
        decayed = [
            if_live(live, rules.decay(plane, old))
            for plane, old in zip(operands.decay[s], trace, strict=True)
            if plane is not None and old is not None
        ]
        return store(add_trees([*fresh, *decayed]), trace, s, operands.seed)

    advanced = tuple(None if old is None else new(s) for s, old in enumerate(trace))
    return advanced, read_trace(rules, operands.signal, trace, operands.total, live)
