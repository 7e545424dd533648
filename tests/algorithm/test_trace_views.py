"""Traces in braintrace's layout: views of what the learner carries."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.errors import NotSupportedError

XS = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
OPS = {
    'matmul': btf.matmul,
    'einsum': lambda x, w: btf.einsum('bi,io->bo', x, w),
    'transposed': lambda x, w: btf.einsum('bi,oi->bo', x, w.T),
}


class Leaky(brainstate.nn.Module):
    """A current with one time constant, and a rate that reads it; or the current alone."""

    def __init__(self, op='matmul', rate=False):
        super().__init__()
        self.op, self.rate = OPS[op], rate
        self.w = brainstate.ParamState(jnp.asarray(W))

    def init_state(self, batch_size=None, **kwargs):
        self.I = brainstate.HiddenState(jnp.zeros((2, 5)))
        if self.rate:
            self.r = brainstate.HiddenState(jnp.zeros((2, 5)))

    def update(self, x):
        self.I.value = 0.8 * self.I.value + self.op(x, self.w.value)
        if self.rate:
            self.r.value = jnp.tanh(self.I.value)
            return self.r.value
        return self.I.value


def learner_of(rule='d_rtrl', steps=4, model=None, **options):
    model = Leaky() if model is None else model
    learner = btf.compile(model, rule, jnp.asarray(XS[0]), batch_size=2, **options)
    if steps:
        learner.etrace_evolve(jnp.asarray(XS[:steps]))
    return learner


def expected_trace():
    """``e[b, i, o]`` of the current."""
    total = np.zeros((2, 3))
    for x in XS:
        total = 0.8 * total + x
    return np.broadcast_to(total[:, :, None], (2, 3, 5))


@pytest.mark.parametrize('op', OPS)
def test_a_trace_is_shaped_like_the_parameter_with_examples_in_front_and_states_last(op):
    learner = learner_of(model=Leaky(op))
    ((key, view),) = learner.etrace_bwg.items()
    (relation,) = learner.graph.hidden_param_op_relations
    assert key == (id(relation.y_var), 0)
    assert isinstance(view, btf.EligibilityTrace)
    found = view.value['weight']
    if op == 'transposed':  # the op's weight, not the parameter's
        found = found.transpose(0, 2, 1, 3)
    np.testing.assert_allclose(found[..., 0], expected_trace(), rtol=1e-5)
    assert found.shape == (2, 3, 5, 1)


def test_the_views_of_pp_prop_are_those_of_its_two_sides():
    learner = learner_of('pp_prop', decay_or_rank=0.9)
    (relation,) = learner.graph.hidden_param_op_relations
    ((x_key, x),) = learner.etrace_xs.items()
    ((f_key, f),) = learner.etrace_dfs.items()
    assert (x_key, f_key) == (id(relation.x_var), (id(relation.y_var), 'hidden_group_0'))
    assert x.value.shape == (2, 3) and f.value.shape == (2, 5, 1)
    assert np.any(x.value) and np.any(f.value)
    for view in (x, f):
        view.value = jnp.full_like(view.value, 3)
    assert all(np.all(a == 3) for a in jax.tree.leaves(learner.trace.value))


def test_a_state_that_no_step_reads_again_is_not_a_number():
    learner = learner_of(model=Leaky(rate=True), steps=0)
    (view,) = learner.etrace_bwg.values()
    assert view.value['weight'].shape == (2, 3, 5, 2)
    assert not np.any(view.value['weight'])
    learner.etrace_evolve(jnp.asarray(XS))
    np.testing.assert_allclose(view.value['weight'][..., 0], expected_trace(), rtol=1e-5)
    assert np.all(np.isnan(view.value['weight'][..., 1]))
    learner.reset_state()
    assert not np.any(view.value['weight'])


def test_what_is_written_to_a_view_is_what_the_learner_goes_on_from():
    learner, other = (learner_of(backend='interpret', steps=n) for n in (0, 4))
    (view,), (seen,) = (one.etrace_bwg.values() for one in (learner, other))
    view.value = seen.value
    for one in (learner, other):
        one.etrace_evolve(jnp.asarray(XS))
    np.testing.assert_array_equal(view.value['weight'], seen.value['weight'])
    assert np.any(seen.value['weight'])


def test_a_trace_in_a_smaller_form_can_be_set_to_zeros_only():
    learner = learner_of(backend='jax')
    (view,) = learner.etrace_bwg.values()
    assert jax.tree.leaves(learner.trace.value)[0].shape[-1] == 1
    with pytest.raises(NotSupportedError, match='smaller form'):
        view.value = jax.tree.map(jnp.ones_like, view.value)
    view.value = jax.tree.map(jnp.zeros_like, view.value)
    assert not np.any(view.value['weight'])
