"""What treats each position apart is traced in full, however it is written; what does not, is not.

The models have ops of inputs alone, so that nothing but the code under test could mix positions:
where it does not, D-RTRL gives the gradient of BPTT.
"""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace_fast as btf
from braintrace_fast import testing
from tests.compiler.checks import param
from tests.models import hidden

pytestmark = pytest.mark.usefixtures('x64')

N_IN, N, BATCH, STEPS = 3, 4, 2, 4


class Pair(brainstate.nn.Module):
    """Two states that drive each other, after a function of both."""

    def __init__(self, function):
        super().__init__()
        self.W, self.U = param(N_IN, N), param(N_IN, N)
        self.function = function

    def init_state(self, batch_size=None, **_):
        self.a, self.b = hidden(batch_size, N), hidden(batch_size, N)

    def update(self, x):
        y = btf.matmul(x, self.W.value)
        a, b = self.function(0.8 * self.a.value + y, self.b.value)
        self.a.value = jnp.tanh(a + 0.2 * b)
        self.b.value = 0.7 * b + jnp.sin(self.a.value) + btf.matmul(x, self.U.value)
        return self.b.value + self.a.value


def one(function):
    return lambda a, b: (function(a), b)


def concatenated(end):
    """Both states in one array and apart again, the second ``end`` places before its own."""

    def function(a, b):
        joined = jnp.sin(jnp.concatenate([a + 0.1 * b, b], axis=-1))
        return joined[..., :N], joined[..., N - end : 2 * N - end]

    return function


def loss_of(run):
    return lambda x: jnp.sum(jnp.sin(run(x) * jnp.arange(1.0, N + 1)[None]))


def learn(model, algorithm='d_rtrl', **options):
    xs = jnp.asarray(np.random.default_rng(1).normal(size=(STEPS, BATCH, N_IN)))
    return btf.compile(model, algorithm, xs[0], batch_size=BATCH, **options), xs


def gradient(learner, xs, **options):
    for state in learner.hidden_states.values():
        state.value = jnp.zeros_like(state.value)
    learner.reset_state()
    return learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum', **options)


POSITION_WISE = {
    'map': one(lambda h: lax.map(lambda v: jnp.tanh(v) * v, h)),
    'scan': one(lambda h: lax.scan(lambda k, v: (k + 1, jnp.sin(v) * k), 0.3, h)[1]),
    'two flips': one(lambda h: jnp.flip(jnp.sin(jnp.flip(h)))),
    'index set': one(lambda h: h.at[..., 1].set(0.3 * h[..., 1])),
    'index set to a number': one(lambda h: h.at[..., -1].set(0.3)),
    'two indices set': one(lambda h: h.at[1, 2].set(jnp.tanh(h[1, 2]))),
    'index updated': one(
        lambda h: lax.dynamic_update_index_in_dim(
            h, 2 * lax.dynamic_index_in_dim(h, 1, 1, keepdims=False), 1, 1
        )
    ),
    'concatenate and split': concatenated(0),
    'stack and unstack': lambda a, b: tuple(jnp.sin(jnp.stack([a + b, b]))),
}


SLOW = {'scan', 'index set to a number', 'index updated', 'stack and unstack'}
"""Relatives of others."""


@pytest.mark.parametrize(
    'name',
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in POSITION_WISE],
)
def test_the_gradient_is_that_of_bptt_and_nothing_is_warned_of(name, silent):
    model = Pair(POSITION_WISE[name])
    learner, xs = learn(model)
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    testing.compare(gradient(learner, xs, trace_every=3), true).check(1e-12)


# What they move connects no position with itself, so that the recurrence is the truth.
MOVING = {
    'a flip': one(lambda h: h[..., ::-1]),
    'flips of two axes': one(lambda h: h[::-1][:, ::-1]),
    'another index set': one(lambda h: h.at[..., 1].set(h[..., 2])),
    'neighbours added': one(lambda h: h + 0.5 * jnp.roll(h, 1, axis=-1)),
    'split elsewhere': concatenated(1),
}


@pytest.mark.parametrize('name', MOVING)
def test_what_moves_positions_is_cut_and_warned_of(name):
    model = Pair(MOVING[name])
    with pytest.warns(btf.UntracedWarning, match='test_position_wise.py'):
        learner, xs = learn(model)
    groups = [group.hidden_paths for group in learner.graph.hidden_groups]
    true = testing.recurrence(model, xs, step_fn=loss_of(model), groups=groups)
    testing.compare(gradient(learner, xs, trace_every=3), true).check(1e-12)


class Third(Pair):
    """A state reads another one out of place, and a third one in place; the three are a group."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.k = hidden(batch_size, N)

    def update(self, x):
        a = 0.9 * self.a.value + 0.1 * self.b.value + btf.matmul(x, self.W.value)
        self.k.value = 0.8 * self.k.value + btf.matmul(x, self.U.value)
        self.b.value = jnp.tanh(self.function(a) + self.k.value)
        self.a.value = a
        return self.b.value


@pytest.mark.parametrize(
    'move',
    [lambda a: jnp.pad(a[:, 1:], [(0, 0), (0, 1)]), lambda a: a[:, ::-1]],
    ids=['shift', 'flip'],
)
def test_what_a_state_does_out_of_place_counts_within_the_step(move):
    model = Third(move)
    learner, xs = learn(model)
    (group,) = learner.graph.hidden_groups
    true = testing.recurrence(model, xs, step_fn=loss_of(model), groups=[group.hidden_paths])
    testing.compare(gradient(learner, xs, trace_every=1), true).check(1e-12)
    testing.compare(gradient(learner, xs), true).check(1e-12)


# Layers in a list


class Layer(brainstate.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.W = size, param(N_IN, size)

    def init_state(self, batch_size=None, **_):
        self.h = hidden(batch_size, self.size)

    def update(self, x, drive):
        h = 0.8 * self.h.value + btf.matmul(x, self.W.value)
        self.h.value = jnp.tanh(h + drive)
        return self.h.value


class Layers(brainstate.nn.Module):
    """Each layer reads the one before it; with ``back``, the first one reads the last one, too."""

    def __init__(self, sizes, back):
        super().__init__()
        self.layers, self.back = [Layer(size) for size in sizes], back

    def update(self, x):
        h = self.layers[-1].h.value if self.back else 0.0
        for layer in self.layers:
            h = layer(x, 0.5 * jnp.mean(h, -1, keepdims=True) if self.is_uneven else 0.5 * h)
        return jnp.broadcast_to(h.mean(-1, keepdims=True), (BATCH, N)) if self.is_uneven else h

    @property
    def is_uneven(self):
        return len({layer.size for layer in self.layers}) > 1


PATHS = [('layers', i, 'h') for i in range(3)]


@pytest.mark.parametrize(
    ('number', 'back'),
    [(2, True), (3, False), pytest.param(3, True, marks=pytest.mark.slow)],
    ids=['two, both ways', 'three, one way', 'three, both ways'],
)
def test_coupled_layers_of_a_list_give_the_gradient_of_bptt(number, back, silent):
    model = Layers([N] * number, back)
    learner, xs = learn(model, couple_layers=True)
    assert [group.hidden_paths for group in learner.graph.hidden_groups] == [PATHS[:number]]
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    for options in ({'trace_every': 3}, {'trace': 'fresh'}):
        testing.compare(gradient(learner, xs, **options), true).check(1e-12)


@pytest.mark.parametrize(
    ('algorithm', 'options', 'decay'),
    [
        ('pp_prop', {'decay_or_rank': 0.9}, (0.9, 0.9)),
        ('eprop', {'kappa_filter_decay': 0.0}, None),
        ('three_factor', {}, None),
    ],
)
def test_every_rule_couples_layers_of_a_list(algorithm, options, decay, silent):
    model = Layers([N] * 2, True)
    learner, xs = learn(model, algorithm, couple_layers=True, **options)
    (group,) = learner.graph.hidden_groups
    assert group.hidden_paths == PATHS[:2]
    if algorithm != 'three_factor':
        true = testing.recurrence(
            model, xs, step_fn=loss_of(model), groups=[PATHS[:2]], decay=decay
        )
        testing.compare(gradient(learner, xs), true).check(1e-12)


def test_layers_of_a_list_are_apart_by_default_with_a_warning_that_names_both():
    model = Layers([N] * 2, False)
    with pytest.warns(btf.UntracedWarning) as caught:
        learner, xs = learn(model)
    assert [group.hidden_paths for group in learner.graph.hidden_groups] == [[p] for p in PATHS[:2]]
    message = str(caught[0].message)
    assert all(str(path) in message for path in PATHS[:2])
    assert 'couple_layers=True' in message and message.startswith('1 weight is not traced')
    true = testing.bptt(model, xs, step_fn=loss_of(model))
    groups = [[path] for path in PATHS[:2]]
    apart = testing.recurrence(model, xs, step_fn=loss_of(model), groups=groups)
    found = gradient(learner, xs)
    testing.compare(found, apart).check(1e-12)
    assert testing.compare(found, true).worst > 0.01


def test_layers_of_different_shapes_stay_apart():
    learner, _ = learn(Layers([N, N + 1], True), couple_layers=True)
    assert [group.hidden_paths for group in learner.graph.hidden_groups] == [[p] for p in PATHS[:2]]
