"""A trace that was forgotten counts as zeros, whatever it holds."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf

STEPS, BATCH, N_IN, N = 6, 2, 3, 4
RULES = {
    'd_rtrl': ('d_rtrl', {}),
    'bfloat16': ('d_rtrl', {'trace_dtype': jnp.bfloat16, 'stochastic_rounding': True}),
    'interpret': ('d_rtrl', {'backend': 'interpret'}),
    'filter': ('eprop', {'kappa_filter_decay': 0.5}),
    'multi-step': ('d_rtrl', {'vjp_method': 'multi-step'}),
    'pp_prop': ('pp_prop', {'decay_or_rank': 0.9}),
}
every_rule = pytest.mark.parametrize('rule', RULES)
every_held = pytest.mark.parametrize('held', [np.nan, np.inf])
XS = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BATCH, N_IN)), jnp.float32)


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


def made(rule):
    algorithm, options = RULES[rule]
    return btf.compile(Net(), algorithm, XS[0], **options)


def poisoned(rule, held):
    """A learner after a call with an input that is not finite; its model was reset since."""
    learner = made(rule)
    learner.etrace_evolve(XS.at[1, 0, 0].set(held))
    leaves = jax.tree.leaves(learner.trace.value)
    assert not all(bool(jnp.isfinite(a).all()) for a in leaves)
    learner.model.reset_state()
    return learner


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


@every_held
@every_rule
def test_fresh_windows_know_nothing_of_it(rule, held):
    learner, other = poisoned(rule, held), made(rule)
    for x in (learner, other):
        x.model.reset_state()
    true = gradient(other, trace='fresh', trace_every=2)
    assert_same(gradient(learner, trace='fresh', trace_every=2, check_finite=True), true)


@every_held
@every_rule
def test_a_trace_that_is_carried_on_knows_nothing_of_it(rule, held):
    learner, other = poisoned(rule, held), made(rule)
    for x in (learner, other):  # one window, which leaves no trace
        gradient(x, XS[:2], trace='fresh')
    for trace in ('first', 'second'):
        assert_same(gradient(learner, trace_every=2), gradient(other, trace_every=2))


@every_held
@every_rule
def test_a_step_knows_nothing_of_it(rule, held):
    learner, other = poisoned(rule, held), made(rule)
    learner.forget()
    for t in range(3):
        assert_same(by_step(learner, XS[t]), by_step(other, XS[t]))
    assert_same(learner.get_etrace_of(('W',)), other.get_etrace_of(('W',)))


@pytest.mark.parametrize('held', [np.nan])
@every_rule
def test_nothing_is_left_after_a_reset(rule, held):
    learner, other = poisoned(rule, held), made(rule)
    brainstate.nn.reset_all_states(learner)
    assert_same(gradient(learner, trace_every=2), gradient(other, trace_every=2))


@every_held
def test_a_chunk_knows_nothing_of_it(held):
    learner, other = poisoned('multi-step', held), made('multi-step')
    learner.forget()
    chunk = btf.MultiStepData(XS)
    assert_same(by_step(learner, chunk), by_step(other, chunk))


def test_what_is_forgotten_need_not_be_finite():
    learner = poisoned('d_rtrl', np.nan)
    gradient(learner, trace='fresh', check_finite=True)
    assert not np.isfinite(np.asarray(jax.tree.leaves(learner.trace.value)[0])).all()
