"""A learner gives the same gradients with every backend, and the kernels are in what is lowered."""

import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast.kernels import dispatch
from braintrace_fast.kernels.outer import triton as outer_triton
from braintrace_fast.runtime import adjoint, factorized
from tests.kernel_checks import absent, called
from tests.models import MODELS

RULES = {
    'd_rtrl': (btf.D_RTRL, {}),
    'pp_prop': (btf.pp_prop, {'decay_or_rank': 0.9}),
    'eprop': (btf.EProp, {'kappa_filter_decay': 0.5}),
    'three_factor': (btf.ThreeFactor, {'modulator': 0.5}),
}
OPS = {
    'd_rtrl': {'hidden_jacobian', 'adjoint_scan', 'trace_carry'},
    'pp_prop': {'hidden_jacobian', 'factored_trace', 'factored_trace.smooth'},
}
OPS['eprop'] = OPS['three_factor'] = OPS['d_rtrl']
ENGINES = ['d_rtrl', 'pp_prop', 'eprop']
"""A rule for each engine."""
NO_TILES = {'cond_transition', 'while', 'learned_leak', 'hidden_group_state'}
"""Models whose Jacobians no kernel takes."""

FEW = ['lif_expon', 'gru', 'learned_leak']


def expected_ops(name, rule, kind='triton'):
    """What kernels run of a model."""
    lacking = {'hidden_jacobian'} if name in NO_TILES else set()
    if name == 'drop_connect':  # which is no window
        lacking = OPS[rule] - {'hidden_jacobian'}
    if (name, rule) == ('vanilla', 'd_rtrl'):  # its trace does not outlive a step
        lacking = {'trace_carry'}
    if (name, rule, kind) == ('gif_expon', 'eprop', 'triton'):  # too many planes to hold
        lacking = {'trace_carry'}
    return OPS[rule] - lacking


def slow_but_for(one, *few):
    return () if one in few else pytest.mark.slow


def slowly_but_for(names, *few):
    """Cases that are slow but for a few, which together have every value of every name."""
    return lambda cases: pytest.mark.parametrize(
        names, [pytest.param(*case, marks=slow_but_for(case, *few)) for case in cases]
    )


def on_the_table(*few, without=()):
    """All models with a rule for each engine; slow but for a few models, or models with a rule."""
    return pytest.mark.parametrize(
        ('name', 'rule'),
        [
            pytest.param(
                name, rule, marks=slow_but_for(name if name in few else (name, rule), *few)
            )
            for rule in ENGINES
            for name in MODELS
            if name not in without
        ],
    )


def new_learner(name, rule, **options):
    model, inputs = MODELS[name].build(3)
    xs = inputs(0, 6)
    algorithm, own = RULES[rule]
    learner = algorithm(model, **own, **options)
    learner.compile_graph(jax.tree.map(lambda a: a[0], xs))
    return learner, xs


def loss_of(learner):
    return lambda x: jnp.sum(u.get_mantissa(learner(x)) ** 2)


def restart(learner, start):
    brainstate.random.seed(3)
    for state, value in start:
        state.value = value
    learner.reset_state()


def gradients(learner, xs, start, first='grad'):
    """Of two halves of a sequence, the second with the trace of the first.

    The first may be run without a gradient, by another program.
    """
    restart(learner, start)
    loss = loss_of(learner)
    run = brainstate.transform.jit(lambda xs: learner.etrace_grad(xs, step_fn=loss))
    begin = brainstate.transform.jit(learner.etrace_evolve) if first == 'evolve' else run
    halves = [jax.tree.map(lambda a, p=part: a[p], xs) for part in (slice(3), slice(3, 6))]
    return begin(halves[0]), run(halves[1])


def start_of(learner):
    return [(state, state.value) for state in learner.model.states().values()]


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max() + 1e-6))


def run_by_kernels(choices):
    return {choice.op for choice in choices if choice.implementation == 'triton'}


@on_the_table('lif_expon', ('gru', 'pp_prop'), ('learned_leak', 'd_rtrl'))
def test_backends_agree(name, rule):
    learner, xs = new_learner(name, rule)
    start, first = start_of(learner), 'evolve' if name in FEW else 'grad'
    expected = gradients(learner, xs, start, first)
    assert any(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(expected[1]))
    for backend in ('interpret', 'pallas') if name in FEW else ('interpret',):
        other = learner.with_backend(backend)
        with dispatch.recording() as choices:
            found = gradients(other, xs, start, first)
        assert_same(found, expected)
        if backend == 'interpret':
            assert run_by_kernels(choices) == expected_ops(name, rule)
            assert run_by_kernels(choices) <= run_by_kernels(other.choices)


def step_gradient(learner):
    """Of a step, in which the trace moves."""
    return brainstate.transform.grad(loss_of(learner), learner.param_states)


@pytest.mark.parametrize('name', ['lif_expon', 'gru'])
@pytest.mark.parametrize('rule', [pytest.param(r, marks=slow_but_for(r, 'd_rtrl')) for r in RULES])
def test_steps_agree(name, rule):
    learner, xs = new_learner(name, rule)
    start = start_of(learner)

    def run(learner):
        restart(learner, start)
        step = brainstate.transform.jit(step_gradient(learner))
        return [step(jax.tree.map(lambda a, t=t: a[t], xs)) for t in range(3)]

    expected = run(learner)
    assert any(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(expected[2]))
    assert_same(run(learner.with_backend('interpret')), expected)


@pytest.mark.slow
@pytest.mark.parametrize('rule', ENGINES)
def test_windows_in_full_agree(rule):
    """Windows that are differentiated in full, and read the trace at their start."""
    learner, xs = new_learner('lif_expon', rule, vjp_method='multi-step')
    start = start_of(learner)

    def run(learner):
        restart(learner, start)

        def losses(x):
            return jnp.sum(u.get_mantissa(learner(btf.MultiStepData(x))) ** 2, axis=(1, 2))

        options = {'step_fn': losses, 'chunk_size': 2}
        return brainstate.transform.jit(lambda xs: learner.etrace_grad(xs, **options))(xs)

    expected = run(learner)
    assert any(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(expected))
    with dispatch.recording() as choices:
        assert_same(run(learner.with_backend('interpret')), expected)
    assert run_by_kernels(choices) == OPS[rule] - {'factored_trace.smooth'}


def kernels_in(run, x):
    """The names of the kernels in a function of states, lowered for each platform."""
    function = brainstate.transform.StatefulFunction(run, return_only_write=False)
    with absent('cuda'):
        function.make_jaxpr(x)
        values = [state.value for state in function.get_state_trace(x).states]
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (values, x))
        traced = jax.jit(function.jaxpr_call).trace(*shapes)
    found = {}
    for platform in dispatch.platforms():
        with absent(platform):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        found[platform] = {*called(text, platform)}
    return found


def names_of(ops):
    return {op.split('.')[-1] for op in ops}


# It checks its random numbers by a callback, which is lowered only where there is a device.
@on_the_table('lif_expon', without=['drop_connect'])
def test_the_kernels_are_in_what_is_lowered(name, rule):
    learner, xs = new_learner(name, rule, backend='pallas')
    found = kernels_in(lambda xs: learner.etrace_grad(xs, step_fn=loss_of(learner)), xs)
    assert found == {
        kind.platform: names_of(expected_ops(name, rule, kind.name))
        for kind in dispatch.KINDS.values()
    }


@pytest.mark.parametrize(  # eprop has those of d_rtrl, with more planes
    'rule', [pytest.param(r, marks=slow_but_for(r, 'd_rtrl', 'pp_prop')) for r in ENGINES]
)
def test_the_kernels_are_in_a_step_that_is_lowered(rule):
    learner, xs = new_learner('lif_expon', rule, backend='pallas')
    found = kernels_in(step_gradient(learner), jax.tree.map(lambda a: a[0], xs))
    step = {'hidden_jacobian'} if rule == 'pp_prop' else {'hidden_jacobian', 'trace_step'}
    assert found == dict.fromkeys(dispatch.platforms(), step)


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop'])
def test_plain_jax_is_lowered_without_kernels(rule):
    learner, xs = new_learner('lif_expon', rule, backend='jax')
    found = kernels_in(lambda xs: learner.etrace_grad(xs, step_fn=loss_of(learner)), xs)
    assert found == dict.fromkeys(dispatch.platforms(), set())


@pytest.mark.parametrize(
    ('rule', 'engine', 'walk'),
    [('d_rtrl', adjoint, 'adjoint_scan'), ('pp_prop', factorized, 'factored_trace')],
)
def test_a_window_is_walked_once_per_group(rule, engine, walk, monkeypatch):
    learner, _ = new_learner('gru', rule, backend='pallas')
    assert len(learner.graph.hidden_param_op_relations) > len(learner.graph.hidden_groups) == 1
    run, calls = getattr(engine, walk), []

    def counted(*operands, **options):
        calls.append(walk)
        return run(*operands, **options)

    monkeypatch.setattr(engine, walk, counted)
    learner.with_backend('pallas')  # which looks at a window
    assert calls == [walk]


def test_the_report_says_what_runs_where():
    learner, _ = new_learner('lif_expon', 'd_rtrl', backend='pallas')
    text = learner.report.to_str()
    for op in (*OPS['d_rtrl'], 'trace_step'):
        assert f'{op} on cuda: triton' in text
        assert f'{op} on tpu: mosaic' in text
        assert f'{op} on cpu: jax, there are no kernels for CPUs' in text
    assert 'jax (asked for: auto)' in new_learner('gru', 'd_rtrl')[0].report.to_str()


@slowly_but_for(('rule', 'rows'), ('d_rtrl', 4), ('three_factor', 7))(
    itertools.product(['d_rtrl', 'eprop', 'three_factor'], [4, 7])
)
def test_the_report_says_what_a_gradient_runs(rule, rows, monkeypatch):
    """Signals are operands too, of which a kernel holds only so many."""
    monkeypatch.setattr(outer_triton, 'ROWS', rows)
    learner, xs = new_learner('lif_expon', rule, backend='pallas')
    with dispatch.recording() as choices:
        learner.etrace_grad(xs, step_fn=loss_of(learner))
    assert any(choice.op == 'trace_carry' for choice in choices)
    # Reasons count planes, and which of them a loss reads is not known before.
    assert {choice[:3] for choice in choices} <= {choice[:3] for choice in learner.choices}


def test_what_falls_back_says_why():
    learner, _ = new_learner('learned_leak', 'd_rtrl', backend='pallas')
    assert 'hidden_jacobian on tpu: jax, an op has fewer axes' in learner.report.to_str()
    with pytest.raises(btf.FallbackError, match='hidden_jacobian has no kernel on tpu'):
        learner.with_backend('pallas', strict=['tpu'])
    assert learner.with_backend('jax', strict=['tpu']).resolved_backend.name == 'jax'


def test_a_learner_with_another_backend_goes_on_by_itself():
    learner, xs = new_learner('gru', 'd_rtrl')
    x = jax.tree.map(lambda a: a[0], xs)
    learner(x)
    other = learner.with_backend('interpret')
    assert other.model is learner.model and other.backend == 'interpret'
    assert int(other.running_index.value) == 1
    other(x)
    assert int(other.running_index.value) == 2 and int(learner.running_index.value) == 1


@slowly_but_for(('windows', 'rule'), (True, 'd_rtrl'), (False, 'eprop'))(
    itertools.product([True, False], ['d_rtrl', 'eprop'])
)
def test_stochastic_rounding_is_the_same_on_every_backend(windows, rule):
    learner, xs = new_learner('leaky', rule, trace_dtype=jnp.bfloat16, stochastic_rounding=True)
    nearest, _ = new_learner('leaky', rule, trace_dtype=jnp.bfloat16)
    start = start_of(learner)

    def trace_of(learner):
        restart(learner, start)
        if windows:
            learner.etrace_evolve(xs)
        else:
            for t in range(5):
                learner(jax.tree.map(lambda a, t=t: a[t], xs))
        return np.asarray(jax.tree.leaves(learner.trace.value)[-1], np.float32)

    found = trace_of(learner)
    np.testing.assert_array_equal(trace_of(learner), found)
    np.testing.assert_array_equal(trace_of(learner.with_backend('interpret')), found)
    assert np.abs(found).max() > 0
    assert np.any(found != trace_of(nearest))  # which may be narrow
