"""Planes that are kept as filtered inputs of a convolution or a sparse matrix change nothing."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from tests.op_models import OP_MODELS
from tests.op_models.model import Driven

pytestmark = pytest.mark.usefixtures('x64')

STEPS, BATCH = 6, 3
RNG = np.random.default_rng(0)
DONE = RNG.random(size=(STEPS, BATCH)) < 0.3
OPS = 'conv', 'conv_grouped', 'sparse_matmul'


def new_learner(name, rule='d_rtrl', **options):
    xs = OP_MODELS[name].inputs(STEPS, BATCH)
    return btf.compile(Driven(OP_MODELS[name], 'two'), rule, xs[0], batch_size=BATCH, **options), xs


def keep_whole_planes(learner):
    learner.engine.planes = [
        dataclasses.replace(planes, inputs=(False,) * len(planes.inputs))
        for planes in learner.engine.planes
    ]
    learner.init_etrace_state()


def learned(learner, xs, **options):
    return learner.etrace_grad(
        xs,
        jnp.asarray(DONE),
        step_fn=lambda x, done: sum(jnp.sum(jnp.sin(h)) for h in learner(x, reset=done)),
        reduction='sum',
        **options,
    )


def traces(learner):
    return jax.tree.leaves(learner.get_etrace_of(('weight',)))


@pytest.mark.parametrize('name', OPS)
@pytest.mark.parametrize('rule', ['d_rtrl', 'eprop'])
def test_filtered_inputs_change_neither_gradients_nor_traces(name, rule):
    """With episodes that end at other steps for every example."""
    results = []
    for keep in (None, keep_whole_planes):
        learner, xs = new_learner(name, rule)
        if keep is not None:
            keep(learner)
        gradients = learned(learner, xs, trace_every=4)
        results.append((gradients, traces(learner)))
    (found, own), (expected, whole) = results
    testing.compare(found, expected).check(1e-12)
    assert len(own) == len(whole)
    for a, b in zip(own, whole, strict=True):
        assert a.shape == b.shape and np.any(b)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('name', OPS)
def test_a_uniform_plane_is_no_larger_than_the_input(name):
    learner, xs = new_learner(name)
    (slow, fast), *_ = learner.trace.value
    assert slow['x'].shape == xs[0].shape and slow['one'].shape[0] == BATCH
    assert fast['weight'].shape[0] == BATCH
    assert (
        slow['x'].size < fast['weight'].size or name == 'sparse_matmul'
    )  # a small one has few entries


def test_leaks_of_their_own_leave_planes_whole():
    class Varied(Driven):
        def __init__(self):
            super().__init__(OP_MODELS['conv'], 'two')
            leaks = jnp.linspace(0.2, 0.8, self.model.y[-1])
            own = self.transition

            def varied(states, y):
                return own((states[0] * jnp.broadcast_to(leaks, states[0].shape), states[1]), y)

            self.transition = varied

    learner = btf.compile(
        Varied(), 'd_rtrl', OP_MODELS['conv'].inputs(1, BATCH)[0], batch_size=BATCH
    )
    assert not any('x' in e for planes in learner.trace.value for e in planes)


@pytest.mark.parametrize('name', OPS)
def test_a_trace_that_does_not_count_is_not_read(name):
    first, xs = new_learner(name)
    expected = learned(first, xs, trace_every=4)
    second, _ = new_learner(name)
    second.trace.value = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), second.trace.value)
    testing.compare(learned(second, xs, trace_every=4), expected).check(1e-14)


def test_a_narrow_trace_is_narrow_as_an_input_too():
    with brainstate.environ.context(precision=32):
        learner, xs = new_learner('conv', trace_dtype=jnp.bfloat16)
        assert {a.dtype for a in jax.tree.leaves(learner.trace.value)} == {jnp.dtype('bfloat16')}
        found = learned(learner, xs, trace_every=2)
        exact, _ = new_learner('conv')
        testing.compare(found, learned(exact, xs, trace_every=2)).check(0.05)
        assert {a.dtype for a in jax.tree.leaves(learner.trace.value)} == {jnp.dtype('bfloat16')}


def test_filtered_inputs_go_on_after_saving(tmp_path):
    learner, xs = new_learner('conv')
    learned(learner, xs, trace_every=2)
    learner.save(tmp_path / 'learner.npz')
    expected = learned(learner, xs)
    other, _ = new_learner('conv')
    other.load(tmp_path / 'learner.npz')
    testing.compare(learned(other, xs), expected).check(1e-14)
