"""A learner gives the same gradients with every backend, and the kernels are in what is lowered."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast.kernels import dispatch
from braintrace_fast.kernels.outer import triton as outer_triton
from braintrace_fast.runtime import factorized, materialized
from tests.kernel_checks import absent, called, count_calls, lowered
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
LACKING = {
    'vanilla': {'trace_carry'},  # its trace does not outlive a step
    'drop_connect': {'adjoint_scan', 'trace_carry'},  # which is no window
    **dict.fromkeys(
        ['cond_transition', 'while', 'learned_leak', 'hidden_group_state'], {'hidden_jacobian'}
    ),
}
"""What no kernel runs of a model."""

FEW = [('lif_expon', 'd_rtrl'), ('lif_expon', 'pp_prop'), ('alif_expon', 'eprop')]


def new_learner(name, rule, **options):
    model, inputs = MODELS[name].build(3)
    xs = inputs(0, 5)
    algorithm, own = RULES[rule]
    learner = algorithm(model, **own, **options)
    learner.compile_graph(jax.tree.map(lambda a: a[0], xs))
    return learner, xs


def gradient(learner, xs, start, **options):
    brainstate.random.seed(3)
    for state, value in start:
        state.value = value
    learner.reset_state()
    first, rest = (jax.tree.map(lambda a, p=part: a[p], xs) for part in (slice(2), slice(2, None)))
    loss = lambda x: jnp.sum(u.get_mantissa(learner(x)) ** 2)  # noqa: E731
    learner.etrace_evolve(first)
    return learner.etrace_grad(rest, step_fn=loss, **options)


def start_of(learner):
    return [(state, state.value) for state in learner.model.states().values()]


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max() + 1e-6))


def check(name, rule, backends):
    learner, xs = new_learner(name, rule)
    start = start_of(learner)
    expected = gradient(learner, xs, start)
    assert any(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(expected))
    for backend in backends:
        other = learner.with_backend(backend)
        with dispatch.recording() as choices:
            found = gradient(other, xs, start)
        assert_same(found, expected)
        if backend == 'interpret':
            assert run_by_kernels(choices) == OPS[rule] - LACKING.get(name, set())
            assert run_by_kernels(choices) <= run_by_kernels(other.choices)


def run_by_kernels(choices):
    return {choice.op for choice in choices if choice.implementation == 'triton'}


@pytest.mark.parametrize(
    ('name', 'rule'),
    [pytest.param(*few, marks=pytest.mark.slow if 'eprop' in few else ()) for few in FEW],
)
def test_backends_agree(name, rule):
    check(name, rule, ['interpret', 'pallas'])


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in MODELS if (name, 'd_rtrl') not in FEW])
def test_backends_agree_on_the_table(name):
    check(name, 'd_rtrl', ['interpret'])


@pytest.mark.parametrize('name', ['lif_expon', 'gru'])
def test_steps_agree(name):
    """Called step by step, where the trace moves in every step."""
    learner, xs = new_learner(name, 'd_rtrl')
    start = start_of(learner)

    def run(learner):
        for state, value in start:
            state.value = value
        learner.reset_state()
        weights = learner.param_states

        def loss(x):
            return jnp.sum(u.get_mantissa(learner(x)) ** 2)

        return [
            brainstate.transform.grad(loss, weights)(jax.tree.map(lambda a, t=t: a[t], xs))
            for t in range(3)
        ]

    assert_same(run(learner.with_backend('interpret')), run(learner))


def module_of(learner, xs, platform):
    """The gradient over a sequence, lowered."""

    def run(xs):
        loss = lambda x: jnp.sum(u.get_mantissa(learner(x)) ** 2)  # noqa: E731
        return learner.etrace_grad(xs, step_fn=loss)

    function = brainstate.transform.StatefulFunction(run, return_only_write=False)
    with absent(platform):
        function.make_jaxpr(xs)
    values = [state.value for state in function.get_state_trace(xs).states]
    return lowered(function.jaxpr_call, values, xs, platform=platform)


@pytest.mark.parametrize('platform', ['cuda', 'tpu'])
@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop'])
def test_the_kernels_are_in_what_is_lowered(rule, platform):
    learner, xs = new_learner('lif_expon', rule, backend='pallas')
    plain = learner.with_backend('jax')
    names = called(module_of(learner, xs, platform), platform)
    assert {*names} == {op.split('.')[-1] for op in OPS[rule]}
    assert count_calls(module_of(plain, xs, platform), platform) == 0


@pytest.mark.parametrize(
    ('rule', 'engine', 'walk'),
    [('d_rtrl', materialized, 'adjoint_scan'), ('pp_prop', factorized, 'factored_trace')],
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


@pytest.mark.parametrize('rows', [4, 7])
@pytest.mark.parametrize('rule', ['d_rtrl', 'eprop', 'three_factor'])
def test_the_report_says_what_a_gradient_runs(rule, rows, monkeypatch):
    """Signals are operands too, of which a kernel holds only so many."""
    monkeypatch.setattr(outer_triton, 'ROWS', rows)
    learner, xs = new_learner('lif_expon', rule, backend='pallas')
    loss = lambda x: jnp.sum(u.get_mantissa(learner(x)) ** 2)  # noqa: E731
    with dispatch.recording() as choices:
        learner.etrace_grad(xs, step_fn=loss)
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


@pytest.mark.parametrize('rule', ['d_rtrl', 'eprop'])
@pytest.mark.parametrize('windows', [True, False])
def test_stochastic_rounding_is_the_same_on_every_backend(windows, rule):
    learner, xs = new_learner('leaky', rule, trace_dtype=jnp.bfloat16, stochastic_rounding=True)
    nearest, _ = new_learner('leaky', rule, trace_dtype=jnp.bfloat16)
    start = start_of(learner)

    def trace_of(learner):
        for state, value in start:
            state.value = value
        learner.reset_state()
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
