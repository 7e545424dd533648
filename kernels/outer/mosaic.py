"""A pass over the trace on a TPU.

Outputs are on lanes and inputs on sublanes, as XLA stores ``(B, G, I, O)``, so nothing is moved. A
grid cell owns a tile of the planes of a group; the tiles of the batch come one after the other, so
that the gradient of a tile of weights stays in VMEM while it is summed. The chunks of a window come
innermost, with the new planes in scratch between them. What lies past an edge is read as it comes:
it is left out of every sum, and never written.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..planes import add
from ..rounding import stochastic
from .passes import Arrays, Blocks, Pass, call_arguments, dot

__all__ = ['Tile', 'choose_tile', 'launch', 'supports', 'vmem_bytes']

SUBLANES, LANES = 8, 128
VMEM = 13 * 2**20  # of 16 MiB; up to 2 go to what the compiler cannot keep in registers
SIDES = (256, 256), (128, 256), (128, 128)
STEPS, LEAST_STEPS = 64, 8


class Tile(NamedTuple):
    """What a grid cell works on."""

    batch: int
    inputs: int
    outputs: int
    steps: int


def choose_tile(todo: Pass) -> Tile:
    """As many examples as sublanes, the largest sides that fit, then as many steps as do.

    Larger sides load the steps of a window less often; a single step gains nothing from them.
    """

    def tile(sides: tuple[int, int], steps: int) -> Tile:
        inputs, outputs = sides
        return Tile(
            min(todo.batch, SUBLANES),
            min(todo.inputs, inputs),
            min(todo.outputs, outputs),
            min(todo.steps, steps),
        )

    choices = [tile(sides, STEPS) for sides in SIDES] if todo.window else []
    steps = STEPS
    while steps >= LEAST_STEPS:
        choices.append(tile(SIDES[-1], steps))
        steps //= 2
    fitting = (choice for choice in choices if vmem_bytes(todo, choice) <= VMEM)
    return next(fitting, choices[-1])


def vmem_bytes(todo: Pass, tile: Tile) -> int:
    """Two buffers for each block, padded to whole tiles, and the scratch."""

    def block(dtype: Any, *shape: int) -> int:
        *lead, rows, lanes = shape
        packed = 32 // dtype.itemsize
        padded = pl.cdiv(rows, packed) * packed * pl.cdiv(lanes, LANES) * LANES
        return math.prod(lead) * padded * dtype.itemsize

    given, float32 = todo.arrays, jnp.dtype('float32')
    plane, steps = (tile.batch, tile.inputs, tile.outputs), (tile.steps, tile.batch)
    blocks = [block(t, *plane) for t in todo.written.values()]
    blocks += [block(a.dtype, *plane) for a in given.trace.values()]
    blocks += [
        block(a.dtype, tile.batch, tile.outputs)
        for a in (*given.decay.values(), *given.signal.values())
    ]
    multiplied = [*given.fresh.values(), *([] if given.w is None else [given.w])]
    blocks += [block(a.dtype, *steps, tile.outputs) for a in multiplied]
    blocks += [block(given.x.dtype, *steps, tile.inputs)] if multiplied else []
    total = 0 if todo.read is None else block(float32, tile.inputs, tile.outputs)
    sums = len(_narrow(todo)) * block(float32, *plane)
    drawn = 0 if given.keys is None else sums  # random bits, which registers do not hold
    return 2 * sum(blocks) + sums + drawn + 3 * total


def _narrow(todo: Pass) -> list[int]:
    """The planes that cannot be summed up where they are stored, chunk by chunk."""
    return [s for s, dtype in todo.written.items() if todo.window and dtype != jnp.float32]


def supports(todo: Pass) -> str | None:
    """Why there is no kernel for this pass, or None."""
    size = vmem_bytes(todo, choose_tile(todo))
    return f'a tile takes {size} bytes of VMEM, and {VMEM} are free' if size > VMEM else None


def launch(todo: Pass, *, name: str, interpret: Any = False) -> tuple[dict[int, jax.Array], Any]:
    """The new planes, and what the signal reads, by a Mosaic kernel."""
    tile = choose_tile(todo)
    row = pl.BlockSpec((None, tile.batch, tile.outputs), lambda g, o, i, b, c: (g, b, o))
    rows = row
    columns = pl.BlockSpec((None, tile.batch, tile.inputs), lambda g, o, i, b, c: (g, b, i))
    if todo.window:
        block = (tile.steps, None, tile.batch)
        rows = pl.BlockSpec((*block, tile.outputs), lambda g, o, i, b, c: (c, g, b, o))
        columns = pl.BlockSpec((*block, tile.inputs), lambda g, o, i, b, c: (c, g, b, i))
    sides = (None, tile.inputs, tile.outputs)
    blocks = Blocks(
        row,
        rows,
        columns,
        pl.BlockSpec((tile.batch, *sides), lambda g, o, i, b, c: (b, g, i, o)),
        pl.BlockSpec(sides, lambda g, o, i, b, c: (g, i, o)),
        number=lambda a: pl.BlockSpec(memory_space=pltpu.SMEM),
    )
    arrays = _groups_in_front(todo.arrays)
    if arrays.live is not None:  # a kernel cannot read a flag
        arrays = arrays._replace(live=arrays.live.astype(jnp.float32))
    sums = pltpu.VMEM((tile.batch, tile.inputs, tile.outputs), jnp.float32)
    total = pltpu.VMEM((tile.inputs, tile.outputs), jnp.float32) if arrays.signal else None
    scratch: Any = [dict.fromkeys(_narrow(todo), sums), total]
    new, read = pl.pallas_call(
        lambda *refs: _kernel(todo, tile, Arrays(*refs[:-4]), *refs[-4:]),
        name=name,
        grid=(
            todo.groups,
            pl.cdiv(todo.outputs, tile.outputs),
            pl.cdiv(todo.inputs, tile.inputs),
            pl.cdiv(todo.batch, tile.batch),
            pl.cdiv(todo.steps, tile.steps),
        ),
        **call_arguments(todo, arrays, blocks),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'parallel', 'arbitrary', 'arbitrary')
        ),
        interpret=interpret,
    )(*arrays)
    return new, read


def _groups_in_front(arrays: Arrays) -> Arrays:
    """All but the trace with groups in front of the batch, which must be on sublanes."""

    def moved(a: Any) -> Any:
        *time, batch, groups, size = a.shape
        return a.reshape(*time, 1, batch, size) if groups == 1 else a.swapaxes(-3, -2)

    names = ('x', 'decay', 'fresh', 'signal', 'w')
    return arrays._replace(**{k: jax.tree.map(moved, getattr(arrays, k)) for k in names})


class _Cell(NamedTuple):
    """What a grid cell works on.

    ``group``, ``outputs``, ``inputs`` and ``examples`` are its place in the grid, ``first`` is the
    number of its first example; ``new`` are the planes that it writes, ``narrow`` are sums in
    scratch of those that cannot be summed up in place, and ``total`` is the gradient so far.
    """

    todo: Pass
    tile: Tile
    refs: Arrays
    new: dict[int, Any]
    narrow: dict[int, Any]
    total: Any
    group: Any
    outputs: Any
    inputs: Any
    examples: Any
    first: Any

    def inside(self, b: int) -> Any:
        """Whether there is an example ``b`` in this tile of the batch."""
        return self.todo.batch % self.tile.batch == 0 or self.first + b < self.todo.batch


def _kernel(
    todo: Pass,
    tile: Tile,
    refs: Arrays,
    new: dict[int, Any],
    read: Any,
    narrow: dict[int, Any],
    total: Any,
) -> None:
    group, outputs, inputs, examples, chunk = map(pl.program_id, range(5))
    first = examples * tile.batch
    cell = _Cell(todo, tile, refs, new, narrow, total, group, outputs, inputs, examples, first)

    def leave() -> None:
        read[...] = total[...].astype(read.dtype)

    is_last = first + tile.batch >= todo.batch
    if not todo.window:
        _enter(cell)
        if refs.signal:
            pl.when(is_last)(leave)
        return
    pl.when(chunk == 0)(partial(_enter, cell))
    left = todo.steps - chunk * tile.steps
    _add_steps(cell, left)
    if refs.signal:
        pl.when(is_last & (left <= tile.steps))(leave)

    @pl.when(left <= tile.steps)
    def _() -> None:
        for s, ref in narrow.items():
            for b in range(tile.batch):
                _store(cell, s, b, ref[b])


def _enter(cell: _Cell) -> None:
    """Read the old planes, example by example, and decay them; of a single step, add it too."""
    refs, window = cell.refs, cell.todo.window
    decay, signal = jax.tree.map(_load, (refs.decay, refs.signal))
    live = True if refs.live is None else refs.live[0, 0] != 0
    if refs.x is not None and not window:
        columns = _load(refs.x).T
        fresh, w = jax.tree.map(_load, (refs.fresh, refs.w))
    zero = jnp.zeros((cell.tile.inputs, cell.tile.outputs), jnp.float32)
    gradient, sums = zero, cell.new | cell.narrow
    for b in range(cell.tile.batch):
        here = slice(b, b + 1)
        old = {q: _if(live, ref[b].astype(jnp.float32)) for q, ref in refs.trace.items()}
        part = add(plane[here] * old[q] for q, plane in signal.items())
        if refs.w is not None and not window:
            part = add([part, columns[:, here] * w[here]])
        if part is not None:
            gradient += _if(cell.inside(b), part)
        for s in cell.new:
            value = add(plane[here] * old[q] for (p, q), plane in decay.items() if p == s)
            if window:
                sums[s][b] = zero if value is None else value
            elif s in refs.fresh:
                _store(cell, s, b, add([value, columns[:, here] * fresh[s][here]]))
            else:
                _store(cell, s, b, value)
    if refs.signal:
        cell.total[...] = gradient + _if(cell.examples > 0, cell.total[...])


def _add_steps(cell: _Cell, left: Any) -> None:
    """Add the products of a chunk of steps, of which ``left`` are in the window."""
    refs, todo, sums = cell.refs, cell.todo, cell.new | cell.narrow

    def steps_of(ref: Any, b: int) -> jax.Array:
        value = ref[:, b, :]
        step = lax.broadcasted_iota(jnp.int32, value.shape, 0)
        return _if(todo.steps % cell.tile.steps == 0 or step < left, value)

    for b in range(cell.tile.batch):
        if refs.x is not None:
            x = steps_of(refs.x, b)
        for s, ref in refs.fresh.items():
            sums[s][b] += dot(x, steps_of(ref, b))
        if refs.w is not None:
            cell.total[...] += _if(cell.inside(b), dot(x, steps_of(refs.w, b)))


def _load(ref: Any) -> jax.Array:
    return ref[...].astype(jnp.float32)


def _store(cell: _Cell, s: int, b: int, value: Any) -> None:
    """Write an example of a plane, rounded stochastically if there are keys."""
    ref, keys = cell.new[s], cell.refs.keys
    if keys is not None and ref.dtype == jnp.bfloat16:
        value = stochastic(value, keys[0, s], _places(cell, b))
    ref[b] = value.astype(ref.dtype)


def _if(inside: Any, value: jax.Array) -> jax.Array:
    return value if inside is True else jnp.where(inside, value, jnp.zeros_like(value))


def _places(cell: _Cell, b: int) -> jax.Array:
    """Where the elements of the tile of example ``b`` are in their plane."""
    todo, tile = cell.todo, cell.tile
    block = (cell.first + b) * todo.groups + cell.group
    shape = (tile.inputs, tile.outputs)
    i = cell.inputs * tile.inputs + lax.broadcasted_iota(jnp.int32, shape, 0)
    o = cell.outputs * tile.outputs + lax.broadcasted_iota(jnp.int32, shape, 1)
    return ((block * todo.inputs + i) * todo.outputs + o).astype(jnp.uint32)
