"""``GroupedLinear``, ``LoRA`` and ``Embedding``: what they compute, learn and refuse."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import nn, testing

pytestmark = pytest.mark.usefixtures('x64')


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize('has_bias', [False, True], ids=['no_bias', 'bias'])
def test_grouped_linear(has_bias) -> None:
    bias = draw(2, 4) if has_bias else None
    layer = nn.GroupedLinear(2, 3, 4, w_init=draw(2, 3, 4), b_init=bias)
    x = draw(5, 2, 3, seed=1)
    expected = np.einsum('bgi,gio->bgo', x, draw(2, 3, 4)) + (np.asarray(bias) if has_bias else 0)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-13)
    assert list(layer.weight.value) == (['weight', 'bias'] if has_bias else ['weight'])


def test_lora_scales_by_its_rank_and_adds_what_it_corrects() -> None:
    base = nn.Linear(3, 4)
    layer, x = nn.LoRA(3, 2, 4, base_module=base), draw(5, 3)
    params = layer.weight.value
    expected = x @ params['lora_a'] @ params['lora_b'] / 2 + base(x)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-13)


def test_lora_refuses_a_base_that_cannot_be_called() -> None:
    with pytest.raises(ValueError, match='base_module=3, expected a module or a function'):
        nn.LoRA(3, 2, 4, base_module=3)(jnp.ones(3))


def test_rows_of_an_embedding_may_have_any_shape() -> None:
    layer = nn.Embedding(5, (2, 3))
    indices = jnp.array([[0, 4], [-1, 2]])
    np.testing.assert_array_equal(layer(indices), layer.weight.value[indices])


@pytest.mark.parametrize(
    'option',
    [{'max_norm': 1.0}, {'padding_idx': 1}, {'scale_grad_by_freq': True}, {'freeze': True}],
)
def test_options_that_cannot_be_traced_are_refused(option) -> None:
    ((name, value),) = option.items()
    with pytest.raises(NotImplementedError, match=f'does not support: {name}={value!r}'):
        nn.Embedding(5, 3, **{name: value})
    layer = nn.Embedding(5, 3)
    setattr(layer, name, value)
    with pytest.raises(NotImplementedError, match=name):
        layer(jnp.array(0))


def test_all_options_that_cannot_be_traced_are_named_and_no_others() -> None:
    with pytest.raises(NotImplementedError, match='support: freeze=True, padding_idx=2. '):
        nn.Embedding(5, 3, padding_idx=2, freeze=True)


@pytest.mark.parametrize('options', [{'padding_idx': 7}, {'num_embeddings': -5}])
def test_sizes_that_do_not_fit_are_refused(options) -> None:
    with pytest.raises(ValueError):
        nn.Embedding(**{'num_embeddings': 5, 'embedding_size': 3} | options)


class Leaky(brainstate.nn.Module):
    """A layer, and states that it drives."""

    def __init__(self, layer, *shape):
        super().__init__()
        self.layer, self.shape = layer, shape

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, *self.shape)))

    def update(self, x):
        self.h.value = jnp.tanh(0.8 * self.h.value + self.layer(x))
        return self.h.value


@pytest.mark.parametrize(
    ('layer', 'shape', 'xs'),
    [
        (lambda: nn.GroupedLinear(2, 3, 4), (2, 4), lambda: draw(5, 2, 2, 3)),
        (lambda: nn.LoRA(3, 2, 4, base_module=nn.Linear(3, 4)), (4,), lambda: draw(5, 2, 3)),
        (lambda: nn.Embedding(6, (2, 3)), (2, 3), lambda: jnp.arange(10).reshape(5, 2) % 6),
    ],
    ids=['GroupedLinear', 'LoRA', 'Embedding'],
)
def test_layers_are_traced_exactly(layer, shape, xs, silent) -> None:
    model, xs = Leaky(layer(), *shape), xs()
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=2)

    def loss(run):
        return lambda x: jnp.sum(jnp.sin(3 * run(x)))

    true = testing.bptt(model, xs, step_fn=loss(model))
    found = learner.etrace_grad(xs, step_fn=loss(learner), reduction='sum', trace_every=3)
    testing.compare(found, true).check(1e-11)
