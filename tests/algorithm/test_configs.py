"""Every configuration learns, by steps and in windows, what is written out by hand."""

import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.algorithm.learning import check
from tests.oracles.configured import BATCH, INPUTS, Layer, factors, gradient, sequences

C = btf.ETraceConfig
KEY = np.array([0, 3], np.uint32)
SIGNALS = 'symmetric', 'random_feedback', 'modulatory'
LEAK = {'temporal_recursion': 'scalar_leak', 'decay': 0.6}
NONE = {'temporal_recursion': 'none'}
WHOLE = [
    C(learning_signal=signal, **recursion, **kind)
    for signal, recursion, kind in itertools.product(
        SIGNALS, ({}, LEAK, NONE), ({}, {'trace_filter': 'kappa', 'kappa': 0.7})
    )
]
FACTORIZED = [
    C(
        'io_factorized',
        temporal_recursion=(x, f),
        decay=(0.0 if x == 'none' else 0.8, 0.0 if f == 'none' else 0.9),
        learning_signal=signal,
    )
    for signal, x, f in itertools.product(
        SIGNALS, ('scalar_leak', 'none'), ('jacobian', 'scalar_leak', 'none')
    )
]


def learner_of(layer, config, **options):
    if config.learning_signal == 'random_feedback':
        options['random_feedback_key'] = KEY
    start = [state.value for state in (layer.i, layer.v)]
    learner = btf.compile(layer, config, jnp.ones((BATCH, INPUTS)), **options)
    layer.i.value, layer.v.value = start
    return learner


def step_loss(learner, is_modulated):
    def loss(x, k, m):
        return jnp.sum(k * learner(x, modulator=m if is_modulated else None))

    return loss


def by_steps(learner, data, is_modulated):
    loss = step_loss(learner, is_modulated)

    def step(*slices):
        return brainstate.transform.grad(lambda: loss(*slices), learner.param_states)()

    grads = brainstate.transform.for_loop(step, *data)
    return jax.tree.map(lambda g: g.sum(0), grads)


def in_windows(learner, data, is_modulated, **options):
    loss = step_loss(learner, is_modulated)
    return learner.etrace_grad(*data, step_fn=loss, reduction='sum', **options)


def every_way(layer, config, **options):
    """Gradients by steps, in windows that carry a trace, and in fresh ones; and the truth."""
    data = tuple(map(jnp.asarray, sequences()))
    is_modulated = config.learning_signal == 'modulatory'
    start = [state.value for state in (layer.i, layer.v)]
    learner = learner_of(layer, config, **options)
    assert learner.config == config
    matrix = None
    if learner.random_feedback is not None:
        matrix = np.asarray(learner.random_feedback.feedback[0].B)
    true = gradient(config, factors(layer, *sequences()[:2]), sequences()[2], matrix)
    found = []
    for way in (
        lambda: by_steps(learner, data, is_modulated),
        lambda: in_windows(learner, data, is_modulated, trace_every=3),
        lambda: in_windows(learner, data, is_modulated, trace='fresh'),
    ):
        layer.i.value, layer.v.value = start
        learner.reset_state()
        found.append(way())
    return learner, found, true


def _differs_once(config):
    """From D-RTRL or pp_prop, in one axis at most: a configuration that stands for others."""
    if config.is_factorized:
        usual = config.recursion_x == 'scalar_leak', config.recursion_f == 'jacobian'
    else:
        usual = config.temporal_recursion == 'jacobian', config.trace_filter == 'none'
    return [*usual, config.learning_signal == 'symmetric'].count(False) <= 1


@pytest.mark.parametrize(
    'config',
    [
        pytest.param(config, marks=() if _differs_once(config) else pytest.mark.slow)
        for config in (*WHOLE, *FACTORIZED)
    ],
    ids=C.describe,
)
def test_a_configuration_learns_what_is_written_out_by_hand(config, x64):
    _, found, true = every_way(Layer(skip=0.4), config)
    for grads in found:
        check(grads, true, rtol=1e-10)


@pytest.mark.parametrize(
    'config',
    [
        C(),
        C(**LEAK),
        C(**NONE),
        C(trace_filter='kappa', kappa=0.7, **LEAK),
        C('io_factorized', 'scalar_leak', decay=0.8),
        C('io_factorized', 'none'),
    ],
    ids=C.describe,
)
def test_planes_of_one_number_are_learned_like_others(config, x64):
    _, found, true = every_way(Layer(uniform=True), config)
    for grads in found:
        check(grads, true, rtol=1e-10)


def planes(learner):
    return jax.tree.leaves(learner.trace.value)


def test_without_recursion_there_is_no_trace_unless_an_old_state_is_read(x64):
    def trace(skip, **axes):
        return planes(learner_of(Layer(skip=skip), C(**axes)))

    size = sum(leaf.size for leaf in trace(0.0))
    assert not trace(0.0, **NONE)
    assert 0 < sum(leaf.size for leaf in trace(0.4, **NONE)) < size
    filtered = trace(0.0, trace_filter='kappa', kappa=0.5, **NONE)
    assert sum(leaf.size for leaf in filtered) == size


def test_a_leak_is_the_same_number_at_all_positions():
    learner = learner_of(Layer(), C(**LEAK))
    (transition,) = learner.graph.transitions
    assert transition.D_pattern == [[True, False], [False, True]]


# Rules that are the same


def found_by(config_or_rule, layer=None, options=(), **changes):
    """The gradient of a sequence in windows of three steps."""
    layer = layer or Layer(**changes)
    start = [state.value for state in (layer.i, layer.v)]
    data = tuple(map(jnp.asarray, sequences()))
    learner = btf.compile(layer, config_or_rule, data[0][0], **dict(options))
    layer.i.value, layer.v.value = start
    return in_windows(learner, data, False, trace_every=3)


def of_steps_alone(layer):
    """The sum of the gradients of single steps, by jax.grad at the states before them."""
    weights = layer.weight.value
    a, b = jnp.asarray(layer.a), jnp.asarray(layer.b)

    def step(weights, states, x, k):
        i, v = states
        i = a[None] * i + x @ weights['weight'] + weights['bias'][None]
        v = b[None] * jnp.tanh(v) + i
        return jnp.sum(k * jnp.sin(v) * (1 + i / 2)), (i, v)

    states, total = (layer.i.value, layer.v.value), []
    for x, k, _ in zip(*map(jnp.asarray, sequences()), strict=True):
        grads, states = jax.grad(step, has_aux=True)(weights, states, x, k)
        total.append(grads)
    return {('weight',): jax.tree.map(lambda *g: sum(g), *total)}


def test_rules_that_keep_nothing_are_the_gradients_of_the_steps(x64):
    true = of_steps_alone(Layer())
    check(found_by(C(**NONE)), true, rtol=1e-12)
    check(found_by('ostl_feedforward', options={'decay_or_rank': 0.0}), true, rtol=1e-12)
    check(found_by('pp_prop', options={'decay_or_rank': 1}), true, rtol=1e-12)
    nearly = found_by('OSTL feedforward')
    check(nearly, true, rtol=1e-4)
    assert np.any(nearly['weight',]['weight'] != true['weight',]['weight'])


def test_a_leak_by_which_the_states_decay_is_d_rtrl(x64):
    class Alone(Layer):
        def update(self, x):
            weight = self.weight.value
            drive = btf.matmul(x, weight['weight'], weight['bias'])
            self.v.value = 0.6 * self.v.value + drive
            return jnp.sin(self.v.value)

    check(found_by(C(**LEAK), Alone()), found_by('d_rtrl', Alone()), rtol=1e-12)


def test_a_filter_that_keeps_nothing_is_d_rtrl(x64):
    check(found_by(C(trace_filter='kappa', kappa=0.0)), found_by('d_rtrl'), rtol=1e-12)


@pytest.mark.parametrize('factorization', ['per_param', 'io_factorized'])
def test_the_losses_own_signal_as_the_modulator_is_the_symmetric_rule(factorization, x64):
    axes = {} if factorization == 'per_param' else {'decay': 0.8}
    layer, config = Layer(), C(factorization, learning_signal='modulatory', **axes)
    steps = factors(layer, *sequences()[:2])
    signals = jnp.asarray(np.stack([np.moveaxis(step.L, 0, -1) for step in steps]))
    learner = learner_of(layer, config)
    data = (*map(jnp.asarray, sequences()[:2]), signals)
    found = in_windows(learner, data, True, trace_every=3)
    check(found, found_by(config.replace(learning_signal='symmetric')), rtol=1e-12)


@pytest.mark.parametrize('factorization', ['per_param', 'io_factorized'])
@pytest.mark.parametrize('recursion', ['jacobian', 'scalar_leak', 'none'])
def test_chunks_read_the_trace_of_a_configuration_at_their_entry(factorization, recursion, x64):
    """With one chunk for all steps but the first, whose trace is f (x) x whatever carries it."""
    decay = None if (factorization, recursion) == ('per_param', 'jacobian') else 0.5
    config = C(factorization, recursion, decay=None if recursion == 'none' else decay)
    layer = Layer()
    learner = learner_of(layer, config, vjp_method='multi-step')
    xs, ks, _ = map(jnp.asarray, sequences())
    learner(xs[0])

    def loss():
        return jnp.sum(ks[1:] * learner(btf.MultiStepData(xs[1:])))

    found = brainstate.transform.grad(loss, learner.param_states)()
    plain = learner_of(Layer(), C(), vjp_method='multi-step')
    plain(xs[0])
    true = brainstate.transform.grad(
        lambda: jnp.sum(ks[1:] * plain(btf.MultiStepData(xs[1:]))), plain.param_states
    )()
    check(found, true, rtol=1e-12)


# What classes stand for, and what is refused


@pytest.mark.parametrize(
    ('rule', 'options', 'config'),
    [
        ('d_rtrl', {}, C()),
        ('pp_prop', {'decay_or_rank': 0.9}, C('io_factorized', decay=0.9)),
        ('pp_prop', {'decay_or_rank': (3, 0.9)}, C('io_factorized', decay=(0.5, 0.9))),
        ('eprop', {}, C()),
        ('eprop', {'kappa_filter_decay': 0.5}, C(trace_filter='kappa', kappa=0.5)),
        (
            'eprop',
            {'feedback': 'random', 'random_feedback_key': KEY},
            C(learning_signal='random_feedback'),
        ),
        ('three_factor', {}, C(learning_signal='modulatory')),
        ('ostl_feedforward', {}, C('io_factorized', decay=1e-6)),
        ('d_rtrl', {'config': C(**LEAK)}, C(**LEAK)),
        ('pp_prop', {'decay_or_rank': 0.9, 'config': FACTORIZED[0]}, FACTORIZED[0]),
    ],
)
def test_a_class_stands_for_a_configuration(rule, options, config):
    learner = btf.compile(btf.nn.GRUCell(3, 4), rule, jnp.ones(3), **options)
    assert learner.config == config


@pytest.mark.parametrize(
    ('algorithm', 'options', 'error', 'message'),
    [
        (btf.D_RTRL, {'config': {}}, TypeError, 'is a dict; expected an ETraceConfig'),
        (btf.D_RTRL, {'config': FACTORIZED[0]}, ValueError, "keeps traces 'per_param'"),
        (btf.pp_prop, {'config': C()}, ValueError, "keeps traces 'io_factorized'"),
        (btf.pp_prop, {}, TypeError, 'decay_or_rank'),
        (C(learning_signal='random_feedback'), {}, ValueError, 'random_feedback_key'),
        (
            C(learning_signal='modulatory'),
            {'vjp_method': 'multi-step'},
            ValueError,
            'single-step',
        ),
        (C(learning_signal='bootstrapped'), {}, NotImplementedError, 'ParamDimVjpAlgorithm'),
        (C(), {'config': C()}, TypeError, 'once'),
        (C(), {'modulator': 1.0}, TypeError, 'modulator'),
        (btf.EProp, {'config': C()}, TypeError, 'config'),
        (btf.ThreeFactor, {'config': C()}, TypeError, 'config'),
    ],
)
def test_configurations_that_a_learner_cannot_have_are_refused(algorithm, options, error, message):
    with pytest.raises(error, match=message):
        btf.compile(btf.nn.GRUCell(3, 4), algorithm, jnp.ones(3), **options)


def test_only_modulated_rules_have_a_modulator():
    learner = learner_of(Layer(), C())
    assert learner.modulator is None
    with pytest.raises(TypeError, match='takes no modulator'):
        learner.modulator = 1.0


def test_a_file_of_another_configuration_is_refused(tmp_path):
    path = tmp_path / 'learner.npz'
    for config in (C(**LEAK), C('io_factorized', decay=0.8)):
        learner_of(Layer(), config).save(path)
        learner_of(Layer(), config).load(path)
        others = [config.replace(decay=0.5)]
        if config.is_factorized:
            others.append(config.replace(temporal_recursion='scalar_leak'))
            others.append(config.replace(learning_signal='random_feedback'))
        for other in others:
            with pytest.raises(btf.CheckpointError, match='the option config is'):
                learner_of(Layer(), other).load(path)


# Kernels, and examples that start anew


@pytest.mark.parametrize(
    'config',
    [
        pytest.param(C(trace_filter='kappa', kappa=0.7, **LEAK), marks=pytest.mark.slow),
        C(**NONE),
        C('io_factorized', 'scalar_leak', decay=0.8),
        pytest.param(C('io_factorized', 'none'), marks=pytest.mark.slow),
    ],
    ids=C.describe,
)
def test_kernels_carry_a_leak_like_any_other_trace(config):
    _, found, true = every_way(Layer(skip=0.4), config, backend='interpret')
    for grads in found:
        check(grads, true, rtol=1e-4)


@pytest.mark.parametrize('config', [C(**LEAK), WHOLE[5]], ids=C.describe)
def test_nothing_leaks_past_a_new_start(config, x64):
    data = tuple(map(jnp.asarray, sequences()))
    learner = learner_of(Layer(skip=0.4), config)
    resets = jnp.arange(len(data[0])) == 3
    loss = lambda x, k, m, r: jnp.sum(k * learner(x, reset=r))  # noqa: E731
    found = learner.etrace_grad(*data, resets, step_fn=loss, reduction='sum', trace_every=4)
    layer, true = Layer(skip=0.4), []
    for part in (slice(3), slice(3, None)):
        xs, ks, ms = (a[part] for a in sequences())
        true.append(gradient(config, factors(layer, xs, ks), ms))
    # A new start gives the states the values of the compiled learner.
    check(found, jax.tree.map(jnp.add, *true), rtol=1e-10)


@pytest.mark.parametrize(
    ('config', 'rule', 'options'),
    [
        (C(recurrence_scope='coupled'), btf.OSTLRecurrent, {}),
        (C(recurrence_scope='sparse_n', sparse_n=2), btf.SnAp, {'n': 2}),
        (C('random_projection', recurrence_scope='coupled'), btf.UORO, {}),
    ],
    ids=['coupled', 'sparse_n', 'random_projection'],
)
def test_a_rule_is_its_configuration(x64, config, rule, options):
    xs = jnp.linspace(-1.0, 1.0, 12).reshape(6, 2)

    def gradient(algorithm, **options):
        cell = btf.nn.ValinaRNNCell(2, 3, activation='tanh')
        with brainstate.random.seed_context(1):
            weights = brainstate.random.normal(size=(5, 3))
        cell.W.weight.value |= {'weight': weights}
        learner = btf.compile(cell, algorithm, xs[0], vjp_method='single-step', **options)
        assert learner.config == config
        return learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))

    found, expected = (jax.tree.leaves(g) for g in (gradient(config), gradient(rule, **options)))
    for a, b in zip(found, expected, strict=True):
        assert jnp.abs(b).max() > 1e-2
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize('way', ['steps', 'carry', 'fresh'])
def test_a_filter_goes_with_neighbourhoods(x64, way):
    """``ebar_t = sum_k kappa^(t-k) e_k``, where ``e`` is the whole influence on a dense group."""
    kappa, xs = 0.6, jnp.linspace(-1.0, 1.0, 12).reshape(6, 2)
    cell = btf.nn.ValinaRNNCell(2, 3, activation='tanh')
    config = C(recurrence_scope='sparse_n', sparse_n=2, trace_filter='kappa', kappa=kappa)
    learner = btf.compile(cell, config, xs[0], seed=0)
    start, params = cell.h.value, cell.W.weight.value

    def states(params):
        def step(h, x):
            new = jnp.tanh(jnp.concatenate([x, h]) @ params['weight'] + params['bias'])
            return new, new

        return jax.lax.scan(step, start, xs)[1]

    def filtered(params):
        h = states(params)
        signals = 2 * jax.lax.stop_gradient(h)
        ages = jnp.arange(len(xs))[:, None] - jnp.arange(len(xs))[None]
        weights = jnp.where(ages >= 0, kappa ** ages.astype(h.dtype), 0.0)
        return jnp.sum(weights * (signals @ h.T))

    def step_fn(x):
        return jnp.sum(learner(x) ** 2)

    if way == 'steps':
        grads = [brainstate.transform.grad(step_fn, learner.param_states)(x) for x in xs]
        found = jax.tree.map(lambda *g: sum(g), *grads)
    else:
        found = learner.etrace_grad(
            xs,
            step_fn=step_fn,
            reduction='sum',
            trace=way,
            trace_every=4 if way == 'carry' else None,
        )
    true = jax.grad(filtered)(params)
    for key, b in true.items():
        assert jnp.abs(b).max() > 1e-2
        np.testing.assert_allclose(found['W', 'weight'][key], b, rtol=1e-10)
