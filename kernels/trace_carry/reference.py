"""The definition of ``trace_carry`` in plain JAX, which is also what runs without a kernel."""

from collections.abc import Sequence
from typing import Any

import jax

from ..planes import Plane, add_trees, if_live, read_trace
from ..rounding import store

__all__ = ['trace_carry']


def trace_carry(
    rules: Any,
    x: jax.Array | None,
    P: Sequence[Sequence[Plane]],
    u: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None,
    seed: Any = None,
    live: Any = None,
    w: Plane = None,
    total: Any = None,
) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`.

    With a ``seed``, planes of bfloat16 are rounded stochastically. What ``w`` says is in ``total``.
    """

    def new(s: int) -> Any:
        fresh = [] if u[s] is None else [rules.outer_sum(x, u[s])]
        decayed = [
            if_live(live, rules.decay(plane, old))
            for plane, old in zip(P[s], trace, strict=True)
            if plane is not None and old is not None
        ]
        return store(add_trees([*fresh, *decayed]), trace, s, seed)

    advanced = tuple(None if old is None else new(s) for s, old in enumerate(trace))
    return advanced, read_trace(rules, signal, trace, total, live)
