"""What a pass over the trace reads and writes, without what is structurally zero."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._pallas import result
from ..promotion import common_type, product
from ..rounding import keys
from .operands import TraceOperands

__all__ = [
    'Arrays',
    'Blocks',
    'Pass',
    'PlaneRules',
    'as_pass',
    'call_arguments',
    'dot',
    'entry_points',
    'reason',
    'run',
]

NOTHING = 'there is nothing to compute'
FLOATS = (jnp.dtype('float32'), jnp.dtype('bfloat16'))


class Arrays(NamedTuple):
    """What a kernel reads, with all batch axes as one of size B, and one of G groups.

    Attributes
    ----------
    x : array or None
        The input, ``(B, G, I)``, or ``(K, B, G, I)`` over a window; None if it is not multiplied.
    decay : dict
        ``D[s][q]`` or ``P[s][q]`` by ``(s, q)``, each ``(B, G, O)``.
    fresh : dict
        ``f[s]`` or ``u[s]`` by ``s``, each ``(B, G, O)`` or ``(K, B, G, O)``.
    signal : dict
        What reads the old planes, by ``q``, each ``(B, G, O)``.
    trace : dict
        The old planes that are read, by ``q``, each ``(B, G, I, O)``, or ``(B, N)`` for entries.
    w : array or None
        What is multiplied by ``x`` and counted with what the signal reads, like ``f[s]``.
    keys : array or None
        The key of stochastic rounding per plane, ``(1, S)``; None to round to the nearest.
    live : array or None
        A flag, ``(1, 1)``; if it is not set, the old planes count as zero. None if they never do.
    rows, cols : array or None
        Of a weight with entries at some places, where they are, ``(N,)`` each.
    """

    x: Any
    decay: dict[tuple[int, int], Any]
    fresh: dict[int, Any]
    signal: dict[int, Any]
    trace: dict[int, Any]
    w: Any
    keys: Any
    live: Any
    rows: Any = None
    cols: Any = None


class Pass(NamedTuple):
    """A pass over the trace of one op.

    Attributes
    ----------
    arrays : Arrays
        What is read.
    written : dict
        The dtype of each plane that has a new value, by ``s``.
    read : dtype or None
        The dtype of what the signal reads; None if it reads nothing.
    groups, batch, inputs, outputs : int
        The sizes G, B, I and O.
    weights : tuple of int
        The shape of the gradient, ``(G, I, O)`` or ``(N,)``.
    steps : int
        The length K of a window; one for a single step.
    window : bool
        Whether it is a window: then there is an axis of steps.
    """

    arrays: Arrays
    written: dict[int, Any]
    read: Any
    groups: int
    batch: int
    inputs: int
    outputs: int
    weights: tuple[int, ...]
    steps: int
    window: bool

    @property
    def aliases(self) -> dict[int, int]:
        """Which operand is overwritten by which result; the new planes are the first results."""
        leaves, tree = jax.tree.flatten(self.arrays)
        places = jax.tree.unflatten(tree, range(len(leaves))).trace
        return {places[s]: k for k, s in enumerate(self.written) if s in places}


class Blocks(NamedTuple):
    """How the arrays of a pass are cut.

    Attributes
    ----------
    row, rows, columns, plane, weights : BlockSpec
        Of a plane ``D[s][q]``; of ``f[s]``; of ``x``; of a plane of the trace; of the gradient.
    number : callable
        From an array of single numbers, such as a flag, to its block.
    places : BlockSpec, optional
        Of the rows and columns of entries.
    """

    row: Any
    rows: Any
    columns: Any
    plane: Any
    weights: Any
    number: Callable[[Any], Any]
    places: Any = None


def call_arguments(todo: Pass, arrays: Arrays, blocks: Blocks) -> dict[str, Any]:
    """What ``pallas_call`` must know of the operands and the results of a pass."""
    leaves = jax.tree.leaves(arrays)
    plane = (todo.batch, *todo.weights)
    in_specs = Arrays(
        None if arrays.x is None else blocks.columns,
        dict.fromkeys(arrays.decay, blocks.row),
        dict.fromkeys(arrays.fresh, blocks.rows),
        dict.fromkeys(arrays.signal, blocks.row),
        dict.fromkeys(arrays.trace, blocks.plane),
        None if arrays.w is None else blocks.rows,
        *(None if a is None else blocks.number(a) for a in (arrays.keys, arrays.live)),
        *(None if a is None else blocks.places for a in (arrays.rows, arrays.cols)),
    )
    return dict(
        in_specs=[*in_specs],
        out_specs=(
            dict.fromkeys(todo.written, blocks.plane),
            blocks.weights if arrays.signal else None,
        ),
        out_shape=(
            {s: result(plane, dtype, leaves) for s, dtype in todo.written.items()},
            result(todo.weights, todo.read, leaves) if arrays.signal else None,
        ),
        input_output_aliases=todo.aliases,
    )


class PlaneRules(NamedTuple):
    """Trace rules for entries of a trace that are the plane itself, such as a bias; in float32."""

    names: tuple[str, ...]
    groups: int = 0

    @property
    def is_outer(self) -> bool:
        """No: they are for what kernels leave."""
        return False

    @property
    def entries(self) -> None:
        """None."""

    def outer(self, x: Any, plane: jax.Array) -> dict[str, jax.Array]:
        """The plane."""
        return dict.fromkeys(self.names, plane.astype(jnp.float32))

    def outer_sum(self, x: Any, plane: jax.Array) -> dict[str, jax.Array]:
        """The sum of the planes of all steps."""
        return dict.fromkeys(self.names, plane.astype(jnp.float32).sum(0))

    def decay(self, plane: jax.Array, trace: Any) -> dict[str, jax.Array]:
        """The product of plane and trace."""
        return {name: product(plane.astype(jnp.float32), trace[name]) for name in self.names}

    def contract(self, plane: jax.Array, trace: Any) -> dict[str, jax.Array]:
        """Their product, summed over batch."""
        leading = tuple(range(plane.ndim - 1 - self.groups))
        return {name: a.sum(leading) for name, a in self.decay(plane, trace).items()}


def as_pass(given: TraceOperands, window: bool) -> Pass:
    """What there is of the operands of ``trace_step`` or, over a window, of ``trace_carry``.

    ``total`` has the type of the product with ``w``, and an entry for the weight if that is wanted.
    """
    kept = {q: e['weight'] for q, e in enumerate(given.trace) if e is not None}
    lead, inputs, outputs, own = _sizes(given)
    groups = lead.pop() if given.rules.groups else 1
    batch, time = math.prod(lead), given.x.shape[:window]
    places = given.places
    weights = (groups, *own) if places is None else own
    decay = {(s, q): given.decay[s][q] for s in kept for q in kept if given.decay[s][q] is not None}
    signal: dict[int, Any] = {
        q: given.signal[q] for q in kept if given.signal and given.signal[q] is not None
    }
    fresh = {s: given.fresh[s] for s in kept if given.fresh[s] is not None}
    read = {q for _, q in decay} | set(signal)
    summed = [a for q in signal for a in (signal[q], kept[q])]
    multiplied = bool(signal) and given.w is not None and 'weight' in given.total
    if multiplied:
        summed.append(given.total['weight'])
    row, rows = _reshaping(batch, groups, outputs), _reshaping(*time, batch, groups, outputs)
    plane = _reshaping(batch, *weights)
    x = _reshaping(*time, batch, groups, inputs)(given.x) if fresh or multiplied else None
    return Pass(
        Arrays(
            x,
            jax.tree.map(row, decay),
            jax.tree.map(rows, fresh),
            jax.tree.map(row, signal),
            {q: plane(kept[q]) for q in sorted(read)},
            rows(given.w) if multiplied else None,
            _keys(given),
            None if given.live is None else given.live.reshape(1, 1),
            None if places is None or x is None else places[0],
            None if places is None else places[1],
        ),
        {s: kept[s].dtype for s in kept if s in fresh or any(s == p for p, _ in decay)},
        common_type(*(a.dtype for a in summed)) if signal else None,
        groups,
        batch,
        inputs,
        outputs,
        weights,
        time[0] if window else 1,
        window,
    )


def _sizes(given: TraceOperands) -> tuple[list[int], int, int, tuple[int, ...]]:
    """The axes of a plane in front of the outputs; how many inputs and outputs there are.

    Then the axes that a trace has for these: inputs and outputs, or entries.
    """
    weight = next(e['weight'] for e in given.trace if e is not None)
    if given.rules.entries is None:
        *lead, inputs, outputs = weight.shape
        return lead, inputs, outputs, (inputs, outputs)
    *lead, entries = weight.shape
    plane = jax.tree.leaves((given.decay, given.fresh, given.signal))[0]
    return lead, given.x.shape[-1], plane.shape[-1], (entries,)


def _reshaping(*shape: int) -> Callable[[Any], Any]:
    """A function that gives an array, or the description of one, another shape."""
    return lambda a: (
        a.update(shape=shape) if isinstance(a, jax.ShapeDtypeStruct) else a.reshape(shape)
    )


def _keys(given: TraceOperands) -> Any:
    """The keys of stochastic rounding, or their shape."""
    if given.seed is None:
        return None
    if isinstance(given.seed, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, len(given.trace)), jnp.uint32)
    return keys(given.seed, len(given.trace))[None]


def reason(
    supports: Callable[[Pass], str | None], given: TraceOperands, window: bool
) -> str | None:
    """Why no kernel that ``supports`` some passes takes these operands; None if it does."""
    kept = [e for e in given.trace if e is not None]
    if not kept:
        return 'no plane of the trace is kept'
    if given.x is None or not (given.rules.is_outer or given.rules.entries):
        return 'the trace of the op is not an outer product of its input with a plane'
    if not jax.tree.leaves((given.decay, given.fresh, given.signal)):
        return NOTHING
    for a, shape in _expected(given, kept, window):
        if a.dtype not in FLOATS:
            return f'an operand is of {a.dtype}; kernels take float32 and bfloat16'
        if a.shape != shape:
            return f'an operand has shape {a.shape}, expected {shape}'
        if math.prod(shape) == 0:
            return f'an operand of shape {shape} is empty'
    seed = None if given.seed is None else jax.ShapeDtypeStruct((), jnp.uint32)
    todo = as_pass(replace(given, seed=seed, live=None), window)
    return supports(todo) if todo.written or todo.arrays.signal else NOTHING


def _expected(
    given: TraceOperands, kept: Sequence[Any], window: bool
) -> list[tuple[Any, tuple[int, ...]]]:
    """Every array, with the shape that kernels expect of it."""
    lead, inputs, outputs, own = _sizes(given)
    time = given.x.shape[:window]
    row, rows = (*lead, outputs), (*time, *lead, outputs)
    return [
        (given.x, (*time, *lead, inputs)),
        *((e['weight'], (*lead, *own)) for e in kept),
        *((a, row) for e in kept for name, a in e.items() if name != 'weight'),
        *((a, row) for planes in given.decay for a in planes if a is not None),
        *((a, row) for a in given.signal or () if a is not None),
        *((a, rows) for a in (*given.fresh, given.w) if a is not None),
    ]


def run(
    launch: Callable[[Pass], tuple[dict[int, jax.Array], jax.Array | None]],
    plain: Callable[[TraceOperands], tuple[tuple[Any, ...], Any]],
    given: TraceOperands,
    window: bool,
) -> tuple[tuple[Any, ...], Any]:
    """Launch the kernel for the weight, take the ``plain`` op for the rest, and join them."""
    todo = as_pass(given, window)
    weights, weight_read = launch(todo)
    old = next(e for e in given.trace if e is not None)
    rules = PlaneRules(tuple(name for name in old if name != 'weight'), given.rules.groups)
    new: list[Any] = [{} if s in weights else None for s in range(len(given.trace))]
    read: Any = {}
    if rules.names:
        rest = [e and {name: e[name] for name in rules.names} for e in given.trace]
        rest_new, rest_read = plain(replace(given, rules=rules, trace=rest, w=None, total=None))
        new = list(rest_new)
        read = jax.tree.map(lambda a: a.astype(todo.read), rest_read)
    shape = old['weight'].shape
    for s, weight in weights.items():
        new[s] = new[s] | {'weight': weight.reshape(shape)}
    if weight_read is None:
        return tuple(new), given.total
    examples = given.x.ndim - 1 - window - given.rules.groups
    read = read | {'weight': weight_read.reshape(shape[examples:])}
    if given.total is not None:  # the kernel has multiplied for the weight itself
        read = {
            name: read[name] if name == 'weight' else read[name] + a
            for name, a in given.total.items()
        }
    return tuple(new), read


def entry_points(
    platform: Any, plain: Callable[..., Any], window: bool
) -> tuple[Callable[..., str | None], Callable[..., tuple[tuple[Any, ...], Any]]]:
    """``supports`` and the op itself on a platform, for the op that ``plain`` defines."""

    def supports(operands: TraceOperands) -> str | None:
        """Why there is no kernel for these operands, or None."""
        return reason(platform.supports, operands, window)

    def op(operands: TraceOperands, *, interpret: Any = False) -> tuple[tuple[Any, ...], Any]:
        """What ``plain`` gives; with a ``seed``, bfloat16 is rounded stochastically."""
        launch = partial(platform.launch, name=plain.__name__, interpret=interpret)
        return run(launch, plain, operands, window)

    return supports, op


def dot(x: jax.Array, u: jax.Array) -> jax.Array:
    """``sum_t x[t] (x) u[t]`` in float32; products of bfloat16 are exact in it as they are."""
    if not x.dtype == u.dtype == jnp.bfloat16:
        x, u = x.astype(jnp.float32), u.astype(jnp.float32)
    return lax.dot_general(
        x,
        u,
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
