"""Units and errors of ``grouped_matmul``; one group of it is ``matmul``."""

import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace_fast.op import grouped_matmul, matmul

X, WEIGHT, BIAS = jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4)), jnp.ones((2, 4))


def test_the_bias_is_converted_to_the_unit_of_x_times_weight() -> None:
    found = grouped_matmul(X * u.mV, WEIGHT * u.mS, BIAS * u.nA)
    np.testing.assert_allclose(found.to_decimal(u.uA), np.full((5, 2, 4), 3.001), rtol=1e-6)


def test_functions_see_numbers_without_unit_and_spikes_are_taken() -> None:
    found = grouped_matmul(
        X > 0, 3 * WEIGHT * u.mV, 2 * BIAS * u.mV, weight_fn=jnp.square, bias_fn=jnp.exp
    )
    expected = np.full((5, 2, 4), 27 + np.exp(2))
    np.testing.assert_allclose(found.to_decimal(u.mV), expected, rtol=1e-6)


@pytest.mark.parametrize('lead', [(), (5,), (2, 5)])
def test_one_group_is_matmul(lead, x64) -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s)) for s in ((*lead, 1, 3), (1, 3, 4)))
    expected = matmul(x[..., 0, :], weight[0])
    np.testing.assert_allclose(grouped_matmul(x, weight)[..., 0, :], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ('x', 'weight', 'bias', 'error', 'message'),
    [
        (X, jnp.ones((3, 4)), None, ValueError, r'weight of shape \(3, 4\), expected \(groups'),
        (jnp.ones(3), WEIGHT, None, ValueError, r'expected x of shape \(\.\.\., 2, 3\)'),
        (jnp.ones((5, 3, 2)), WEIGHT, None, ValueError, r'found x of shape \(5, 3, 2\)'),
        (X, WEIGHT, jnp.ones(4), ValueError, r'bias of shape \(4,\), expected \(2, 4\)'),
        (X, WEIGHT.astype(int), None, TypeError, 'grouped_matmul: found a weight of dtype int32'),
        (X, WEIGHT, BIAS > 0, TypeError, 'bias of dtype bool'),
        (X * u.mV, WEIGHT, BIAS, u.UnitMismatchError, 'grouped_matmul: the bias has the unit 1'),
    ],
)
def test_errors_say_what_was_found_and_expected(x, weight, bias, error, message) -> None:
    with pytest.raises(error, match=message):
        grouped_matmul(x, weight, bias)
