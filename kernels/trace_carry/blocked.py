"""``trace_carry`` for CPUs: one example at a time, which stays in the cache.

In place, the old planes of an example are copied out before the new ones of the example before it
are written: XLA then sees that nothing reads the trace while it is written, and does not copy it.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..outer.operands import TraceOperands
from ..planes import PyTree, add_read
from . import reference

__all__ = ['trace_carry']


def trace_carry(operands: TraceOperands, *, overwrite: bool = True) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`.

    With a ``seed``, the reference runs: what is drawn for an element depends on its place in the
    whole batch. It also runs for an empty batch, which has no first example.
    """
    x, P, u, signal = operands.x, operands.decay, operands.fresh, operands.signal
    shapes = {plane.shape[:-1] for row in P for plane in row if plane is not None}
    plain = operands.seed is not None or not operands.rules.is_outer
    if (
        plain
        or x is None
        or x.ndim < 3 + operands.rules.groups
        or not x.size
        or shapes != {x.shape[1:-1]}
    ):
        return reference.trace_carry(operands)
    last = x.shape[1] - 1

    def one(example: Any, old: Any) -> Any:
        own_x, own_u = _at((x, u), example, axis=1)
        own_P, own_signal = _at((P, signal), example)
        own = TraceOperands(operands.rules, own_x, own_P, own_u, old, own_signal)
        return reference.trace_carry(replace(own, live=operands.live))

    def body(example: Any, carry: Any) -> Any:
        new, old, read = carry
        values, part = one(example, _at(given, example) if old is None else old)
        read = add_read(read, part)
        new = jax.tree.map(lambda a, b: _put(a, b, example), new, values)
        return new, old if old is None else _at(new, jnp.minimum(example + 1, last)), read

    given = tuple(operands.trace)
    first = _at(given, 0)
    read = _start(operands.total, jax.eval_shape(one, 0, first)[1])
    start = (given, first, read)
    if not overwrite:
        # Different numbers: XLA would share one array of equal ones, and copy it.
        leaves, tree = jax.tree.flatten(given)
        room = [jnp.full_like(leaf, number) for number, leaf in enumerate(leaves)]
        start = (jax.tree.unflatten(tree, room), None, read)
    new, _, read = lax.fori_loop(0, last + 1, body, start)
    return new, read


def _start(total: Any, part: Any) -> Any:
    """What the parts are added to: zeros, or the total in the type of its sum with them."""
    if total is None:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), part)
    types = jax.eval_shape(add_read, total, part)
    return jax.tree.map(lambda a, b: a.astype(b.dtype), total, types)


def _put(a: jax.Array, value: jax.Array, example: Any) -> jax.Array:
    place = (example, *(0 for _ in value.shape))
    return lax.dynamic_update_slice(a, value[None], place, allow_negative_indices=False)


def _at(tree: PyTree, example: Any, axis: int = 0) -> PyTree:
    def part(a: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(a, example, 1, axis, allow_negative_indices=False)
        return lax.squeeze(own, (axis,))

    return jax.tree.map(part, tree)
