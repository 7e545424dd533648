"""What learners of the layers give is what brute force gives, for every parameter."""

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import nn, testing

pytestmark = pytest.mark.usefixtures('x64')

BATCH, STEPS, N_IN, N = 2, 5, 3, 4


class Leaky(brainstate.nn.Module):
    """A layer that drives neurons without connections between them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.ScaledWSLinear(N_IN, N, **options)

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, N)))

    def update(self, x: Any) -> Any:
        self.h.value = jnp.tanh(0.8 * self.h.value + self.layer(x))
        return self.h.value


def masked() -> Leaky:
    mask = np.random.default_rng(5).random((N_IN, N)) > 0.3
    return Leaky(w_mask=jnp.asarray(mask))


MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: getattr(nn, name)(N_IN, N) for name in nn.__all__ if 'Cell' in name},
    'MiniGRU': lambda: nn.MiniGRU(N_IN, N),
    'MiniLSTM': lambda: nn.MiniLSTM(N_IN, N),
    'ScaledWSLinear': Leaky,
    'ScaledWSLinear with a mask': masked,
    'ScaledWSLinear without gain and bias': lambda: Leaky(ws_gain=False, b_init=None),
}
# No neuron reaches another from step to step, so that D-RTRL is exact.
POSITION_WISE = [name for name in MODELS if name.startswith(('LRU', 'ScaledWS'))]


FAST = ('CFNCell', 'LRUCell', 'ScaledWSLinear', 'URLSTMCell')
DECAY = (0.8, 0.9)


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


def drawn(tree: Any, seed: int, scale: float = 0.7) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(a + scale * rng.normal(size=a.shape)), tree)


def learner_of(name: str, rule: str, **options: Any) -> tuple[Any, Any, jax.Array]:
    """A model, its learner and inputs, from random states and parameters."""
    xs = drawn(jnp.zeros((STEPS, BATCH, N_IN)), 0)
    model = MODELS[name]()
    learner = btf.compile(model, rule, xs[0], batch_size=BATCH, **options)
    for seed, state in enumerate(model.states().values()):
        state.value = drawn(state.value, seed)
    return model, learner, xs


def gradient(learner: Any, xs: jax.Array, **options: Any) -> Any:
    return learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum', **options)


def loss_of(run: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
    return lambda x: jnp.sum(jnp.sin(2 * run(x)))


def is_alive(gradients: Any) -> bool:
    return all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize('name', MODELS)
def test_a_step_with_a_zero_trace_has_the_gradient_of_that_step(name: str) -> None:
    model, learner, xs = learner_of(name, 'd_rtrl')
    true = testing.bptt(model, xs[:1], step_fn=loss_of(model))
    assert is_alive(true)
    testing.compare(gradient(learner, xs[:1]), true).check(rtol=1e-11)


@pytest.mark.parametrize('name', MODELS)
def test_a_sequence_has_the_gradient_of_the_recurrence(name: str) -> None:
    model, learner, xs = learner_of(name, 'd_rtrl')
    true = testing.recurrence(model, xs, step_fn=loss_of(model))
    assert is_alive(true)
    testing.compare(gradient(learner, xs, trace_every=2), true).check(rtol=1e-10)


@pytest.mark.parametrize('name', [name if name in FAST else slow(name) for name in MODELS])
def test_pp_prop_follows_its_recurrence(name: str) -> None:
    model, learner, xs = learner_of(name, 'pp_prop', decay_or_rank=DECAY)
    true = testing.recurrence(model, xs, step_fn=loss_of(model), decay=DECAY)
    assert is_alive(true)
    testing.compare(gradient(learner, xs, trace_every=2), true).check(rtol=1e-10)


@pytest.mark.parametrize('name', POSITION_WISE)
def test_without_connections_a_sequence_has_its_true_gradient(name: str) -> None:
    model, learner, xs = learner_of(name, 'd_rtrl')
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    testing.compare(gradient(learner, xs, trace_every=2), true).check(rtol=1e-10)
