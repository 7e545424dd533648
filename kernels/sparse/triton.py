"""A pass over the trace of a sparse weight on a GPU.

A program owns a block of entries, ``tile.entries`` of the ``(B, N)`` of every plane, and walks the
batch, ``tile.examples`` at a time: so the gradient of its entries is summed in registers, nobody
else touches what it overwrites, and there are no atomics. It loads the rows and columns of its
entries once. Inputs and planes are gathered from copies with the examples last, ``(I, K B)`` and
``(O, K B)``: what an entry takes of them is in one piece. All old planes of a tile are loaded
before any new one is stored. What lies past an edge loads as zero and is not stored.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..outer.passes import Arrays, Blocks, Pass, call_arguments
from ..outer.triton import GRADIENT, decayed, load, multiplied, rounded, supports

__all__ = ['Tile', 'choose_tile', 'launch', 'supports']


class Tile(NamedTuple):
    """The entries that a program owns, and what it takes at a time of the batch and a window."""

    entries: int
    examples: int
    steps: int
    num_warps: int


def choose_tile(todo: Pass) -> Tile:
    """What fits into registers: less per thread for more planes.

    Four numbers of a gathered row come in one load: examples or, of a smaller batch, steps.
    """
    (entries,) = todo.weights
    examples = min(16, pl.next_power_of_2(todo.batch))
    steps = min(max(1, 4 // examples), pl.next_power_of_2(todo.steps))
    size = 1024 if len(todo.written) <= 2 else 512
    most = min(256, size // (examples * steps))
    return Tile(min(most, pl.next_power_of_2(entries)), examples, steps, 4)


def launch(todo: Pass, *, name: str, interpret: bool = False) -> tuple[dict[int, jax.Array], Any]:
    """The new planes, and what the signal reads, by a Triton kernel."""
    tile, (entries,) = choose_tile(todo), todo.weights
    arrays = _examples_last(todo.arrays)

    def whole(a: Any) -> Any:
        return pl.BlockSpec(a.shape, lambda i: (0, 0))

    block = pl.BlockSpec((tile.entries,), lambda i: (i,))
    columns = todo.steps * todo.batch
    blocks = Blocks(
        row=pl.BlockSpec((todo.outputs, todo.batch), lambda i: (0, 0)),
        rows=pl.BlockSpec((todo.outputs, columns), lambda i: (0, 0)),
        columns=pl.BlockSpec((todo.inputs, columns), lambda i: (0, 0)),
        plane=pl.BlockSpec((todo.batch, tile.entries), lambda i: (0, i)),
        weights=block,
        number=whole,
        places=block,
    )
    new, read = pl.pallas_call(
        lambda *refs: _kernel(todo, tile, Arrays(*refs[:-2]), *refs[-2:]),
        name=name,
        grid=(pl.cdiv(entries, tile.entries),),
        **call_arguments(todo, arrays, blocks),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
    )(*arrays)
    return new, read


def _examples_last(arrays: Arrays) -> Arrays:
    """All but the trace with steps and examples as one axis, the last."""
    names = ('x', 'decay', 'fresh', 'signal', 'w')
    moved = {k: jax.tree.map(_transposed, getattr(arrays, k)) for k in names}
    return arrays._replace(**moved)


def _transposed(a: jax.Array) -> jax.Array:
    return a.reshape(-1, a.shape[-1]).T


class _Program(NamedTuple):
    """What a program works on: entries ``p`` in rows and columns, those in ``inside`` are there."""

    todo: Pass
    tile: Tile
    refs: Arrays
    p: jax.Array
    rows: Any
    cols: Any
    inside: jax.Array


def _kernel(todo: Pass, tile: Tile, refs: Arrays, new: dict[int, Any], read: Any) -> None:
    p = pl.program_id(0) * tile.entries + lax.iota(jnp.int32, tile.entries)
    inside = p < todo.weights[0]
    rows, cols = (
        None if ref is None else plgpu.load(ref, mask=inside, other=0)
        for ref in (refs.rows, refs.cols)
    )
    program = _Program(todo, tile, refs, p, rows, cols, inside)
    start = jnp.zeros((tile.examples, tile.entries), jnp.float32) if refs.signal else None
    total = lax.fori_loop(
        0,
        pl.cdiv(todo.batch, tile.examples),
        lambda c, total: _add_examples(program, new, c * tile.examples, total),
        start,
    )
    if refs.signal:
        plgpu.store(read, total.sum(0).astype(read.dtype), mask=inside)


def _add_examples(program: _Program, new: dict[int, Any], first: Any, total: Any) -> Any:
    """Advance the planes of a tile of the batch, and add what is read of them to ``total``."""
    todo, tile, refs, p, _, cols, inside = program
    b = first + lax.iota(jnp.int32, tile.examples)
    some = pl.ds(first, tile.examples)
    both = (b < todo.batch)[:, None] & inside[None, :]
    # What is not live is not loaded: a product would keep its NaNs.
    live = both if refs.live is None else both & refs.live[0, 0]

    def place() -> jax.Array:
        return b[:, None] * todo.weights[0] + p[None, :]

    old = {q: load(ref.at[some], live) for q, ref in refs.trace.items()}
    planes = decayed(
        refs, new, total, old, lambda ref: load(ref.at[cols[None, :], b[:, None]], both)
    )
    if products := multiplied(refs):
        planes |= _add_steps(program, products, b, both, planes)
    for s, ref in new.items():
        plgpu.store(ref.at[some], rounded(refs, s, planes[s], ref.dtype, place), mask=both)
    return planes[GRADIENT]


def _add_steps(
    program: _Program,
    products: dict[int, Any],
    b: jax.Array,
    both: jax.Array,
    planes: dict[int, Any],
) -> dict[int, Any]:
    """Add ``sum_t u_t[s][col p] x_t[row p]``, some steps at a time; of one step, ``f[s]``."""
    todo, tile, refs, _, rows, cols, _ = program

    def chunk(c: Any, sums: dict[int, jax.Array]) -> dict[int, jax.Array]:
        t = c * tile.steps + lax.iota(jnp.int32, tile.steps)
        mask = (t < todo.steps)[:, None, None] & both[None]
        at = (t[:, None] * todo.batch + b[None, :])[:, :, None]
        x = load(refs.x.at[rows[None, None, :], at], mask)
        return {
            s: sums[s] + _sum_steps(x * load(ref.at[cols[None, None, :], at], mask))
            for s, ref in products.items()
        }

    zero = jnp.zeros(both.shape, jnp.float32)
    sums = {s: zero if planes[s] is None else planes[s] for s in products}
    return lax.fori_loop(0, pl.cdiv(todo.steps, tile.steps), chunk, sums)


def _sum_steps(a: jax.Array) -> jax.Array:
    return a.reshape(a.shape[1:]) if len(a) == 1 else a.sum(0)
