"""A learner of one example, mapped over a batch by hand, gives what one of the batch gives."""

import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing

pytestmark = pytest.mark.usefixtures('x64')

BATCH = 3
XS = np.random.default_rng(0).normal(size=(5, BATCH, 3))
KEY = np.array([0, 7], np.uint32)
RULES = {
    'd_rtrl': {},
    'pp_prop': {'decay_or_rank': 0.9},
    'eprop': {'kappa_filter_decay': 0.5},
    'random feedback': {'feedback': 'random', 'random_feedback_key': KEY},
    'three_factor': {'modulator': 1.5},
    'multi-step': {'vjp_method': 'multi-step'},
}
NAMES = {'random feedback': 'eprop', 'multi-step': 'd_rtrl'}


def model():
    brainstate.random.seed(3)
    cell = btf.nn.ValinaRNNCell(3, 4, activation='tanh')
    return brainstate.nn.Sequential(cell, btf.nn.Linear(4, 2))


def learner_of_one(cell, rule):
    kind = btf.learner.ALGORITHMS[NAMES.get(rule, rule)]
    return kind(cell, **RULES[rule])


def with_new_states(rule):
    cell = model()
    learner = learner_of_one(cell, rule)

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=BATCH)
    def init():
        brainstate.nn.init_all_states(cell)
        learner.compile_graph(jnp.asarray(XS[0, 0]))

    init()
    return learner, brainstate.nn.Vmap(learner, vmap_states='new')


def with_states_made_wider(rule):
    cell = model()
    brainstate.nn.init_all_states(cell)
    learner = learner_of_one(cell, rule)
    learner.compile_graph(jnp.asarray(XS[0, 0]))
    mapped = [*learner.hidden_states.values(), learner.trace]
    for state in mapped:
        state.value = jax.tree.map(lambda a: jnp.stack([a] * BATCH), state.value)
    return learner, brainstate.transform.vmap(learner.update, in_states={0: mapped})


def gradient(learner, call):
    @brainstate.transform.jit
    def step(x):
        return brainstate.transform.grad(lambda: jnp.mean(call(x) ** 2), learner.param_states)()

    return jax.tree.map(lambda *g: sum(g), *[step(jnp.asarray(x)) for x in XS])


QUICK = [('d_rtrl', with_new_states), ('eprop', with_states_made_wider)]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(RULES, [with_new_states, with_states_made_wider])
]


@pytest.mark.parametrize(('rule', 'spelling'), CASES)
def test_mapped_by_hand(rule, spelling):
    name, x = NAMES.get(rule, rule), jnp.asarray(XS[0])
    batch = btf.compile(model(), name, x, batch_size=BATCH, **RULES[rule])
    testing.compare(gradient(*spelling(rule)), gradient(batch, batch)).check(1e-12)
