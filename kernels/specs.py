"""Operands to try the ops with: one list that tests, compilation and benchmarks share.

A spec describes the operands of an op, and makes them: random arrays from a generator of random
numbers, or the shapes of arrays without one. ``CHECKED`` are interpreted and lowered by tests,
``EMULATED`` run as the emitted program of a GPU, ``COMPILED`` is what ``make accelerators``
compiles, and ``TIMED`` what ``make bench`` measures.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .planes import closure

__all__ = [
    'CHECKED',
    'COMPILED',
    'EMULATED',
    'LARGE',
    'MANY',
    'TIMED',
    'AdjointSpec',
    'FactoredSpec',
    'JacobianSpec',
    'SmoothSpec',
    'SparseSpec',
    'Spec',
    'TraceSpec',
]

LARGE = 512
"""The neurons of a layer whose trace is worth a look at every byte."""

MANY = 64
"""Examples that no chip holds."""

STEPS = 64
Generator = np.random.Generator


@dataclass(frozen=True)
class TraceSpec:
    """The operands of ``trace_step`` or, if there are steps, of ``trace_carry``.

    Attributes
    ----------
    size : int
        The number of planes.
    shape : tuple of int
        That of a plane of the trace, ``(*batch, inputs, outputs)``, or with groups
        ``(*batch, groups, inputs, outputs)``.
    dtype, stored : str
        The types of the operands and of the trace; the same unless it is given.
    steps : int, optional
        The length of a window.
    bias : bool
        Whether there is a bias.
    density : float
        Below one, some planes are absent.
    signal : bool
        Whether the old trace is read.
    rounded : bool
        Whether what is stored is rounded stochastically.
    groups : int
        How many axes (0 or 1) number groups.
    """

    size: int
    shape: tuple[int, ...]
    dtype: str = 'float32'
    stored: str | None = None
    steps: int | None = None
    bias: bool = False
    density: float = 1.0
    signal: bool = True
    rounded: bool = False
    groups: int = 0

    @property
    def op(self) -> str:
        """The name of the op."""
        return 'trace_step' if self.steps is None else 'trace_carry'

    @property
    def trace_shape(self) -> tuple[int, ...]:
        """That of the weight's trace."""
        return self.shape

    def arrays(self, rng: Generator | None = None, *, fractions: bool = False) -> tuple[Any, ...]:
        """``x, D, f, trace, signal``; the first plane of each is there at any density."""
        *lead, inputs, outputs = self.shape
        time = () if self.steps is None else (self.steps,)
        make = _Maker(rng, self.dtype, self.density, fractions)
        stored = make._replace(dtype=self.stored or self.dtype)
        row, rows = (*lead, outputs), (*time, *lead, outputs)

        def trace() -> dict[str, Any]:
            weight = {'weight': stored.plane(*self.trace_shape)}
            return weight | ({'bias': stored.plane(*row)} if self.bias else {})

        D, f, signal = make.nested(row, 2, self.size), make.nested(rows, 1, self.size), None
        e = [trace() if make.is_there() else None for _ in range(self.size)]
        D[0][0], f[0], e[0] = make.plane(*row), make.plane(*rows), trace()
        if self.signal:
            signal = make.nested(row, 1, self.size)
            signal[0] = make.plane(*row)
        return make.plane(*time, *lead, inputs), D, f, e, signal


@dataclass(frozen=True)
class SparseSpec(TraceSpec):
    """The operands of ``sparse_step`` or, if there are steps, of ``sparse_carry``.

    Attributes
    ----------
    entries : int
        How many there are. If there are as many as rows and columns, all of these have some.
    """

    entries: int = 1

    @property
    def op(self) -> str:
        """The name of the op."""
        return 'sparse_step' if self.steps is None else 'sparse_carry'

    @property
    def trace_shape(self) -> tuple[int, ...]:
        """That of the weight's trace."""
        return (*self.shape[:-2], self.entries)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the entries, in order, and their columns, at random; places may repeat."""
        number, rng = np.arange(self.entries, dtype=np.int32), np.random.default_rng(0)
        return np.sort(number % self.shape[-2]), rng.permutation(number % self.shape[-1])


@dataclass(frozen=True)
class _ScanSpec:
    """The planes of a group over a window.

    Attributes
    ----------
    size, steps : int
        The number of states, and the length of the window.
    shape : tuple of int
        The positions.
    dtype : str
        The type of all planes.
    ops : int
        How many ops reach the group.
    density : float
        Below one, some planes are absent.
    """

    size: int
    steps: int
    shape: tuple[int, ...]
    dtype: str = 'float32'
    ops: int = 1
    density: float = 1.0


@dataclass(frozen=True)
class AdjointSpec(_ScanSpec):
    """The operands of ``adjoint_scan``.

    Attributes
    ----------
    within : bool
        Whether all ops read the learning signal within their step; then the loss reads nothing
        else.
    later : bool
        Whether other windows follow.
    """

    within: bool = False
    later: bool = False

    op: ClassVar[str] = 'adjoint_scan'

    def arrays(self, rng: Generator | None = None, *, fractions: bool = False) -> tuple[Any, ...]:
        """``D, f, L, R, c, later, beyond``; the signal of each state is there at any density."""
        make = _Maker(rng, self.dtype, self.density, fractions, scale=0.7)
        every, plane = make._replace(density=1.0), (self.steps, *self.shape)
        D = make.nested(plane, 2, self.size)
        D[0][-1] = make.plane(*plane)
        f = [make.nested(plane, 1, self.size) for _ in range(self.ops)]
        L = every.nested(plane, 1, self.size)
        R, c = None, None
        if not self.within:
            R, c = make.nested(plane, 1, self.size), every.nested(plane, 1, self.ops)
        if not self.later:
            return D, f, L, R, c, None, None
        reached = closure([[plane is not None for plane in row] for row in D])
        beyond = [[make.plane(*self.shape) if there else None for there in row] for row in reached]
        return D, f, L, R, c, make.nested(self.shape, 1, self.size), beyond


@dataclass(frozen=True)
class FactoredSpec(_ScanSpec):
    """The operands of ``factored_trace``."""

    op: ClassVar[str] = 'factored_trace'

    def arrays(self, rng: Generator | None = None, *, fractions: bool = False) -> tuple[Any, ...]:
        """``D, f, start``; the first ``f`` of each op is there at any density."""
        make = _Maker(rng, self.dtype, self.density, fractions)
        plane = (self.steps, *self.shape)
        D = make.nested(plane, 2, self.size)
        f = [[make.plane(*plane), *make.nested(plane, 1, self.size)[1:]] for _ in range(self.ops)]
        every = make._replace(density=1.0)
        return D, f, [every.nested(self.shape, 1, self.size) for _ in range(self.ops)]


@dataclass(frozen=True)
class SmoothSpec:
    """The operands of ``smooth``, from what the steps before left, or backwards from zero."""

    steps: int
    shape: tuple[int, ...]
    dtype: str = 'float32'
    backwards: bool = False

    op: ClassVar[str] = 'factored_trace.smooth'

    def arrays(self, rng: Generator | None = None, *, fractions: bool = False) -> tuple[Any, ...]:
        """``x, left``."""
        make = _Maker(rng, self.dtype, 1.0, fractions)
        left = None if self.backwards else make.plane(*self.shape)
        return make.plane(self.steps, *self.shape), left


@dataclass(frozen=True)
class JacobianSpec:
    """The transitions of a model of the tests, of which the first is compiled.

    Attributes
    ----------
    model : str
        Its name.
    batch : int or None
        How many examples there are; None for no axis of examples.
    neurons : int, optional
        How many neurons; as many as in other tests if left out.
    precision : int or str
        That of the model, as ``brainstate`` takes it.
    """

    model: str
    batch: int | None
    neurons: int | None = None
    precision: int | str = 32

    op: ClassVar[str] = 'hidden_jacobian'


Spec = TraceSpec | AdjointSpec | FactoredSpec | SmoothSpec | JacobianSpec


class _Maker(NamedTuple):
    """Makes planes: of random numbers, normal or between 0 and 1; or without them, their shapes."""

    rng: Generator | None
    dtype: str
    density: float
    fractions: bool
    scale: float = 1.0

    def plane(self, *shape: int) -> Any:
        if self.rng is None:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        values = self.rng.random(shape) if self.fractions else self.rng.normal(size=shape)
        return jnp.asarray(values if self.fractions else self.scale * values, self.dtype)

    def is_there(self) -> bool:
        return self.rng is None or self.rng.random() < self.density

    def nested(self, shape: tuple[int, ...], depth: int, size: int) -> Any:
        if depth == 0:
            plane = self.plane(*shape)
            return plane if self.is_there() else None
        return [self.nested(shape, depth - 1, size) for _ in range(size)]


def _compiled_traces(window: bool) -> list[TraceSpec]:
    """Large operands, of which every byte counts, and shapes that no tile divides."""
    large, many = (8, LARGE, LARGE), (MANY, LARGE, LARGE)
    rounded: Any = dict(stored='bfloat16', rounded=True)
    specs = [TraceSpec(size, large) for size in (1, 2, 3, 4)]
    specs += [TraceSpec(size, many) for size in ((2, 4) if window else (1, 2, 3, 4))]
    specs += [TraceSpec(size, many, signal=False) for size in (() if window else (2, 4))]
    specs += [TraceSpec(2, large, 'bfloat16'), TraceSpec(2, large, **rounded)]
    specs += [TraceSpec(6, large), TraceSpec(6, large, **rounded)]  # as many as the kernels take
    specs += [TraceSpec(2, (3, 21, 37), dtype) for dtype in ('float32', 'bfloat16')]
    specs += [TraceSpec(2, (3, 4, 130, 257), groups=1), TraceSpec(2, (4, 8, 9), groups=1)]
    specs += [TraceSpec(2, (8, 4, LARGE, LARGE), groups=1)]
    specs += [TraceSpec(3, (130, 257)), TraceSpec(2, (2, 3, 13, 37)), TraceSpec(1, (1, 1, 1))]
    if not window:
        return specs
    return [replace(spec, steps=STEPS if spec.shape[-1] == LARGE else 7) for spec in specs]


def _compiled_entries(steps: int | None) -> list[SparseSpec]:
    """Likewise; few planes and many, few examples and many."""
    window = 7 if steps else None
    rounded: Any = dict(stored='bfloat16', rounded=True)

    def large(size: int, batch: int, **options: Any) -> SparseSpec:
        shape = (batch, 4 * LARGE, 4 * LARGE)
        return SparseSpec(size, shape, steps=steps, entries=2 * LARGE * LARGE, **options)

    specs = [large(size, 8) for size in (1, 2, 6)] + [large(2, 1), large(2, MANY)]
    specs += [large(2, 8, **rounded), large(6, 8, **rounded)]
    specs += [SparseSpec(2, (3, 37, 21), 'bfloat16', steps=window, entries=301)]
    if steps is None:
        specs += [large(1, 8, signal=False), large(6, 8, signal=False)]
        specs += [large(2, 8, signal=False, **rounded), SparseSpec(1, (5, 7), entries=1)]
    return specs


def _compiled_jacobians() -> list[JacobianSpec]:
    specs = []
    for model in ('lif', 'lif_expon', 'alif_expon', 'gif_expon', 'stp', 'gru', 'lstm'):
        specs += [JacobianSpec(model, 3, 37), JacobianSpec(model, 8, LARGE)]
    specs += [JacobianSpec(model, None, 5) for model in ('coba_ei', 'custom_vjp', 'custom_jvp')]
    # Other layers mix types in bfloat16.
    narrow = ('lif', 'lstm', 'layer_norm', 'custom_vjp', 'custom_jvp')
    return specs + [JacobianSpec(model, 3, 37, 'bf16') for model in narrow]


def _of_both_types(make: Callable[..., Any], *shapes: tuple[Any, ...], **options: Any) -> list[Any]:
    types = ('float32', 'bfloat16')
    return [make(*shape, dtype, **options) for dtype in types for shape in shapes]


COMPILED: dict[str, list[Any]] = {
    'hidden_jacobian': _compiled_jacobians(),
    'trace_step': _compiled_traces(window=False),
    'trace_carry': _compiled_traces(window=True),
    'sparse_step': _compiled_entries(None),
    'sparse_carry': _compiled_entries(STEPS // 4),
    'adjoint_scan': [
        *(AdjointSpec(size, STEPS, (8, LARGE)) for size in (1, 2, 3, 4)),
        AdjointSpec(2, STEPS, (8, LARGE), 'bfloat16'),
        AdjointSpec(1, STEPS, (256, LARGE)),  # too much for some TPUs
        AdjointSpec(2, 2 * STEPS, (256, LARGE)),  # and for all
        *(AdjointSpec(1, STEPS, (8, LARGE), ops=ops, within=True) for ops in (1, 2)),
        AdjointSpec(2, STEPS, (8, LARGE), later=True),
        AdjointSpec(1, 7, (3, 37), 'bfloat16', later=True),
        *_of_both_types(AdjointSpec, (2, 7, (3, 37)), (1, 19, (33,))),
        AdjointSpec(8, 7, (3, 37)),  # as many planes as a GPU holds
        AdjointSpec(2, 5, (2, 3, 5)),
        AdjointSpec(1, 1, (1, 1)),
    ],
    'factored_trace': _of_both_types(FactoredSpec, (2, STEPS, (8, LARGE)), (2, 7, (3, 37))),
    'factored_trace.smooth': [
        spec
        for dtype in ('float32', 'bfloat16')
        for spec in (
            SmoothSpec(STEPS, (8, LARGE), dtype),
            SmoothSpec(STEPS, (8, LARGE), dtype, backwards=True),
            SmoothSpec(19, (33,), dtype),
        )
    ],
}
"""By op: large operands, and shapes that no tile divides."""

_CHECKED_TRACES = {
    'one neuron, no batch': TraceSpec(1, (1, 1), bias=True),
    'two axes of batch': TraceSpec(3, (2, 1, 5, 3), density=0.5, bias=True),
    'past a tile': TraceSpec(2, (9, 131, 130)),
    'bfloat16': TraceSpec(2, (9, 5, 70), 'bfloat16', bias=True),
    'many planes': TraceSpec(5, (2, 17, 4), density=0.6, stored='bfloat16'),
    'groups': TraceSpec(2, (3, 4, 17, 70), density=0.7, bias=True, groups=1),
    'groups, no batch': TraceSpec(1, (3, 5, 6), 'bfloat16', groups=1),
    'one group past a tile': TraceSpec(1, (2, 1, 33, 130), groups=1),
}
_CHECKED_ENTRIES = {
    'one entry, no batch': SparseSpec(1, (3, 4), entries=1, bias=True),
    'empty rows and columns': SparseSpec(2, (3, 11, 13), entries=7, bias=True),
    'one example': SparseSpec(2, (1, 9, 8), entries=65),
    'no batch, past a block': SparseSpec(2, (40, 50), entries=300),
    'two axes of batch': SparseSpec(3, (2, 1, 5, 3), density=0.5, entries=9, bias=True),
    'past a tile of the batch': SparseSpec(2, (19, 21, 30), entries=131),
    'bfloat16': SparseSpec(2, (9, 5, 70), 'bfloat16', entries=77, bias=True),
    'many planes': SparseSpec(5, (2, 17, 4), density=0.6, stored='bfloat16', entries=130),
    'more entries than places': SparseSpec(2, (3, 3, 2), entries=40),
}
_CHECKED_STEPS = {'past a tile': 17, 'many planes': 70, 'one example': 17}


def _over_windows(specs: dict[str, Any]) -> dict[str, Any]:
    return {k: replace(spec, steps=_CHECKED_STEPS.get(k, 3)) for k, spec in specs.items()}


_LAYERS = ('gru', 'lstm', 'lif', 'alif_expon', 'gif_expon', 'coba_ei', 'stp', 'lif_expon_shared')
_WRITTEN = ('custom_jvp', 'custom_vjp', 'layer_norm', 'lateral', 'jit', 'scan')

CHECKED: dict[str, dict[str, Any]] = {
    'hidden_jacobian': {model: JacobianSpec(model, 3) for model in _LAYERS + _WRITTEN},
    'trace_step': _CHECKED_TRACES,
    'trace_carry': _over_windows(_CHECKED_TRACES),
    'sparse_step': _CHECKED_ENTRIES,
    'sparse_carry': _over_windows(_CHECKED_ENTRIES),
    'adjoint_scan': {
        'one neuron': AdjointSpec(1, 1, (1,)),
        'no batch': AdjointSpec(2, 11, (37,), density=0.6),
        'batch 1': AdjointSpec(2, 4, (1, 3), ops=2, density=0.6),
        'two axes of neurons': AdjointSpec(2, 3, (2, 3, 5), density=0.6),
        'no axis': AdjointSpec(2, 9, (), density=0.5),
        'three planes': AdjointSpec(3, 5, (3, 5), density=0.4),
        'bfloat16': AdjointSpec(2, 9, (3, 33), 'bfloat16'),
        'bfloat16, no batch': AdjointSpec(1, 19, (33,), 'bfloat16'),
        'windows follow': AdjointSpec(2, 5, (3, 37), density=0.6, later=True),
        'windows follow, bfloat16': AdjointSpec(2, 5, (3, 33), 'bfloat16', later=True),
    },
    'factored_trace': {
        'one neuron': FactoredSpec(1, 1, (1,), density=0.6),
        'no batch': FactoredSpec(2, 11, (37,), density=0.6),
        'batch 1': FactoredSpec(3, 4, (1, 3), ops=2, density=0.4),
        'two axes of neurons': FactoredSpec(2, 3, (2, 3, 5), density=0.6),
        'no axis': FactoredSpec(2, 9, (), density=0.6),
        'bfloat16': FactoredSpec(2, 9, (3, 33), 'bfloat16', density=0.6),
        'bfloat16, no batch': FactoredSpec(1, 19, (33,), 'bfloat16', density=0.6),
    },
}
"""By op and name: odd shapes, absent planes, and everything past the edge of a tile."""

EMULATED: dict[str, Any] = {
    'a step': TraceSpec(2, (2, 19, 70)),
    'a step of many planes': TraceSpec(3, (9, 65)),
    'a step of one weight': TraceSpec(1, (1, 1, 1)),
    'a step of two batch axes': TraceSpec(1, (2, 3, 5, 7), 'bfloat16'),
    'a step of groups': TraceSpec(2, (2, 3, 19, 70), groups=1),
    'a carry of groups': TraceSpec(1, (2, 3, 35, 9), steps=7, groups=1),
    'a carry': TraceSpec(2, (2, 19, 70), steps=7),
    'a carry of one weight': TraceSpec(1, (1, 1, 1), steps=7),
    'a carry in bfloat16': TraceSpec(1, (3, 17), 'bfloat16', steps=7),
    'a carry of two chunks': TraceSpec(2, (2, 19, 70), steps=20),
    'a carry of two chunks in bfloat16': TraceSpec(1, (3, 17), 'bfloat16', steps=20),
    'a step of entries': SparseSpec(2, (19, 7, 9), entries=70),
    'a step of one entry': SparseSpec(1, (1, 1), entries=1),
    'a carry of entries': SparseSpec(2, (19, 7, 9), entries=70, steps=5),
    'a carry of entries, no batch': SparseSpec(2, (7, 9), entries=270, steps=6),
    'a carry of entries in bfloat16': SparseSpec(1, (2, 7, 9), 'bfloat16', entries=30, steps=5),
    'an adjoint': AdjointSpec(2, 6, (3, 37)),
    'an adjoint of one neuron': AdjointSpec(1, 1, (1,)),
    'an adjoint that others follow': AdjointSpec(2, 6, (3, 37), later=True),
    'an adjoint in bfloat16': AdjointSpec(1, 9, (2, 3, 11), 'bfloat16'),
    'a factor': FactoredSpec(2, 5, (3, 37)),
    'a factor in bfloat16': FactoredSpec(1, 6, (33,), 'bfloat16'),
    'an input': SmoothSpec(5, (3, 37)),
    'an input in bfloat16': SmoothSpec(5, (33,), 'bfloat16'),
}
"""By name: what is small enough to run element by element."""

TIMED: dict[str, Any] = {
    'adjoint_scan': AdjointSpec(2, 50, (16, LARGE)),
    'factored_trace': FactoredSpec(2, 50, (16, LARGE)),
    'sparse_carry': SparseSpec(2, (16, LARGE, LARGE), entries=32 * LARGE, steps=50),
    'sparse_step': SparseSpec(2, (16, LARGE, LARGE), entries=32 * LARGE),
    'trace_carry': TraceSpec(2, (16, 256, LARGE), steps=50),
    'trace_step': TraceSpec(2, (16, 256, LARGE)),
}
"""By op: a layer as one trains it."""
