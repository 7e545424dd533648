import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace_fast import nn
from tests.promotion import promoting

pytestmark = pytest.mark.usefixtures('x64')


def draw(*shape: int, seed: int = 0) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize('batch', [(), (5,), (4, 5)])
@pytest.mark.parametrize('has_bias', [False, True], ids=['no_bias', 'bias'])
@pytest.mark.parametrize('is_masked', [False, True], ids=['dense', 'masked'])
def test_linear_is_brainstates_linear_for_inputs_of_any_rank(batch, has_bias, is_masked) -> None:
    b_init = draw(2, seed=1) if has_bias else None
    w_mask = draw(3, 2, seed=2) > 0 if is_masked else None
    ours, plain = (
        module.Linear(3, 2, w_init=draw(3, 2), b_init=b_init, w_mask=w_mask)
        for module in (nn, brainstate.nn)
    )
    x = draw(*batch, 3, seed=3)
    assert isinstance(ours, brainstate.nn.Linear)
    assert ours(x).shape == (*batch, 2)
    with promoting():
        expected = plain(x)
    np.testing.assert_allclose(ours(x), expected, rtol=1e-14)


@pytest.mark.parametrize('batch', [(), (5,), (4, 5)])
@pytest.mark.parametrize('signs', [None, (3, 2), (2,)], ids=['positive', 'signed', 'by_output'])
def test_signed_linear_is_brainstates_signed_linear(batch, signs) -> None:
    w_sign = None if signs is None else jnp.sign(draw(*signs, seed=1)).astype(int)
    ours, plain = (
        module.SignedWLinear(3, 2, w_init=draw(3, 2), w_sign=w_sign)
        for module in (nn, brainstate.nn)
    )
    x = draw(*batch, 3, seed=3)
    assert isinstance(ours, brainstate.nn.SignedWLinear)
    with promoting():
        expected = plain(x)
    np.testing.assert_allclose(ours(x), expected, rtol=1e-14)


@pytest.mark.parametrize('batch', [(), (5,), (4, 5)])
@pytest.mark.parametrize('has_bias', [False, True], ids=['no_bias', 'bias'])
def test_sparse_linear_is_the_matrix_that_it_is_given(batch, has_bias) -> None:
    matrix, bias = jnp.where(draw(3, 2, seed=2) > 0, draw(3, 2), 0.0), draw(2, seed=1)
    layer = nn.SparseLinear(brainevent.CSC.fromdense(matrix), bias if has_bias else None, in_size=3)
    x = draw(*batch, 3, seed=3)
    assert isinstance(layer, brainstate.nn.SparseLinear)
    assert layer.in_size == (3,) and layer.out_size == (2,)
    expected = np.asarray(x @ matrix) + (np.asarray(bias) if has_bias else 0.0)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-14)
    assert layer.weight.value['weight'].shape == (int((matrix != 0).sum()),)


def test_sparse_linear_takes_events_and_units_and_gives_gradients() -> None:
    matrix = u.sparse.CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0], [1.0, 4.0]]) * u.mS)
    layer = nn.SparseLinear(matrix, b_init=jnp.ones(2) * u.mS)
    spikes = brainevent.BinaryArray(jnp.array([True, False, True]))
    np.testing.assert_allclose(layer(spikes).to_decimal(u.mS), [2.0, 7.0], rtol=1e-12)

    def loss() -> jax.Array:
        return jnp.sin(layer(spikes).to_decimal(u.mS)).sum()

    (gradient,) = brainstate.transform.grad(loss, layer.states(brainstate.ParamState))().values()
    cosines = np.cos([2.0, 7.0])
    weight, bias = (u.get_mantissa(gradient[key]) for key in ('weight', 'bias'))
    np.testing.assert_allclose(weight, [cosines[1], 0.0, *cosines], rtol=1e-12)
    np.testing.assert_allclose(bias, cosines, rtol=1e-12)


def test_linear_carries_units() -> None:
    layer = nn.Linear(3, 2, w_init=draw(3, 2) * u.mS, b_init=jnp.ones(2) * u.uA)
    expected = draw(3, seed=1) @ draw(3, 2) + 1.0
    found = layer(draw(3, seed=1) * u.mV)
    np.testing.assert_allclose(found.to_decimal(u.uA), expected, rtol=1e-12)


@pytest.mark.parametrize(('name', 'option'), [('Linear', 'w_mask'), ('SignedWLinear', 'w_sign')])
def test_every_parameter_gets_the_gradient_of_the_plain_layer(name, option) -> None:
    def gradients(module) -> list:
        factors = jnp.sign(draw(3, 2, seed=2))
        layer = getattr(module, name)(3, 2, w_init=draw(3, 2, seed=1), **{option: factors})
        parameters = layer.states(brainstate.ParamState)
        x = draw(5, 3)
        return jax.tree.leaves(
            brainstate.transform.grad(lambda: jnp.sin(layer(x)).sum(), parameters)()
        )

    with promoting():
        plain = gradients(brainstate.nn)
    for found, expected in zip(gradients(nn), plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert jnp.any(expected != 0)
