"""What a scan consists of, and its flat form that both kernels run."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import tree
from jax.extend.core import Literal

__all__ = ['Scan', 'Window', 'longest', 'mixed', 'reason', 'window']

FLOATS = (jnp.dtype('float32'), jnp.dtype('bfloat16'))


class Scan(NamedTuple):
    """A scan over the steps of a window.

    Attributes
    ----------
    name : str
        The name of the kernel.
    body, init, xs
        As ``lax.scan`` takes them. The body must treat every position alike: it runs on tiles, in
        float32. A leaf of ``init`` may be a float, for all positions; a leaf of ``xs`` may have a
        leading axis of 1, if it is the same in all steps, or be uniform, with every axis of 1.
    dtype : dtype
        That of the results.
    final : bool
        Whether the state after the last step is wanted.
    reverse : bool
        Whether the last step comes first.
    """

    name: str
    body: Callable[[Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any
    dtype: Any
    final: bool = True
    reverse: bool = False


class Window(NamedTuple):
    """A scan whose pytrees are flat.

    Attributes
    ----------
    steps : int
        The length K of the leading axis.
    shape : tuple of int
        The positions: what follows the leading axis.
    starts : list
        The state before the first step: arrays of ``shape``, or a number for all positions. What
        is loop-invariant is kept as state too, which does not change.
    xs : list of array
        What the body reads per step, of shape ``(steps, *shape)``, without what no result needs.
    dtype : dtype
        That of the results.
    final, ys : int
        How many of the states are results after the last step, and how many values per step.
    body : callable
        From lists of tiles, state and ``xs``, to such lists, state and ``ys``.
    unflatten : callable
        From the results, the final states first, to what ``lax.scan`` returns.
    """

    steps: int
    shape: tuple[int, ...]
    starts: list[Any]
    xs: list[jax.Array]
    dtype: Any
    final: int
    ys: int
    body: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]
    unflatten: Callable[[Sequence[Any]], Any]

    @property
    def arrays(self) -> list[jax.Array]:
        """The starts that are arrays."""
        return _arrays(self.starts)

    @property
    def live(self) -> int:
        """How many planes are on chip at once: old and new state, and what a step reads."""
        return 2 * len(self.starts) + len(self.xs)


def window(scan: Scan) -> Window:
    """Flatten a scan."""
    starts, state_tree = tree.flatten(scan.init)
    leaves, step_tree = tree.flatten(scan.xs)
    steps, *shape = longest(leaves).shape
    leaves = [_whole(leaf, shape) for leaf in leaves]

    def flat(state: list[Any], step: list[Any]) -> tuple[Any, Any]:
        new, y = scan.body(tree.unflatten(state_tree, state), tree.unflatten(step_tree, step))
        return tree.leaves(new), y

    tile = jax.ShapeDtypeStruct((1,), jnp.float32)
    tiles = [tile] * len(starts), [tile] * len(leaves)
    jaxpr, (_, y) = jax.make_jaxpr(flat, return_shape=True)(*tiles)
    used = _used(jaxpr.jaxpr)[len(starts) :]
    used[0] |= not any(used)  # a kernel must have an operand
    held = [leaf.shape[0] < steps for leaf in leaves]
    final = scan.init if scan.final else None

    def body(state: list[Any], step: list[Any]) -> tuple[list[Any], list[Any]]:
        own, rest, read = state[: len(starts)], iter(state[len(starts) :]), iter(step)
        values = [
            next(rest if h else read) if u else jnp.zeros_like(state[0])
            for u, h in zip(used, held, strict=True)
        ]
        new, y = flat(own, values)
        return [*new, *state[len(starts) :]], tree.leaves(y)

    needed = [(leaf, h) for leaf, u, h in zip(leaves, used, held, strict=True) if u]
    return Window(
        steps,
        tuple(shape),
        [*starts, *(_only(leaf) for leaf, h in needed if h)],
        [leaf for leaf, h in needed if not h],
        jnp.dtype(scan.dtype),
        len(tree.leaves(final)),
        len(tree.leaves(y)),
        body,
        partial(tree.unflatten, tree.structure((final, y))),
    )


def _only(leaf: Any) -> Any:
    """The only step of an array, or its shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[0]


def _whole(leaf: Any, shape: Sequence[int]) -> Any:
    """An array, or its shape, with all positions."""
    full = (leaf.shape[0], *shape)
    if leaf.shape == full:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(full, leaf.dtype)
    return jnp.broadcast_to(leaf, full)


def longest(leaves: Sequence[Any]) -> Any:
    """A leaf with all steps and positions: the others may be the same in all of them."""
    return max(leaves, key=lambda leaf: (leaf.shape[0], leaf.size))


def _used(jaxpr: Any) -> list[bool]:
    """Which arguments reach a result."""
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    return [v in live for v in jaxpr.invars]


def _arrays(starts: list[Any]) -> list[Any]:
    return [start for start in starts if not isinstance(start, float)]


def reason(scan: Scan, most: int) -> str | None:
    """Why no kernel that holds ``most`` planes per position runs the scan; None if one does."""
    starts, xs = tree.leaves(scan.init), tree.leaves(scan.xs)
    if not starts or not xs:
        return 'there is nothing to compute'
    for leaf in (*_arrays(starts), *xs):
        if leaf.dtype not in FLOATS:
            return f'an operand is of {leaf.dtype}; kernels take float32 and bfloat16'
    if math.prod(shape := longest(xs).shape) == 0:
        return f'a plane of shape {shape} is empty'
    planes = 2 * len(starts) + len(xs)
    if planes > most:
        return f'it takes {planes} planes per position, and a kernel holds {most}'
    return None


def mixed(*planes: Any) -> str | None:
    """Why planes of several dtypes have no kernel."""
    dtypes = sorted({str(plane.dtype) for plane in tree.leaves(planes)})
    return f'the planes are of {" and ".join(dtypes)}, expected one dtype' if dtypes[1:] else None
