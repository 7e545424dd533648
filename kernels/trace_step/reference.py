"""The definition of ``trace_step`` in plain JAX, which is also what runs without a kernel."""

from collections.abc import Sequence
from typing import Any

import jax

from ..planes import Plane, add_trees, after, if_live, read_trace, update_order
from ..rounding import store

__all__ = ['trace_step']


def trace_step(
    rules: Any,
    x: jax.Array | None,
    D: Sequence[Sequence[Plane]],
    f: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None,
    seed: Any = None,
    live: Any = None,
    w: Plane = None,
    total: Any = None,
) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_step.trace_step`.

    With a ``seed``, planes of bfloat16 are rounded stochastically. What ``w`` says is in ``total``.
    ``D`` is chosen by ``live`` too, so that it is no constant: ``after`` must not be foreseen.
    """
    read = read_trace(rules, signal, trace, total, live)
    done = [read]
    new: list[Any] = [None] * len(trace)
    for s in update_order([[plane is not None for plane in row] for row in D]):
        if trace[s] is not None:
            decayed = [
                if_live(live, rules.decay(after(if_live(live, plane), done), old))
                for plane, old in zip(D[s], trace, strict=True)
                if plane is not None and old is not None
            ]
            fresh = [] if f[s] is None else [rules.outer(x, f[s])]
            new[s] = store(add_trees([*fresh, *decayed]), trace, s, seed)
            done.append(new[s])
    return tuple(new), read
