"""What ``conv`` adds to other ops: geometries, layouts of the bias, bad input, 1x1 kernels."""

import functools
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax import lax

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.op import conv, matmul
from tests.op.conv_geometries import BATCH_FIRST, NHWC, OTHERS, plain

pytestmark = pytest.mark.usefixtures('x64')

IMAGE = {'strides': (1, 1), 'dimension_numbers': NHWC}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def operands(geometry):
    return [draw(*shape) for shape in (geometry.x, geometry.kernel, *geometry.bias.values())]


def equation(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


@pytest.mark.parametrize('geometry', [*BATCH_FIRST, *OTHERS], ids=lambda g: g.name)
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
def test_the_trace_is_the_jacobian_of_each_position(geometry):
    x, kernel = operands(geometry)[:2]
    op = functools.partial(conv, **geometry.options)
    eqn = equation(op, x, kernel)
    plane = draw(*geometry.y, seed=1)
    trace = eqn.primitive.trace_rules.outer(x, plane, **eqn.params)['weight']
    spec = eqn.params['geometry'].layout.out_spec
    order = (0, *spec[2:], spec[1])  # positions, then channels
    jacobian = jax.jacrev(lambda kernel: op(x, kernel).transpose(order))(kernel)
    rows = plane.transpose(order)
    per_position = jnp.einsum('...o,...ok->...k', rows, jacobian.reshape(*rows.shape, -1))
    np.testing.assert_allclose(
        trace, per_position.reshape(*rows.shape[:-1], *kernel.shape), rtol=1e-12, atol=1e-12
    )


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
        rules = eqn.primitive.trace_rules
        trace = rules.outer(x, plane, **eqn.params)
        return [
            eqn.primitive.bind(x, weight, bias, **eqn.params),
            trace,
            rules.contract(signal, rules.decay(plane, trace, **eqn.params), **eqn.params),
            eqn.primitive.weight_vjp(x, signal, {'weight': weight, 'bias': bias}, **eqn.params),
        ]

    results = computed(own, kernel), computed(dense, kernel[0, 0])
    for found, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-12, atol=1e-13)


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


class Leaky(brainstate.nn.Module):
    """Neurons at positions that know nothing of each other, so that a trace per position is exact.

    They have leaks of their own, and an adaptation: no plane is uniform.
    """

    def __init__(self, kernel, bias, size, op=conv, **options):
        super().__init__()
        self.op = functools.partial(op, **options)
        self.w = brainstate.ParamState(
            {'weight': kernel} | ({} if bias is None else {'bias': bias})
        )
        self.leak = jnp.linspace(0.5, 0.9, np.prod(size)).reshape(size)
        self.size = size

    def init_state(self, batch_size=None, **_):
        shape = self.size if batch_size is None else (batch_size, *self.size)
        self.h = brainstate.HiddenState(jnp.zeros(shape))
        self.a = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        params, h, a = self.w.value, self.h.value, self.a.value
        y = self.op(x, params['weight'], params.get('bias'))
        self.h.value = jnp.tanh(jnp.broadcast_to(self.leak, h.shape) * h - 0.3 * a + y)
        self.a.value = 0.9 * a + 0.2 * h
        return self.h.value


NCHW = ('NCHW', 'OIHW', 'NCHW')
BIASES = {
    'channel last': ((4,), NHWC),
    'channel last, rank 3': ((1, 1, 4), NHWC),
    'channel last, rank 4': ((1, 1, 1, 4), NHWC),
    'channel first': ((4,), NCHW),
    'channel first, rank 3': ((4, 1, 1), NCHW),
    'channel first, rank 4': ((1, 4, 1, 1), NCHW),
    'one number': ((), NHWC),
    'one number, rank 1': ((1,), NCHW),
    'per position': ((4, 4, 4), NHWC),
    'per row': ((1, 4, 1, 1), NHWC),
    'per example': ((2, 1, 1, 4), NHWC),
}
SLOW = {'channel last, rank 3', 'channel first, rank 3', 'one number, rank 1'}


def loss_of(run):
    return lambda x: jnp.sum(jnp.sin(run(x)) * 0.3)


def learned(model, xs, algorithm, options, **compiled):
    """Gradients in several ways, each from states of zero."""
    learner = btf.compile(model, algorithm, xs[0], batch_size=2, **compiled)
    for how in options:
        for state in learner.hidden_states.values():
            state.value = jnp.zeros_like(state.value)
        learner.reset_state()
        yield learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum', **how)


@pytest.mark.parametrize(
    ('shape', 'layout'),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, case in BIASES.items()
    ],
)
def test_every_layout_of_the_bias_is_exact_in_every_rule(shape, layout):
    """As many channels as positions along an axis, so that no wrong axis is noticed by its size."""
    kernel = draw(3, 3, 2, 4) if layout is NHWC else draw(4, 2, 3, 3)
    model = Leaky(kernel, draw(*shape, seed=1), (4, 4, 4), strides=(1, 1), dimension_numbers=layout)
    xs = draw(5, 2, *((4, 4, 2) if layout is NHWC else (2, 4, 4)))
    brainstate.nn.init_all_states(model, batch_size=2)
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    for found in learned(model, xs, 'd_rtrl', [{'trace_every': 3}, {'trace': 'fresh'}]):
        testing.compare(found, true).check(1e-12)
    smoothed = testing.recurrence(model, xs, step_fn=loss_of(model), decay=(0.8, 0.8))
    for found in learned(model, xs, 'pp_prop', [{'trace_every': 3}], decay_or_rank=0.8):
        testing.compare(found, smoothed).check(1e-12)


@pytest.mark.parametrize('kernel_fn', [None, jnp.tanh], ids=['raw', 'hook'])
def test_the_reference_gives_the_same_where_it_is_right(kernel_fn):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        reference = pytest.importorskip('braintrace', reason='it needs Python 3.11')
    xs, options = draw(4, 2, 5, 4, 2), {'kernel_fn': kernel_fn, **IMAGE}
    gradients = []
    for library in (btf, reference):
        model = Plain(draw(3, 3, 2, 4), draw(4), (5, 4, 4), op=library.conv, **options)
        brainstate.nn.init_all_states(model, batch_size=2)
        learner = library.D_RTRL(model)
        learner.compile_graph(xs[0])
        learner.init_etrace_state()
        gradients.append(sum_of_steps(learner, model, xs))
    for found, expected in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert jnp.any(expected != 0)


class Plain(Leaky):
    """One state, of which the reference counts no path twice."""

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.size)))

    def update(self, x):
        params, h = self.w.value, self.h.value
        y = self.op(x, params['weight'], params.get('bias'))
        self.h.value = jnp.tanh(jnp.broadcast_to(self.leak, h.shape) * h + y)
        return self.h.value


def sum_of_steps(learner, model, xs):
    def step(total, x):
        grads = brainstate.transform.grad(
            lambda: loss_of(learner)(x), model.states(brainstate.ParamState)
        )()
        return jax.tree.map(jnp.add, total, grads), None

    weights = {path: s.value for path, s in model.states(brainstate.ParamState).items()}
    start = jax.tree.map(jnp.zeros_like, weights)
    return brainstate.transform.scan(step, start, xs)[0]
