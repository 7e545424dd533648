"""The scan on a TPU, with the state in VMEM.

The last axis of the positions is on lanes and the one before it on sublanes, as XLA stores them, so
nothing is moved: arrays are ``(steps, lead, rows, lanes)``. With one axis of positions or none they
are ``(steps, lanes)``, and the steps are on sublanes. A grid cell owns a tile of rows and lanes and
the chunks of ``tile.steps`` steps come one after the other along the last axis of the grid, with
the state in scratch between them. What lies past an edge is read as it comes and never written:
no position reads another.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._pallas import result, split
from .window import Scan, Window, reason, window

__all__ = ['Tile', 'choose_tile', 'chunk_bytes', 'loop_bytes', 'run', 'supports', 'vmem_bytes']

LANES = 128
REGISTERS = 64
BUFFERS = 8 * 2**20  # of the 16 MiB of VMEM, what a chunk may take
PLANES = 256  # a chunk of one step of them fits


class Tile(NamedTuple):
    """How a window is cut."""

    steps: int
    rows: int
    lanes: int


def _rows_per_tile(w: Window) -> int:
    """Sublanes of a tile in memory: those of the narrowest operand."""
    return max(32 // a.dtype.itemsize for a in (*w.xs, *w.arrays))


def _by_row(w: Window) -> bool:
    """Whether the steps, and not positions, are on sublanes."""
    return len(w.shape) < 2


def choose_tile(w: Window) -> Tile:
    """As many lanes as keep a step in registers, and as many steps as fit into the buffers."""
    packed = _rows_per_tile(w)
    lanes = min(w.shape[-1] if w.shape else 1, LANES * max(1, min(8, REGISTERS // w.live)))
    rows = 1 if _by_row(w) else min(w.shape[-2], packed)
    least = packed if _by_row(w) else 1
    most = BUFFERS // chunk_bytes(w, Tile(least, rows, lanes)) * least
    chunks = pl.cdiv(w.steps, max(least, most))
    steps = pl.cdiv(w.steps, chunks)
    return Tile(steps if chunks == 1 else pl.cdiv(steps, least) * least, rows, lanes)


def chunk_bytes(w: Window, tile: Tile) -> int:
    """Two buffers for each block of a chunk, padded to whole tiles."""
    rows = tile.steps if _by_row(w) else tile.steps * _rows_per_tile(w)
    bytes_per_position = sum(x.dtype.itemsize for x in w.xs) + w.ys * w.dtype.itemsize
    return 2 * bytes_per_position * rows * pl.cdiv(tile.lanes, LANES) * LANES


def vmem_bytes(w: Window, tile: Tile) -> int:
    """What a grid cell holds at most: the chunk, the state, two buffers for its start and end."""
    plane = 4 * _rows_per_tile(w) * pl.cdiv(tile.lanes, LANES) * LANES
    return chunk_bytes(w, tile) + plane * (len(w.starts) + 2 * len(w.arrays) + 2 * w.final)


def loop_bytes(w: Window) -> int:
    """The state and the results of all steps, padded to whole tiles: what XLA's loop writes."""
    *lead, rows, lanes = (1, w.steps, *w.shape)
    packed = 32 // w.dtype.itemsize
    padded = math.prod(lead) * pl.cdiv(rows, packed) * packed * pl.cdiv(lanes, LANES) * LANES
    return w.dtype.itemsize * padded * (w.ys * w.steps + len(w.starts)) // w.steps


def supports(scan: Scan) -> str | None:
    """Why there is no kernel for this scan, or None."""
    return reason(scan, PLANES)


def run(scan: Scan, *, interpret: Any = False) -> tuple[Any, Any]:
    """What ``lax.scan`` gives, by a Mosaic kernel."""
    w = window(scan)
    tile = choose_tile(w)
    grid, (edge_shape, edge), (window_shape, chunk) = _layout(w, tile, scan.reverse)
    arrays = w.arrays
    operands = [a.reshape(edge_shape) for a in arrays] + [x.reshape(window_shape) for x in w.xs]
    results = pl.pallas_call(
        lambda *refs: _kernel(w, tile, scan.reverse, refs),
        name=scan.name,
        grid=grid,
        in_specs=[edge] * len(arrays) + [chunk] * len(w.xs),
        out_specs=[edge] * w.final + [chunk] * w.ys,
        out_shape=[result(edge_shape, scan.dtype, operands)] * w.final
        + [result(window_shape, scan.dtype, operands)] * w.ys,
        scratch_shapes=[pltpu.VMEM((tile.rows, tile.lanes), jnp.float32)] * len(w.starts),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'parallel', 'arbitrary')
        ),
        interpret=interpret,
    )(*operands)
    ends, ys = results[: w.final], results[w.final :]
    return w.unflatten(
        [a.reshape(w.shape) for a in ends] + [a.reshape(w.steps, *w.shape) for a in ys]
    )


def _layout(
    w: Window, tile: Tile, reverse: bool
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], Any], tuple[tuple[int, ...], Any]]:
    """The grid; of what is there once and of what is there per step, the shape and the blocks."""
    chunks = pl.cdiv(w.steps, tile.steps)

    def at(chunk: Any) -> Any:
        return chunks - 1 - chunk if reverse else chunk

    *leading, rows, lanes = (1, 1, *w.shape)[-max(2, len(w.shape)) :]
    lead = math.prod(leading)
    grid = (lead, pl.cdiv(rows, tile.rows), pl.cdiv(lanes, tile.lanes), chunks)
    if _by_row(w):
        edge = pl.BlockSpec((1, tile.lanes), lambda a, i, j, c: (0, j))
        chunk = pl.BlockSpec((tile.steps, tile.lanes), lambda a, i, j, c: (at(c), j))
        return grid, ((1, lanes), edge), ((w.steps, lanes), chunk)
    edge = pl.BlockSpec((None, tile.rows, tile.lanes), lambda a, i, j, c: (a, i, j))
    chunk = pl.BlockSpec(
        (tile.steps, None, tile.rows, tile.lanes), lambda a, i, j, c: (at(c), a, i, j)
    )
    return grid, ((lead, rows, lanes), edge), ((w.steps, lead, rows, lanes), chunk)


def _kernel(w: Window, tile: Tile, reverse: bool, refs: tuple[Any, ...]) -> None:
    starts, xs, final, ys, scratch = split(refs, len(w.arrays), len(w.xs), w.final, w.ys)
    chunk, last = pl.program_id(3), pl.num_programs(3) - 1

    @pl.when(chunk == 0)
    def _() -> None:
        given = iter(starts)
        for ref, start in zip(scratch, w.starts, strict=True):
            if isinstance(start, float):
                ref[...] = jnp.full(ref.shape, start, ref.dtype)
            else:
                ref[...] = next(given)[...].astype(ref.dtype)

    first = (last - chunk if reverse else chunk) * tile.steps
    walk = _walk_rows if _by_row(w) else _walk_planes
    state = walk(w, tile, reverse, w.steps - first, xs, ys, [ref[...] for ref in scratch])
    for ref, value in zip(scratch, state, strict=True):
        ref[...] = value

    @pl.when(chunk == last)
    def _() -> None:
        for ref, value in zip(final, state[: w.final], strict=True):
            ref[...] = value.astype(ref.dtype)


def _walk_planes(
    w: Window, tile: Tile, reverse: bool, left: Any, xs: Any, ys: Any, state: list[jax.Array]
) -> list[jax.Array]:
    """The steps of a chunk of ``(steps, rows, lanes)``, of which ``left`` are in the window."""
    count = jnp.minimum(left, tile.steps) if w.steps % tile.steps else np.int32(tile.steps)

    def step(i: Any, state: list[jax.Array]) -> list[jax.Array]:
        t = count - 1 - i if reverse else i
        state, y = w.body(state, [ref[t].astype(jnp.float32) for ref in xs])
        for ref, value in zip(ys, y, strict=True):
            ref[t] = value.astype(ref.dtype)
        return state

    return lax.fori_loop(np.int32(0), count, step, state)


def _walk_rows(
    w: Window, tile: Tile, reverse: bool, left: Any, xs: Any, ys: Any, state: list[jax.Array]
) -> list[jax.Array]:
    """The steps of a chunk of ``(steps, lanes)``, read and written in whole tiles of rows."""
    packed = _rows_per_tile(w)
    full, rest = divmod(tile.steps, packed)
    ragged = w.steps % tile.steps != 0

    def group(first: Any, count: int, state: list[jax.Array]) -> list[jax.Array]:
        rows = pl.ds(first, count)
        steps = [ref[rows, :].astype(jnp.float32) for ref in xs]
        outputs: list[Any] = [None] * count
        for j in reversed(range(count)) if reverse else range(count):
            new, outputs[j] = w.body(state, [step[j : j + 1] for step in steps])
            if ragged:
                new = [jnp.where(first + j < left, n, s) for n, s in zip(new, state, strict=True)]
            state = new
        for ref, *column in zip(ys, *outputs, strict=True):
            ref[rows, :] = jnp.concatenate(column, axis=0).astype(ref.dtype)
        return state

    def walk(i: Any, state: list[jax.Array]) -> list[jax.Array]:
        first = (full - 1 - i if reverse else i) * packed
        return group(pl.multiple_of(first, packed), packed, state)

    if rest and reverse:
        state = group(full * packed, rest, state)
    if full:
        state = lax.fori_loop(np.int32(0), np.int32(full), walk, state)
    if rest and not reverse:
        state = group(full * packed, rest, state)
    return state
