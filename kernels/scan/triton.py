"""The scan on a GPU, with the state in registers.

Arrays are ``(steps, positions)`` with the positions flattened, which moves nothing. A program owns
``tile.block`` positions, one per thread, and walks all steps, ``tile.unroll`` at a time: the loads
of a turn do not wait for one another. Lanes past the last position load zeros and store nothing.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .._pallas import result, split
from .window import Scan, Window, longest, reason, window

__all__ = ['Tile', 'choose_tile', 'run', 'supports']

# A thread has 255 registers; `Window.live` overstates what is needed at once.
PLANES = 240
UNROLL = 4
LOADS = 64  # of one turn, at most, while there is more than one step in it


class Tile(NamedTuple):
    """How a window is cut."""

    block: int
    unroll: int
    num_warps: int


def choose_tile(w: Window) -> Tile:
    """One position per thread; small blocks where few positions must spread over the device."""
    block = 64 if math.prod(w.shape) >= 2**13 else 32
    unroll = max(1, min(UNROLL, w.steps, LOADS // max(1, len(w.xs))))
    return Tile(block, unroll, block // 32)


def supports(scan: Scan) -> str | None:
    """Why there is no kernel for this scan, or None."""
    if why := reason(scan, PLANES):
        return why
    elements = math.prod(longest(jax.tree.leaves(scan.xs)).shape)
    if elements >= 2**31:
        return f'a plane has {elements} elements, and offsets have 32 bits'
    return None


def run(scan: Scan, *, interpret: bool = False) -> tuple[Any, Any]:
    """What ``lax.scan`` gives, by a Triton kernel."""
    w = window(scan)
    tile = choose_tile(w)
    size = math.prod(w.shape)
    arrays = w.arrays
    operands = [a.reshape(size) for a in arrays] + [x.reshape(w.steps, size) for x in w.xs]
    edge = pl.BlockSpec((tile.block,), lambda i: (i,))
    column = pl.BlockSpec((w.steps, tile.block), lambda i: (0, i))
    results = pl.pallas_call(
        lambda *refs: _kernel(w, tile, scan.reverse, refs),
        name=scan.name,
        grid=(pl.cdiv(size, tile.block),),
        in_specs=[edge] * len(arrays) + [column] * len(w.xs),
        out_specs=[edge] * w.final + [column] * w.ys,
        out_shape=[result((size,), scan.dtype, operands)] * w.final
        + [result((w.steps, size), scan.dtype, operands)] * w.ys,
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
    )(*operands)
    return w.unflatten([a.reshape(*a.shape[:-1], *w.shape) for a in results])


def _kernel(w: Window, tile: Tile, reverse: bool, refs: tuple[Any, ...]) -> None:
    starts, xs, final, ys, _ = split(refs, len(w.arrays), len(w.xs), w.final, w.ys)
    first = pl.program_id(0) * tile.block
    inside = first + lax.iota(jnp.int32, tile.block) < math.prod(w.shape)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, mask=inside, other=0.0).astype(jnp.float32)

    def store(ref: Any, value: jax.Array) -> None:
        plgpu.store(ref, value.astype(ref.dtype), mask=inside)

    def turn(walked: Any, state: list[jax.Array], count: int) -> list[jax.Array]:
        """Walk ``count`` steps, after those already walked."""
        times = [w.steps - 1 - walked - j if reverse else walked + j for j in range(count)]
        steps = [[load(ref.at[t]) for ref in xs] for t in times]
        for t, step in zip(times, steps, strict=True):
            state, y = w.body(state, step)
            for ref, value in zip(ys, y, strict=True):
                store(ref.at[t], value)
        return state

    given = iter(starts)
    state = [
        jnp.full(inside.shape, s, jnp.float32) if isinstance(s, float) else load(next(given))
        for s in w.starts
    ]
    turns, rest = divmod(w.steps, tile.unroll)
    state = lax.fori_loop(0, turns, lambda i, s: turn(i * tile.unroll, s, tile.unroll), state)
    state = turn(jnp.full((), turns * tile.unroll), state, rest)
    for ref, value in zip(final, state[: w.final], strict=True):
        store(ref, value)
