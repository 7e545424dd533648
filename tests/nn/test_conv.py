"""Convolutional layers: those of brainstate, those of the reference, and their gradients."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import nn, testing
from tests.promotion import promoting

pytestmark = pytest.mark.usefixtures('x64')


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def mask(shape, **_):
    return (draw(*shape, seed=7) > 0).astype(jnp.float64)


NORMAL = brainstate.nn.init.Normal()
LAYERS = {
    'line': ('Conv1d', (7, 3), 4, 3, {}),
    'line with two paddings': ('Conv1d', (7, 3), 4, 3, {'padding': (2, 1), 'b_init': NORMAL}),
    'image': ('Conv2d', (6, 5, 2), 4, 3, {'stride': 2, 'b_init': NORMAL}),
    'masked': ('Conv2d', (6, 5, 2), 4, (3, 2), {'w_mask': mask, 'padding': 'VALID'}),
    'grouped': ('Conv2d', (6, 5, 4), 6, 3, {'groups': 2, 'rhs_dilation': 2}),
    'channel first': ('Conv2d', (2, 6, 5), 4, 3, {'channel_first': True, 'b_init': NORMAL}),
    'dilated': ('Conv2d', (4, 3, 2), 3, 2, {'lhs_dilation': 2, 'padding': 1}),
    'volume': ('Conv3d', (4, 3, 5, 2), 3, 2, {'b_init': NORMAL}),
}
KINDS = pytest.mark.parametrize(
    ('name', 'in_size', 'out_channels', 'kernel_size', 'options'), LAYERS.values(), ids=LAYERS
)


def made(module, name, *sizes, **options):
    brainstate.random.seed(3)
    with promoting():  # brainstate does, when it makes a layer
        return getattr(module, name)(*sizes, **options)


@KINDS
def test_it_is_brainstates_layer_with_and_without_batch(
    reference, name, in_size, out_channels, kernel_size, options
):
    ours, theirs = (
        made(module, name, in_size, out_channels, kernel_size, **options)
        for module in (nn, brainstate.nn)
    )
    assert isinstance(ours, getattr(brainstate.nn, name)) and ours.out_size == theirs.out_size
    for x in (draw(2, *in_size), draw(*in_size)):
        with promoting():
            expected = theirs(x)
        np.testing.assert_allclose(ours(x), expected, rtol=1e-12, atol=1e-13)
    assert ours(draw(*in_size)).shape == ours.out_size

    def pulled_back(layer):
        return brainstate.transform.grad(
            lambda: jnp.sin(layer(draw(2, *in_size))).sum(), {'w': layer.weight}
        )()

    with promoting():
        expected = pulled_back(theirs)
    pulled = pulled_back(ours), expected
    for found, expected in zip(*map(jax.tree.leaves, pulled), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


@KINDS
def test_the_same_seed_gives_the_weights_of_the_reference(
    reference, name, in_size, out_channels, kernel_size, options
):
    ours, theirs = (
        made(module, name, in_size, out_channels, kernel_size, **options)
        for module in (nn, reference.nn)
    )
    assert ours.weight.value.keys() == theirs.weight.value.keys()
    for key, expected in theirs.weight.value.items():
        np.testing.assert_allclose(ours.weight.value[key], expected, rtol=1e-14)
        assert ours.weight.value[key].shape == expected.shape
    with promoting():
        expected = theirs(draw(2, *in_size))
    np.testing.assert_allclose(ours(draw(2, *in_size)), expected, rtol=1e-12, atol=1e-13)


def test_units_of_weight_and_bias():
    weight, bias = draw(3, 2, 4) * u.mS, draw(1, 4) * u.nA
    layer = made(nn, 'Conv1d', (7, 2), 4, 3, w_init=weight, b_init=bias)
    found = layer(draw(2, 7, 2) * u.mV)
    with promoting():
        plain = brainstate.nn.Conv1d((7, 2), 4, 3, w_init=draw(3, 2, 4), b_init=draw(1, 4) * 1e-3)
        expected = plain(draw(2, 7, 2))
    np.testing.assert_allclose(found.to_decimal(u.uA), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ('in_size', 'shape', 'options', 'message'),
    [
        ((6, 5), (2, 6, 5), {}, 'in_size must have 3 entries'),
        ((6, 5, 2), (2, 5, 6, 2), {}, 'expected input shape'),
        ((6, 5, 2), (2, 2, 6, 5, 2), {}, 'got 5D input'),
        ((6, 5, 3), (2, 6, 5, 3), {'groups': 2}, 'divisible by groups'),
    ],
)
def test_bad_sizes_are_refused(in_size, shape, options, message):
    with pytest.raises(ValueError, match=message):
        nn.Conv2d(in_size, 4, 3, **options)(jnp.ones(shape))


class Neurons(brainstate.nn.Module):
    """A layer that drives neurons with leaks of their own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        size = layer.out_size
        self.leak = jnp.linspace(0.5, 0.9, np.prod(size)).reshape(size)

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, *self.leak.shape)))

    def update(self, x):
        h, y = self.h.value, self.layer(x)
        self.h.value = jnp.tanh(jnp.broadcast_to(self.leak, h.shape) * h + y)
        return self.h.value


def loss_of(run):
    return lambda x: jnp.sum(jnp.sin(run(x)))


@pytest.mark.parametrize('how', ['batch', 'single', 'vmap'])
@pytest.mark.parametrize('name', ['masked', 'channel first'])
def test_a_learner_gives_the_gradient_of_bptt(name, how):
    """The reference refuses every layer with a bias, and lets masked weights move."""
    kind, *sizes, options = LAYERS[name]
    model = Neurons(made(nn, kind, *sizes, **options))
    batch = () if how == 'single' else (2,)
    xs = draw(5, *batch, *sizes[0])
    brainstate.nn.init_all_states(model, *batch)
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    batch_size = {} if how == 'single' else {'batch_size': 2}
    learner = btf.compile(model, 'd_rtrl', xs[0], vmap=how == 'vmap', **batch_size)
    found = learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum', trace_every=3)
    testing.compare(found, true).check(1e-12)
    if name == 'masked':
        (weights,) = found.values()
        masked = np.asarray(mask(weights['weight'].shape)) == 0
        assert masked.any() and not weights['weight'][masked].any()
