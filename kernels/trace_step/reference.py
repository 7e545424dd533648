"""The definition of ``trace_step`` in plain JAX, which is also what runs without a kernel."""

from typing import Any

from ..outer.operands import TraceOperands
from ..planes import add_trees, after, if_live, read_trace, update_order
from ..rounding import store

__all__ = ['trace_step']


def trace_step(operands: TraceOperands) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_step.trace_step`.

    With a ``seed``, planes of bfloat16 are rounded stochastically. The product with ``w`` is in
    ``total``. ``D`` depends on ``live`` too, so that XLA cannot fold ``after`` of a constant.
    """
    rules, trace, live = operands.rules, operands.trace, operands.live
    read = read_trace(rules, operands.signal, trace, operands.total, live)
    done = [read]
    new: list[Any] = [None] * len(trace)
    for s in update_order([[plane is not None for plane in row] for row in operands.decay]):
        if trace[s] is not None:
            decayed = [
                if_live(live, rules.decay(after(if_live(live, plane), done), old))
                for plane, old in zip(operands.decay[s], trace, strict=True)
                if plane is not None and old is not None
            ]
            f = operands.fresh[s]
            fresh = [] if f is None else [rules.outer(operands.x, f)]
            new[s] = store(add_trees([*fresh, *decayed]), trace, s, operands.seed)
            done.append(new[s])
    return tuple(new), read
