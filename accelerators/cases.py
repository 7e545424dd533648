"""Which kernels are checked, for which operands."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from braintrace_fast.compiler import compile_etrace_graph
from braintrace_fast.op.matmul import matmul_p
from tests import models

__all__ = [
    'Case',
    'adjoint_scan',
    'all_cases',
    'as_arrays',
    'factored_trace',
    'floor',
    'hidden_jacobian',
    'implementation',
    'plain_formula',
    'plain_pass',
    'redundant',
    'smooth',
    'stacked_pass',
    'stacked_walk',
    'trace_carry',
    'trace_step',
]

LARGE = 512
MANY = 64
STEPS = 64
BOTH = 'triton', 'mosaic'


class Case(NamedTuple):
    """A kernel and its operands.

    Attributes
    ----------
    op : str
        The folder of the kernel, and its function; ``folder.function`` if that has another name.
    dtype, shape : str
        What the operands are, for a reader.
    operands : tuple
        Trees of shapes and dtypes.
    bind : callable
        From an implementation of the op to a function of the operands.
    trace : tuple of int
        Which operands are the trace: they are donated, and must be updated in place.
    bounded : bool
        Whether the bytes that it moves may exceed the floor by no more than 5%.
    compared : tuple of str
        The kinds of kernels that are compared with what XLA makes of the plain formula.
    halved : tuple of str
        Those that must move half as much as that does for stacked planes.
    stacked : callable, optional
        The plain formula over planes that are one array, and its operands.
    steps : int
        How often the loop of the plain formula runs, if it has one.
    """

    op: str
    dtype: str
    shape: str
    operands: tuple[Any, ...]
    bind: Callable[[Callable[..., Any]], Callable[..., Any]]
    trace: tuple[int, ...] = ()
    bounded: bool = False
    compared: tuple[str, ...] = ()
    halved: tuple[str, ...] = ()
    stacked: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None
    steps: int = 0

    def __str__(self) -> str:
        return f'{self.op}, {self.dtype}, {self.shape}'


def implementation(case: Case, kind: str) -> Callable[..., Any]:
    """What a case runs by the kernels of a kind, ``'triton'`` or ``'mosaic'``; or the reference."""
    folder, _, function = case.op.partition('.')
    module = importlib.import_module(f'braintrace_fast.kernels.{folder}.{kind}')
    return case.bind(getattr(module, function or folder))


def redundant(case: Case, kind: str) -> str | None:
    """Why a kind of kernel is not worth it, as it says itself; None if it is."""
    folder, _, function = case.op.partition('.')
    module = importlib.import_module(f'braintrace_fast.kernels.{folder}.{kind}')
    said = getattr(module, f'redundant_{function}'.strip('_'), None)
    return said and case.bind(said)(*case.operands)


def plain_formula(
    case: Case, *, stacked: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The plain formula of a case and its operands, over single planes or one array of them."""
    if stacked:
        return case.stacked and case.stacked()
    return implementation(case, 'reference'), case.operands


def floor(case: Case) -> int:
    """The bytes of all operands that a result depends on, and of all results, each once."""
    reference = implementation(case, 'reference')
    closed, results = jax.make_jaxpr(reference, return_shape=True)(*case.operands)
    needed = _needed(closed.jaxpr)
    read = [a for a, n in zip(jax.tree.leaves(case.operands), needed, strict=True) if n]
    return sum(a.size * a.dtype.itemsize for a in (*read, *jax.tree.leaves(results)))


def _needed(jaxpr: Any) -> list[bool]:
    """Which arguments a result depends on."""
    live = {v for v in jaxpr.outvars if not hasattr(v, 'val')}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not hasattr(v, 'val'))
    return [v in live for v in jaxpr.invars]


def all_cases() -> list[Callable[[], Case]]:
    """Makers of cases: every kernel, with large operands and with shapes that no tile divides."""
    return [*_jacobians(), *_passes(trace_step), *_passes(trace_carry), *_adjoints(), *_factors()]


def hidden_jacobian(model: str, batch: int | None, neurons: int, precision: int | str = 32) -> Case:
    """The first transition of a model of the tests."""
    with (
        brainstate.environ.context(dt=0.1 * u.ms, precision=precision),
        mock.patch.object(models, 'N', neurons),
    ):
        network, inputs = models.MODELS[model].build(batch)
        x = jax.tree.map(lambda a: a[0], inputs(0, 1))
        graph = compile_etrace_graph(network, x)
        info = graph.module_info
        states = [state.value for state in info.compiled_model_states]
        values = info.jaxpr_call(x, old_state_vals=states)[-1]
    transition = graph.transitions[0]
    read = [row.constvars for row in transition.rows]
    inputs = (*transition.hidden_invars, *transition.y_vars)
    variables = list(dict.fromkeys([*inputs, *(v for row in read for v in row)]))

    def bind(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(operands: Sequence[Any]) -> Any:
            given = dict(zip(variables, operands, strict=True))
            constants = [[given[v] for v in row] for row in read]
            return function(transition, constants, [given[v] for v in inputs])

        return run

    operands = [values[v] for v in variables]
    shape = f'{model}, {operands[0].shape}'
    compared = BOTH if neurons == LARGE else ()
    dtype = operands[0].dtype.name
    return Case('hidden_jacobian', dtype, shape, (operands,), bind, compared=compared)


def _jacobians() -> Iterator[Callable[[], Case]]:
    for model in ('lif', 'lif_expon', 'alif_expon', 'gif_expon', 'stp', 'gru', 'lstm'):
        yield partial(hidden_jacobian, model, 3, 37)
        yield partial(hidden_jacobian, model, 8, LARGE)
    for model in ('coba_ei', 'custom_vjp', 'custom_jvp'):
        yield partial(hidden_jacobian, model, None, 5)
    for model in ('lif', 'lstm', 'layer_norm', 'custom_vjp', 'custom_jvp'):
        yield partial(hidden_jacobian, model, 3, 37, 'bf16')  # other layers mix types in bfloat16


def _planes(shape: tuple[int, ...], dtype: str) -> Callable[..., Any]:
    """Nested lists of so many arrays."""
    array = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def nested(*counts: int) -> Any:
        return [nested(*counts[1:]) for _ in range(counts[0])] if counts else array

    return nested


def trace_step(
    size: int,
    shape: tuple[int, ...],
    dtype: str,
    *,
    seed: bool = False,
    steps: int | None = None,
    signal: bool = True,
) -> Case:
    """A step of all planes of a trace of ``(*batch, inputs, outputs)``.

    With a ``seed``, float32 is rounded stochastically to a trace of that type. Without a ``signal``
    nothing is read of the old trace; over ``steps``, there is a product to be counted with it.
    """
    *lead, inputs, outputs = shape
    plain = 'float32' if seed else dtype
    time = () if steps is None else (steps,)
    row = _planes((*lead, outputs), plain)
    trace = _planes(shape, dtype)
    operands = (
        _planes((*time, *lead, inputs), plain)(),
        row(size, size),
        _planes((*time, *lead, outputs), plain)(size),
        [{'weight': plane} for plane in trace(size)],
        row(size) if signal else None,
        jax.ShapeDtypeStruct((), bool),
        None if steps is None else _planes((*time, *lead, outputs), plain)(),
    )
    window = '' if steps is None else f'K={steps}, '
    compared: tuple[str, ...] = BOTH if lead == [MANY] else ()
    if steps is not None and shape[-1] == LARGE:  # XLA takes minutes for many examples on a TPU
        compared = {(MANY,): ('triton',), (8,): ('mosaic',) if size == 2 else ()}[(*lead,)]
    return Case(
        'trace_step' if steps is None else 'trace_carry',
        f'{dtype}, rounded' if seed else dtype,
        f'S={size}, {window}{shape}' + ('' if signal else ', no signal'),
        (*operands, jax.ShapeDtypeStruct((), jnp.uint32)) if seed else operands,
        _with_rules,
        trace=(3,),
        bounded=shape[-2:] == (LARGE, LARGE),
        compared=compared if dtype == 'float32' else (),
        halved=BOTH if lead == [MANY] else (),
        stacked=(lambda: (stacked_pass, as_arrays(operands[:5]))) if signal else None,
    )


def plain_pass(x: Any, D: Any, f: Any, trace: Any, signal: Any) -> Any:
    """What the kernels of a trace compute, as one would write it: over lists of planes."""

    def outer(plane: Any) -> Any:
        if x.ndim == 2:
            return x[:, :, None] * plane[:, None, :]
        return jnp.einsum('tbi,tbo->bio', x, plane, precision='highest')

    size = range(len(trace))
    new = [sum(D[s][q][:, None, :] * trace[q] for q in size) + outer(f[s]) for s in size]
    return new, sum((signal[q][:, None, :] * trace[q]).sum(0) for q in size)


def stacked_pass(*operands: Any) -> Any:
    """The same over planes that are one array."""
    new, read = plain_pass(*operands)
    return jnp.stack(new), read


def as_arrays(operands: Sequence[Any]) -> tuple[Any, ...]:
    """The operands of a pass over the trace, with planes as one array."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return value['weight']
        if not isinstance(value, list):
            return value
        inner = [convert(v) for v in value]
        return jax.ShapeDtypeStruct((len(inner), *inner[0].shape), inner[0].dtype)

    return tuple(map(convert, operands))


def trace_carry(size: int, shape: tuple[int, ...], dtype: str, *, seed: bool = False) -> Case:
    """The same over a window; a long one for a large trace."""
    return trace_step(size, shape, dtype, seed=seed, steps=STEPS if shape[-1] == LARGE else 7)


def _with_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    params = dict(has_bias=False, precision='highest')
    rules = replace(
        matmul_p.trace_rules,
        **{
            name: partial(getattr(matmul_p.trace_rules, name), **params)
            for name in ('outer', 'outer_sum', 'decay', 'contract')
        },
    )

    def run(x: Any, D: Any, f: Any, trace: Any, signal: Any, live: Any, *rest: Any) -> Any:
        w, seed = (*rest, None, None)[:2]
        total = None if w is None else _product(x, w)
        options = dict(seed=seed, live=live, w=w, total=total)
        return function(rules, x, D, f, trace, signal, **options)

    return run


def _product(x: Any, w: Any) -> Any:
    leading = tuple(range(x.ndim - 1))
    numbers = (leading, leading), ((), ())
    return {'weight': jax.lax.dot_general(x, w, numbers, precision='highest')}


def _passes(make: Callable[..., Case]) -> Iterator[Callable[[], Case]]:
    for size in (1, 2, 3, 4):
        yield partial(make, size, (8, LARGE, LARGE), 'float32')
    for size in (1, 2, 3, 4) if make is trace_step else (2, 4):
        yield partial(make, size, (MANY, LARGE, LARGE), 'float32')
    if make is trace_step:
        for size in (2, 4):
            yield partial(make, size, (MANY, LARGE, LARGE), 'float32', signal=False)
    yield partial(make, 2, (8, LARGE, LARGE), 'bfloat16')
    yield partial(make, 2, (8, LARGE, LARGE), 'bfloat16', seed=True)
    yield partial(make, 6, (8, LARGE, LARGE), 'float32')  # as many planes as the kernels take
    yield partial(make, 6, (8, LARGE, LARGE), 'bfloat16', seed=True)
    for dtype in ('float32', 'bfloat16'):
        yield partial(make, 2, (3, 21, 37), dtype)
    yield partial(make, 3, (130, 257), 'float32')
    yield partial(make, 2, (2, 3, 13, 37), 'float32')
    yield partial(make, 1, (1, 1, 1), 'float32')


def adjoint_scan(
    size: int, steps: int, shape: tuple[int, ...], dtype: str, *, within: int = 0
) -> Case:
    """All planes of a group of ``size`` states and one op.

    Or of so many ops that read the learning signal ``within`` their step, as those of a layer do
    that is read by its states alone; then the loss reads nothing else.
    """
    planes = _planes((steps, *shape), dtype)
    large = shape[-1:] == (LARGE,)
    flags = [True] * within or [False]

    def stacked() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        matrix, vector = ((steps, *sizes, *shape) for sizes in ((size, size), (size,)))
        return stacked_walk, tuple(
            jax.ShapeDtypeStruct(s, dtype)
            for s in (matrix, vector, vector, vector, (steps, *shape))
        )

    return Case(
        'adjoint_scan',
        dtype,
        f'S={size}, K={steps}, {shape}' + (f', {within} within' if within else ''),
        (
            planes(size, size),
            planes(len(flags), size),
            planes(size),
            None if within else planes(size),
            None if within else planes(1),
        ),
        lambda function: lambda D, f, L, R, c: function(D, f, L, R, True, c, flags),
        bounded=large,
        compared=BOTH if large else (),
        halved=('triton',),
        stacked=None if within else stacked,
        steps=steps,
    )


def stacked_walk(D: Any, f: Any, L: Any, R: Any, c: Any) -> Any:
    """What ``adjoint_scan`` computes for one op, over matrices ``(K, S, S, ...)``."""

    def body(state: Any, step: Any) -> Any:
        nu, P = state
        D, f, L, R, c = step
        w, u = c + (f * nu).sum(0), (P * f[None]).sum(1)
        nu = (D * (L + nu)[:, None]).sum(0) + R
        return (nu, (P[:, :, None] * D[None]).sum(1)), (w, u)

    one = jnp.eye(D.shape[1]).reshape(*D.shape[1:3], *[1] * (D.ndim - 3))
    start = jnp.zeros_like(f[0]), jnp.broadcast_to(one, D.shape[1:])
    return jax.lax.scan(body, start, (D, f, L, R, c), reverse=True)


def _adjoints() -> Iterator[Callable[[], Case]]:
    for size in (1, 2, 3, 4):
        yield partial(adjoint_scan, size, STEPS, (8, LARGE), 'float32')
    yield partial(adjoint_scan, 2, STEPS, (8, LARGE), 'bfloat16')
    for size, steps in (1, STEPS), (2, 2 * STEPS):  # too much for some TPUs, and for all
        yield partial(adjoint_scan, size, steps, (256, LARGE), 'float32')
    for ops in (1, 2):
        yield partial(adjoint_scan, 1, STEPS, (8, LARGE), 'float32', within=ops)
    for dtype in ('float32', 'bfloat16'):
        yield partial(adjoint_scan, 2, 7, (3, 37), dtype)
        yield partial(adjoint_scan, 1, 19, (33,), dtype)
    yield partial(adjoint_scan, 8, 7, (3, 37), 'float32')  # as many planes as a GPU holds
    yield partial(adjoint_scan, 2, 5, (2, 3, 5), 'float32')
    yield partial(adjoint_scan, 1, 1, (1, 1), 'float32')


def factored_trace(size: int, steps: int, shape: tuple[int, ...], dtype: str) -> Case:
    """All planes of a group of ``size`` states."""
    planes, start = _planes((steps, *shape), dtype), _planes(shape, dtype)
    return Case(
        'factored_trace',
        dtype,
        f'S={size}, K={steps}, {shape}',
        (planes(size, size), planes(1, size), start(1, size)),
        lambda function: partial(function, decay=0.9),
    )


def smooth(steps: int, shape: tuple[int, ...], dtype: str, signal: bool = False) -> Case:
    """The input side of a factorised trace; or its ``signal``, which is smoothed back in time."""
    past = None if signal else _planes(shape, dtype)()
    return Case(
        'factored_trace.smooth',
        dtype,
        f'K={steps}, {shape}' + ', backwards from zero' * signal,
        (_planes((steps, *shape), dtype)(), past),
        lambda function: partial(function, decay=0.9, reverse=signal),
    )


def _factors() -> Iterator[Callable[[], Case]]:
    for dtype in ('float32', 'bfloat16'):
        yield partial(factored_trace, 2, STEPS, (8, LARGE), dtype)
        yield partial(factored_trace, 2, 7, (3, 37), dtype)
    for dtype in ('float32', 'bfloat16'):
        yield partial(smooth, STEPS, (8, LARGE), dtype)
        yield partial(smooth, STEPS, (8, LARGE), dtype, signal=True)
        yield partial(smooth, 19, (33,), dtype)
