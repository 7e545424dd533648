"""What a pass over the trace reads and writes, without what is structurally zero."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..planes import Plane
from ..rounding import keys

__all__ = ['Operands', 'Pass', 'PlaneRules', 'as_pass', 'dot', 'entry_points', 'reason', 'run']

FLOATS = (jnp.dtype('float32'), jnp.dtype('bfloat16'))


class Operands(NamedTuple):
    """What a kernel reads, with all batch axes as one of size B.

    Attributes
    ----------
    x : array or None
        The input, ``(B, I)``, or ``(K, B, I)`` over a window; None if it is not multiplied.
    decay : dict
        ``D[s][q]`` or ``P[s][q]`` by ``(s, q)``, each ``(B, O)``.
    fresh : dict
        ``f[s]`` or ``u[s]`` by ``s``, each ``(B, O)`` or ``(K, B, O)``.
    signal : dict
        What reads the old planes, by ``q``, each ``(B, O)``.
    trace : dict
        The old planes that are read, by ``q``, each ``(B, I, O)``.
    w : array or None
        What is multiplied by ``x`` and counted with what the signal reads, like ``f[s]``.
    keys : array or None
        The key of stochastic rounding per plane, ``(1, S)``; None to round to the nearest.
    live : array or None
        A flag, ``(1, 1)``; if it is not set, the old planes count as zero. None if they never do.
    """

    x: Any
    decay: dict[tuple[int, int], Any]
    fresh: dict[int, Any]
    signal: dict[int, Any]
    trace: dict[int, Any]
    w: Any
    keys: Any
    live: Any


class Pass(NamedTuple):
    """A pass over the trace of one op.

    Attributes
    ----------
    operands : Operands
        What is read.
    written : dict
        The dtype of each plane that has a new value, by ``s``.
    read : dtype or None
        The dtype of what the signal reads; None if it reads nothing.
    batch, inputs, outputs : int
        The sizes B, I and O.
    steps : int
        The length K of a window; one for a single step.
    window : bool
        Whether it is a window: then there is an axis of steps.
    """

    operands: Operands
    written: dict[int, Any]
    read: Any
    batch: int
    inputs: int
    outputs: int
    steps: int
    window: bool

    @property
    def aliases(self) -> dict[int, int]:
        """Which operand is overwritten by which result; the new planes are the first results."""
        leaves, tree = jax.tree.flatten(self.operands)
        places = jax.tree.unflatten(tree, range(len(leaves))).trace
        return {places[s]: k for k, s in enumerate(self.written) if s in places}


class PlaneRules(NamedTuple):
    """Trace rules for entries of a trace that are the plane itself, such as a bias; in float32."""

    names: tuple[str, ...]

    def outer(self, x: Any, plane: jax.Array) -> dict[str, jax.Array]:
        """The plane."""
        return dict.fromkeys(self.names, plane.astype(jnp.float32))

    def outer_sum(self, x: Any, plane: jax.Array) -> dict[str, jax.Array]:
        """The sum of the planes of all steps."""
        return dict.fromkeys(self.names, plane.astype(jnp.float32).sum(0))

    def decay(self, plane: jax.Array, trace: Any) -> dict[str, jax.Array]:
        """The product of plane and trace."""
        return {name: plane.astype(jnp.float32) * trace[name] for name in self.names}

    def contract(self, plane: jax.Array, trace: Any) -> dict[str, jax.Array]:
        """Their product, summed over batch."""
        leading = tuple(range(plane.ndim - 1))
        return {name: a.sum(leading) for name, a in self.decay(plane, trace).items()}


def as_pass(
    x: Any,
    decay: Sequence[Sequence[Plane]],
    fresh: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None,
    seed: Any,
    live: Any,
    window: bool,
    w: Plane = None,
    total: Any = None,
) -> Pass:
    """Keep what is there of the operands of ``trace_step`` or, over a window, ``trace_carry``.

    ``total`` says of what type the product with ``w`` is, if it is wanted for the weight at all.
    """
    kept = {q: e['weight'] for q, e in enumerate(trace) if e is not None}
    *lead, inputs, outputs = next(iter(kept.values())).shape
    batch, time = math.prod(lead), x.shape[:window]

    def flat(*shape: int) -> Callable[[Any], Any]:
        return lambda a: (
            a.update(shape=shape) if isinstance(a, jax.ShapeDtypeStruct) else a.reshape(shape)
        )

    planes = {(s, q): decay[s][q] for s in kept for q in kept if decay[s][q] is not None}
    signals: dict[int, Any] = {
        q: signal[q] for q in kept if signal is not None and signal[q] is not None
    }
    added = {s: fresh[s] for s in kept if fresh[s] is not None}
    read = {q for _, q in planes} | set(signals)
    summed = [a for q in signals for a in (signals[q], kept[q])]
    multiplied = bool(signals) and w is not None and 'weight' in total
    if multiplied:
        summed.append(total['weight'])
    row = flat(batch, outputs)
    return Pass(
        Operands(
            flat(*time, batch, inputs)(x) if added or multiplied else None,
            jax.tree.map(row, planes),
            jax.tree.map(flat(*time, batch, outputs), added),
            jax.tree.map(row, signals),
            {q: flat(batch, inputs, outputs)(kept[q]) for q in sorted(read)},
            flat(*time, batch, outputs)(w) if multiplied else None,
            None if seed is None else keys(seed, len(trace))[None],
            None if live is None else live.reshape(1, 1),
        ),
        {s: kept[s].dtype for s in kept if s in added or any(s == p for p, _ in planes)},
        jnp.result_type(*(a.dtype for a in summed)) if signals else None,
        batch,
        inputs,
        outputs,
        time[0] if window else 1,
        window,
    )


def reason(
    supports: Callable[[Pass], str | None],
    rules: Any,
    x: Any,
    decay: Sequence[Sequence[Plane]],
    fresh: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None,
    seed: Any,
    w: Plane,
    total: Any,
    window: bool,
) -> str | None:
    """Why no kernel that ``supports`` some passes takes these operands; None if it does."""
    kept = [e for e in trace if e is not None]
    if not kept:
        return 'no plane of the trace is kept'
    if x is None or not rules.is_outer:
        return 'the trace of the op is not an outer product of its input with a plane'
    *lead, inputs, outputs = kept[0]['weight'].shape
    time = x.shape[:window]
    row, rows = (*lead, outputs), (*time, *lead, outputs)
    expected = [
        (x, (*time, *lead, inputs)),
        *((e['weight'], (*lead, inputs, outputs)) for e in kept),
        *((a, row) for e in kept for name, a in e.items() if name != 'weight'),
        *((a, row) for planes in (*decay, signal or ()) for a in planes if a is not None),
        *((a, rows) for a in (*fresh, w) if a is not None),
    ]
    for a, shape in expected:
        if a.dtype not in FLOATS:
            return f'an operand is of {a.dtype}; kernels take float32 and bfloat16'
        if a.shape != shape:
            return f'an operand has shape {a.shape}, expected {shape}'
        if math.prod(shape) == 0:
            return f'an operand of shape {shape} is empty'
    todo = as_pass(x, decay, fresh, trace, signal, None, None, window, w, total)
    if seed is not None:
        drawn = jax.ShapeDtypeStruct((1, len(trace)), jnp.uint32)
        todo = todo._replace(operands=todo.operands._replace(keys=drawn))
    return supports(todo) if todo.written or todo.operands.signal else 'there is nothing to compute'


def run(
    launch: Callable[[Pass], tuple[dict[int, jax.Array], jax.Array | None]],
    plain: Callable[..., tuple[tuple[Any, ...], Any]],
    x: Any,
    decay: Sequence[Sequence[Plane]],
    fresh: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None,
    seed: Any,
    live: Any,
    w: Plane,
    total: Any,
    window: bool,
) -> tuple[tuple[Any, ...], Any]:
    """Launch the kernel for the weight, take the ``plain`` op for the rest, and join them."""
    todo = as_pass(x, decay, fresh, trace, signal, seed, live, window, w, total)
    weights, weight_read = launch(todo)
    old = next(e for e in trace if e is not None)
    rules = PlaneRules(tuple(name for name in old if name != 'weight'))
    new: list[Any] = [{} if s in weights else None for s in range(len(trace))]
    read: Any = {}
    if rules.names:
        rest = [e and {name: e[name] for name in rules.names} for e in trace]
        found, rest_read = plain(rules, x, decay, fresh, rest, signal, seed, live)
        new = list(found)
        read = jax.tree.map(lambda a: a.astype(todo.read), rest_read)
    shape = old['weight'].shape
    for s, weight in weights.items():
        new[s] = new[s] | {'weight': weight.reshape(shape)}
    if weight_read is None:
        return tuple(new), total
    read = read | {'weight': weight_read}
    if total is not None:  # the kernel has multiplied for the weight, so that nobody else does
        read = {
            name: read[name] if name == 'weight' else read[name] + a for name, a in total.items()
        }
    return tuple(new), read


def entry_points(
    platform: Any, plain: Callable[..., Any], window: bool
) -> tuple[Callable[..., str | None], Callable[..., tuple[tuple[Any, ...], Any]]]:
    """``supports`` and the op itself on a platform, for the op that ``plain`` defines."""

    def supports(
        rules: Any,
        x: Any,
        decay: Sequence[Sequence[Plane]],
        fresh: Sequence[Plane],
        trace: Sequence[Any],
        signal: Sequence[Plane] | None = None,
        seed: Any = None,
        live: Any = None,
        w: Plane = None,
        total: Any = None,
    ) -> str | None:
        """Why there is no kernel for these operands, with whatever flag; or None."""
        operands = x, decay, fresh, trace, signal, seed, w, total
        return reason(platform.supports, rules, *operands, window)

    def op(
        rules: Any,
        x: Any,
        decay: Sequence[Sequence[Plane]],
        fresh: Sequence[Plane],
        trace: Sequence[Any],
        signal: Sequence[Plane] | None = None,
        seed: Any = None,
        live: Any = None,
        w: Plane = None,
        total: Any = None,
        *,
        interpret: Any = False,
    ) -> tuple[tuple[Any, ...], Any]:
        """What ``plain`` gives; with a ``seed``, bfloat16 is rounded stochastically."""
        launch = partial(platform.launch, name=plain.__name__, interpret=interpret)
        operands = x, decay, fresh, trace, signal, seed, live, w, total
        return run(launch, plain, *operands, window)

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
