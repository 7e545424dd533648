"""The promises of the compiler on generated models.

A program says, plane by plane, how a layer's new hidden states follow from old ones, from new ones
that are there already, and from the outputs of ops. ``Net`` is the model of a program. Truth is
taken from the model itself by dense Jacobians, with the inputs of ops cut, and those of other
operations that mix positions, where the factors are compared.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import brainstate
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

import braintrace_fast as btf
from tests.compiler.test_table import (
    accumulate_step,
    assert_close,
    compiled_values,
    flat,
    projection_loss,
)
from tests.models import hidden, of_rank, parameter, spike_by_jvp, spike_by_vjp
from tests.oracles.dense import factor_oracle, plain_ops
from tests.oracles.step import Values, state_values, step_function

BATCH, N_IN, N, N_OUT = 2, 2, 3, 2

Expression = tuple[Any, ...]
"""``('old', q)``, ``('new', q)``, ``('y', k)``, ``('below',)``, or a name and its operands."""

_calls: list[tuple[str | int, ...]] = []
"""The weights of the last step's op calls, in order."""

_mixing_is_cut: ContextVar[bool] = ContextVar('mixing_is_cut', default=False)


@contextlib.contextmanager
def mixing_cut() -> Iterator[None]:
    token = _mixing_is_cut.set(True)
    try:
        yield
    finally:
        _mixing_is_cut.reset(token)


def mixing(function: Any) -> Any:
    return lambda v: function(lax.stop_gradient(v) if _mixing_is_cut.get() else v)


def substeps(v: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda a, k: (a - k * a**3, None), v, jnp.asarray([0.1, 0.2], v.dtype))[0]


POSITION_WISE = {
    'tanh': jnp.tanh,
    'scale': lambda v: 0.7 * v,
    'softplus': jax.nn.softplus,
    'spike by jvp': spike_by_jvp,
    'spike by vjp': spike_by_vjp,
    'stop': lax.stop_gradient,
    'jit': jax.jit(jnp.sin),
    'checkpoint': jax.checkpoint(lambda v: v * jnp.tanh(v)),
    'cond': lambda v: lax.cond(v.ravel()[0] > 0, jnp.sin, lambda v: 0.5 * v, v),
    'scan': substeps,
    'pieces': lambda v: jnp.concatenate([0.5 * v[..., :1], jnp.tanh(v[..., 1:])], axis=-1),
    'fold': lambda v: jnp.sin(v.reshape(-1)).reshape(v.shape),
}
MIXING = {
    'mean': mixing(lambda v: 0.5 * v.mean(-1, keepdims=True) + jnp.zeros(v.shape)),
    'first': mixing(lambda v: v[..., :1] + jnp.zeros(v.shape)),
    'roll': mixing(lambda v: jnp.roll(v, 1, axis=-1)),
}
BINARY = {
    'add': lambda a, b: a + b,
    'subtract': lambda a, b: a - 0.5 * b,
    'multiply': lambda a, b: a * b,
    'gate': lambda a, b: jax.nn.sigmoid(a) * b,
    'where': lambda a, b: jnp.where(a > 0, 0.5 * a, b),
}


@dataclass(frozen=True)
class Op:
    """``matmul`` of the input and some old planes, or of a new plane; else ``element_wise``."""

    old: tuple[int, ...] | None = None
    new: int | None = None
    scalar: bool = False
    """Whether all neurons share the weight of ``element_wise``, as the batch does."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        if self.new is not None:
            return N, N
        if self.old is not None:
            return N_IN + N * len(self.old), N
        return () if self.scalar else (N,)


@dataclass(frozen=True)
class Layer:
    """How the planes of a layer are held, its ops, and the expressions of its new planes."""

    layout: str
    ops: tuple[Op, ...]
    planes: tuple[Expression, ...]
    output: Expression


@dataclass(frozen=True)
class Program:
    layers: tuple[Layer, ...]
    batch: int | None
    readout: str


class LayerModule(brainstate.nn.Module):
    def __init__(self, index: int, layer: Layer):
        super().__init__()
        self.index, self.layer = index, layer
        for k, op in enumerate(layer.ops):
            setattr(self, f'W{k}', parameter(*op.weight_shape))

    def init_state(self, batch_size=None, **_):
        planes = len(self.layer.planes)
        if self.layer.layout != 'plain':
            self.h = brainstate.HiddenGroupState(hidden(batch_size, N, planes).value)
        else:
            for s in range(planes):
                setattr(self, f'h{s}', hidden(batch_size, N))

    def old_planes(self) -> list[jax.Array]:
        if self.layer.layout == 'plain':
            return [getattr(self, f'h{s}').value for s in range(len(self.layer.planes))]
        if self.layer.layout == 'scattered':
            return list(jnp.moveaxis(self.h.value, -1, 0))
        return [self.h.value[..., s] for s in range(len(self.layer.planes))]

    def update(self, x, below):
        env = {('old', s): plane for s, plane in enumerate(self.old_planes())}
        env['below',] = below
        for k, op in enumerate(self.layer.ops):
            if op.new is None:
                env['y', k] = self.call_op(k, op, x, env)
        for s, expression in enumerate(self.layer.planes):
            new = jnp.broadcast_to(evaluate(expression, env), below.shape)
            if self.layer.layout == 'plain':
                getattr(self, f'h{s}').value = new
            if self.layer.layout == 'scattered':
                self.h.value = self.h.value.at[..., s].set(new)
            env['new', s] = new
            for k, op in enumerate(self.layer.ops):
                if op.new == s:
                    env['y', k] = self.call_op(k, op, x, env)
        if self.layer.layout == 'stacked':
            self.h.value = jnp.stack([env['new', s] for s in range(len(self.layer.planes))], -1)
        return jnp.broadcast_to(evaluate(self.layer.output, env), below.shape)

    def call_op(self, k, op, x, env):
        weight = getattr(self, f'W{k}').value
        _calls.append(('layers', self.index, f'W{k}'))
        if op.new is not None:
            return btf.matmul(env['new', op.new], weight)
        if op.old is None:
            return jnp.broadcast_to(btf.element_wise(weight), (N,))
        return btf.matmul(jnp.concatenate([x, *(env['old', q] for q in op.old)], -1), weight)


def evaluate(expression: Expression, env: dict[Expression, jax.Array]) -> jax.Array:
    name, *operands = expression
    if expression in env:
        return env[expression]
    values = [evaluate(operand, env) for operand in operands]
    values = [of_rank(max(v.ndim for v in values), v) for v in values]
    return ({**POSITION_WISE, **MIXING} if len(values) == 1 else BINARY)[name](*values)


class Net(brainstate.nn.Module):
    """The layers of a program on the same input; each also gets the output of the one below."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.layers = [LayerModule(*item) for item in enumerate(program.layers)]
        if program.readout != 'none':
            self.R = parameter(N, N_OUT)

    def update(self, x):
        _calls.clear()
        below = 0.1 * jnp.ones((*x.shape[:-1], N), x.dtype)
        for layer in self.layers:
            below = layer(x, below)
        if self.program.readout == 'op':
            _calls.append(('R',))
            return btf.matmul(below, self.R.value)
        return below @ self.R.value if self.program.readout == 'plain' else below


@st.composite
def expressions(draw, atoms: list[Expression], unary: list[str], depth: int = 2) -> Expression:
    kind = draw(st.sampled_from(['atom', 'unary', 'binary', 'binary'])) if depth else 'atom'
    if kind == 'atom':
        return draw(st.sampled_from(atoms))
    if kind == 'unary':
        return draw(st.sampled_from(unary)), draw(expressions(atoms, unary, depth - 1))
    name = draw(st.sampled_from(sorted(BINARY)))
    a, b = (draw(expressions(atoms, unary, depth - 1)) for _ in range(2))
    return name, a, b


def leaves(expression: Expression | list[Expression]) -> set[Expression]:
    if isinstance(expression[-1], int):
        return {expression}
    return set().union(*(leaves(e) for e in expression if not isinstance(e, str)))


@st.composite
def layers(draw, index: int, *, mixes: bool) -> Layer:
    """With ``mixes``, positions may mix: by ops on new planes, and without an op."""
    num_planes = draw(st.integers(1, 4))
    olds = st.lists(st.sampled_from(range(num_planes)), max_size=2, unique=True).map(tuple)
    # A number that all neurons share has one position, which nothing can mix.
    scalar = st.just(False) if mixes else st.booleans()
    kinds = [st.builds(Op, old=olds), st.builds(Op, scalar=scalar)]
    if mixes:
        kinds.append(st.builds(Op, new=st.sampled_from(range(num_planes))))
    # Without a traced weight there is nothing to compile: the first layer always has one.
    first = [draw(st.one_of(kinds[:2]))] if index == 0 else []
    ops = (*first, *draw(st.lists(st.one_of(kinds), max_size=2)))
    unary = sorted(POSITION_WISE) + sorted(MIXING) * mixes
    atoms = [('old', q) for q in range(num_planes)] + [('below',)] * (index > 0)
    atoms += [('y', k) for k, op in enumerate(ops) if op.new is None]
    planes = []
    for s in range(num_planes):
        expression = draw(expressions(atoms, unary))
        planes.append(('add', expression, ('y', 0)) if first and s == 0 else expression)
        atoms.append(('new', s))
        atoms += [('y', k) for k, op in enumerate(ops) if op.new == s]
    if not mixes:
        # An op between old states and the output alone is no part of the transition: not cut.
        atoms = [a for a in atoms if a[0] != 'y' or not ops[a[1]].old or a in leaves(planes)]
    layout = draw(st.sampled_from(['plain', 'plain', 'stacked', 'scattered']))
    return Layer(layout, ops, tuple(planes), draw(expressions(atoms, unary, depth=1)))


@st.composite
def programs(draw, *, num_layers: int = 2, mixes: bool = True) -> Program:
    count = draw(st.integers(1, num_layers))
    return Program(
        layers=tuple(draw(layers(index, mixes=mixes)) for index in range(count)),
        batch=draw(st.sampled_from([None, BATCH])),
        readout=draw(st.sampled_from(['none', 'plain'] + ['op'] * mixes)),
    )


def compiled(program: Program) -> tuple[Net, btf.ETraceGraph, Values, jax.Array]:
    """The model with lively states, its graph, the values of its states, and an input."""
    brainstate.random.seed(1)
    model = Net(program)
    brainstate.nn.init_all_states(model, batch_size=program.batch)
    rng = np.random.default_rng(0)
    values = state_values(model)
    lively = {p: jnp.asarray(rng.normal(size=v.shape), v.dtype) for p, v in values.hidden.items()}
    shape = (N_IN,) if program.batch is None else (program.batch, N_IN)
    x = jnp.asarray(rng.normal(size=shape), brainstate.environ.dftype())
    return model, btf.compile_etrace_graph(model, x), values._replace(hidden=lively), x


@settings(max_examples=25)
@given(st.booleans().flatmap(lambda mixes: programs(mixes=mixes)))
def test_D_and_f_equal_dense_jacobians_with_mixing_cut(x64, program):
    model, graph, values, x = compiled(program)
    oracle = factor_oracle(model, [group.hidden_paths for group in graph.hidden_groups])
    with mixing_cut():
        dense = oracle(values, x)
    *_, temps = graph.module_info.jaxpr_call(x, old_state_vals=compiled_values(graph, values))
    found_f = {}
    for group, transition in zip(graph.hidden_groups, graph.transitions, strict=True):
        D, f = transition.jacobians(temps)
        assert [[p is not None for p in row] for row in D] == [list(row) for row in group.pattern]
        for row, true_row in zip(D, dense.D[group.index], strict=True):
            for plane, true in zip(row, true_row, strict=True):
                assert_close(0 if plane is None else plane, true)
        found_f.update({(y, group.index): planes for y, planes in f.items()})
    y_of = {relation.path: relation.y_var for relation in graph.hidden_param_op_relations}
    for path, by_group in zip(_calls, dense.f, strict=True):
        for group, true in zip(graph.hidden_groups, by_group, strict=True):
            found = found_f.get((y_of.get(path), group.index), [None] * group.num_state)
            for plane, true_plane in zip(found, true or [0] * group.num_state, strict=True):
                assert_close(0 if plane is None else plane, true_plane)
    for relation in graph.hidden_param_op_relations:
        for group, pattern in zip(relation.hidden_groups, relation.f_patterns, strict=True):
            planes = found_f[relation.y_var, group.index]
            assert [plane is not None for plane in planes] == list(pattern)


@settings(max_examples=20)
@given(programs())
def test_perturbed_steps_with_zeros_equal_the_step(x64, program):
    model, graph, values, x = compiled(program)
    old = compiled_values(graph, values)
    out, new_hidden, _ = step_function(model)(*values, x)
    zeros = graph.hidden_perturb.init_perturb_data()
    plain = graph.module_info.jaxpr_call(x, old_state_vals=old)
    perturbed = graph.call_hidden_perturb((x,), zeros, old)
    exits = graph.call_exit_perturb((x,), *graph.exit_perturb.zeros(), old)
    for found in (plain, perturbed, exits):
        assert_close(found[0], out, 1e-13)
        for path in found[1]:
            assert_close(found[1][path], new_hidden[path], 1e-13)
        for v, value in found[3].items():
            assert_close(value, plain[3][v], 1e-13)


@settings(max_examples=15)
@given(programs())
def test_c_gives_exactly_the_gradient_of_the_step(x64, program):
    model, graph, values, x = compiled(program)
    loss, _ = projection_loss(graph)
    step = step_function(model)

    def true_loss(params):
        out, new_hidden, _ = step(params, values.hidden, values.others, x)
        return loss(out, new_hidden)

    true = jax.grad(true_loss)(values.params)
    found = {path: [jnp.zeros_like(leaf) for leaf in flat(g)] for path, g in true.items()}
    accumulate_step(graph, x, compiled_values(graph, values), loss, {}, found, over_time=False)
    for path in true:
        assert_close(found[path][0], true[path])


@settings(max_examples=10)
@given(programs(num_layers=1, mixes=False))
def test_factors_over_time_give_the_gradient_of_the_model_without_mixing(x64, program):
    model, graph, start, x = compiled(program)
    loss, _ = projection_loss(graph)
    step = step_function(model)
    inputs = [x, -x, 0.5 * x]

    def sequence_loss(params):
        total, values = 0.0, start._replace(params=params)
        with plain_ops():
            for x in inputs:
                out, new_hidden, others = step(*values, x)
                total += loss(out, new_hidden)
                values = values._replace(hidden=new_hidden, others=others)
        return total

    true = jax.grad(sequence_loss)(start.params)
    found = {path: flat(jnp.zeros_like(value)) for path, value in true.items()}
    traces, values = {}, start
    for x in inputs:
        accumulate_step(
            graph, x, compiled_values(graph, values), loss, traces, found, over_time=True
        )
        _, new_hidden, others = step(*values, x)
        values = values._replace(hidden=new_hidden, others=others)
    for path, _ in btf.CompilationReport(graph).etrace_weights:
        assert_close(found[path][0], true[path])


def shifted(v: jax.Array) -> jax.Array:
    return jnp.pad(v[..., 1:], [(0, 0)] * (v.ndim - 1) + [(0, 1)])


# What moves or spreads a state, and meets its own path in one equation; with the truth for D.
MEETING = {
    'shifted': (lambda h: 0.9 * h + shifted(h), 0.9),
    'shifted alone': (shifted, None),
    'first for all': (lambda h: 0.9 * h + h[..., :1], 0.9),
    'all times first': (lambda h: h[..., :1] * h, lambda h: h[..., :1] + 0 * h),
    'first by index': (lambda h: 0.9 * h + h[..., 0, None], 0.9),
    'added to neighbours': (lambda h: h.at[..., 1:].add(0.1 * h[..., :-1]), 1.0),
    'two swapped': (
        lambda h: jnp.concatenate([h[..., 1:2], h[..., :1], h[..., 2:]], -1),
        lambda h: jnp.broadcast_to(jnp.asarray([0.0, 0.0, 1.0]), h.shape),
    ),
    'with its transpose': (lambda h: h + 0.5 * (h.T if h.ndim == 2 else h[..., ::-1]), 1.0),
}


class Meeting(brainstate.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.W = parameter(N_IN + N, N)

    def init_state(self, batch_size=None, **_):
        self.h = hidden(batch_size, N, fill=0.3)

    def update(self, x):
        y = btf.matmul(jnp.concatenate([x, self.h.value], -1), self.W.value)
        self.h.value = self.function(self.h.value) + y
        return self.h.value


@pytest.mark.parametrize('name', MEETING)
def test_a_path_in_place_is_kept_where_it_meets_one_that_moves(name, x64):
    function, expected = MEETING[name]
    model = Meeting(function)
    brainstate.nn.init_all_states(model, batch_size=N)
    x = jnp.ones((N, N_IN))
    graph = btf.compile_etrace_graph(model, x)
    *_, temps = graph.module_info.jaxpr_call(x)
    ((D,),), f = graph.transitions[0].jacobians(temps)
    (group,) = graph.hidden_groups
    assert not group.is_position_wise
    assert (D is None) == (expected is None)
    if expected is not None:
        true = expected(model.h.value) if callable(expected) else expected
        assert_close(D, jnp.broadcast_to(true, D.shape))
    (((planes,)),) = f.values()
    assert_close(planes, jnp.ones((N, N)))


def test_what_passes_through_an_op_is_cut_there_whatever_was_mixed_before(x64):
    """An op may read several functions of one state side by side, or their mean."""
    layer = Layer(
        'plain', (Op(old=(0, 0)),), (('add', ('scale', ('old', 0)), ('y', 0)),), ('new', 0)
    )
    _, graph, *_ = compiled(Program((layer,), BATCH, 'none'))
    (group,) = graph.hidden_groups
    assert group.is_position_wise
    assert {record.level for record in graph.diagnostics} == {btf.DiagnosticLevel.INFO}
