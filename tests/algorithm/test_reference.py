"""Beside braintrace: the same gradients where it is right."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from tests.oracles.step import random_projection
from tests.promotion import promoting
from tests.reference_models import (
    RULES,
    build,
    by_name,
    chunk_gradient,
    eprop_gradients,
    gradient,
    learner_of,
)

pytestmark = pytest.mark.usefixtures('x64')


# Where PARITY.md says that the reference is right

RIGHT_SINGLE_STEP = {
    'vanilla': ('W',),
    'gru': ('Wh', 'Wz'),
    'leaky': ('W',),
    'skip': ('W', 'Z'),
    'lif': ('comm',),
    'plain_readout': ('W',),
}
RIGHT_MULTI_STEP = {
    'vanilla': ('W',),
    'gru': ('Wh', 'Wz', 'Wr'),
    'lstm': ('Wi', 'Wf', 'Wg', 'Wo'),
    'minimal_rnn': ('phi', 'W_u'),
    'skip': ('W', 'Z'),
    'lif': ('comm',),
    'lif_expon': ('comm',),
}


def assert_same(ours: Any, theirs: Any, names: tuple[str, ...]) -> None:
    ours, theirs = by_name(ours), by_name(theirs)
    chosen = {(name,): ours[name] for name in names}, {(name,): theirs[name] for name in names}
    testing.compare(*chosen).check(rtol=1e-5)


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', RIGHT_SINGLE_STEP)
def test_same_gradient_where_the_reference_is_right(reference, name, rule):
    ours, theirs = (gradient(lib, name, rule) for lib in (btf, reference))
    assert_same(ours, theirs, RIGHT_SINGLE_STEP[name])


@pytest.mark.parametrize('name', RIGHT_MULTI_STEP)
def test_same_gradient_of_chunks(reference, name):
    ours, theirs = (chunk_gradient(lib, name, 'd_rtrl') for lib in (btf, reference))
    assert_same(ours, theirs, RIGHT_MULTI_STEP[name])


@pytest.mark.parametrize('name', ['vanilla', 'gru', 'lstm'])
def test_same_gradient_of_plain_steps_by_a_multi_step_learner(reference, name):
    ours, theirs = (gradient(lib, name, vjp_method='multi-step') for lib in (btf, reference))
    assert_same(ours, theirs, RIGHT_MULTI_STEP[name])


@pytest.mark.parametrize(
    ('rule', 'name', 'weights'),
    [
        ('filter', 'vanilla', ('W',)),
        ('filter', 'lif', ('comm',)),
        ('feedback', 'vanilla', ('W',)),
        ('feedback', 'lif', ('comm',)),
    ],
)
def test_same_gradient_of_eprop_step_by_step(reference, rule, name, weights):
    ours, theirs = (eprop_gradients(lib, name, rule) for lib in (btf, reference))
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other, weights)


def test_random_feedback_draws_the_matrices_of_the_reference(reference):
    """Also where the order of the groups differs."""
    ours, theirs = (learner_of(lib, 'used_backwards', 'feedback')[0] for lib in (btf, reference))
    for group in ours.graph.hidden_groups:
        other = next(
            g for g in theirs.graph.hidden_groups if set(g.hidden_paths) == set(group.hidden_paths)
        )
        mine = ours.random_feedback.feedback[group.index].B
        np.testing.assert_array_equal(mine, theirs._random_feedback[other.index].B)


@pytest.mark.parametrize(
    ('name', 'weights'),
    [('vanilla', ('W',)), ('lstm', ('Wi', 'Wf', 'Wg', 'Wo')), ('lif_expon', ('comm',))],
)
def test_same_gradient_of_three_factors(reference, name, weights):
    """The modulator takes the place of the signal that the reference counts twice."""
    rewards = jnp.asarray([0.5, -1.0, 2.0, 0.0, 1.5, -0.3])

    def gradient(lib):
        learner, xs = learner_of(lib, name, 'modulator')
        loss = lambda x, m: random_projection(learner(x, modulator=m))  # noqa: E731
        with promoting(lib is not btf):
            return learner.etrace_grad(xs, rewards, step_fn=loss)

    assert_same(gradient(btf), gradient(reference), weights)


@pytest.mark.parametrize(('kappa', 'error'), [(1.0, ValueError), (1.5, ValueError)])
def test_same_errors_of_arguments(reference, kappa, error):
    for lib in (btf, reference):
        with pytest.raises(error):
            lib.EProp(build(lib, 'vanilla')[0], kappa_filter_decay=kappa)
        with pytest.raises(error):
            lib.KappaFilter(jnp.zeros(2), kappa)
