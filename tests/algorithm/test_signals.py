"""e-prop and three-factor learning against a step recurrence in numpy, per step and in windows."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.algorithm.learning import (
    ALGORITHMS,
    Learning,
    add_trees,
    at,
    begin,
    check,
    learning,
    set_states,
)
from tests.models import MODELS
from tests.oracles.recurrence import BATCH, STEPS, step_loss
from tests.oracles.signals import (
    as_parameters,
    feedback_signal,
    gradients_per_step,
    modulator_signal,
)

KAPPA = 0.7
KEY = jax.random.PRNGKey(3)
REWARDS = np.array([0.5, -1.0, 2.0, 0.0, 1.5, -0.3])
RULES = {
    'filter': (btf.EProp, {'kappa_filter_decay': KAPPA}),
    'feedback': (btf.EProp, {'feedback': 'random', 'random_feedback_key': KEY}),
    'both': (
        btf.EProp,
        {'kappa_filter_decay': KAPPA, 'feedback': 'random', 'random_feedback_key': KEY},
    ),
    'modulator': (btf.ThreeFactor, {}),
}
TABLE = {
    'filter': (
        'vanilla gru lstm lif_expon gif_expon two_layers drop_connect shared_weight '
        'tied_readout output_reads_y while learned_leak hidden_group_state units'
    ),
    'feedback': 'gru lstm two_layers drop_connect plain_readout output_reads_y',
    'both': 'lif_expon gif_expon hidden_group_state',
    'modulator': 'gru lstm gif_expon two_layers drop_connect plain_readout output_reads_y',
}
LARGE = 'gif_expon', 'two_layers'  # which take long to compile
every_rule = pytest.mark.parametrize('rule', RULES)


def models(*names):
    return pytest.mark.parametrize('case', [MODELS[n] for n in names], ids=names, scope='module')


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for name, rule in RULES.items():
        monkeypatch.setitem(ALGORITHMS, name, rule)


def calls(learned, rule):
    """The loss of a step, from its inputs and its reward."""
    loss = step_loss(learned.model)
    if rule != 'modulator':
        return lambda x, reward: loss(learned.learner, x)
    return lambda x, reward: loss(lambda x: learned.learner(x, modulator=reward), x)


def sequences(learned, where=slice(None)):
    return jax.tree.map(lambda a: a[where], (learned.xs, jnp.asarray(REWARDS)))


def in_windows(learned, rule, where=slice(None), reduction='sum', **options):
    return learned.learner.etrace_grad(
        *sequences(learned, where), step_fn=calls(learned, rule), reduction=reduction, **options
    )


@functools.cache
def compiled_step(name, rule, precision):
    learned = learning(MODELS[name], rule)
    loss = calls(learned, rule)

    @brainstate.transform.jit
    def step(x, reward):
        return brainstate.transform.grad(lambda: loss(x, reward), learned.learner.param_states)()

    return step


def by_steps(learned, case, rule, steps=range(STEPS)):
    step = compiled_step(case.name, rule, brainstate.environ.get_precision())
    return [step(at(learned.xs, t), jnp.asarray(REWARDS[t])) for t in steps]


def truth(learned, case, rule, steps=slice(None), weights=None):
    """From the recurrence, the gradient of some steps, or of all with weights."""
    signal = None
    if rule in ('feedback', 'both'):
        matrices = learned.learner.random_feedback.feedback
        matrices = {group: own.B for group, own in matrices.items()}
        signal = feedback_signal(case, learned.learner.graph.hidden_groups, matrices)
    elif rule == 'modulator':
        signal = modulator_signal(REWARDS)
    kappa = KAPPA if rule in ('filter', 'both') else 0.0
    grads = gradients_per_step(case, kappa, signal)
    if weights is not None:
        grads = (w * g for w, g in zip(weights, grads, strict=True))
    return as_parameters(case, sum(list(grads)[steps]))


@pytest.mark.parametrize(
    ('rule', 'name'),
    [
        pytest.param(rule, name, marks=pytest.mark.slow if name in LARGE else ())
        for rule, names in TABLE.items()
        for name in names.split()
    ],
)
def test_steps_and_windows_give_the_gradient_of_the_recurrence(rule, name, x64):
    case = MODELS[name]
    learned = learning(case, rule)
    true = truth(learned, case, rule)
    begin(learned)
    check(add_trees(by_steps(learned, case, rule)), true, rtol=1e-10)
    left = jax.tree.map(jnp.copy, learned.learner.trace.value)
    begin(learned)
    check(in_windows(learned, rule, trace_every=4), true, rtol=1e-10)
    found = learned.learner.trace.value
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(left), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@every_rule
@models('vanilla', 'lstm', 'gif_expon')
def test_pieces_of_a_sequence(case, rule, x64):
    """Evolved, then differentiated in two calls, then forgotten."""
    learned = learning(case, rule)
    learner = learned.learner
    begin(learned)
    learner.etrace_evolve(*sequences(learned, slice(3)), step_fn=lambda x, _: learner(x))
    found = [in_windows(learned, rule, slice(3, 4)), in_windows(learned, rule, slice(4, None))]
    check(add_trees(found), truth(learned, case, rule, slice(3, None)), rtol=1e-10)
    for every in (None, 4):
        set_states(learned.model, learned.start)
        fresh = in_windows(learned, rule, trace='fresh', trace_every=every)
        check(fresh, truth(learned, case, rule), rtol=1e-10)


@models('vanilla', 'lstm', 'lif_expon')
def test_calls_without_a_gradient_advance_the_filter(case, x64):
    learned = learning(case, 'filter')
    begin(learned)
    for t in range(3):
        learned.learner(at(learned.xs, t))
    found = add_trees(by_steps(learned, case, 'filter', range(3, STEPS)))
    check(found, truth(learned, case, 'filter', slice(3, None)), rtol=1e-10)


@pytest.mark.slow
@every_rule
@models('lstm', 'lif_expon')
def test_float32_gives_the_recurrence_up_to_rounding(case, rule):
    learned = learning(case, rule)
    begin(learned)
    check(in_windows(learned, rule, trace_every=4), truth(learned, case, rule), rtol=1e-4)


def test_without_filter_and_feedback_eprop_is_d_rtrl(x64):
    learned = learning(MODELS['lstm'], 'd_rtrl')
    begin(learned)
    expected = in_windows(learned, 'd_rtrl')
    learner = btf.EProp(learned.model)
    learner.compile_graph(at(learned.xs, 0))
    begin(learned._replace(learner=learner))
    found = in_windows(learned._replace(learner=learner), 'd_rtrl')
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# Ops whose output is a state


class OpIsState(brainstate.nn.Module):
    """A state that is set to an op's output, or to one times it, and what reads the two."""

    def __init__(self, size, times_one):
        super().__init__()
        rng = np.random.default_rng(0)
        self.times_one = times_one
        self.W = brainstate.ParamState(jnp.asarray(rng.normal(size=(2 * size, size))))
        self.drive, self.again, self.v = (
            brainstate.HiddenState(jnp.asarray(0.1 * rng.normal(size=(BATCH, size))))
            for _ in range(3)
        )

    def update(self, x):
        y = btf.matmul(jnp.concatenate([x, self.drive.value], -1), self.W.value)
        self.drive.value = self.again.value = y = 1.0 * y if self.times_one else y
        self.v.value = 0.9 * jnp.tanh(self.v.value) + y + self.again.value**2
        return y * self.v.value


@pytest.mark.parametrize('rule', [*RULES, 'd_rtrl', 'pp_prop'])
def test_a_state_may_be_the_output_of_an_op(rule, x64):
    """It is learned like one that is computed from it."""
    xs = jnp.asarray(np.random.default_rng(1).normal(size=(STEPS, BATCH, 3)))

    def gradients(times_one):
        made, options = ALGORITHMS[rule]
        for window in (1, 4):
            learner = btf.compile(OpIsState(3, times_one), made, xs[0], **options)
            learned = Learning(learner.model, xs, None, learner, None)
            yield in_windows(learned, rule, trace_every=window)

    found = list(gradients(times_one=False))
    for true in gradients(times_one=True):
        for grads in found:
            check(grads, true, rtol=1e-12)


class Scalar(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((1, 1)))
        self.h = brainstate.HiddenState(jnp.zeros((1, 1)))

    def update(self, x):
        self.h.value = btf.matmul(x, self.w.value)
        return self.h.value


def test_a_filter_sees_the_past_of_a_state_that_is_the_output_of_an_op():
    x, signs = jnp.full((1, 1), 2.0), [1.0, -1.0, 1.0]
    learner = btf.compile(Scalar(), btf.EProp, x, kappa_filter_decay=0.5)
    found = [
        brainstate.transform.grad(lambda c=c: c * learner(x)[0, 0], learner.param_states)()
        for c in signs
    ]
    np.testing.assert_allclose([g[('w',)][0, 0] for g in found], [2.0, -3.0, 3.5])


# Windows that are differentiated in full


@models('lstm', 'lif_expon')
def test_a_window_reads_the_filtered_trace_at_its_start(case, x64):
    """What D-RTRL gives if the filter of its traces is put in the place of its trace."""
    learned = learning(case, 'filter', vjp_method='multi-step')
    plain = learning(case, 'd_rtrl', vjp_method='multi-step')

    def gradient(learned):
        inputs = btf.MultiStepData(jax.tree.map(lambda a: a[4:], learned.xs))
        weights = learned.learner.param_states
        return brainstate.transform.grad(
            lambda: jnp.sum(jnp.sin(learned.learner(inputs))), weights
        )()

    begin(learned)
    learned.learner.etrace_evolve(jax.tree.map(lambda a: a[:4], learned.xs))
    found = gradient(learned)
    begin(plain)
    filtered = jax.tree.map(jnp.zeros_like, plain.learner.trace.value)
    for t in range(4):
        plain.learner(at(plain.xs, t))
        new = plain.learner.trace.value
        filtered = jax.tree.map(lambda old, new: KAPPA * old + new, filtered, new)
    plain.learner.trace.value = filtered
    check(found, gradient(plain), rtol=1e-10)


# The modulator


@pytest.mark.parametrize('rule', ['filter', 'feedback', 'modulator'])
def test_a_mean_is_a_part_of_the_sum_whatever_the_signal(rule, x64):
    learned = learning(MODELS['vanilla'], rule)
    begin(learned)
    true = jax.tree.map(lambda g: g / STEPS, truth(learned, MODELS['vanilla'], rule))
    check(in_windows(learned, rule, reduction='mean'), true, rtol=1e-10)


MASK = np.array([0.0, 1.0, 0.5, 0.0, 2.0, -1.0])


@pytest.mark.parametrize(
    ('rule', 'name', 'reduction', 'every'),
    [
        ('filter', 'vanilla', 'sum', 4),
        ('feedback', 'vanilla', 'mean', 4),
        ('feedback', 'drop_connect', 'sum', None),
        ('modulator', 'vanilla', 'mean', 4),
        ('modulator', 'drop_connect', 'sum', None),
        pytest.param('both', 'lif_expon', 'sum', 1, marks=pytest.mark.slow),
        pytest.param('modulator', 'gif_expon', 'sum', 4, marks=pytest.mark.slow),
        pytest.param('feedback', 'plain_readout', 'mean', 4, marks=pytest.mark.slow),
    ],
)
def test_masks_weigh_what_a_step_teaches_whatever_the_signal(rule, name, reduction, every, x64):
    case = MODELS[name]
    learned = learning(case, rule)
    begin(learned)
    found = in_windows(learned, rule, mask=MASK, reduction=reduction, trace_every=every)
    scale = MASK.sum() if reduction == 'mean' else 1.0
    check(found, truth(learned, case, rule, weights=MASK / scale), rtol=1e-7)


@pytest.mark.parametrize('rule', ['feedback', 'modulator'])
def test_steps_that_a_mask_leaves_out_teach_nothing(rule, x64):
    learned = learning(MODELS['vanilla'], rule)
    begin(learned)
    grads = in_windows(learned, rule, mask=np.zeros(STEPS, int))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def leaky(batch=BATCH, **options):
    cell = btf.nn.LSTMCell(3, 4)
    x = jnp.ones((batch, 3))
    return btf.compile(cell, 'three_factor', x, batch_size=batch, seed=0, **options), x


def test_modulators_of_all_shapes():
    learner, x = leaky()
    loss = brainstate.transform.grad(lambda m: learner(x, modulator=m).sum(), learner.param_states)
    number = loss(2.0)
    for same in (jnp.full((BATCH, 4), 2.0), jnp.full((BATCH, 1, 1), 2), np.full((4, 2), 2.0)):
        learner.reset_state()
        brainstate.nn.reset_all_states(learner.model, batch_size=BATCH)
        for a, b in zip(jax.tree.leaves(number), jax.tree.leaves(loss(same)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(number))


def test_a_standing_modulator_stands_until_it_is_set_anew_also_under_jit():
    learner, x = leaky(modulator=1.0)

    @brainstate.transform.jit
    def gradient():
        return brainstate.transform.grad(lambda: learner(x).sum(), learner.param_states)()

    def start():
        learner.reset_state()
        brainstate.nn.reset_all_states(learner.model, batch_size=BATCH)
        return jax.tree.leaves(gradient())

    one = start()
    learner.modulator = -2.0
    two = start()
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(-2 * a, b, rtol=1e-6)
    learner.modulator = jnp.full((BATCH, 4), 3)
    for a, b in zip(one, start(), strict=True):
        np.testing.assert_allclose(3 * a, b, rtol=1e-6)
    assert learner.modulator.shape == (BATCH, 4)


def test_a_mapped_learner_takes_a_modulator():
    xs = jnp.ones((5, BATCH, 3))
    cell = btf.nn.LSTMCell(3, 4)
    learner = btf.compile(cell, 'three_factor', xs[0], batch_size=BATCH, vmap=True)
    start = [(state, state.value) for state in learner.hidden_states.values()]
    given = learner.etrace_grad(
        xs,
        jnp.full(5, 2.0),
        step_fn=lambda x, m: learner(x, modulator=m).sum(),
        trace='fresh',
    )
    for state, value in start:
        state.value = value
    learner.modulator = 2.0
    stands = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), trace='fresh')
    check(stands, given, rtol=1e-6)


def test_a_step_may_set_the_modulator():
    learner, x = leaky(modulator=0.0)
    xs, rewards = jnp.stack([x, -x, 2 * x]), jnp.array([1.0, -2.0, 0.5])
    start = [(state, state.value) for state in learner.hidden_states.values()]

    def given(x, reward):
        return learner(x, modulator=reward).sum()

    def setting(x, reward):
        learner.modulator = reward
        return learner(x).sum()

    true = learner.etrace_grad(xs, rewards, step_fn=given, trace='fresh')
    for every in (None, 2):
        for state, value in start:
            state.value = value
        learner.modulator = 0.0
        options = dict(trace='fresh', trace_every=every)
        check(learner.etrace_grad(xs, rewards, step_fn=setting, **options), true, rtol=1e-6)
        assert float(learner.modulator) == 0.5


def test_a_missing_modulator_is_asked_for_where_it_is_needed():
    learner, x = leaky()
    learner(x)
    learner.etrace_evolve(x[None])
    with pytest.raises(RuntimeError, match='no modulator'):
        brainstate.transform.grad(lambda: learner(x).sum(), learner.param_states)()
    with pytest.raises(RuntimeError, match='modulator=m'):
        learner.etrace_grad(x[None], step_fn=lambda x: learner(x).sum())


@pytest.mark.parametrize(
    ('modulator', 'error', 'message'),
    [
        ([1.0, 2.0], TypeError, 'is a list'),
        (jnp.ones(3), ValueError, r'shape \(3,\), which does not fit hidden group 0'),
        (jnp.ones((BATCH, 4, 2, 1)), ValueError, r'broadcasts to \(2, 4, 2\)'),
        (1j, TypeError, 'complex'),
        ('much', TypeError, 'modulator'),
    ],
)
def test_wrong_modulators_are_refused(modulator, error, message):
    learner, x = leaky(modulator=0.5)
    with pytest.raises(error, match=message):
        learner(x, modulator=modulator)
    with pytest.raises(error, match=message):
        learner.modulator = modulator
    assert float(learner.modulator) == 0.5


def test_other_rules_take_no_modulator():
    learner = btf.compile(btf.nn.GRUCell(3, 4), 'd_rtrl', jnp.ones(3))
    with pytest.raises(TypeError, match='D_RTRL takes no modulator'):
        learner(jnp.ones(3), modulator=1.0)


# Arguments


@pytest.mark.parametrize(
    ('rule', 'options', 'error', 'message'),
    [
        ('eprop', {'feedback': 'none'}, ValueError, "'symmetric' or 'random'"),
        ('eprop', {'feedback': 'random'}, ValueError, 'random_feedback_key'),
        (
            'eprop',
            {'feedback': 'random', 'random_feedback_key': 'seed'},
            TypeError,
            'random_feedback_key',
        ),
        ('eprop', {'kappa_filter_decay': 1.0}, ValueError, r'in \[0, 1\)'),
        ('eprop', {'kappa_filter_decay': -0.1}, ValueError, r'in \[0, 1\)'),
        ('eprop', {'kappa_filter_decay': float('nan')}, ValueError, r'in \[0, 1\)'),
        ('eprop', {'kappa_filter_decay': '0.5'}, TypeError, 'must be a number'),
        ('eprop', {'kappa_filter_decay': True}, TypeError, 'must be a number'),
        ('eprop', {'kappa_filter_decay': None}, TypeError, 'must be a number'),
        ('three_factor', {'vjp_method': 'multi-step'}, ValueError, 'single-step'),
        ('three_factor', {'modulator': (1.0,)}, TypeError, 'is a tuple'),
        ('three_factor', {'modulator': jnp.ones(7)}, ValueError, 'does not fit'),
    ],
)
def test_wrong_arguments_are_refused(rule, options, error, message):
    with pytest.raises(error, match=message):
        btf.compile(btf.nn.GRUCell(3, 4), rule, jnp.ones(3), **options)


@pytest.mark.parametrize('name', ['eprop', 'e_prop', 'EProp', 'three_factor'])
def test_rules_by_name(name):
    learner = btf.compile(btf.nn.GRUCell(3, 4), name, jnp.ones(3))
    assert isinstance(learner, btf.ThreeFactor if name == 'three_factor' else btf.EProp)


def test_a_filter_of_a_signal():
    state = btf.KappaFilter(jnp.zeros((2, 3)), 0.5)
    assert isinstance(state, brainstate.ShortTermState)
    state.update(jnp.ones((2, 3)))
    np.testing.assert_allclose(state.update(jnp.ones((2, 3))), 0.75)
    state.reset_state()
    np.testing.assert_array_equal(state.value, np.zeros((2, 3)))
    state.reset_state(batch_size=5)
    assert state.value.shape == (5, 3)
    with pytest.raises(ValueError, match='kappa is 1.0'):
        btf.KappaFilter(jnp.zeros(2), 1.0)


def test_a_fixed_matrix():
    feedback = btf.FixedRandomFeedback(200, 300, KEY, init_scale=2.0)
    assert (feedback.n_target, feedback.n_layer) == feedback.B.shape == (200, 300)
    assert abs(float(feedback.B.std()) - 2.0) < 0.05
    np.testing.assert_array_equal(feedback.B, btf.FixedRandomFeedback(200, 300, KEY, 2.0).B)
    with pytest.raises(TypeError, match='n_layer'):
        btf.FixedRandomFeedback(2, 3.5, KEY)
    with pytest.raises(ValueError, match='n_target'):
        btf.FixedRandomFeedback(0, 3, KEY)


@pytest.mark.parametrize('name', ['eprop', 'three_factor'])
def test_the_memory_of_windows_can_be_bounded(name):
    cell = btf.nn.ValinaRNNCell(2, 4, activation='tanh')
    learner = btf.compile(cell, name, jnp.ones(2), memory_budget='2kB')
    assert learner.resolved_budget == 2000
