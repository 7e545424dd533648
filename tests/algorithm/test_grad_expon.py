"""A leaky sum of gradients, beside the reference's."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf

SHAPE = {'w': jnp.ones((2, 3)), 'b': jax.ShapeDtypeStruct((3,), jnp.float32)}


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=a.shape), jnp.float32) for k, a in SHAPE.items()}


@pytest.mark.parametrize(
    ('given', 'decay'), [(0.7, 0.7), (2.0 * u.ms, np.exp(-0.05)), (0.002 * u.second, np.exp(-0.05))]
)
def test_it_adds_up_gradients_and_leaks(given, decay):
    total = btf.GradExpon(SHAPE, given)
    update = brainstate.transform.jit(total.update)
    expected = jax.tree.map(jnp.zeros_like, gradients(0))
    for seed in range(4):
        assert update(gradients(seed)) is None
        expected = jax.tree.map(lambda g, new: decay * g + new, expected, gradients(seed))
    assert isinstance(total.gradients, brainstate.LongTermState)
    for key in SHAPE:
        np.testing.assert_allclose(total.gradients.value[key], expected[key], rtol=1e-5)


@pytest.mark.parametrize('given', [0.0, 1.0, -0.1, 1.5, float('nan'), 3.0 * u.mV, -1.0 * u.ms])
def test_decays_and_times_that_make_no_sum_are_refused(given):
    with pytest.raises(ValueError, match='tau_or_decay'):
        btf.GradExpon(SHAPE, given)


@pytest.mark.parametrize('given', [1, True, '0.5', None])
def test_other_types_are_refused(given):
    with pytest.raises(TypeError, match='tau_or_decay'):
        btf.GradExpon(SHAPE, given)
