"""The oracles agree with each other, and refuse to agree with everything."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from tests.models import MODELS
from tests.oracles.step import random_projection

XS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), jnp.float32)


def gru():
    brainstate.random.seed(1)
    model = btf.nn.GRUCell(3, 4)
    brainstate.nn.init_all_states(model, batch_size=2)
    return model


def loss_of(model):
    return lambda x: random_projection(model(x))


def test_finite_differences_agree_with_bptt_and_leave_the_model_alone():
    model = gru()
    before = {path: state.value for path, state in model.states().items()}
    true = testing.bptt(model, XS, step_fn=loss_of(model))
    differences = testing.finite_differences(model, XS, step_fn=loss_of(model))
    testing.compare(differences, true).check(1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves((true, differences))} == {np.dtype('float64')}
    for path, state in model.states().items():
        assert state.value is before[path]


def test_finite_differences_refuse_a_model_that_is_not_smooth():
    model, inputs = MODELS['custom_vjp'].build(2)
    with pytest.raises((ValueError, testing.VacuousComparison)):
        testing.finite_differences(model, inputs(0, 6), step_fn=loss_of(model))


def test_one_step_of_the_recurrence_is_bptt_of_one_step():
    model = gru()
    true = testing.bptt(model, XS[:1], step_fn=loss_of(model))
    testing.compare(testing.recurrence(model, XS[:1], step_fn=loss_of(model)), true).check(1e-12)


def test_the_recurrence_is_not_bptt_where_an_op_reads_hidden_states():
    model = gru()
    true = testing.bptt(model, XS, step_fn=loss_of(model))
    online = testing.recurrence(model, XS, step_fn=loss_of(model))
    assert testing.compare(online, true).worst > 0.01


def test_chunks_approach_bptt_as_they_grow():
    model = gru()
    oracle = testing.Recurrence(model, XS, step_fn=loss_of(model))
    true = testing.bptt(model, XS, step_fn=loss_of(model))
    errors = [testing.compare(oracle.gradient(chunk_size=k), true).worst for k in (1, 2)]
    assert 0 < errors[1] < errors[0]


def test_groups_may_be_given():
    model, inputs = MODELS['lif_expon'].build(2)
    xs, groups = inputs(0, 4), MODELS['lif_expon'].expected.groups
    by_hand = testing.recurrence(model, xs, step_fn=loss_of(model), groups=groups)
    testing.compare(testing.recurrence(model, xs, step_fn=loss_of(model)), by_hand).check(1e-13)


ORACLES = [testing.bptt, testing.recurrence, testing.finite_differences]


@pytest.mark.parametrize('oracle', ORACLES)
def test_gradients_that_are_all_zero_are_refused(oracle):
    model = gru()
    with pytest.raises(testing.VacuousComparison, match='all parameters .* are zero'):
        oracle(model, XS, step_fn=lambda x: 0.0 * jnp.sum(model(x)))


@pytest.mark.parametrize('oracle', [testing.bptt, testing.recurrence])
def test_a_silent_spiking_layer_is_refused(oracle):
    model, inputs = MODELS['lif_expon'].build(2)
    xs = inputs(0, 4)
    oracle(model, xs, step_fn=loss_of(model))
    for state in model.states().values():
        state.value = jax.tree.map(lambda a: 0.01 * a, state.value)
    with pytest.raises(testing.VacuousComparison, match=r"\('neu',\) has not spiked once"):
        oracle(model, xs, step_fn=loss_of(model))


@pytest.mark.parametrize('size', [0, 4, 8])
def test_a_chunk_as_long_as_the_sequence_is_refused(size):
    model = gru()
    with pytest.raises(testing.VacuousComparison, match=f'chunk_size is {size} .* 4 steps'):
        testing.recurrence(model, XS, step_fn=loss_of(model), chunk_size=size)


@pytest.mark.parametrize('oracle', ORACLES)
def test_sequences_must_have_a_common_length(oracle):
    model = gru()
    for sequences in ((), (XS, XS[:2]), (jnp.ones(()),)):
        with pytest.raises(ValueError, match='common length'):
            oracle(model, *sequences, step_fn=loss_of(model))
    with pytest.raises(ValueError, match='not a scalar'):
        oracle(model, XS, step_fn=model)


def test_a_comparison_reports_error_angle_and_length_by_parameter():
    true = {('a',): np.array([3.0, 4.0]), ('b',): {'w': np.zeros(2)}}
    ours = {('a',): np.array([6.0, 8.0]), ('b',): {'w': np.zeros(2)}}
    result = testing.compare(ours, true)
    assert result.agreements['a',] == testing.Agreement(1.0, 1.0, 2.0)
    assert result.agreements['b',] == testing.Agreement(0.0, 1.0, 1.0)
    assert result.worst == 1.0
    with pytest.raises(AssertionError, match=r"above 0\.5(.|\n)*\('a',\)"):
        result.check(0.5)
    result.check(1.0)


def test_a_comparison_refuses_what_proves_nothing():
    zero = {('a',): np.zeros(2)}
    with pytest.raises(testing.VacuousComparison):
        testing.compare(zero, zero)
    with pytest.raises(ValueError, match='same parameters'):
        testing.compare({('b',): np.ones(2)}, {('a',): np.ones(2)})
    with pytest.raises(ValueError, match='elements'):
        testing.compare({('a',): np.ones(3)}, {('a',): np.ones(2)})
    nan = testing.compare({('a',): np.full(2, np.nan)}, {('a',): np.ones(2)})
    with pytest.raises(AssertionError):
        nan.check(1.0)
