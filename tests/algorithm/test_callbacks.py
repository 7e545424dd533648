"""Code on the host, which JAX can neither map nor differentiate, where that need not be."""

import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace_fast as btf
from braintrace_fast import testing

pytestmark = pytest.mark.usefixtures('x64')

RULES = {
    'd_rtrl': {},
    'pp_prop': {'decay_or_rank': 0.9},
    'eprop': {'kappa_filter_decay': 0.5},
    'multi-step': {'vjp_method': 'multi-step'},
}
XS = np.random.default_rng(0).normal(size=(6, 2, 3))


def encoded(x):
    """A callback with neither ``vmap_method`` nor derivative."""
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def plain(x):
    return jnp.tanh(x)


class Encoder(brainstate.nn.Module):
    def __init__(self, encode):
        super().__init__()
        self.cell, self.encode = btf.nn.ValinaRNNCell(3, 4, activation='tanh'), encode

    def update(self, x):
        return self.cell(self.encode(x))


def learner_of(rule, encode):
    brainstate.random.seed(3)
    options, name = RULES[rule], 'd_rtrl' if rule == 'multi-step' else rule
    return btf.compile(Encoder(encode), name, jnp.asarray(XS[0]), batch_size=2, **options)


def losses_of(learner, where, encode):
    """Losses that read the host in the model, before it, or after it."""

    def loss(x):
        y = learner(encode(x) if where == 'before' else x)
        target = encode(lax.stop_gradient(y)) if where == 'after' else 0.0
        return jnp.mean((y - target) ** 2)

    return loss


def per_step(rule, where, encode):
    learner = learner_of(rule, encode if where == 'inside' else lambda x: x)
    loss = losses_of(learner, where, encode)

    @brainstate.transform.jit
    def step(x):
        return brainstate.transform.grad(lambda: loss(x), learner.param_states)()

    return jax.tree.map(lambda *g: sum(g), *[step(jnp.asarray(x)) for x in XS])


def in_windows(rule, where, encode, **options):
    learner = learner_of(rule, encode if where == 'inside' else lambda x: x)
    loss = losses_of(learner, where, encode)
    return learner.etrace_grad(jnp.asarray(XS), step_fn=loss, reduction='sum', **options)


QUICK = [('d_rtrl', 'inside'), ('d_rtrl', 'after'), ('pp_prop', 'before')]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(RULES, ['inside', 'before', 'after'])
]


@pytest.mark.parametrize(('rule', 'where'), CASES)
def test_host_code_gives_the_gradient_of_the_same_in_jax(rule, where):
    true = per_step(rule, where, plain)
    testing.compare(per_step(rule, where, encoded), true).check(1e-12)
    testing.compare(in_windows(rule, where, encoded, trace_every=4), true).check(1e-12)


def test_host_code_in_a_window_that_is_differentiated_in_full():
    def gradient(encode):
        learner = learner_of('multi-step', encode)

        def loss(x):
            return jnp.mean(learner(btf.MultiStepData(x)) ** 2, axis=(1, 2))

        return learner.etrace_grad(jnp.asarray(XS), step_fn=loss, chunk_size=3)

    testing.compare(gradient(encoded), gradient(plain)).check(1e-12)


def gradient_by_input(call, x):
    return brainstate.transform.grad(lambda x: jnp.mean(call(x) ** 2), argnums=0)(x)


def test_inputs_have_gradients_where_they_can():
    def gradient(encode):
        brainstate.random.seed(3)

        class Two(Encoder):
            def update(self, x, context):
                return self.cell(x + self.encode(context))

        x, context = jnp.asarray(XS[0]), jnp.asarray(XS[1])
        learner = btf.compile(Two(encode), 'd_rtrl', x, context, batch_size=2)
        return gradient_by_input(lambda x: learner(x, context), x)

    found, true = gradient(encoded), gradient(plain)
    assert jnp.abs(true).max() > 1e-3
    np.testing.assert_allclose(found, true, rtol=1e-12)
    with pytest.raises(ValueError, match='do not support JVP'):
        learner = learner_of('d_rtrl', encoded)
        gradient_by_input(learner, jnp.asarray(XS[0]))
