"""``trace_carry`` for CPUs: one example at a time, which stays in the cache, and in place.

What an example needs is copied out of the trace before the example before it is written back: XLA
then sees that nothing else reads the trace while it is written, and does not copy it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..planes import Plane, PyTree, add_trees, if_live
from . import reference

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
) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`.

    With a ``seed``, the reference runs: what it draws depends on the place in the whole batch.
    """
    P, signal = if_live(live, (P, signal))
    shapes = {plane.shape[:-1] for row in P for plane in row if plane is not None}
    plain = seed is not None or not rules.is_outer
    if plain or x is None or x.ndim < 3 or shapes != {x.shape[1:-1]}:
        return reference.trace_carry(rules, x, P, u, trace, signal, seed)
    last = x.shape[1] - 1
    x, u = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (x, u))

    def one(example: Any, old: Any) -> Any:
        own_x, own_P, own_u, own_signal = _at((x, P, u, signal), example)
        return reference.trace_carry(rules, own_x, own_P, own_u, old, own_signal)

    def body(example: Any, carry: Any) -> Any:
        trace, old, read = carry
        new, part = one(example, old)
        read = read if part is None else add_trees([read, part])
        trace = jax.tree.map(
            lambda a, b: lax.dynamic_update_index_in_dim(a, b, example, 0), trace, new
        )
        return trace, _at(trace, jnp.minimum(example + 1, last)), read

    first = _at(tuple(trace), 0)
    read = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(one, 0, first)[1])
    new, _, read = lax.fori_loop(0, last + 1, body, (tuple(trace), first, read))
    return new, read


def _at(tree: PyTree, example: Any) -> PyTree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, example, 0, keepdims=False), tree)
