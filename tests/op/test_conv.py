"""What ``conv`` adds to other ops: geometries, layouts of the bias, bad input, 1x1 kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax import lax

from braintrace_fast.op import conv, matmul
from tests.op.conv_geometries import BATCH_FIRST, NHWC, OTHERS, OUTPUT_BEHIND, plain

pytestmark = pytest.mark.usefixtures('x64')

IMAGE = {'strides': (1, 1), 'dimension_numbers': NHWC}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def operands(geometry):
    return [draw(*shape) for shape in (geometry.x, geometry.kernel, *geometry.bias.values())]


def equation(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


@pytest.mark.parametrize('geometry', [*BATCH_FIRST, *OTHERS, *OUTPUT_BEHIND], ids=lambda g: g.name)
def test_forward_and_gradients_are_those_of_lax(geometry):
    args = operands(geometry)
    ours, theirs = (functools.partial(f, **geometry.options) for f in (conv, plain))
    y = theirs(*args)
    assert y.shape == geometry.y
    np.testing.assert_allclose(jax.jit(ours)(*args), y, rtol=1e-13, atol=1e-13)
    pulled = [jax.vjp(f, *args)[1](jnp.cos(y)) for f in (ours, theirs)]
    for found, expected in zip(*pulled, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        assert jnp.any(expected != 0)


@pytest.mark.parametrize('geometry', BATCH_FIRST, ids=lambda g: g.name)
def test_it_is_a_product_with_a_matrix_per_group_at_every_position(geometry):
    x, kernel, *bias = operands(geometry)
    eqn = equation(functools.partial(conv, **geometry.options), x, kernel, *bias)
    rules, params = eqn.primitive.trace_rules, eqn.params
    views = rules.weight_view(
        dict(zip(('weight', 'bias'), (kernel, *bias), strict=False)), **params
    )
    y = rules.plane_view(plain(x, kernel, *bias, **geometry.options), **params)
    found = jnp.einsum('...gi,gio->...go', rules.operand(x, **params), views['weight'])
    if bias:
        found = found + jnp.broadcast_to(views['bias'], found.shape)
    np.testing.assert_allclose(found, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize('geometry', BATCH_FIRST, ids=lambda g: g.name)
@pytest.mark.parametrize('lead', [(), (3,)], ids=['step', 'window'])
def test_weight_vjp_sums_over_time_and_batch(geometry, lead):
    x, cotangent = draw(*lead, *geometry.x, seed=1), draw(*lead, *geometry.y, seed=2)
    weights = dict(zip(('weight', 'bias'), operands(geometry)[1:], strict=False))
    eqn = equation(functools.partial(conv, **geometry.options), *operands(geometry))
    found = eqn.primitive.weight_vjp(x, cotangent, weights, **eqn.params)

    def loss(weights):
        rows = x.reshape(-1, *geometry.x)
        ys = [
            plain(row, weights['weight'], weights.get('bias'), **geometry.options) for row in rows
        ]
        return jnp.sum(jnp.stack(ys) * cotangent.reshape(-1, *geometry.y))

    for key, expected in jax.grad(loss)(weights).items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-12, atol=1e-12)
    only = {'weight': weights['weight']}  # a bias that is no parameter has no entry
    assert eqn.primitive.weight_vjp(x, cotangent, only, **eqn.params).keys() == only.keys()


def test_without_a_batch_axis_there_is_one_example():
    x, kernel, bias = draw(2, 5, 4, 2), draw(3, 3, 2, 4), draw(1, 1, 1, 4)
    y = conv(x, kernel, bias, **IMAGE)
    np.testing.assert_allclose(conv(x[0], kernel, bias, **IMAGE), y[0], rtol=1e-13)
    positional = draw(1, 5, 4, 4)
    y = conv(x, kernel, positional, **IMAGE)
    np.testing.assert_allclose(conv(x[0], kernel, positional, **IMAGE), y[0], rtol=1e-13)
    behind = ('HWNC', 'HWIO', 'CNHW')
    y = conv(x.transpose(1, 2, 0, 3), kernel, strides=(1, 1), dimension_numbers=behind)
    one = conv(x[0], kernel, strides=(1, 1), dimension_numbers=behind)
    np.testing.assert_allclose(one, y[:, 0], rtol=1e-13)


def test_further_batch_axes_stand_in_front():
    x, kernel, bias = draw(3, 2, 5, 4, 2), draw(3, 3, 2, 4), draw(5, 4, 4)
    expected = jnp.stack([conv(one, kernel, bias, **IMAGE) for one in x])
    np.testing.assert_allclose(conv(x, kernel, bias, **IMAGE), expected, rtol=1e-13)


def test_lists_are_taken_under_jit():
    x, kernel = draw(2, 3, 6), draw(4, 3, 3)

    @jax.jit
    def listed(x, kernel):
        return conv(
            x, kernel, strides=[2], padding=[[1, 0]], rhs_dilation=[2],
            dimension_numbers=['NCH', 'OIH', 'NCH'],
        )  # fmt: skip

    expected = plain(x, kernel, strides=(2,), padding=((1, 0),), rhs_dilation=(2,))
    np.testing.assert_allclose(listed(x, kernel), expected, rtol=1e-13)


def test_a_layout_of_numbers_is_taken():
    layout = lax.conv_dimension_numbers((2, 5, 4, 2), (3, 3, 2, 4), NHWC)
    x, kernel = draw(2, 5, 4, 2), draw(3, 3, 2, 4)
    found = conv(x, kernel, strides=(1, 1), dimension_numbers=layout)
    np.testing.assert_array_equal(found, conv(x, kernel, **IMAGE))


@pytest.mark.parametrize('dtype', [jnp.bool_, jnp.int32])
def test_spikes_are_taken_in_the_dtype_of_the_kernel(dtype):
    x, kernel = draw(2, 3, 6) > 0, draw(4, 3, 3).astype(jnp.float32)
    found = conv(x.astype(dtype), kernel)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, conv(x.astype(jnp.float32), kernel))


def test_the_result_has_the_unit_of_x_times_kernel_and_hooks_see_numbers():
    x, kernel, bias = draw(2, 3, 6), draw(4, 3, 3), draw(4)
    found = conv(
        x * u.mV, kernel * u.mS, bias * u.nA, kernel_fn=jnp.tanh, bias_fn=lambda b: b.reshape(4, 1)
    )
    expected = plain(x, jnp.tanh(kernel), bias * 1e-3)
    np.testing.assert_allclose(u.Quantity(found).to_decimal(u.uA), expected, rtol=1e-12)


def test_a_1x1_kernel_is_a_matrix_for_all_positions():
    x, kernel, bias = draw(2, 5, 4, 3), draw(1, 1, 3, 6), draw(6)
    dense = equation(matmul, x, kernel[0, 0], bias)
    own = equation(lambda *args: conv(*args, **IMAGE), x, kernel, bias)
    plane, signal = draw(2, 5, 4, 6, seed=1), draw(2, 5, 4, 6, seed=2)

    def computed(eqn, weight):
        rules, params = eqn.primitive.trace_rules, eqn.params
        operand, view = rules.operand or take, rules.plane_view or take
        e = rules.outer(operand(x, **params), view(plane, **params), **params)
        decayed = rules.decay(view(plane, **params), e, **params)
        return [
            eqn.primitive.bind(x, weight, bias, **params),
            e,
            rules.contract(view(signal, **params), decayed, **params),
            eqn.primitive.weight_vjp(x, signal, {'weight': weight, 'bias': bias}, **params),
        ]

    results = computed(own, kernel), computed(dense, kernel[0, 0])
    for found, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-12, atol=1e-13)


def take(array, **_):
    return array


x, kernel = np.ones((2, 3, 8), np.float32), np.ones((4, 3, 5), np.float32)
BAD = {
    'no axes to convolve': ((x[0, 0], kernel), {}, TypeError, r'x of shape \(8,\)'),
    'a matrix as kernel': ((x, kernel[0]), {}, TypeError, r'kernel of shape \(3, 5\)'),
    'strides of a line': ((x[None], kernel[..., None]), {}, ValueError, 'expected 2 positive'),
    'a number as strides': ((x, kernel), {'strides': 2}, TypeError, 'found strides=2'),
    'a stride of zero': ((x, kernel), {'strides': (0,)}, ValueError, r'strides=\(0,\)'),
    'dilations': ((x, kernel), {'rhs_dilation': (1, 1)}, ValueError, r'rhs_dilation=\(1, 1\)'),
    'input channels': ((x[:, 1:], kernel), {}, ValueError, 'found 2 input channels'),
    'groups of inputs': ((x, kernel), {'feature_group_count': 2}, ValueError, r'2 group\(s\)'),
    'no groups': ((x, kernel), {'feature_group_count': 0}, ValueError, r'0 group\(s\)'),
    'batch groups': ((x[:1], kernel), {'batch_group_count': 2}, ValueError, 'a batch of 1'),
    'batch groups of one': ((x[0], kernel), {'batch_group_count': 2}, ValueError, 'batch of 1'),
    'two kinds of groups': (
        (x, kernel),
        {'batch_group_count': 2, 'feature_group_count': 2},
        ValueError,
        'one of them to be 1',
    ),
    'padding': ((x, kernel), {'padding': 'SOME'}, RuntimeError, 'SAME_LOWER'),
    'a number as padding': ((x, kernel), {'padding': 1}, ValueError, 'found padding=1'),
    'pairs': ((x, kernel), {'padding': ((1, 1),) * 2}, TypeError, r'expected 1 pair\(s\)'),
    'no pairs': ((x, kernel), {'padding': (1,)}, TypeError, r'expected 1 pair\(s\)'),
    'a dilated input': ((x, kernel), {'lhs_dilation': (2,)}, ValueError, 'expected pairs'),
    'a layout': ((x, kernel), {'dimension_numbers': NHWC}, TypeError, 'must have len equal'),
    'axes of a layout': (
        (x, kernel),
        {'dimension_numbers': lax.ConvDimensionNumbers((0, 1, 1), (0, 1, 2), (0, 1, 2))},
        TypeError,
        'all of its 3 axes once',
    ),
    'channels of a bias': ((x, kernel, x[0, :, 0]), {}, ValueError, r'bias of shape \(3,\)'),
    'positions of a bias': ((x, kernel, x[0]), {}, ValueError, r'bias of shape \(3, 8\), which'),
    'rank of a bias': ((x, kernel, x[None]), {}, ValueError, r'expected \(4,\)'),
    'type of a kernel': ((x, kernel.astype(int)), {}, TypeError, 'kernel of dtype int'),
    'type of a bias': ((x, kernel, np.ones(4, int)), {}, TypeError, 'bias of dtype int'),
    'unit of a bias': ((x * u.mV, kernel, kernel[:, 0, 0]), {}, u.UnitMismatchError, 'has mV'),
}


@pytest.mark.parametrize(('args', 'options', 'error', 'message'), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_what_was_found_and_expected(args, options, error, message):
    with pytest.raises(error, match=message):
        conv(*args, **options)
