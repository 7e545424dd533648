"""Run the Triton programs of a function on the CPU, in random order, and watch their memory.

A GPU runs the programs of a kernel in any order and side by side, and checks no address. So here:

- an access outside of its array is an error;
- an element that one program writes and another one touches is an error;
- lanes that a mask switches off load NaN unless the program says what, and results start as NaN;
- the bytes that are loaded and stored are counted.

Programs are run one after the other: a race within a program is not seen, and of the rounding of a
GPU only the formats are known, not how its units and library round.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .triton_ir import Block, Launch, Operation, launches, parse
from .triton_ops import apply

__all__ = ['MemoryFault', 'Traffic', 'emulate']

NOBODY, MANY = -1, -2


class MemoryFault(Exception):
    """A program touches what is not its own."""


class Traffic(NamedTuple):
    """The bytes that programs move: all that they ask for, and each element once."""

    loaded: int
    stored: int
    unique_loaded: int
    unique_stored: int

    def __add__(self, other: tuple[Any, ...]) -> 'Traffic':
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


class Buffer:
    """An array in the memory of a GPU, and which program has read and written each element."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        flat = np.array(array).reshape(-1)
        signed = {'b': 'i1', 'u': f'i{flat.itemsize}'}.get(flat.dtype.kind)
        self.name = name
        self.values = flat if signed is None else flat.view(signed)
        self.reader = np.full(flat.shape, NOBODY)
        self.writer = np.full(flat.shape, NOBODY)
        self.loaded = self.stored = 0

    def load(self, program: int, places: np.ndarray) -> np.ndarray:
        self._check('reads', places, program, self.writer)
        readers = self.reader[places]
        self.reader[places] = np.where((readers == NOBODY) | (readers == program), program, MANY)
        self.loaded += places.size * self.values.itemsize
        return self.values[places]

    def store(self, program: int, places: np.ndarray, values: np.ndarray) -> None:
        self._check('writes', places, program, self.writer, self.reader)
        if np.unique(places).size != places.size:
            raise MemoryFault(f'program {program} writes an element of {self.name} twice at once')
        self.writer[places] = program
        self.stored += places.size * self.values.itemsize
        self.values[places] = values

    def _check(self, verb: str, places: np.ndarray, program: int, *users: np.ndarray) -> None:
        size = self.values.size
        outside = places[(places < 0) | (places >= size)]
        if outside.size:
            raise MemoryFault(
                f'program {program} {verb} element {outside[0]} of {self.name}, which has {size}'
            )
        for user in users:
            others = user[places][~np.isin(user[places], (NOBODY, program))]
            if others.size:
                whose = 'others have' if others[0] == MANY else f'program {others[0]} has'
                done = 'written' if user is self.writer else 'read'
                raise MemoryFault(
                    f'program {program} {verb} an element of {self.name} that {whose} {done}'
                )

    @property
    def traffic(self) -> Traffic:
        size = self.values.itemsize
        return Traffic(
            self.loaded,
            self.stored,
            size * int(np.sum(self.reader != NOBODY)),
            size * int(np.sum(self.writer != NOBODY)),
        )


class Pointers(NamedTuple):
    """Places in a buffer."""

    buffer: Buffer
    places: Any


def emulate(f: Callable[..., Any], *operands: Any, seed: int = 0) -> tuple[Any, Traffic]:
    """The results of a function of arrays whose kernels are emulated, and what these moved.

    What is around the kernels is done by JAX.

    Parameters
    ----------
    f : callable
        What calls the kernels.
    *operands
        Trees of arrays.
    seed : int
        Of the order of the programs.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax.experimental import pallas as pl
    >>> from jax.experimental.pallas import triton as plgpu
    >>> from accelerators.emulator import emulate
    >>> def add_one(x_ref, y_ref):
    ...     y_ref[...] = x_ref[...] + 1
    >>> def f(x):
    ...     block = pl.BlockSpec((4,), lambda i: (i,))
    ...     return pl.pallas_call(
    ...         add_one,
    ...         grid=(2,),
    ...         in_specs=[block],
    ...         out_specs=block,
    ...         out_shape=x,
    ...         compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
    ...     )(x)
    >>> y, traffic = emulate(f, jnp.arange(8.0))
    >>> y.tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    >>> traffic.loaded, traffic.stored
    (32, 32)
    """
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*operands)
    moved: list[Traffic] = []
    rng = np.random.default_rng(seed)
    leaves = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(operands), rng, moved)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), sum(moved, Traffic(0, 0, 0, 0))


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rng: Any, moved: list[Traffic]
) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, 'val') else values[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get('jaxpr') or eqn.params.get('call_jaxpr')
        if eqn.primitive.name == 'pallas_call':
            bound = partial(eqn.primitive.bind, **eqn.params)
            (launch,) = launches(bound, *given)
            results = _run(launch, given, [v.aval for v in eqn.outvars], rng, moved)
        elif hasattr(inner, 'consts'):
            results = _evaluate(inner.jaxpr, inner.consts, given, rng, moved)
        else:
            results = eqn.primitive.bind(*given, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run(
    launch: Launch, operands: Sequence[Any], results: Sequence[Any], rng: Any, moved: list[Traffic]
) -> list[jax.Array]:
    buffers = [Buffer(f'operand {n}', np.asarray(a)) for n, a in enumerate(operands)]
    written = []
    for n, aval in enumerate(results):
        if n in launch.aliases:
            written.append(buffers[launch.aliases[n]])
        else:
            blank = np.nan if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating) else 0
            written.append(Buffer(f'result {n}', np.full(aval.shape, blank, aval.dtype)))
            buffers.append(written[-1])
    given = [Pointers(b, np.int64(0)) for b in (*buffers[: len(operands)], *written)]
    body = parse(launch.program)
    x, y, z = launch.grid
    with np.errstate(all='ignore'):  # lanes that are switched off hold NaN
        for number in rng.permutation(x * y * z).tolist():
            place = (number % x, number // x % y, number // (x * y))
            Program(number, place).block(body, given, {})
    moved.append(sum((b.traffic for b in buffers), Traffic(0, 0, 0, 0)))
    return [
        jax.numpy.asarray(b.values.view(aval.dtype).reshape(aval.shape))
        for b, aval in zip(written, results, strict=True)
    ]


class Program:
    """One of the programs of a launch, by its number and its place in the grid."""

    def __init__(self, number: int, place: tuple[int, int, int]) -> None:
        self.number = number
        self.place = place

    def block(self, block: Block, arguments: Sequence[Any], values: dict[int, Any]) -> list[Any]:
        """Run a block, which sees the values around it; what it yields."""
        values.update(zip(block.arguments, arguments, strict=True))
        for operation in block.operations:
            given = [values[v] for v in operation.operands]
            if operation.name in ('scf.yield', 'tt.reduce.return', 'tt.return'):
                return given
            results = self.operation(operation, given, values)
            values.update(zip(operation.results, results, strict=True))
        return []

    def operation(
        self, operation: Operation, given: list[Any], values: dict[int, Any]
    ) -> list[Any]:
        match operation.name:
            case 'scf.for':
                first, end, step, *state = given
                for i in range(int(first), int(end), int(step)):
                    counter = np.asarray(i, first.dtype)
                    state = self.block(operation.blocks[0], [counter, *state], values)
                return state
            case 'scf.if':
                taken = operation.blocks[:1] if given[0] else operation.blocks[1:]
                return self.block(taken[0], [], values) if taken else []
            case 'tt.reduce':
                first, *others = np.moveaxis(given[0], operation.attributes['axis'], 0)
                for other in others:
                    (first,) = self.block(operation.blocks[0], [first, other], values)
                return [first]
            case 'tt.load':
                return [self.load(operation, *given)]
            case 'tt.store':
                self.store(*given)
                return []
            case 'tt.addptr':
                return [Pointers(given[0].buffer, given[0].places + given[1].astype(np.int64))]
            case 'tt.get_program_id':
                return [np.int32(self.place[operation.attributes['axis']])]
        if given and isinstance(given[0], Pointers):
            return [Pointers(given[0].buffer, apply(operation, [given[0].places]))]
        return [apply(operation, given)]

    def load(self, operation: Operation, at: Pointers, mask: Any = True, other: Any = None) -> Any:
        blank = other if other is not None else np.nan if operation.dtype.kind in 'fV' else 0
        values = np.array(np.broadcast_to(blank, operation.shape), operation.dtype)
        if operation.used:  # Triton removes a load that nothing uses
            mask = np.broadcast_to(mask, operation.shape)
            values[mask] = at.buffer.load(self.number, np.asarray(at.places)[mask])
        return values

    def store(self, at: Pointers, values: Any, mask: Any = True) -> None:
        places = np.asarray(at.places)
        mask = np.broadcast_to(mask, places.shape)
        at.buffer.store(self.number, places[mask], np.broadcast_to(values, places.shape)[mask])
