"""A pass over the trace on a GPU.

A program owns a tile of inputs and outputs of a group, ``(tile.inputs, tile.outputs)`` of the
``(B, G, I, O)`` of every plane, and walks the batch: so the gradient of the tile is summed in
registers, and nobody else touches what the program overwrites. All old planes of an example are
loaded before any new one is stored. What lies past an edge loads as zero and is not stored.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..planes import add
from ..rounding import stochastic
from .passes import Arrays, Blocks, Pass, call_arguments, dot

__all__ = [
    'GRADIENT',
    'Tile',
    'choose_tile',
    'decayed',
    'launch',
    'load',
    'multiplied',
    'rounded',
    'supports',
]

GRADIENT = -1  # beside the numbers of the planes
ROWS = 49  # of planes that a thread may hold at once; S x S, 2 S and one of them for S = 6


class Tile(NamedTuple):
    """What a program owns, and how many steps of a window it takes at a time."""

    inputs: int
    outputs: int
    steps: int
    num_warps: int


def choose_tile(todo: Pass) -> Tile:
    """What fits into registers: less per thread for more planes, square for a product of matrices.

    No side of a dot may be below 16.
    """
    few = len(todo.written) <= (1 if todo.window else 2)
    if todo.window:
        converts = any(dtype != jnp.float32 for dtype in todo.written.values())
        many = converts and len(todo.written) > 5
        # Loads of four elements at once take fewer addresses.
        many |= todo.outputs % 4 != 0 and len(todo.written) > 1
        least, most, num_warps = 16, (16 if many else 32, 64 if few else 32), 8
    else:
        light = few and todo.arrays.keys is None  # drawing random bits takes registers too
        least, most, num_warps = 1, (16 if few else 8, 64), 4 if light else 8
    inputs, outputs = (
        min(limit, max(least, pl.next_power_of_2(size)))
        for limit, size in zip(most, (todo.inputs, todo.outputs), strict=True)
    )
    return Tile(inputs, outputs, 16, num_warps)


def supports(todo: Pass) -> str | None:
    """Why there is no kernel for this pass, or None."""
    given = todo.arrays
    rows = len(given.decay) + len(given.fresh) + len(given.signal) + (given.w is not None)
    if rows > ROWS:
        return f'it takes {rows} planes per tile, and registers hold {ROWS}'
    plane = todo.batch * math.prod(todo.weights)
    size = max(plane, *(a.size for a in jax.tree.leaves(given)))
    return f'an operand has {size} elements, and offsets have 32 bits' if size >= 2**31 else None


def launch(todo: Pass, *, name: str, interpret: bool = False) -> tuple[dict[int, jax.Array], Any]:
    """The new planes, and what the signal reads, by a Triton kernel."""
    tile, batch = choose_tile(todo), todo.batch
    time = (todo.steps,) if todo.window else ()
    tiles = pl.cdiv(todo.inputs, tile.inputs)
    at = partial(_place, todo, tiles)

    zeros = (0,) * (len(time) + 1)
    blocks = Blocks(
        row=pl.BlockSpec((batch, None, tile.outputs), lambda i, o: (0, at(i)[0], o)),
        rows=pl.BlockSpec((*time, batch, None, tile.outputs), lambda i, o: (*zeros, at(i)[0], o)),
        columns=pl.BlockSpec((*time, batch, None, tile.inputs), lambda i, o: (*zeros, *at(i))),
        plane=pl.BlockSpec((batch, None, tile.inputs, tile.outputs), lambda i, o: (0, *at(i), o)),
        weights=pl.BlockSpec((None, tile.inputs, tile.outputs), lambda i, o: (*at(i), o)),
        number=lambda a: pl.BlockSpec(a.shape, lambda i, o: (0, 0)),
    )
    new, read = pl.pallas_call(
        lambda *refs: _kernel(todo, tile, Arrays(*refs[:-2]), *refs[-2:]),
        name=name,
        # One axis for groups and tiles of inputs: a third is left for vmap.
        grid=(todo.groups * tiles, pl.cdiv(todo.outputs, tile.outputs)),
        **call_arguments(todo, todo.arrays, blocks),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
    )(*todo.arrays)
    return new, read


def _place(todo: Pass, tiles: int, program: Any) -> tuple[Any, Any]:
    """The group of a program, and the place of its tile among those of the inputs."""
    return (0, program) if todo.groups == 1 else (program // tiles, program % tiles)


class _Program(NamedTuple):
    """What a program works on: ``i`` and ``o`` number the inputs and outputs of its tile."""

    todo: Pass
    tile: Tile
    refs: Arrays
    i: jax.Array
    o: jax.Array

    def row(self, ref: Any, b: Any) -> jax.Array:
        """The tile of a plane at example ``b``."""
        return load(ref.at[b], self.o < self.todo.outputs)[None, :]


def load(ref: Any, mask: jax.Array) -> jax.Array:
    """What a reference holds where a mask is set, in float32; zero elsewhere."""
    return plgpu.load(ref, mask=mask, other=0.0).astype(jnp.float32)


def multiplied(refs: Arrays) -> dict[int, Any]:
    """What is multiplied by the input, by plane."""
    return refs.fresh if refs.w is None else {**refs.fresh, GRADIENT: refs.w}


def decayed(
    refs: Arrays,
    new: dict[int, Any],
    total: Any,
    old: dict[int, jax.Array],
    row: Callable[[Any], jax.Array],
) -> dict[int, Any]:
    """The sums of decayed planes, and ``total`` with what is read of the old ones.

    ``row`` loads what multiplies a tile of them.
    """
    for q, ref in refs.signal.items():
        total = total + row(ref) * old[q]
    planes: dict[int, Any] = {
        s: add(row(ref) * old[q] for (p, q), ref in refs.decay.items() if p == s) for s in new
    }
    return planes | {GRADIENT: total}


def rounded(refs: Arrays, s: int, value: jax.Array, dtype: Any, place: Callable[[], Any]) -> Any:
    """A plane's values as they are stored; ``place`` numbers them for stochastic rounding."""
    if refs.keys is None or dtype != jnp.bfloat16:
        return value.astype(dtype)
    return stochastic(value, refs.keys[0, s], place().astype(jnp.uint32))


def _kernel(todo: Pass, tile: Tile, refs: Arrays, new: dict[int, Any], read: Any) -> None:
    group, first = _place(todo, pl.cdiv(todo.inputs, tile.inputs), pl.program_id(0))
    i = first * tile.inputs + lax.iota(jnp.int32, tile.inputs)
    o = pl.program_id(1) * tile.outputs + lax.iota(jnp.int32, tile.outputs)
    both = (i < todo.inputs)[:, None] & (o < todo.outputs)[None, :]
    # What is not live is not loaded: a product would keep its NaNs.
    live = both if refs.live is None else both & refs.live[0, 0]
    program = _Program(todo, tile, refs, i, o)

    def example(b: Any, total: Any) -> Any:
        def place() -> jax.Array:
            row = (b * todo.groups + group) * todo.inputs + i[:, None]
            return row * todo.outputs + o[None, :]

        old = {q: load(ref.at[b], live) for q, ref in refs.trace.items()}
        planes = decayed(refs, new, total, old, lambda ref: program.row(ref, b))
        if products := multiplied(refs):
            planes |= (_add_window if todo.window else _add_step)(program, products, b, planes)
        for s, ref in new.items():
            value = rounded(refs, s, planes[s], ref.dtype, place)
            plgpu.store(ref.at[b], value, mask=both)
        return planes[GRADIENT]

    start = jnp.zeros(both.shape, jnp.float32) if refs.signal else None
    total = lax.fori_loop(0, todo.batch, example, start)
    if refs.signal:
        plgpu.store(read, total.astype(read.dtype), mask=both)


def _add_step(
    program: _Program, multiplied: dict[int, Any], b: Any, planes: dict[int, Any]
) -> dict[int, Any]:
    """Add ``f[s] (x) x``."""
    x = load(program.refs.x.at[b], program.i < program.todo.inputs)[:, None]
    return {s: add([planes[s], x * program.row(ref, b)]) for s, ref in multiplied.items()}


def _add_window(
    program: _Program, multiplied: dict[int, Any], b: Any, planes: dict[int, Any]
) -> dict[int, Any]:
    """Add ``sum_t u_t[s] (x) x_t``, some steps at a time."""
    todo, tile = program.todo, program.tile

    def chunk(c: Any, sums: dict[int, jax.Array]) -> dict[int, jax.Array]:
        steps = pl.ds(c * tile.steps, tile.steps)
        inside = (c * tile.steps + lax.iota(jnp.int32, tile.steps) < todo.steps)[:, None]
        mask = inside & (program.i < todo.inputs)[None, :]
        x = plgpu.load(program.refs.x.at[steps, b], mask=mask, other=0.0)
        mask = inside & (program.o < todo.outputs)[None, :]
        return {
            s: sums[s] + dot(x, plgpu.load(ref.at[steps, b], mask=mask, other=0.0))
            for s, ref in multiplied.items()
        }

    zero = jnp.zeros((tile.inputs, tile.outputs), jnp.float32)
    sums = {s: zero if planes[s] is None else planes[s] for s in multiplied}
    return lax.fori_loop(0, pl.cdiv(todo.steps, tile.steps), chunk, sums)
