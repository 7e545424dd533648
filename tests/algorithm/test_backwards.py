"""Fresh sequences in windows that run from the last to the first give what one window gives."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.runtime import planner
from tests.algorithm.learning import ALGORITHMS, begin, check, cut_into, learning
from tests.algorithm.test_etrace_grad import bar_counts
from tests.algorithm.test_signals import RULES, in_windows, truth
from tests.algorithm.test_windows import made_shapes
from tests.models import MODELS
from tests.oracles.recurrence import recurrence_of

TABLE = {
    'd_rtrl': (
        'vanilla gru lstm lif_expon alif_expon gif_expon two_layers shared_weight tied_readout '
        'output_reads_y plain_readout learned_leak hidden_group_state units unread_state'
    ),
    'filter': 'lif_expon output_reads_y learned_leak lstm',
    'feedback': 'gru plain_readout',
    'both': 'lif_expon',
    'modulator': 'gru output_reads_y',
}
QUICK = {
    ('d_rtrl', 'gru'),
    ('d_rtrl', 'lif_expon'),
    ('d_rtrl', 'output_reads_y'),
    ('d_rtrl', 'units'),
    ('filter', 'lif_expon'),
    ('feedback', 'gru'),
    ('modulator', 'gru'),
}


@pytest.fixture(autouse=True)
def backwards(monkeypatch):
    """However small the trace is."""
    monkeypatch.setattr(planner, 'CHEAP', 0)
    for name, rule in RULES.items():
        monkeypatch.setitem(ALGORITHMS, name, rule)


CUTS = {'windows': (3, None), 'blocks': (11, 3), 'windows of blocks': (6, 4)}
"""The most steps of a window, and of a block."""


@pytest.fixture
def cut(monkeypatch):
    return functools.partial(cut_into, monkeypatch)


@pytest.mark.parametrize('every', [1, 2, 4, 'blocks'])
@pytest.mark.parametrize(
    ('rule', 'name'),
    [
        pytest.param(rule, name, marks=() if (rule, name) in QUICK else pytest.mark.slow)
        for rule, names in TABLE.items()
        for name in names.split()
        if name in MODELS
    ],
)
def test_the_gradient_is_that_of_the_recurrence(cut, rule, name, every, x64):
    case, learned = MODELS[name], learning(MODELS[name], rule)
    true = recurrence_of(case, rule) if rule == 'd_rtrl' else truth(learned, case, rule)
    begin(learned)
    if every == 'blocks':
        cut(100, 2)
        every = None
    found = in_windows(learned, rule, trace='fresh', trace_every=every)
    assert learned.learner.plan.backwards and len(learned.learner.plan.windows) in (1, 2)
    check(found, true, rtol=1e-10)


class Net(brainstate.nn.Module):
    """Noisy neurons that differ, a count in a state of its own, and two parameters."""

    def __init__(self, n=4):
        super().__init__()
        self.n, self.leaks = n, jnp.linspace(0.5, 0.9, n)
        self.layer = btf.nn.Linear(3 + n, n)
        self.random = brainstate.random.RandomState(5)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.n)))
        self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def update(self, x):
        self.count.value = self.count.value + 1
        noise = 0.1 * self.random.normal(size=self.h.value.shape).astype(self.h.value.dtype)
        inputs = jnp.concatenate([x, jnp.sin(self.h.value)], -1)
        leak = jnp.broadcast_to(self.leaks, self.h.value.shape)
        self.h.value = leak * self.h.value + jnp.tanh(self.layer(inputs)) + noise
        return self.h.value


XS = np.random.default_rng(0).normal(size=(11, 2, 3))


def new_learner(rule='d_rtrl', model=Net, **options):
    brainstate.random.seed(1)
    return btf.compile(model(), rule, jnp.asarray(XS[0]), batch_size=2, **options)


def run(learner, **options):
    def step(x, target):
        y = learner(x)
        return jnp.mean((y - target) ** 2), {'y': y, 'count': learner.model.count.value}

    arguments = dict(step_fn=step, has_aux=True, return_value=True, trace='fresh') | options
    return learner.etrace_grad(jnp.asarray(XS), jnp.asarray(XS[..., :1]), **arguments)


@pytest.mark.parametrize('mask', [None, np.arange(11) % 3 > 0], ids=['all steps', 'masked'])
@pytest.mark.parametrize('rule', ['d_rtrl', 'eprop'])
@pytest.mark.parametrize('name', CUTS)
def test_losses_outputs_and_states_are_those_of_one_window(cut, name, rule, mask, x64):
    options = {'mask': mask, 'loss_output': 'masked'}
    one, several = new_learner(rule), new_learner(rule)
    expected = run(one, **options)
    cut(*CUTS[name])
    found = run(several, **options)
    assert not one.plan.backwards and several.plan.backwards
    testing.compare(found[0], expected[0]).check(1e-12)
    for a, b in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(expected[1:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert found[2]['count'].tolist() == list(range(1, 12))
    for learner in (one, several):
        assert int(learner.model.count.value) == 11 and int(learner.running_index.value) == 0
    np.testing.assert_allclose(one.model.h.value, several.model.h.value, rtol=1e-12)
    same_key = one.model.random.value == several.model.random.value
    assert np.all(jax.random.key_data(same_key) if same_key.dtype == 'key' else same_key)


@pytest.mark.parametrize('backend', ['jax', 'interpret'])
@pytest.mark.parametrize('name', CUTS)
def test_backends_agree(cut, name, backend):
    expected = run(new_learner())[0]
    learner = new_learner().with_backend(backend)
    cut(*CUTS[name])
    testing.compare(run(learner)[0], expected).check(1e-4)
    assert learner.plan.backwards


@pytest.mark.parametrize('name', CUTS)
def test_inside_jit_and_mapped_examples(cut, name, x64):
    expected = run(new_learner())[0]
    jitted = new_learner()
    cut(*CUTS[name])
    found = brainstate.transform.jit(lambda: run(jitted)[0])()
    testing.compare(found, expected).check(1e-12)

    def gradient(vmap, **options):
        gru = functools.partial(btf.nn.GRUCell, 3, 4)
        learner = new_learner(model=gru, vmap=vmap)
        xs = jnp.asarray(XS)
        return learner, learner.etrace_grad(xs, step_fn=lambda x: learner(x).var(), **options)

    mapped, found = gradient(True, trace='fresh')
    assert mapped.plan.backwards
    cut(11, None)
    testing.compare(found, gradient(False)[1]).check(1e-12)


@pytest.mark.parametrize('name', CUTS)
def test_a_progress_bar_counts_steps(cut, name, capsys):
    bar = brainstate.transform.ProgressBar(freq=2, desc=('step {i}', lambda d: {'i': d['i']}))
    learner = new_learner()
    cut(*CUTS[name])
    counts, ends = bar_counts(lambda: run(learner, pbar=bar), capsys)
    assert learner.plan.backwards
    assert ends == {11} and counts == sorted(counts) and set(counts) >= {0, 2, 4, 6, 8, 10, 11}


def test_side_effects_happen_once(x64):
    learner, seen = new_learner(), []

    def step(x):
        y = learner(x)
        jax.debug.callback(lambda count: seen.append(int(count)), learner.model.count.value)
        return jnp.mean(y**2)

    options = dict(trace='fresh', trace_every=3)
    found = learner.etrace_grad(jnp.asarray(XS), step_fn=step, **options)
    jax.effects_barrier()
    assert seen == list(range(1, 12)) and not learner.plan.backwards
    other = new_learner()
    silent = other.etrace_grad(
        jnp.asarray(XS), step_fn=lambda x: jnp.mean(other(x) ** 2), **options
    )
    assert other.plan.backwards
    testing.compare(found, silent).check(1e-12)


@pytest.mark.parametrize('steps', [5, 300])
def test_there_is_no_trace_at_any_length(monkeypatch, steps):
    monkeypatch.setattr(planner, 'LITTLE', 1)
    learner = new_learner(model=functools.partial(Net, 40))
    xs = jnp.ones((steps, 2, 3))

    def gradient(**options):
        function = brainstate.transform.StatefulFunction(
            lambda: learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), **options)
        )
        return set(made_shapes(function.make_jaxpr().get_jaxpr().jaxpr))

    assert (2, 43, 40) in gradient()
    assert (2, 43, 40) not in gradient(trace='fresh', trace_every=2)
    assert learner.plan.backwards
    assert (2, 43, 40) not in gradient(trace='fresh')
    assert learner.plan.backwards == (steps > 200)


def test_an_op_without_trace_rules_learns_over_any_length(x64):
    twice = btf.register_primitive(
        'test_backwards_twice', lambda x, weight: 2 * (x @ weight), batched=True
    )

    class Cell(Net):
        def __init__(self):
            super().__init__()
            self.W = brainstate.ParamState(brainstate.random.normal(size=(3, self.n)))

        def update(self, x):
            super().update(x)
            self.h.value = self.h.value + twice.bind(x, self.W.value)
            return self.h.value

    expected = run(new_learner(model=Cell))[0]
    learner = new_learner(model=Cell)
    testing.compare(run(learner, trace_every=4)[0], expected).check(1e-12)
    assert learner.plan.backwards and 'no trace is carried' in new_learner(model=Cell).report(1)


@pytest.mark.parametrize(('cheap', 'backwards'), [(0, True), (1e6, False)])
def test_the_report_says_what_will_be_done_and_was_done(monkeypatch, cheap, backwards):
    monkeypatch.setattr(planner, 'CHEAP', cheap)
    monkeypatch.setattr(planner, 'LITTLE', 1)
    learner = new_learner()
    why = 'from the last to the first' if backwards else 'costs less than a second forward pass'
    assert 'up to 200 steps; for more, ' in learner.report(1) and why in learner.report(1)
    xs = jnp.ones((400, 2, 3))
    learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), trace='fresh')
    # On a CPU all steps run forwards first.
    windows, block = (((1, 400),), 100) if backwards else (((4, 100),), None)
    assert learner.plan.windows == windows and learner.plan.block == block
    assert learner.plan.backwards == backwards and why in learner.report(1)
