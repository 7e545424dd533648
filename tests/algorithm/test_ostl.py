"""OSTL: D is the block diagonal of the whole step, whatever mixes positions in it."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from tests.models import parameter
from tests.oracles.influence import influence_gradient
from tests.oracles.step import state_values, step_function

pytestmark = pytest.mark.usefixtures('x64')
N, STEPS = 4, 7
SHARED = ('einsum', None)  # which needs a batch


def states_loss(hidden):
    return sum(jnp.sum(jnp.sin(h + 0.3 * i)) for i, h in enumerate(jax.tree.leaves(hidden)))


class Recurrent(brainstate.nn.Module):
    """Two states: a leaky one, driven by what an op makes of its own spikes, and a smoothed one."""

    def __init__(self, op, shape=(N,)):
        super().__init__()
        self.op, self.shape = op, shape
        self.w_in = parameter(N, N)

    def init_state(self, batch_size=None, **_):
        shape = self.shape if batch_size is None else (batch_size, *self.shape)
        self.v = brainstate.HiddenState(brainstate.random.randn(*shape))
        self.a = brainstate.HiddenState(brainstate.random.randn(*shape))

    def update(self, x):
        v, a = self.v.value, self.a.value
        rate = jnp.tanh(v) * (1.0 + 0.1 * a)
        drive = btf.matmul(x, self.w_in.value).reshape(v.shape)
        new = 0.6 * v + 0.2 * a + self.op(rate) + drive
        self.v.value = jnp.tanh(new)
        self.a.value = 0.8 * a + 0.3 * new
        return self.v.value


class Op(brainstate.nn.Module):
    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = [parameter(*shape, scale=0.7) for shape in shapes]

    def __call__(self, x):
        return self.function(x, *(w.value for w in self.weights))


def sparse(x, weight):
    dense = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1]], float)
    with jax.ensure_compile_time_eval():
        matrix = u.sparse.CSR.fromdense(jnp.asarray(dense))
    return btf.sparse_matmul(x, weight, sparse_mat=matrix)


def convolved(x, weight):
    layout = ('NWC', 'WIO', 'NWC')
    return btf.conv(x, weight, strides=(1,), padding=((1, 1),), dimension_numbers=layout)


def summed(x, weight):
    return btf.einsum('bk,kn->bn', x, weight)


def joined(x, weight):
    return btf.matmul(jnp.concatenate([0.5 * jnp.ones_like(x), x[..., ::-1]], -1), weight)


OPS = {
    'matmul': (btf.matmul, (N,), (N, N), (N,)),
    'joined': (joined, (N,), (2 * N, N)),
    'plain': (lambda x, w: x @ w, (N,), (N, N)),
    'sparse': (sparse, (N,), (8,)),
    'lora': (lambda x, b, a: btf.lora_matmul(x, b, a, alpha=0.5), (N,), (N, 2), (2, N)),
    'grouped': (btf.grouped_matmul, (2, 2), (2, 2, 2)),
    'conv': (convolved, (2, 2), (3, 2, 2)),
    'einsum': (summed, (N,), (N, N)),
}
PROBED = {
    'two in a row': (lambda x, w: btf.matmul(jnp.tanh(btf.matmul(x, w)), w.T), (N,), (N, N)),
    'softmax': (lambda x, w: btf.matmul(x, w) + jax.nn.softmax(x), (N,), (N, N)),
}


def compiled(case, batch, rule=None, **options):
    function, shape, *shapes = case
    model = Recurrent(Op(function, *shapes), shape)
    brainstate.nn.init_all_states(model, batch_size=batch)
    x = brainstate.random.randn(*(() if batch is None else (batch,)), N)
    learner = (rule or btf.OSTLRecurrent)(model, **options)
    learner.compile_graph(x)
    return model, learner, x


@pytest.mark.parametrize(
    ('name', 'batch'),
    [(name, batch) for name in (*OPS, *PROBED) for batch in (None, 3) if (name, batch) != SHARED],
)
def test_D_is_the_block_diagonal_of_the_step(name, batch):
    model, learner, x = compiled((OPS | PROBED)[name], batch)
    kinds = {record.kind for record in learner.graph.diagnostics}
    assert (btf.DiagnosticKind.TRANSITION_PROBED in kinds) == (name in PROBED)
    step, values = step_function(model), state_values(model)
    jacobian = jax.jacobian(lambda hidden: step(values.params, hidden, values.others, x)[1])(
        values.hidden
    )
    (transition,) = learner.graph.transitions
    if name != 'einsum':  # which has a letter for examples, and one axis for it
        assert transition.num_axes == (0 if batch is None else 1)
    (group,) = learner.graph.hidden_groups
    *_, temps = learner.graph.module_info.jaxpr_call(x)
    D = jax.jit(
        lambda *read: transition.jacobians(dict(zip(transition.variables, read, strict=True)))[0]
    )(*(temps[v] for v in transition.variables))
    size = model.v.value.size
    for s, row in zip(group.hidden_paths, D, strict=True):
        for q, plane in zip(group.hidden_paths, row, strict=True):
            true = jnp.diagonal(jacobian[s][q].reshape(size, size)).reshape(plane.shape)
            np.testing.assert_allclose(plane, true, rtol=1e-12, atol=1e-14)
            assert np.abs(true).max() > 1e-3


class Vanilla(brainstate.nn.Module):
    """A vanilla RNN on one weight, or one per source."""

    def __init__(self, n=N):
        super().__init__()
        self.n, self.w, self.v = n, parameter(n, n, scale=0.9), parameter(n, n)

    def init_state(self, batch_size=None, **_):
        shape = (self.n,) if batch_size is None else (batch_size, self.n)
        self.h = brainstate.HiddenState(brainstate.random.randn(*shape))

    def update(self, x):
        h = self.h.value
        self.h.value = jnp.tanh(btf.matmul(h, self.w.value) + btf.matmul(x, self.v.value))
        return self.h.value


MODELS = {
    'vanilla': Vanilla,
    'cell': lambda: btf.nn.ValinaRNNCell(N, N, activation='tanh'),
    'lstm': lambda: btf.nn.LSTMCell(N, N),
    'two states': lambda: Recurrent(Op(btf.matmul, (N, N))),
}


def problem(name, batch, rule=btf.OSTLRecurrent, **options):
    model = MODELS[name]()
    brainstate.nn.init_all_states(model, batch_size=batch)
    for state in model.states(brainstate.HiddenState).values():
        state.value = brainstate.random.randn(*state.value.shape)
    xs = brainstate.random.randn(STEPS, *(() if batch is None else (batch,)), N)
    learner = rule(model, **options)
    learner.compile_graph(xs[0])

    def step_fn(x):
        learner(x)
        return states_loss({path: s.value for path, s in learner.hidden_states.items()})

    return model, learner, xs, step_fn


def same(found, true, rtol=1e-11):
    assert found.keys() == true.keys()
    for path in true:
        for a, b in zip(*map(jax.tree.leaves, (found[path], true[path])), strict=True):
            assert np.abs(b).max() > 1e-3
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


WAYS = {
    'carried': {},
    'windows': {'trace_every': 3},
    'fresh': {'trace': 'fresh'},
    'by step': None,
}


@pytest.mark.parametrize(
    ('name', 'way', 'batch'),
    [
        ('vanilla', 'carried', 3),
        ('vanilla', 'windows', None),
        ('vanilla', 'by step', 3),
        ('cell', 'fresh', 3),
        ('lstm', 'windows', 3),
        ('lstm', 'by step', None),
        ('two states', 'windows', None),
        ('two states', 'fresh', 3),
    ],
)
def test_gradients_are_those_of_the_truncated_influence(name, way, batch):
    model, learner, xs, step_fn = problem(name, batch)
    true = influence_gradient(model, xs, states_loss, 1, axes=0 if batch is None else 1)
    options = WAYS[way]
    if options is None:
        gradient = brainstate.transform.grad(step_fn, learner.param_states)
        grads = [jax.tree.map(np.asarray, gradient(x)) for x in xs]
        found = jax.tree.map(lambda *g: sum(g), *grads)
    else:
        found = learner.etrace_grad(xs, step_fn=step_fn, reduction='sum', **options)
    same(found, true)


def test_D_RTRL_leaves_out_what_OSTL_keeps():
    model, learner, xs, step_fn = problem('vanilla', None, btf.D_RTRL)
    true = influence_gradient(model, xs, states_loss, 1)
    found = learner.etrace_grad(xs, step_fn=step_fn, reduction='sum')
    assert max(np.abs(found[p] - true[p]).max() for p in true) > 1e-2
