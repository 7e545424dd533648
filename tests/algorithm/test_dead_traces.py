"""A trace that was forgotten counts as zeros, whatever it holds."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf

STEPS, BATCH, N_IN, N = 4, 2, 3, 4
RULES = {
    'd_rtrl': ('d_rtrl', {}),
    'bfloat16': ('d_rtrl', {'trace_dtype': jnp.bfloat16, 'stochastic_rounding': True}),
    'interpret': ('d_rtrl', {'backend': 'interpret'}),
    'filter': ('eprop', {'kappa_filter_decay': 0.5}),
    'multi-step': ('d_rtrl', {'vjp_method': 'multi-step'}),
    'pp_prop': ('pp_prop', {'decay_or_rank': 0.9}),
}
QUICK = 'd_rtrl', 'interpret'
every_rule = pytest.mark.parametrize(
    'rule', [pytest.param(r, marks=() if r in QUICK else pytest.mark.slow) for r in RULES]
)
XS = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BATCH, N_IN)), jnp.float32)
BAD = XS[:2].at[1].set(jnp.array([[jnp.nan] * N_IN, [jnp.inf] * N_IN]))


class Net(brainstate.nn.Module):
    """A narrow trace, a whole one, an output that reads the step before, and a bias."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(1)
        self.W = brainstate.ParamState(jnp.asarray(rng.normal(size=(N_IN, N)), jnp.float32))
        self.b = brainstate.ParamState(jnp.zeros(N))
        self.i, self.v = (brainstate.HiddenState(jnp.zeros((BATCH, N))) for _ in range(2))

    def update(self, x):
        old = self.v.value
        self.i.value = 0.8 * self.i.value + btf.matmul(x, self.W.value, self.b.value)
        self.v.value = 0.9 * jnp.tanh(old) + self.i.value * jnp.cos(old)
        return self.v.value + old

    def reset_state(self, batch_size=None, **kwargs):
        self.i.value = self.v.value = jnp.zeros((BATCH, N))


@functools.cache
def pair(rule):
    algorithm, options = RULES[rule]
    return [btf.compile(Net(), algorithm, XS[0], **options) for _ in range(2)]


@pytest.fixture
def learners(rule):
    """One that had inputs that were not finite, its model being reset since, and one without."""
    for learner in pair(rule):
        brainstate.nn.reset_all_states(learner)
    bad, good = pair(rule)
    bad.etrace_evolve(BAD)
    assert not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(bad.trace.value))
    bad.model.reset_state()
    return bad, good


def gradient(learner, xs=XS, **options):
    return learner.etrace_grad(
        xs, step_fn=lambda x: jnp.sum(jnp.sin(learner(x))), reduction='sum', **options
    )


def by_step(learner, x):
    weights = learner.param_states
    return brainstate.transform.grad(lambda: jnp.sum(jnp.sin(learner(x))), weights)()


def assert_same(found, true):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.any(b)


@every_rule
def test_fresh_windows_know_nothing_of_it(learners):
    found, true = (gradient(x, trace='fresh', trace_every=2, check_finite=True) for x in learners)
    assert_same(found, true)


@every_rule
def test_a_trace_that_is_carried_on_knows_nothing_of_it(learners):
    for learner in learners:  # one window, which leaves no trace
        gradient(learner, XS[:2], trace='fresh', check_finite=True)
    found, true = (gradient(x, trace_every=2) for x in learners)
    assert_same(found, true)


@every_rule
def test_steps_know_nothing_of_it(learners):
    bad, good = learners
    bad.forget()
    for t in range(2):
        assert_same(by_step(bad, XS[t]), by_step(good, XS[t]))
    assert_same(bad.get_etrace_of(('W',)), good.get_etrace_of(('W',)))


@pytest.mark.parametrize('rule', ['multi-step'])
def test_chunks_know_nothing_of_it(learners):
    bad, good = learners
    bad.forget()
    chunk = btf.MultiStepData(XS)
    assert_same(by_step(bad, chunk), by_step(good, chunk))


@pytest.mark.parametrize('rule', QUICK[:1])
def test_nothing_is_left_after_a_reset(learners):
    brainstate.nn.reset_all_states(learners[0])
    found, true = (gradient(x, trace_every=2) for x in learners)
    assert_same(found, true)
