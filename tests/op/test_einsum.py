"""Units, equations and errors of ``einsum``."""

import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace_fast.op import einsum


def test_the_result_has_the_unit_of_x_times_weight_and_spaces_do_not_count() -> None:
    found = einsum(' b k, k n -> b n ', jnp.ones((2, 3), bool), jnp.ones((3, 4)) * u.mV)
    np.testing.assert_allclose(found.to_decimal(u.mV), np.full((2, 4), 3.0))


@pytest.mark.parametrize(
    ('equation', 'x', 'weight'),
    [
        ('bk,kn->bn', (2, 3), (3, 4)),
        ('btk,kn->btn', (2, 5, 3), (3, 4)),
        ('bgk,gkn->bgn', (2, 5, 3), (5, 3, 4)),
        ('bks,knm->bmn', (2, 3, 5), (3, 4, 2)),
        ('bkn,kn->bn', (2, 3, 4), (3, 4)),
    ],
)
def test_it_is_einsum(equation, x, weight) -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (x, weight))
    found = einsum(equation, x, weight, weight_fn=jnp.sin)
    np.testing.assert_allclose(found, jnp.einsum(equation, x, jnp.sin(weight)), rtol=1e-5)


@pytest.mark.parametrize(
    ('equation', 'message'),
    [
        ('bk,kn', 'not of the form'),
        ('bk->bk', 'not of the form'),
        ('bk,kn,n->bn', 'not of the form'),
        ('...k,kn->...n', 'not of the form'),
        ('BK,KN->BN', 'not of the form'),
        ('bkk,kn->bn', 'x has a letter twice'),
        ('bk,knn->bn', 'the weight has a letter twice'),
        ('bk,kn->bnn', 'y has a letter twice'),
        ('k,kn->n', 'batch letter'),
        ('bk,kn->nb', 'batch letter'),
        ('bk,bkn->bn', 'batch letter'),
        ('bk,knz->bn', "the weight alone has 'z'"),
        ('bk,kn->bnz', "neither operand has 'z'"),
    ],
)
def test_an_equation_of_another_form_is_refused(equation, message) -> None:
    with pytest.raises(ValueError, match=message):
        einsum(equation, jnp.ones((2, 3)), jnp.ones((3, 4)))


@pytest.mark.parametrize(
    ('x', 'weight', 'error', 'message'),
    [
        (jnp.ones((2, 2, 3)), jnp.ones((3, 4)), ValueError, r'3\), expected 2 axes \(bk\)'),
        (jnp.ones((2, 3)), jnp.ones(3), ValueError, 'weight of shape'),
        (jnp.ones((2, 3)), jnp.ones((5, 4)), ValueError, "give 'k' the sizes 3 and 5"),
        (jnp.ones((2, 3)), jnp.ones((3, 4), int), TypeError, 'einsum: found a weight of dtype'),
    ],
)
def test_errors_say_what_was_found_and_expected(x, weight, error, message) -> None:
    with pytest.raises(error, match=message):
        einsum('bk,kn->bn', x, weight)


def test_an_example_may_come_without_a_batch() -> None:
    x, weight = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    batch = einsum('btk,kn->btn', x[None], weight)
    np.testing.assert_array_equal(einsum('btk,kn->btn', x, weight), batch[0])
