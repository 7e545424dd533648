"""A trace that is the same for all outputs of an op is kept once, and changes nothing."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax.extend.core import Literal

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.compiler.transition import _is_uniform_sum
from braintrace_fast.compiler.uniform import uniform_arrays
from tests.algorithm.learning import add_trees, at, begin, check, learning
from tests.models import MODELS, N_IN, N, SynapseNet, lif
from tests.oracles.recurrence import STEPS, step_loss
from tests.promotion import promoting

NARROW = {
    'lif_expon': [False, True],
    'alif_expon': [False, False, True],
    'gif_expon': [False, False, False, False, True],
    'rate_readout': [False, True],
    'lif': [False],
    'gru': [False],
    'leaky': [False],  # its leak is a tanh
}
"""Per plane of the first group, whether its traces are the same for all outputs."""


def keep_whole_planes(learner):
    learner.engine.compresses = False
    learner.init_etrace_state()


@pytest.mark.parametrize('name', NARROW)
def test_planes_are_narrow_where_one_number_moves_all_neurons(name):
    learner = learning(MODELS[name], 'd_rtrl').learner
    assert learner.graph.transitions[0].uniform == NARROW[name]
    widths = [None if e is None else e['weight'].shape[-1] for e in learner.trace.value[0]]
    size = learner.graph.hidden_groups[0].varshape[-1]
    for width, narrow in zip(widths, NARROW[name], strict=True):
        assert width in (None, 1 if narrow else size)


class Affine(brainstate.nn.Module):
    """One state, which a function moves."""

    def __init__(self, move):
        super().__init__()
        self.move = move
        self.w = brainstate.ParamState(jnp.ones((3, 4)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.ones((batch_size, 4)))

    def update(self, x):
        self.h.value = self.move(self.h.value, btf.matmul(x, self.w.value))
        return self.h.value


MOVES = {
    'a decay': (lambda h, y: 0.9 * h + y, True),
    'a quotient': (lambda h, y: (h - y) / 2.0, True),
    'an offset per neuron': (lambda h, y: 0.9 * h + y + jnp.arange(4.0)[None], True),
    'a decay per neuron': (lambda h, y: jnp.linspace(0.1, 0.9, 4)[None] * h + y, False),
    'a weight per neuron': (lambda h, y: 0.9 * h + y * jnp.arange(4.0)[None], False),
    'a product': (lambda h, y: 0.9 * h * y, False),
    'a reciprocal': (lambda h, y: y / (2.0 + h), False),
    'a threshold': (lambda h, y: jnp.maximum(h, 0.0) + y, False),
    'a choice': (lambda h, y: jnp.where(h > 1, 0.5 * h, 0.9 * h) + y, False),
}


@pytest.mark.parametrize('name', MOVES)
def test_only_single_numbers_make_a_plane_narrow(name):
    move, narrow = MOVES[name]
    learner = btf.compile(Affine(move), 'd_rtrl', jnp.ones((2, 3)), batch_size=2)
    assert learner.graph.transitions[0].uniform == [narrow]


@pytest.mark.parametrize(('value', 'narrow'), [(np.float32(0.9), True), (np.ones(4), False)])
def test_only_literals_of_one_number_make_a_plane_narrow(value, narrow):
    """Newer versions of JAX have literals that are arrays."""
    literal = Literal(value, jax.typeof(value))
    plane = jax.ShapeDtypeStruct((4,), jnp.float32)

    def with_literal(function, *inputs):
        jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
        first = jaxpr.eqns[0].replace(invars=[literal, *jaxpr.eqns[0].invars[1:]])
        return jaxpr.replace(eqns=[first, *jaxpr.eqns[1:]])

    decay = with_literal(lambda h, y: jnp.float32(0.9) * h + y, plane, plane)
    assert _is_uniform_sum(decay, 0) == narrow
    negative = with_literal(lambda a: -a, 1.0)
    assert uniform_arrays(negative.eqns, lambda v: False) == set(negative.outvars if narrow else ())


class Following(Affine):
    """A second state decays alike in all neurons, but follows the first, which does not."""

    def __init__(self):
        super().__init__(lambda h, y: jnp.tanh(h + y))
        self.w.value = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.slow = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.slow.value = 0.9 * self.slow.value + self.h.value
        return super().update(x) + self.slow.value


def test_what_follows_a_whole_plane_is_whole(x64):
    model, xs = Following(), jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, 2, 3)))
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=2)
    assert sorted(learner.graph.transitions[0].uniform) == [False, True]
    assert all(a.shape[-1] == 4 for a in jax.tree.leaves(learner.trace.value))
    loss = lambda run, x: jnp.sum(run(x) ** 2)  # noqa: E731
    found = learner.etrace_grad(
        xs, step_fn=lambda x: loss(learner, x), reduction='sum', trace_every=2
    )
    brainstate.nn.init_all_states(model, batch_size=2)
    check(found, testing.recurrence(model, xs, step_fn=lambda x: loss(model, x)), rtol=1e-10)


def test_time_constants_of_their_own_leave_planes_whole():
    net = SynapseNet(lif, tau=jnp.linspace(0.3, 0.7, N) * u.ms)
    with promoting():  # brainpy.state broadcasts time constants
        learner = btf.compile(net, 'd_rtrl', jnp.ones((2, N_IN)), batch_size=2)
    assert learner.graph.transitions[0].uniform == [False, False]


@pytest.mark.parametrize(
    ('name', 'rule'),
    [
        ('lif_expon', btf.D_RTRL),
        ('lif_expon', btf.EProp),
        ('coba_ei', btf.D_RTRL),
        pytest.param('rate_readout', btf.D_RTRL, marks=pytest.mark.slow),
        pytest.param('gif_expon', btf.EProp, marks=pytest.mark.slow),
    ],
)
def test_narrow_planes_change_neither_gradients_nor_traces(name, rule, x64):
    found = []
    for narrows in (True, False):
        model, inputs = MODELS[name].build(2)
        learner = rule(model, backend='jax')
        xs = inputs(0, STEPS)
        learner.compile_graph(at(xs, 0))
        assert any(a.shape[-1] == 1 for a in jax.tree.leaves(learner.trace.value))
        if not narrows:
            keep_whole_planes(learner)
            assert all(a.shape[-1] > 1 for a in jax.tree.leaves(learner.trace.value))
        loss = step_loss(model)
        windows = dict(step_fn=lambda x: loss(learner, x), reduction='sum', trace_every=2)  # noqa: B023
        grads = [learner.etrace_grad(xs, **windows) for _ in range(2)]
        learner.etrace_evolve(xs)
        step = brainstate.transform.grad(lambda x: loss(learner, x), learner.param_states)  # noqa: B023
        grads += [brainstate.transform.jit(step)(at(xs, t)) for t in range(2)]
        traces = [learner.get_etrace_of(path) for path, _ in learner.report.etrace_weights]
        found.append((add_trees(grads), traces))
    check(found[0][0], found[1][0], rtol=1e-12)
    for a, b in zip(*(jax.tree.leaves(traces) for _, traces in found), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


def test_traces_pass_between_backends(tmp_path):
    learned = learning(MODELS['lif_expon'], 'd_rtrl')
    begin(learned)
    learner, xs = learned.learner, learned.xs
    learner.etrace_evolve(xs)
    kept = [a.shape for a in jax.tree.leaves(learner.trace.value)]
    path = ('proj', 'comm', 'weight')
    expected = learner.get_etrace_of(path)
    other = learner.with_backend('interpret')
    assert [a.shape for a in jax.tree.leaves(other.trace.value)] != kept
    learner.save(tmp_path / 'narrow.npz')
    other.save(tmp_path / 'whole.npz')
    for receiver in (learner, other):
        for file in ('narrow.npz', 'whole.npz'):
            receiver.reset_state()
            receiver.load(tmp_path / file)
            assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(receiver.trace.value))
            jax.tree.map(np.testing.assert_array_equal, receiver.get_etrace_of(path), expected)
    assert max(np.abs(a).max() for a in jax.tree.leaves(expected)) > 0
