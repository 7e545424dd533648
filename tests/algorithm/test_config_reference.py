"""Configurations beside the reference's, on a cell that it is right about."""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.algorithm.learning import check
from tests.promotion import promoting

KEY = np.array([0, 3], np.uint32)
STEPS, BATCH = 5, 2
CONFIGS = [
    {'temporal_recursion': 'scalar_leak', 'decay': 0.6},
    {'temporal_recursion': 'none'},
    {'learning_signal': 'modulatory', 'trace_filter': 'kappa', 'kappa': 0.7},
    {
        'temporal_recursion': 'scalar_leak',
        'decay': 0.6,
        'learning_signal': 'random_feedback',
        'trace_filter': 'kappa',
        'kappa': 0.7,
    },
    {
        'trace_factorization': 'io_factorized',
        'temporal_recursion': ('scalar_leak', 'scalar_leak'),
        'decay': (0.8, 0.9),
        'learning_signal': 'random_feedback',
    },
    {
        'trace_factorization': 'io_factorized',
        'temporal_recursion': ('none', 'jacobian'),
        'decay': (0.0, 0.9),
        'learning_signal': 'modulatory',
    },
]


def gradient(library, fields):
    class Cell(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            rng = np.random.default_rng(0)
            self.w = brainstate.ParamState(jnp.asarray(rng.normal(size=(3, 4))))
            self.h = brainstate.HiddenState(jnp.zeros((BATCH, 4)))

        def update(self, x):
            self.h.value = jnp.tanh(0.8 * self.h.value + library.matmul(x, self.w.value))
            return self.h.value

    rng = np.random.default_rng(1)
    xs, ks = (jnp.asarray(rng.normal(size=(STEPS, BATCH, n))) for n in (3, 4))
    ms = jnp.asarray(rng.normal(size=STEPS))
    config = library.ETraceConfig(**fields)
    options = {}
    if config.learning_signal == 'random_feedback':
        options['random_feedback_key'] = KEY
    learner = library.compile(Cell(), config, xs[0], **options)
    given = config.learning_signal == 'modulatory'

    def loss(x, k, m):
        return jnp.sum(k * (learner(x, modulator=m) if given else learner(x)))

    def step(*slices):
        return brainstate.transform.grad(lambda: loss(*slices), learner.param_states)()

    grads = brainstate.transform.for_loop(step, xs, ks, ms)
    return jax.tree.map(lambda g: g.sum(0), grads)


@pytest.mark.parametrize(
    'fields', CONFIGS, ids=lambda fields: btf.ETraceConfig(**fields).describe()
)
def test_a_configuration_learns_as_in_the_reference(reference, fields, x64):
    with warnings.catch_warnings(), promoting():
        warnings.simplefilter('ignore')
        true = gradient(reference, fields)
    check(gradient(btf, fields), true, rtol=1e-10)
