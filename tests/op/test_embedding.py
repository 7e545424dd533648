"""Indices, units and errors of ``embedding``; it is ``matmul`` of one-hot rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace_fast.op import embedding, matmul

TABLE = jnp.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize('shape', [(), (3,), (2, 3)])
@pytest.mark.parametrize('dtype', [jnp.int32, jnp.uint8])
def test_indices_of_any_shape_give_rows(shape, dtype) -> None:
    indices = np.random.default_rng(0).integers(4, size=shape)
    found = embedding(jnp.asarray(indices, dtype), TABLE * u.mV, weight_fn=jnp.square)
    np.testing.assert_array_equal(found.to_decimal(u.mV), np.asarray(TABLE)[indices] ** 2)


@pytest.mark.parametrize('indices', [[0, 3, 3, 1], [-1, -4, 3, 0]], ids=['positive', 'negative'])
def test_it_is_matmul_of_one_hot_rows(indices, x64) -> None:
    indices, table = jnp.asarray(indices), TABLE.astype(float) / 7
    one_hot = jax.nn.one_hot(indices % 4, 4)
    found = jax.value_and_grad(lambda w: jnp.sin(embedding(indices, w)).sum())(table)
    expected = jax.value_and_grad(lambda w: jnp.sin(matmul(one_hot, w)).sum())(table)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13)
    (eqn,) = jax.make_jaxpr(embedding)(indices, table).eqns
    cotangent = jnp.cos(embedding(indices, table))
    for x in (indices, one_hot):  # what pp_prop smooths is a sum of one-hot rows
        grads = eqn.primitive.weight_vjp(x, cotangent, {'weight': table}, **eqn.params)
        np.testing.assert_allclose(grads['weight'], expected[1], rtol=1e-13)


def test_sums_of_one_hot_rows_over_time(x64) -> None:
    indices, scales = jnp.array([[0, 3], [-1, 3], [2, 3]]), jnp.array([0.5, 2.0, 3.0])
    (eqn,) = jax.make_jaxpr(embedding)(indices[0], TABLE.astype(float)).eqns
    found = eqn.primitive.x_total(indices, scales, **eqn.params)
    np.testing.assert_array_equal(found, [[0.5, 0, 3.0, 2.0], [0, 0, 0, 5.5]])


def test_the_weight_vjp_makes_no_one_hot_rows() -> None:
    indices, cotangent = jnp.zeros((7, 5), int), jnp.ones((7, 5, 2))
    (eqn,) = jax.make_jaxpr(embedding)(indices, jnp.ones((60, 2))).eqns

    def vjp(y, w):
        return eqn.primitive.weight_vjp(indices, y, {'weight': w}, **eqn.params)

    text = str(jax.make_jaxpr(vjp)(cotangent, jnp.ones((60, 2))))
    assert '[60,2]' in text and ',60]' not in text and '5,60' not in text


def test_an_index_out_of_range_gives_nan_under_jit_and_no_gradient() -> None:
    def rows(w, indices):
        return embedding(indices, w)

    indices = jnp.array([1, 4, -5])
    found = jax.jit(rows)(TABLE, indices)
    np.testing.assert_array_equal(found, [TABLE[1], [np.nan] * 2, [np.nan] * 2])
    (eqn,) = jax.make_jaxpr(rows)(TABLE, indices).eqns
    grads = eqn.primitive.weight_vjp(indices, jnp.ones((3, 2)), {'weight': TABLE}, **eqn.params)
    np.testing.assert_array_equal(grads['weight'], [[0, 0], [1, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize('outside', [False, True])
def test_indices_that_a_traced_function_closes_over_are_checked(outside) -> None:
    indices = jnp.array([2, 2, 4 if outside else 0])
    if outside:
        with pytest.raises(IndexError, match='from 2 to 4'):
            jax.jit(lambda w: embedding(indices, w))(TABLE)
    else:
        grads = jax.jit(jax.grad(lambda w: embedding(indices, w).sum()))(TABLE)
        np.testing.assert_array_equal(grads, [[1, 1], [0, 0], [2, 2], [0, 0]])


@pytest.mark.parametrize(
    ('indices', 'weight', 'error', 'message'),
    [
        (jnp.ones(3), TABLE, TypeError, 'indices of dtype float32, expected integers'),
        (jnp.ones(3, bool), TABLE, TypeError, 'indices of dtype bool'),
        (jnp.array([0]), jnp.ones(3), ValueError, r'weight of shape \(3,\), expected \(rows'),
        (jnp.array([0]), jnp.ones((3, 2), int), TypeError, 'embedding: found a weight of dtype'),
        (jnp.array([0, 4]), TABLE, IndexError, 'from 0 to 4, expected -4 to 3'),
        (jnp.array([-5]), TABLE, IndexError, 'Check the vocabulary'),
    ],
)
def test_errors_say_what_was_found_and_expected(indices, weight, error, message) -> None:
    with pytest.raises(error, match=message):
        embedding(indices, weight)
