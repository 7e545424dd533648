"""What is compiled of every kernel: the specs of its op, and what is held against them."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from braintrace_fast.compiler import compile_etrace_graph
from braintrace_fast.kernels.adjoint_scan.operands import AdjointOperands
from braintrace_fast.kernels.dispatch import implementation_of
from braintrace_fast.kernels.factored_trace.operands import FactoredOperands, SmoothOperands
from braintrace_fast.kernels.hidden_jacobian.operands import JacobianOperands
from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.specs import (
    COMPILED,
    LARGE,
    MANY,
    AdjointSpec,
    FactoredSpec,
    JacobianSpec,
    SmoothSpec,
    SparseSpec,
    Spec,
    TraceSpec,
)
from braintrace_fast.op.sparse_sums import sample
from tests import models

from .rules import matmul_rules, sparse_rules

__all__ = [
    'Case',
    'all_cases',
    'as_arrays',
    'case_of',
    'first_step',
    'floor',
    'implementation',
    'plain_formula',
    'plain_pass',
    'redundant',
    'stacked_pass',
    'stacked_walk',
]

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
    pack : callable
        Puts the operands, or their shapes, into the object that implementations take.
    trace : tuple of int
        Which operands are the trace: they are donated, and must be updated in place.
    bounded : bool
        Whether the bytes that it moves may exceed the floor by no more than 5%.
    copied : tuple of int
        Which operands are transposed first: what that takes and moves is allowed.
    gathers : bool
        Whether a kernel takes of some blocks what it needs, so that their bytes mean nothing.
    kinds : tuple of str
        The kinds of kernels that have it.
    compared : tuple of str
        The kinds of kernels that are compared with what XLA makes of the plain formula.
    halved : tuple of str
        Those that must move half as much as that does for stacked planes.
    stacked : callable, optional
        The plain formula over planes that are one array, and its operands.
    steps : int
        How often the loop of the plain formula runs, if it has one.
    instead : callable, optional
        What is compiled in place of the op, such as a kernel that is broken on purpose.
    """

    op: str
    dtype: str
    shape: str
    operands: tuple[Any, ...]
    pack: Callable[..., Any]
    trace: tuple[int, ...] = ()
    bounded: bool = False
    copied: tuple[int, ...] = ()
    gathers: bool = False
    kinds: tuple[str, ...] = BOTH
    compared: tuple[str, ...] = ()
    halved: tuple[str, ...] = ()
    stacked: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None
    steps: int = 0
    instead: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f'{self.op}, {self.dtype}, {self.shape}'


def implementation(case: Case, kind: str) -> Callable[..., Any]:
    """What a case runs by the kernels of a kind, ``'triton'`` or ``'mosaic'``; or the reference."""
    if case.instead is not None:
        return case.instead
    folder, _, function = case.op.partition('.')
    module = importlib.import_module(f'braintrace_fast.kernels.{folder}.{kind}')
    run = getattr(module, function or folder)
    return lambda *operands: run(case.pack(*operands))


def redundant(case: Case, kind: str) -> str | None:
    """Why a kind of kernel is not worth it, as it says itself; None if it is."""
    kernel = implementation_of(case.op, kind)
    if kernel is None or kernel.redundant is None:
        return None
    return kernel.redundant(case.pack(*case.operands))


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
    return [partial(case_of, spec) for specs in COMPILED.values() for spec in specs]


def case_of(spec: Spec) -> Case:
    """The case of a spec."""
    match spec:
        case JacobianSpec():
            return _jacobian(spec)
        case SparseSpec():
            return _entries(spec)
        case TraceSpec():
            return _trace(spec)
        case AdjointSpec():
            return _adjoint(spec)
        case FactoredSpec():
            shape = f'S={spec.size}, K={spec.steps}, {spec.shape}'
            pack = partial(FactoredOperands, decay=0.9)
        case SmoothSpec():
            shape = f'K={spec.steps}, {spec.shape}' + ', backwards from zero' * spec.backwards
            pack = partial(SmoothOperands, decay=0.9, reverse=spec.backwards)
    return Case(spec.op, spec.dtype, shape, spec.arrays(), pack)


def first_step(spec: JacobianSpec) -> tuple[Sequence[Any], dict[Any, Any]]:
    """The transitions of a model, and the values of all variables in its first step."""
    with (
        brainstate.environ.context(dt=0.1 * u.ms, precision=spec.precision),
        mock.patch.object(models, 'N', spec.neurons or models.N),
    ):
        network, inputs = models.MODELS[spec.model].build(spec.batch)
        x = jax.tree.map(lambda a: a[0], inputs(0, 1))
        graph = compile_etrace_graph(network, x)
        info = graph.module_info
        states = [state.value for state in info.compiled_model_states]
        return graph.transitions, info.jaxpr_call(x, old_state_vals=states)[-1]


def _jacobian(spec: JacobianSpec) -> Case:
    (transition, *_), values = first_step(spec)
    read = [row.constvars for row in transition.rows]
    inputs = (*transition.hidden_invars, *transition.y_vars)
    variables = list(dict.fromkeys([*inputs, *(v for row in read for v in row)]))

    def pack(operands: Sequence[Any]) -> JacobianOperands:
        given = dict(zip(variables, operands, strict=True))
        constants = [[given[v] for v in row] for row in read]
        return JacobianOperands(transition, constants, [given[v] for v in inputs])

    operands = [values[v] for v in variables]
    dtype, shape = operands[0].dtype.name, f'{spec.model}, {operands[0].shape}'
    compared = BOTH if spec.neurons == LARGE else ()
    return Case(spec.op, dtype, shape, (operands,), pack, compared=compared)


def _trace(spec: TraceSpec) -> Case:
    arrays = spec.arrays()
    stored, lead = spec.stored or spec.dtype, spec.shape[:-2]
    compared: tuple[str, ...] = BOTH if lead == (MANY,) else ()
    if spec.steps is not None and spec.shape[-1] == LARGE:
        # XLA takes minutes for many examples on a TPU.
        compared = {(MANY,): ('triton',), (8,): ('mosaic',) if spec.size == 2 else ()}.get(lead, ())
    return Case(
        *_described(spec),
        (*arrays, None, *_optional(spec, arrays)),
        partial(_pack_trace, spec.groups),
        trace=(3,),
        # For a TPU, inputs and planes of groups are transposed first, which a window shows.
        bounded=spec.shape[-2:] == (LARGE, LARGE) and not (spec.groups and spec.steps),
        compared=compared if stored == 'float32' else (),
        halved=BOTH if lead == (MANY,) else (),
        stacked=(lambda: (stacked_pass, as_arrays(arrays)))
        if spec.signal and not spec.groups
        else None,
    )


def _described(spec: TraceSpec) -> tuple[str, str, str]:
    """The op, the type and the operands."""
    stored, window = spec.stored or spec.dtype, '' if spec.steps is None else f'K={spec.steps}, '
    return (
        spec.op,
        f'{stored}, rounded' if spec.rounded else stored,
        f'S={spec.size}, {window}{spec.shape}'
        + ('' if spec.signal else ', no signal')
        + (', groups' if spec.groups else ''),
    )


def _optional(spec: TraceSpec, arrays: Sequence[Any]) -> list[Any]:
    """A flag, if the trace is live; over steps, what is multiplied and added to what is read."""
    w = None if spec.steps is None else arrays[2][0]  # like a plane of ``u``
    seed = [jax.ShapeDtypeStruct((), jnp.uint32)] if spec.rounded else []
    return [jax.ShapeDtypeStruct((), bool), w, *seed]


def _entries(spec: SparseSpec) -> Case:
    op, dtype, shape = _described(spec)
    arrays, large = spec.arrays(), spec.shape[-1] >= LARGE
    return Case(
        op,
        dtype,
        f'{shape}, {spec.entries} entries',
        (*arrays, spec.places(), *_optional(spec, arrays)),
        partial(_pack_trace, spec.groups),
        trace=(3,),
        bounded=large,
        copied=(0, 1, 2, 4, 7),
        gathers=True,
        kinds=('triton',),
        # Of a larger batch, plain JAX has a loop that is none over steps.
        compared=('triton',) if large and spec.shape[0] <= 8 else (),
        steps=spec.steps or 0,
    )


def _pack_trace(
    groups: int,
    x: Any,
    D: Any,
    f: Any,
    trace: Any,
    signal: Any,
    places: Any,
    live: Any,
    w: Any,
    seed: Any = None,
) -> TraceOperands:
    """Of a dense op, or of one with entries in some places."""
    if places is None:
        rules = matmul_rules(groups, has_bias=False, precision='highest')
        product = partial(_product, groups)
    else:
        rules = sparse_rules(*places, has_bias=False)
        product = partial(sample, sources=places[0], targets=places[1])
    total = None
    if w is not None:
        is_shape = isinstance(x, jax.ShapeDtypeStruct)
        total = {'weight': jax.eval_shape(product, x, w) if is_shape else product(x, w)}
    return TraceOperands(rules, x, D, f, trace, signal, seed, live, w, total)


def _product(groups: int, x: Any, w: Any) -> Any:
    axes = tuple(range(x.ndim - 1))
    summed, kept = axes[: len(axes) - groups], axes[len(axes) - groups :]
    return jax.lax.dot_general(x, w, ((summed, summed), (kept, kept)), precision='highest')


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


def _adjoint(spec: AdjointSpec) -> Case:
    large = spec.shape[-1:] == (LARGE,)

    def stacked() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        axes = (spec.size, spec.size), (spec.size,), (spec.size,), (spec.size,), ()
        return stacked_walk, tuple(
            jax.ShapeDtypeStruct((spec.steps, *own, *spec.shape), spec.dtype) for own in axes
        )

    return Case(
        spec.op,
        spec.dtype,
        f'S={spec.size}, K={spec.steps}, {spec.shape}'
        + (f', {spec.ops} within' if spec.within else '')
        + (', windows follow' if spec.later else ''),
        spec.arrays(),
        partial(AdjointOperands, within=(spec.within,) * spec.ops, carry=True),
        bounded=large,
        compared=BOTH if large else (),
        halved=('triton',),
        stacked=None if spec.within or spec.later else stacked,
        steps=spec.steps,
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
