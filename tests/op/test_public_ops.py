"""Units, dtypes and errors of the public ops and of ``register_primitive``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace_fast.op import ETPPrimitive, element_wise, matmul, register_primitive


def assert_quantity(found: u.Quantity, value: list[float], unit: u.Unit) -> None:
    assert u.get_unit(found).has_same_dim(unit)
    np.testing.assert_allclose(u.Quantity(found).to_decimal(unit), value, rtol=1e-6)


def test_matmul_has_the_unit_of_x_times_weight() -> None:
    weight = jnp.array([[1.0, 2.0], [3.0, 4.0]]) * u.mS
    found = matmul(jnp.array([1.0, 1.0]) * u.mV, weight)
    assert_quantity(found, [4.0, 6.0], u.uA)


def test_matmul_converts_the_bias_to_the_unit_of_the_output() -> None:
    weight = jnp.ones((2, 2)) * u.mS
    found = matmul(jnp.ones(2) * u.mV, weight, jnp.array([1.0, 2.0]) * u.nA)
    assert_quantity(found, [2.001, 2.002], u.uA)


def test_matmul_gives_plain_numbers_where_units_cancel() -> None:
    found = matmul(jnp.ones(2) * u.mV, jnp.ones((2, 1)) / u.mV)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, [2.0])


def test_functions_of_weight_and_bias_see_numbers_without_unit() -> None:
    found = matmul(
        jnp.ones(2),
        jnp.full((2, 1), 3.0) * u.mV,
        jnp.array([2.0]) * u.mV,
        weight_fn=jnp.square,
        bias_fn=jnp.exp,
    )
    assert_quantity(found, [18.0 + np.exp(2.0)], u.mV)


def test_gradients_carry_units() -> None:
    def loss(weight: u.Quantity) -> u.Quantity:
        return matmul(jnp.ones(2), weight, weight_fn=jnp.square).sum()

    gradient = u.autograd.grad(loss)(jnp.array([[3.0], [-4.0]]) * u.mV)
    np.testing.assert_allclose(u.get_mantissa(gradient), [[6.0], [-8.0]])


def test_weight_fn_may_change_the_shape() -> None:
    weight = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(matmul(jnp.ones(3), weight, weight_fn=jnp.transpose), [3.0, 12.0])


@pytest.mark.parametrize('dtype', [jnp.bool_, jnp.int32])
@pytest.mark.parametrize('weight_dtype', [jnp.float32, jnp.bfloat16])
def test_spikes_are_taken_in_the_dtype_of_the_weight(dtype, weight_dtype) -> None:
    weight = jnp.ones((3, 2), weight_dtype)
    found = matmul(jnp.array([1, 0, 1], dtype), weight)
    assert found.dtype == weight_dtype
    np.testing.assert_array_equal(found, [2.0, 2.0])
    assert jax.grad(lambda w: matmul(jnp.ones(3, dtype), w).sum())(weight).dtype == weight_dtype


def test_numpy_arrays_and_lists_are_taken() -> None:
    np.testing.assert_array_equal(matmul(np.ones(2, np.float32), np.ones((2, 1), np.float32)), [2])
    np.testing.assert_array_equal(element_wise([1.0, 2.0]), [1.0, 2.0])


def test_the_precision_of_the_block_where_matmul_is_called_counts() -> None:
    def step(x: jax.Array, weight: jax.Array) -> jax.Array:
        with jax.default_matmul_precision('highest'):
            return matmul(x, weight)

    lowered = jax.jit(step).lower(jnp.ones((2, 3)), jnp.ones((3, 2))).as_text()
    assert 'HIGHEST' in lowered


@pytest.mark.parametrize(
    ('x', 'weight', 'bias', 'error', 'message'),
    [
        (1.0, jnp.ones((3, 2)), None, ValueError, r'x without axes, expected shape \(\.\.\., 3\)'),
        (jnp.ones(3), jnp.ones(3), None, ValueError, r'weight of shape \(3,\)'),
        (jnp.ones(3), jnp.ones((1, 3, 2)), None, ValueError, r'expected \(inputs, outputs\)'),
        (jnp.ones((5, 4)), jnp.ones((3, 2)), None, ValueError, 'expected 3 features'),
        (jnp.ones(3), jnp.ones((3, 2)), jnp.ones(3), ValueError, r'bias of shape \(3,\)'),
        (jnp.ones(3), jnp.ones((3, 2)), jnp.ones((1, 2)), ValueError, r'expected \(2,\)'),
        (jnp.ones(3), jnp.ones((3, 2), int), None, TypeError, 'weight of dtype int32'),
        (jnp.ones(3), jnp.ones((3, 2)), jnp.ones(2, bool), TypeError, 'bias of dtype bool'),
        (
            jnp.ones(3) * u.mV,
            jnp.ones((3, 2)),
            jnp.ones(2),
            u.UnitMismatchError,
            r'bias has the unit 1, but x \* weight has mV',
        ),
    ],
)
def test_matmul_says_what_it_found_and_expected(x, weight, bias, error, message) -> None:
    with pytest.raises(error, match=message):
        matmul(x, weight, bias)


def test_element_wise_keeps_the_unit_and_applies_the_function_to_the_numbers() -> None:
    found = element_wise(jnp.array([1.0, -2.0]) * u.mV, weight_fn=jnp.square)
    assert_quantity(found, [1.0, 4.0], u.mV)


def test_element_wise_refuses_integers() -> None:
    with pytest.raises(TypeError, match='weight of dtype int32, expected floating-point'):
        element_wise(jnp.arange(3, dtype=jnp.int32))


def test_what_the_compiler_reads_off_the_primitives() -> None:
    x, weight = jnp.ones((5, 3)), jnp.ones((3, 2))
    (dense,) = jax.make_jaxpr(matmul)(x, weight).jaxpr.eqns
    (marked,) = jax.make_jaxpr(element_wise)(weight).jaxpr.eqns
    assert isinstance(dense.primitive, ETPPrimitive)
    assert dense.primitive.name == 'etp_mm'
    assert dense.primitive.batched and not dense.primitive.gradient_enabled
    assert (dense.primitive.x_invar_index, dense.primitive.y_outvar_index) == (0, 0)
    assert marked.primitive.name == 'etp_elemwise'
    assert marked.primitive.gradient_enabled and not marked.primitive.batched
    assert marked.primitive.x_invar_index is None


def test_the_default_weight_is_the_second_operand() -> None:
    primitive = register_primitive('test_default_weight', lambda x, weight: x * weight)
    assert primitive.trainable_invars({}) == {'weight': 1}


def test_a_name_can_be_registered_once() -> None:
    register_primitive('test_twice', lambda x, weight: x * weight)
    with pytest.raises(ValueError, match="an ETP op named 'test_twice' exists already"):
        register_primitive('test_twice', lambda x, weight: x * weight)


def test_an_op_has_one_output() -> None:
    with pytest.raises(ValueError, match='y_outvar_index=1, expected 0'):
        register_primitive('test_second_output', lambda x, weight: x * weight, y_outvar_index=1)
    primitive = register_primitive('test_two_outputs', lambda x, weight: (x, weight))
    with pytest.raises(TypeError, match='returned 2 arrays, expected one'):
        jax.make_jaxpr(primitive.bind)(1.0, 2.0)
