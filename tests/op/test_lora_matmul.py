"""Units and errors of ``lora_matmul``; it is ``matmul`` of the product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace_fast.op import lora_matmul, matmul

X, B, A, BIAS = jnp.ones((5, 3)), jnp.ones((3, 2)), jnp.ones((2, 4)), jnp.ones(4)


def test_units_multiply_and_the_bias_is_converted() -> None:
    found = lora_matmul(X * u.mV, B * u.mS, A, bias=BIAS * u.nA, alpha=0.5)
    np.testing.assert_allclose(found.to_decimal(u.uA), np.full((5, 4), 3.001), rtol=1e-6)


def test_functions_see_numbers_and_spikes_are_taken() -> None:
    found = lora_matmul(
        X > 0, 2 * B * u.mV, 3 * A, bias=BIAS * u.mV, b_fn=jnp.square, a_fn=jnp.exp, bias_fn=jnp.cos
    )
    expected = np.full((5, 4), 3 * 4 * 2 * np.exp(3) + np.cos(1))
    np.testing.assert_allclose(found.to_decimal(u.mV), expected, rtol=1e-6)


@pytest.mark.parametrize('lead', [(), (5,), (2, 5)])
def test_it_is_matmul_of_the_product(lead, x64) -> None:
    rng = np.random.default_rng(0)
    x, b, a = (jnp.asarray(rng.normal(size=s)) for s in ((*lead, 3), (3, 2), (2, 4)))

    def by_product(b, a):
        return jnp.sin(matmul(x, 0.5 * b @ a)).sum()

    def by_lora(b, a):
        return jnp.sin(lora_matmul(x, b, a, alpha=0.5)).sum()

    found, expected = (jax.value_and_grad(f, (0, 1))(b, a) for f in (by_lora, by_product))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_the_weight_vjp_makes_no_array_of_the_size_of_the_product() -> None:
    x, b, a = jnp.ones((7, 60)), jnp.ones((60, 2)), jnp.ones((2, 50))
    (eqn,) = jax.make_jaxpr(lora_matmul)(x, b, a).eqns

    def vjp(x, y, b, a):
        return eqn.primitive.weight_vjp(x, y, {'lora_b': b, 'lora_a': a}, **eqn.params)

    text = str(jax.make_jaxpr(vjp)(x, jnp.ones((7, 50)), b, a))
    assert '[60,2]' in text and '60,50' not in text and '50,60' not in text


def test_an_alpha_that_is_traced_is_refused() -> None:
    with pytest.raises(TypeError, match='known when the step is traced'):
        jax.jit(lambda alpha: lora_matmul(X, B, A, alpha=alpha))(0.5)


@pytest.mark.parametrize(
    ('x', 'b', 'a', 'options', 'error', 'message'),
    [
        (X, jnp.ones(3), A, {}, ValueError, r'B of shape \(3,\)'),
        (X, B, jnp.ones((3, 4)), {}, ValueError, r'A of shape \(3, 4\), expected \(inputs, rank'),
        (jnp.ones((5, 4)), B, A, {}, ValueError, 'expected 3 features'),
        (1.0, B, A, {}, ValueError, 'expected 3 features'),
        (X, B, A, {'bias': jnp.ones(3)}, ValueError, r'bias of shape \(3,\), expected \(4,\)'),
        (X, B.astype(int), A, {}, TypeError, 'found a B of dtype int32'),
        (X, B, A.astype(int), {}, TypeError, 'found a A of dtype int32'),
        (X, B, A, {'alpha': 'much'}, TypeError, "alpha='much', expected a number"),
        (X * u.mV, B, A, {'bias': BIAS}, u.UnitMismatchError, 'lora_matmul: the bias has'),
    ],
)
def test_errors_say_what_was_found_and_expected(x, b, a, options, error, message) -> None:
    with pytest.raises(error, match=message):
        lora_matmul(x, b, a, **options)
