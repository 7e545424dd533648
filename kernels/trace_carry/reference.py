"""The definition of ``trace_carry`` in plain JAX, which is also what runs without a kernel."""

from collections.abc import Sequence
from typing import Any

import jax

from ..planes import Plane

__all__ = ['trace_carry']


def trace_carry(
    rules: Any,
    x: jax.Array | None,
    P: Sequence[Sequence[Plane]],
    u: Sequence[Plane],
    trace: Sequence[Any] | None,
    kept: Sequence[bool],
) -> tuple[Any, ...]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`."""
    new = []
    for s, keep in enumerate(kept):
        parts = []
        if keep and u[s] is not None:
            parts.append(rules.outer_sum(x, u[s]))
        if keep and trace is not None:
            parts += [
                rules.decay(P[s][q], old)
                for q, old in enumerate(trace)
                if old is not None and P[s][q] is not None
            ]
        total = None
        if parts:
            total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)
        new.append(total)
    return tuple(new)
