"""Convolutions in learners: every layout of the bias, and beside the reference."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.runtime import memory_budget
from tests.op.conv_geometries import NHWC, OTHERS, OUTPUT_BEHIND

pytestmark = pytest.mark.usefixtures('x64')

IMAGE = {'strides': (1, 1), 'dimension_numbers': NHWC}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


class Leaky(brainstate.nn.Module):
    """Neurons at positions that know nothing of each other, so that a trace per position is exact.

    They have leaks of their own, and an adaptation: no plane is uniform.
    """

    def __init__(self, kernel, bias, size, op=btf.conv, **options):
        super().__init__()
        self.op = functools.partial(op, **options)
        self.w = brainstate.ParamState(
            {'weight': kernel} | ({} if bias is None else {'bias': bias})
        )
        self.leak = jnp.linspace(0.5, 0.9, np.prod(size)).reshape(size)
        self.size = size

    def init_state(self, batch_size=None, **_):
        shape = self.size if batch_size is None else (batch_size, *self.size)
        self.h = brainstate.HiddenState(jnp.zeros(shape))
        self.a = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        params, h, a = self.w.value, self.h.value, self.a.value
        y = self.op(x, params['weight'], params.get('bias'))
        self.h.value = jnp.tanh(jnp.broadcast_to(self.leak, h.shape) * h - 0.3 * a + y)
        self.a.value = 0.9 * a + 0.2 * h
        return self.h.value


NCHW = ('NCHW', 'OIHW', 'NCHW')
BIASES = {
    'channel last': ((4,), NHWC),
    'channel last, rank 3': ((1, 1, 4), NHWC),
    'channel last, rank 4': ((1, 1, 1, 4), NHWC),
    'channel first': ((4,), NCHW),
    'channel first, rank 3': ((4, 1, 1), NCHW),
    'channel first, rank 4': ((1, 4, 1, 1), NCHW),
    'one number': ((), NHWC),
    'one number, rank 1': ((1,), NCHW),
    'per position': ((4, 4, 4), NHWC),
    'per row': ((1, 4, 1, 1), NHWC),
    'per example': ((2, 1, 1, 4), NHWC),
}
QUICK = {'channel last', 'channel first, rank 4', 'one number', 'per position', 'per example'}


def loss_of(run):
    return lambda x: jnp.sum(jnp.sin(run(x)) * 0.3)


def learned(model, xs, algorithm, options, batch_size=2, **compiled):
    """Gradients in several ways, each from states of zero."""
    learner = btf.compile(model, algorithm, xs[0], batch_size=batch_size, **compiled)
    for how in options:
        for state in learner.hidden_states.values():
            state.value = jnp.zeros_like(state.value)
        learner.reset_state()
        yield learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum', **how)


@pytest.mark.parametrize(
    ('shape', 'layout'),
    [
        pytest.param(*case, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, case in BIASES.items()
    ],
)
def test_every_layout_of_the_bias_is_exact_in_every_rule(shape, layout):
    """As many channels as positions along an axis, so that no wrong axis is noticed by its size."""
    kernel = draw(3, 3, 2, 4) if layout is NHWC else draw(4, 2, 3, 3)
    model = Leaky(kernel, draw(*shape, seed=1), (4, 4, 4), strides=(1, 1), dimension_numbers=layout)
    xs = draw(5, 2, *((4, 4, 2) if layout is NHWC else (2, 4, 4)))
    brainstate.nn.init_all_states(model, batch_size=2)
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    smoothed = testing.recurrence(model, xs, step_fn=loss_of(model), decay=(0.8, 0.8))
    for found in learned(model, xs, 'd_rtrl', [{'trace_every': 3}, {'trace': 'fresh'}]):
        testing.compare(found, true).check(1e-12)
    for found in learned(model, xs, 'pp_prop', [{'trace_every': 3}], decay_or_rank=0.8):
        testing.compare(found, smoothed).check(1e-12)


@pytest.mark.parametrize('geometry', OTHERS, ids=lambda g: g.name)
def test_batch_groups_and_an_input_whose_batch_is_not_in_front(geometry):
    kernel, xs = draw(*geometry.kernel), draw(4, *geometry.x)
    model = Leaky(kernel, None, geometry.y, **geometry.options)
    brainstate.nn.init_all_states(model)
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    options = [{'trace_every': 3}, {'trace': 'fresh'}]
    for found in learned(model, xs, 'd_rtrl', options, batch_size=None):
        testing.compare(found, true).check(1e-12)


def test_an_output_whose_batch_is_not_in_front_is_refused():
    geometry = OUTPUT_BEHIND[0]
    model = Leaky(draw(*geometry.kernel), None, geometry.y, **geometry.options)
    with pytest.raises(btf.CompilationError, match='output has shape'):
        btf.compile(model, 'd_rtrl', draw(*geometry.x))


@pytest.fixture
def little_memory(monkeypatch):
    """A machine on which 40 kB are free."""
    monkeypatch.setattr(memory_budget, '_free_bytes', lambda: 40_000)


def test_a_trace_without_room_is_refused_before_it_is_made(little_memory):
    model, xs = Leaky(draw(3, 3, 2, 4), draw(4), (4, 4, 4), **IMAGE), draw(5, 2, 4, 4, 2)
    brainstate.nn.init_all_states(model, batch_size=2)
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=2)
    assert not jax.tree.leaves(learner.trace.value)
    size = 2 * 2 * 16 * (3 * 3 * 2 * 4 + 4) * 8  # examples, states, positions, weights, bytes
    message = rf"takes {size / 1000:.1f} kB, .* room for 20.0 kB.*'w',.*trace='fresh'.*pp_prop"
    for run in (
        lambda: learner(xs[0]),
        lambda: learner.etrace_grad(xs, step_fn=loss_of(learner)),
        lambda: learner.etrace_grad(xs, step_fn=loss_of(learner), trace_every=2),
        lambda: learner.etrace_evolve(xs),
    ):
        with pytest.raises(btf.NotSupportedError, match=message):
            run()
        assert not learner.hidden_states['h',].value.any()
    assert "trace='fresh'" in learner.report.to_str()
    fresh = learner.etrace_grad(
        xs, step_fn=loss_of(learner), reduction='sum', trace='fresh', memory_budget='1GB'
    )
    testing.compare(fresh, true).check(1e-12)


def test_fresh_windows_that_must_carry_a_trace_without_room_say_what_keeps_them(little_memory):
    xs, model = draw(5, 2, 4, 4, 2), Leaky(draw(3, 3, 2, 4), draw(4), (4, 4, 4), **IMAGE)
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=2)

    def loss(x):
        jax.debug.callback(lambda: None)
        return loss_of(learner)(x)

    message = 'several windows.*side effects.*cannot be carried.*one window'
    for options in ({'trace_every': 2}, {'memory_budget': 10_000}):
        with pytest.raises(btf.NotSupportedError, match=message):
            learner.etrace_grad(xs, step_fn=loss, trace='fresh', **options)
    assert not learner.hidden_states['h',].value.any()
    learner.etrace_grad(xs, step_fn=loss, trace='fresh', memory_budget='1GB')


def test_a_larger_budget_and_a_smaller_trace_have_room(little_memory):
    xs, model = draw(5, 2, 4, 4, 2), Leaky(draw(3, 3, 2, 4), draw(4), (4, 4, 4), **IMAGE)
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=2, memory_budget='1MB')
    learner.etrace_grad(xs, step_fn=loss_of(learner))
    assert int(learner.running_index.value) == 5
    learner = btf.compile(model, 'pp_prop', xs[0], batch_size=2, decay_or_rank=0.9)
    learner.etrace_grad(xs, step_fn=loss_of(learner))
    assert int(learner.running_index.value) == 5


@pytest.mark.parametrize('kernel_fn', [None, jnp.tanh], ids=['raw', 'hook'])
def test_the_reference_gives_the_same_where_it_is_right(reference, kernel_fn):
    xs, options = draw(4, 2, 5, 4, 2), {'kernel_fn': kernel_fn, **IMAGE}
    gradients = []
    for library in (btf, reference):
        model = Plain(draw(3, 3, 2, 4), draw(4), (5, 4, 4), op=library.conv, **options)
        brainstate.nn.init_all_states(model, batch_size=2)
        learner = library.D_RTRL(model)
        learner.compile_graph(xs[0])
        learner.init_etrace_state()
        gradients.append(sum_of_steps(learner, model, xs))
    for found, expected in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert jnp.any(expected != 0)


class Plain(Leaky):
    """One state, of which the reference counts no path twice."""

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.size)))

    def update(self, x):
        params, h = self.w.value, self.h.value
        y = self.op(x, params['weight'], params.get('bias'))
        self.h.value = jnp.tanh(jnp.broadcast_to(self.leak, h.shape) * h + y)
        return self.h.value


def sum_of_steps(learner, model, xs):
    def step(total, x):
        grads = brainstate.transform.grad(
            lambda: loss_of(learner)(x), model.states(brainstate.ParamState)
        )()
        return jax.tree.map(jnp.add, total, grads), None

    weights = {path: s.value for path, s in model.states(brainstate.ParamState).items()}
    start = jax.tree.map(jnp.zeros_like, weights)
    return brainstate.transform.scan(step, start, xs)[0]
