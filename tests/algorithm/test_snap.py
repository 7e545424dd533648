"""SnAp: what a weight does to its neighbourhood, by step, in windows and without a trace."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast.runtime import planner
from tests.algorithm.test_ostl import STEPS, WAYS, N, Op, Recurrent, Vanilla, same, states_loss
from tests.models import parameter
from tests.oracles.influence import influence_gradient

pytestmark = pytest.mark.usefixtures('x64')

RING = np.eye(N) + np.roll(np.eye(N), 1, axis=1)
"""Each neuron drives itself and the next one."""


class Ring(Vanilla):
    """A vanilla RNN with a directed, sparse recurrent weight."""

    def __init__(self):
        super().__init__()
        self.w = parameter(2 * N, scale=0.9)

    def update(self, x):
        with jax.ensure_compile_time_eval():
            matrix = u.sparse.CSR.fromdense(jnp.asarray(RING))
        h = btf.sparse_matmul(self.h.value, self.w.value, sparse_mat=matrix)
        self.h.value = jnp.tanh(h + btf.matmul(x, self.v.value))
        return self.h.value


MODELS = {
    'vanilla': Vanilla,
    'ring': Ring,
    'lstm': lambda: btf.nn.LSTMCell(N, N),
    'gru-like': lambda: Recurrent(Op(lambda x, w: x @ jnp.tanh(w) + jax.nn.softmax(x), (N, N))),
    'two states': lambda: Recurrent(Op(btf.matmul, (N, N))),
}


def problem(name, batch, **options):
    model = MODELS[name]()
    brainstate.nn.init_all_states(model, batch_size=batch)
    for state in model.states(brainstate.HiddenState).values():
        state.value = brainstate.random.randn(*state.value.shape)
    xs = brainstate.random.randn(STEPS, *(() if batch is None else (batch,)), N)
    learner = btf.SnAp(model, **options)
    learner.compile_graph(xs[0])

    def step_fn(x):
        learner(x)
        return states_loss({path: s.value for path, s in learner.hidden_states.items()})

    return model, learner, xs, step_fn


def gradient(learner, xs, step_fn, way):
    if WAYS[way] is not None:
        return learner.etrace_grad(xs, step_fn=step_fn, reduction='sum', **WAYS[way])
    by_step = brainstate.transform.grad(step_fn, learner.param_states)
    grads = [jax.tree.map(np.asarray, by_step(x)) for x in xs]
    return jax.tree.map(lambda *g: sum(g), *grads)


@pytest.mark.parametrize(
    ('name', 'n', 'way', 'batch'),
    [
        ('ring', 1, 'windows', 2),
        ('ring', 2, 'carried', 2),
        ('ring', 2, 'windows', None),
        ('ring', 2, 'fresh', 2),
        ('ring', 2, 'by step', 2),
        ('ring', 3, 'windows', 2),
        ('ring', 4, 'fresh', 2),
        ('vanilla', 2, 'windows', 2),
        ('vanilla', 2, 'fresh', 2),
        ('vanilla', 2, 'by step', None),
        ('two states', 2, 'windows', None),
        ('two states', 2, 'fresh', 2),
        ('lstm', 2, 'fresh', 2),
    ],
)
def test_gradients_are_those_of_the_truncated_influence(name, n, way, batch):
    model, learner, xs, step_fn = problem(name, batch, n=n)
    true = influence_gradient(model, xs, states_loss, n, axes=0 if batch is None else 1)
    same(gradient(learner, xs, step_fn, way), true)


def test_the_whole_group_is_bptt():
    model, learner, xs, step_fn = problem('vanilla', 2, n=2)

    def loss(params):
        h, total = model.h.value, 0.0
        for x in xs:
            h = jnp.tanh(h @ params['w',] + x @ params['v',])
            total = total + states_loss({('h',): h})
        return total

    true = jax.grad(loss)({path: s.value for path, s in learner.param_states.items()})
    same(gradient(learner, xs, step_fn, 'fresh'), true)


def test_each_n_keeps_more():
    model, learner, xs, step_fn = problem('ring', 2, n=2)
    others = [influence_gradient(model, xs, states_loss, n, axes=1) for n in (1, 3)]
    found = gradient(learner, xs, step_fn, 'fresh')
    for other in others:
        assert np.abs(found['w',] - other['w',]).max() > 1e-4


@pytest.mark.parametrize('name', ['ring', 'vanilla'])
def test_windows_from_the_last_to_the_first_are_the_same(name, monkeypatch):
    model, learner, xs, step_fn = problem(name, 2, n=2)
    monkeypatch.setattr(planner, 'CHEAP', 0)
    calls = []
    engine = type(learner.engine)
    before = engine.window_before
    monkeypatch.setattr(engine, 'window_before', lambda *args: calls.append(1) or before(*args))
    true = influence_gradient(model, xs, states_loss, 2, axes=1)
    found = learner.etrace_grad(xs, step_fn=step_fn, reduction='sum', trace='fresh', trace_every=3)
    same(found, true)
    assert calls


def test_chunks_are_exact_inside_and_traced_before():
    model, learner, xs, _ = problem('vanilla', 2, n=2, vjp_method='multi-step')
    first, second = xs[:3], xs[3:]

    def step_fn(chunk):
        learner(btf.MultiStepData(chunk))
        return states_loss({path: s.value for path, s in learner.hidden_states.items()})

    by_chunk = brainstate.transform.grad(step_fn, learner.param_states)
    start = {path: s.value for path, s in model.states().items()}
    grads = [by_chunk(first), by_chunk(second)]
    for path, state in model.states().items():
        state.value = start[path]
    whole = brainstate.transform.grad(
        lambda: [model(x) for x in xs] and states_loss({('h',): model.h.value}),
        model.states(brainstate.ParamState),
    )
    same(grads[1], whole())  # all of the past is in the trace


def test_what_cannot_be_told_is_probed_and_all_to_all():
    model, learner, xs, step_fn = problem('gru-like', 2, n=2)
    assert learner.graph.explain(kind=btf.DiagnosticKind.SNAP_PATTERN_CONSERVATIVE)
    true = influence_gradient(model, xs, states_loss, 2, axes=1)
    found = gradient(learner, xs, step_fn, 'fresh')
    np.testing.assert_allclose(found['w_in',], true['w_in',], rtol=1e-10)


@pytest.mark.parametrize('batch', [None, 2])
def test_a_group_tells_its_neighbourhoods(batch):
    (group,) = problem('ring', batch, n=3)[1].graph.hidden_groups
    found = [set(row[ok]) for row, ok in zip(group.snap.neighbours, group.snap.valid, strict=True)]
    positions = range(N * (batch or 1))  # those of all examples
    own = [N * (p // N) for p in positions]
    assert found == [{p, first + (p + 1) % N, first + (p + 2) % N} for p, first in enumerate(own)]
    assert group.snap.neighbours[:, 0].tolist() == list(positions)
    assert (group.snap.num_position, group.snap.num_neighbour) == (len(positions), 3)
    assert group.trace_state_width == 3 and not group.snap.conservative
    assert problem('ring', batch, n=1)[1].graph.hidden_groups[0].snap is None
    relations = problem('two states', batch, n=2)[1].graph.hidden_param_op_relations
    assert all(g.snap.is_saturated for relation in relations for g in relation.hidden_groups)


def test_a_group_without_neighbours_is_reported():
    class Alone(Vanilla):
        def update(self, x):
            self.h.value = 0.9 * self.h.value + btf.matmul(x, self.v.value)
            return self.h.value

    model = Alone()
    brainstate.nn.init_all_states(model)
    learner = btf.SnAp(model, n=3)
    learner.compile_graph(jnp.ones(N))
    (group,) = learner.graph.hidden_groups
    assert group.snap.is_degenerate and group.trace_state_width == 1
    (record,) = learner.graph.explain(kind=btf.DiagnosticKind.SNAP_PATTERN_DEGENERATE)
    assert record.hidden_paths == (('h',),)


def test_n_is_a_number_of_at_least_one():
    with pytest.raises(ValueError, match='at least 1'):
        btf.SnAp(Vanilla(), 0)
    with pytest.raises(TypeError, match='True'):
        btf.SnAp(Vanilla(), True)


def test_too_large_jacobians_are_refused():
    with pytest.raises(btf.NotSupportedError, match='snap_max_jacobian_elements=31'):
        problem('ring', 2, n=2, snap_max_jacobian_elements=31)


def test_a_trace_of_too_many_neighbours_is_refused_but_not_needed():
    model, learner, xs, step_fn = problem('vanilla', 2, n=2, snap_max_jacobian_elements=40)
    true = influence_gradient(model, xs, states_loss, 2, axes=1)
    with pytest.raises(btf.NotSupportedError, match="trace='fresh'"):
        gradient(learner, xs, step_fn, 'carried')
    same(gradient(learner, xs, step_fn, 'fresh'), true)


class WithinStep(brainstate.nn.Module):
    """The new voltage drives the new current of the same step, through a fixed matrix."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix, self.w = jnp.asarray(matrix), parameter(N, N)

    def init_state(self, batch_size=None, **_):
        self.v, self.i = (brainstate.HiddenState(brainstate.random.randn(2, N)) for _ in range(2))

    def update(self, x):
        self.v.value = jnp.tanh(0.7 * self.v.value + self.i.value)
        fed = jnp.sin(self.v.value) @ self.matrix
        self.i.value = 0.8 * self.i.value + fed + btf.matmul(x, self.w.value)
        return self.i.value


@pytest.mark.parametrize('way', ['windows', 'fresh', 'by step'])
@pytest.mark.parametrize('n', [1, 2])
def test_states_that_are_mixed_within_a_step_count_once(n, way):
    mixing = (
        np.diag([0.5, -0.4, 0.3, 0.9]) if n == 1 else np.random.default_rng(0).normal(size=(N, N))
    )
    model = WithinStep(mixing)
    model.init_state()
    xs = brainstate.random.randn(STEPS, 2, N)
    learner = btf.SnAp(model, n)
    learner.compile_graph(xs[0])
    start = model.v.value, model.i.value

    def loss(w):
        (v, i), total = start, 0.0
        for x in xs:
            v = jnp.tanh(0.7 * v + i)
            i = 0.8 * i + jnp.sin(v) @ mixing + x @ w
            total = total + states_loss({('i',): i, ('v',): v})
        return total

    def step_fn(x):
        learner(x)
        return states_loss({('i',): model.i.value, ('v',): model.v.value})

    true = {('w',): jax.grad(loss)(model.w.value)}
    same(gradient(learner, xs, step_fn, way), true)


def test_one_step_is_the_rule_with_the_own_position_alone():
    _, learner, xs, step_fn = problem('two states', 2, n=1)
    other = btf.OSTLRecurrent(learner.model)
    other.compile_graph(xs[0])
    start = {path: state.value for path, state in learner.hidden_states.items()}
    found = gradient(learner, xs, step_fn, 'windows')
    for path, state in learner.hidden_states.items():
        state.value = start[path]

    def step(x):
        other(x)
        return states_loss({path: s.value for path, s in other.hidden_states.items()})

    same(found, gradient(other, xs, step, 'windows'))
