"""What rules have in common: one step without a past, windows and steps, layers of one shape."""

import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing

pytestmark = pytest.mark.usefixtures('x64')

BATCH, STEPS = 2, 7
XS = np.random.default_rng(0).normal(size=(STEPS, BATCH, 3))
KEY = np.array([0, 7], np.uint32)
RULES = {
    'D_RTRL': (btf.D_RTRL, {}),
    'pp_prop': (btf.pp_prop, {'decay_or_rank': (0.7, 0.8)}),
    'EProp': (btf.EProp, {'kappa_filter_decay': 0.6}),
    'OSTLRecurrent': (btf.OSTLRecurrent, {}),
    'OSTLFeedforward': (btf.OSTLFeedforward, {'decay_or_rank': 0.3}),
    'SnAp': (btf.SnAp, {'n': 2}),
    'UORO': (btf.UORO, {'projection_key': 1}),
    'DNI': (btf.DNI, {}),
}
"""All with the signal of the loss."""
OTHERS = {
    'random feedback': (btf.EProp, {'feedback': 'random', 'random_feedback_key': KEY}),
    'ThreeFactor': (btf.ThreeFactor, {'modulator': 1.3}),
}


class Stacked(brainstate.nn.Module):
    """Two recurrent layers of one size, the second of which reads the first through an op."""

    def __init__(self, size=4):
        super().__init__()
        drawn = np.random.default_rng(1)
        shapes = {'v': (3, size), 'w1': (size, size), 'm': (size, size), 'w2': (size, size)}
        for name, shape in {**shapes, 'r': (size, 2)}.items():
            setattr(self, name, brainstate.ParamState(jnp.asarray(drawn.normal(size=shape))))
        self.start = drawn.normal(size=(2, BATCH, size))

    def init_state(self, batch_size=None, **_):
        rows = slice(batch_size) if batch_size else 0
        self.h1, self.h2 = (brainstate.HiddenState(jnp.asarray(h[rows])) for h in self.start)

    def update(self, x):
        drive = btf.matmul(x, self.v.value) + btf.matmul(self.h1.value, self.w1.value)
        self.h1.value = jnp.tanh(drive)
        drive = btf.matmul(self.h1.value, self.m.value) + btf.matmul(self.h2.value, self.w2.value)
        self.h2.value = jnp.tanh(drive)
        return self.h2.value @ self.r.value


def learned(rule, batch=BATCH, size=4, **options):
    kind, own = {**RULES, **OTHERS}[rule]
    model = Stacked(size)
    brainstate.nn.init_all_states(model, batch_size=batch)
    learner = kind(model, **own, **options)
    learner.compile_graph(jnp.asarray(XS[0] if batch else XS[0, 0]))
    if rule == 'DNI':
        shapes = learner.group_signal_shapes()
        learner.attach_synthesizer(btf.SyntheticGradient(shapes, scale=0.0))
    return model, learner


def loss(run, x):
    return jnp.sum(jnp.sin(3 * run(x)))


def by_step(learner, xs):
    """The sum of the gradients of calls, one by one."""
    gradient = brainstate.transform.jit(
        lambda x: brainstate.transform.grad(lambda: loss(learner, x), learner.param_states)()
    )
    return jax.tree.map(lambda *g: sum(g), *[gradient(jnp.asarray(x)) for x in xs])


@pytest.mark.parametrize('rule', RULES)
def test_one_step_from_a_zero_trace_is_the_gradient_of_the_step(rule):
    _, learner = learned(rule)
    model = Stacked()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    true = testing.bptt(model, jnp.asarray(XS[:1]), step_fn=lambda x: loss(model, x))
    testing.compare(by_step(learner, XS[:1]), true).check(1e-12)


@pytest.mark.parametrize('rule', [*RULES, *OTHERS])
def test_a_sequence_in_windows_is_the_rule_step_by_step(rule):
    _, learner = learned(rule)
    found = learner.etrace_grad(
        jnp.asarray(XS), step_fn=lambda x: loss(learner, x), reduction='sum', trace_every=3
    )
    _, other = learned(rule)
    testing.compare(found, by_step(other, XS)).check(1e-11)


def test_the_layers_of_a_trace_by_position_stay_apart():
    """What a weight of the first does to the second at once would not be at one position."""
    for rule in ('D_RTRL', 'OSTLRecurrent', 'SnAp'):
        paths = [group.hidden_paths for group in learned(rule)[1].graph.hidden_groups]
        assert paths == [[('h1',)], [('h2',)]]


class Told(btf.UORO):
    """Takes its signs from a table."""

    table = None

    def _draw_projection(self, key, step, group_index, shape, dtype):
        return self.table[step].reshape(shape).astype(dtype)


def test_the_mean_of_uoro_over_all_signs_is_bptt_through_both_layers(monkeypatch):
    """Of weights with an op; it is the same for a plain one, which has no past."""
    size, steps = 1, 4
    xs = jnp.asarray(XS[:steps, 0])
    monkeypatch.setitem(RULES, 'UORO', (Told, {'vjp_method': 'single-step'}))
    model, learner = learned('UORO', None, size)
    assert [g.hidden_paths for g in learner.graph.hidden_groups] == [[('h1',), ('h2',)]]
    start = [state.value for state in learner.hidden_states.values()]
    true = testing.bptt(model, xs, step_fn=lambda x: loss(model, x))

    def gradient(table):
        learner.table = table
        learner.reset_state()
        for state, value in zip(learner.hidden_states.values(), start, strict=True):
            state.value = value
        return learner.etrace_grad(xs, step_fn=lambda x: loss(learner, x), reduction='sum')

    signs = np.array([*itertools.product((-1.0, 1.0), repeat=2 * size * (steps - 1))])
    tables = np.concatenate([signs, np.ones((len(signs), 2 * size))], 1)
    tables = jnp.asarray(tables.reshape(len(signs), steps, 2 * size))
    each = brainstate.transform.jit(lambda: brainstate.transform.for_loop(gradient, tables))()
    assert np.std(each['w1',]) > 1e-3
    testing.compare(jax.tree.map(lambda g: g.mean(0), each), true).check(1e-11)


@pytest.mark.parametrize('size', [BATCH, 3])
def test_chunks_of_a_mapped_learner_are_those_of_one_written_for_a_batch(size):
    """Also if a chunk has as many steps as the batch has examples."""
    xs = jnp.asarray(XS[: 2 * size])

    def gradient(**options):
        learner = btf.compile(
            Stacked(), 'd_rtrl', xs[0], batch_size=BATCH, vjp_method='multi-step', **options
        )
        for path, state in learner.hidden_states.items():
            state.value = jnp.asarray(Stacked().start[int(path[-1][1]) - 1])

        def losses(x):
            return jnp.sum(jnp.sin(3 * learner(btf.MultiStepData(x))), axis=(1, 2))

        return learner, learner.etrace_grad(xs, step_fn=losses, chunk_size=size, reduction='sum')

    learner, found = gradient(vmap=True)
    assert isinstance(learner, brainstate.nn.Vmap)
    testing.compare(found, gradient()[1]).check(1e-12)
