"""Ops with rules of braintrace's form; ``tests/op_models/registered.py`` has those that learn."""

import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.op_models.registered import one_hot

XS = np.random.default_rng(0).normal(size=(4, 3))
RULES = {
    'xy_to_dw': lambda x, plane, weights: {'weight': x[:, None] * plane[None, :]},
    'dt_to_t': lambda plane, trace: {'weight': trace['weight'] * plane[None, :]},
}
names = map('tests_rules_{}'.format, itertools.count())


class Driven(brainstate.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.w = brainstate.ParamState(jnp.asarray(np.linspace(-1, 1, 6).reshape(3, 2)))
        self.h = brainstate.HiddenState(jnp.zeros(2))

    def update(self, x):
        self.h.value = jnp.tanh(0.8 * self.h.value + self.op.bind(x, self.w.value))
        return self.h.value


def op_with(**rules):
    op = btf.register_primitive(next(names), lambda x, w: x @ w)
    op.register_etp_rules(**rules)
    return op


def learned(op, rule='d_rtrl', **options):
    learner = btf.compile(Driven(op), rule, jnp.asarray(XS[0]))
    (grad,) = learner.etrace_grad(
        jnp.asarray(XS), step_fn=lambda x: jnp.sum(learner(x)), reduction='sum', **options
    ).values()
    return grad


def truth(w):
    def body(h, x):
        h = jnp.tanh(0.8 * h + x @ w)
        return h, h.sum()

    return jax.lax.scan(body, jnp.zeros(2), jnp.asarray(XS))[1].sum()


@pytest.mark.parametrize('missing', RULES)
def test_a_missing_rule_is_named(missing, x64):
    (given,) = set(RULES) - {missing}
    op = op_with(**{given: RULES[given]})
    with pytest.raises(btf.NotSupportedError, match=rf'{op.name}\.register_{missing}\('):
        learned(op)
    true = jax.grad(truth)(Driven(op).w.value)
    np.testing.assert_allclose(learned(op, trace='fresh'), true, rtol=1e-12)


def test_both_are_named_if_others_are_registered():
    with pytest.raises(btf.NotSupportedError, match=r'register_xy_to_dw.* and .*register_dt_to_t'):
        learned(op_with(init_drtrl=lambda *args: None))


def test_the_rule_counts_and_not_the_forward(x64):
    twice = op_with(
        xy_to_dw=lambda *args: jax.tree.map(lambda a: 2 * a, RULES['xy_to_dw'](*args)),
        dt_to_t=RULES['dt_to_t'],
    )
    for options in {}, {'trace_every': 1}, {'trace': 'fresh'}:
        found, once = learned(twice, **options), learned(op_with(**RULES), **options)
        np.testing.assert_allclose(found, 2 * once, rtol=1e-12)
        assert np.abs(once).min() > 0.01


def test_a_rule_that_returns_no_dict_is_refused():
    op = op_with(xy_to_dw=lambda x, plane, weights: jnp.outer(x, plane), dt_to_t=RULES['dt_to_t'])
    with pytest.raises(TypeError, match=r"xy_to_dw of .* expected a dict .*\['weight'\]"):
        learned(op)


def test_rules_of_both_forms_are_refused():
    native = btf.TraceRules(*[lambda *args: {}] * 4)
    op = btf.register_primitive(next(names), lambda x, w: x @ w, trace_rules=native)
    with pytest.raises(ValueError, match='already'):
        op.register_dt_to_t(RULES['dt_to_t'])


def test_an_op_without_input_is_refused():
    op = btf.register_primitive(next(names), lambda w: 2 * w, x_invar_index=None)
    with pytest.raises(ValueError, match='has no input x'):
        op.register_dt_to_t(RULES['dt_to_t'])


def test_pp_prop_needs_the_rule_that_takes_what_it_smooths():
    op = op_with(pp_x_repr=one_hot)
    with pytest.raises(btf.NotSupportedError, match='register_xy_to_dw'):
        btf.compile(Driven(op), 'pp_prop', jnp.asarray(XS[0]), decay_or_rank=0.9)
