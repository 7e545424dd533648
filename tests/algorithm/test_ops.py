"""Every op under every rule, in every way to run it, against the rules in plain JAX and BPTT."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.runtime import planner
from tests.algorithm.learning import cut_into
from tests.op_models import MODULES, OP_MODELS
from tests.op_models.model import TRANSITIONS, Driven
from tests.oracles import op_recurrence as oracle

pytestmark = pytest.mark.usefixtures('x64')

STEPS, BATCH, PIECE, EVERY = 7, 2, 4, 3
"""Pieces of four and three steps, in windows of three."""
IN_CHUNKS, CHUNK = 6, 3
KAPPA, DECAY = 0.7, (0.8, 0.9)
REWARDS = np.array([0.5, -1.0, 2.0, 0.3, 1.5, -0.3, 0.8])


class Rule(NamedTuple):
    algorithm: str
    options: dict[str, Any]
    is_exact: bool = True
    """Whether it learns from the loss's own signal."""


RULES = {
    'd_rtrl': Rule('d_rtrl', {}),
    'pp_prop': Rule('pp_prop', {'decay_or_rank': DECAY}),
    'eprop': Rule('eprop', {'kappa_filter_decay': KAPPA}),
    'feedback': Rule(
        'eprop', {'feedback': 'random', 'random_feedback_key': np.array([0, 3], np.uint32)}, False
    ),
    'three_factor': Rule('three_factor', {}, False),
}
WAYS = (
    *('per step', 'pieces', 'pieces in blocks', 'chunks', 'vmap'),
    *('fresh', 'forwards', 'backwards', 'blocks'),
)
"""Fresh ones are in one window, or in several, in either order, or in one by blocks."""
IN_BLOCKS = 'blocks', 'pieces in blocks'
CHEAP = {'forwards': 1e9, 'backwards': 0}
QUICK = (
    ('d_rtrl', 'per step'),
    ('d_rtrl', 'pieces'),
    ('d_rtrl', 'pieces in blocks'),
    ('d_rtrl', 'blocks'),
    ('pp_prop', 'pieces'),
)
"""For one model of every op; D-RTRL's carried windows for all models, everything for one model."""
FIRST = {module.MODELS[0].name for module in MODULES}
QUICK_OP = 'grouped_matmul'


def marks(name: str, rule: str, way: str, transition: str) -> Any:
    quick = (rule, way) in (QUICK if name in FIRST else QUICK[1:2]) or name == QUICK_OP
    return () if quick and transition == 'two' else pytest.mark.slow


CASES = [
    pytest.param(
        name, transition, rule, way, id=f'{name}-{transition}-{rule}-{way}', marks=marks(*of)
    )
    for name in OP_MODELS
    for transition in TRANSITIONS
    for rule in RULES
    for way in WAYS
    if (rule, way) != ('three_factor', 'chunks')  # refused
    if rule != 'pp_prop' or way not in IN_BLOCKS  # one window
    for of in [(name, rule, way, transition)]
]


def compiled(name: str, transition: str, rule: str, way: str, **more: Any) -> Any:
    model, xs = Driven(OP_MODELS[name], transition), OP_MODELS[name].inputs(STEPS, BATCH)
    options = RULES[rule].options | {'batch_size': BATCH, 'vmap': way == 'vmap'} | more
    if way == 'chunks':
        options['vjp_method'] = 'multi-step'
    return btf.compile(model, RULES[rule].algorithm, xs[0], **options), xs


def loss_of(learner: Any, rule: str) -> Any:
    def loss(x: Any, reward: Any) -> Any:
        options = {'modulator': reward} if rule == 'three_factor' else {}
        return oracle.losses_of(learner(x, **options))

    return loss


def found(learner: Any, xs: Any, rule: str, way: str) -> dict[str, Any]:
    loss, rewards = loss_of(learner, rule), jnp.asarray(REWARDS)
    learn = functools.partial(learner.etrace_grad, step_fn=loss, reduction='sum')
    if way == 'per step':
        step = brainstate.transform.jit(
            lambda x, r: brainstate.transform.grad(lambda: loss(x, r), learner.param_states)()
        )
        parts = [step(x, r) for x, r in zip(xs, rewards, strict=True)]
    elif way == 'chunks':

        def of_chunk(x: Any, reward: Any) -> Any:
            return jax.vmap(oracle.losses_of)(learner(btf.MultiStepData(x)))

        learn = functools.partial(learner.etrace_grad, step_fn=of_chunk, reduction='sum')
        parts = [learn(xs[:IN_CHUNKS], rewards[:IN_CHUNKS], chunk_size=CHUNK)]
    elif way.startswith('pieces'):
        pieces, every = (slice(0, PIECE), slice(PIECE, STEPS)), EVERY if way == 'pieces' else None
        parts = [learn(xs[s], rewards[s], trace_every=every) for s in pieces]
    elif way in CHEAP:
        parts = [learn(xs, rewards, trace='fresh', trace_every=EVERY)]
        assert learner.plan.backwards == (way == 'backwards' and rule != 'pp_prop')
    else:
        parts = [learn(xs, rewards, trace='fresh' if way in ('fresh', 'blocks') else 'carry')]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    return {path[-1]: value for path, value in total.items()}


def signal_of(learner: Any, rule: str) -> oracle.Signal:
    """What a rule learns from; exact signals by default."""
    if rule == 'three_factor':
        return lambda t, L: [jnp.full_like(plane, REWARDS[t]) for plane in L]
    if rule != 'feedback':
        return lambda t, L: L
    (matrix,) = [own.B for own in learner.random_feedback.feedback.values()]

    def project(t: int, L: Any) -> Any:
        lengths = [jnp.sqrt((plane**2).sum(-1, keepdims=True)) for plane in L]
        return [plane / (n + 1e-8) @ matrix for plane, n in zip(L, lengths, strict=True)]

    return project


def truth(learner: Any, xs: Any, name: str, transition: str, rule: str, way: str) -> dict:
    model = OP_MODELS[name]
    follow, size = TRANSITIONS[transition]
    start = (jnp.zeros((BATCH, *model.y)),) * size
    signal = signal_of(learner, rule)

    @jax.jit
    def gradient(weights: Any, xs: Any) -> Any:
        trace: Any = oracle.Exact(model.plain, KAPPA if rule == 'eprop' else 0.0)
        if rule == 'pp_prop':
            trace = oracle.Factorized(model.plain, DECAY)
        chunk = CHUNK if way == 'chunks' else None
        dense = [model.dense(x) for x in xs[: IN_CHUNKS if chunk else STEPS]]
        return oracle.learned(trace, follow, weights, dense, start, signal, chunk)

    return gradient(model.parameters(), xs)


@pytest.mark.parametrize(('name', 'transition', 'rule', 'way'), CASES)
def test_an_op_learns_as_the_rule_says(monkeypatch, name, transition, rule, way):
    monkeypatch.setattr(planner, 'CHEAP', CHEAP.get(way, planner.CHEAP))
    if way in IN_BLOCKS:
        cut_into(monkeypatch, STEPS, EVERY, backwards=way == 'blocks')
    learner, xs = compiled(name, transition, rule, way)
    expected = truth(learner, xs, name, transition, rule, way)
    testing.compare(found(learner, xs, rule, way), expected).check(1e-11)


@pytest.mark.parametrize('name', OP_MODELS)
def test_the_exact_trace_is_back_propagation_where_positions_do_not_mix(name):
    model, (follow, size) = OP_MODELS[name], TRANSITIONS['two']
    xs = [model.dense(x) for x in model.inputs(STEPS, BATCH)]
    start = (jnp.zeros((BATCH, *model.y)),) * size
    weights = model.parameters()
    by_trace = oracle.learned(oracle.Exact(model.plain), follow, weights, xs, start)
    by_time = oracle.bptt(model.plain, follow, weights, xs, start)
    testing.compare(by_trace, by_time).check(1e-12)


@pytest.mark.parametrize(
    'rule',
    [
        pytest.param(name, marks=() if name == 'd_rtrl' else pytest.mark.slow)
        for name, rule in RULES.items()
        if rule.is_exact
    ],
)
@pytest.mark.parametrize('name', OP_MODELS)
def test_one_step_from_a_zero_trace_gives_the_gradient_of_the_step(name, rule):
    model, (follow, size) = OP_MODELS[name], TRANSITIONS['two']
    learner, xs = compiled(name, 'two', rule, 'per step')
    rng = np.random.default_rng(4)
    start = tuple(jnp.asarray(rng.normal(size=(BATCH, *model.y))) for _ in range(size))
    for s, value in enumerate(start):
        learner.hidden_states[f'h{s}',].value = value
    loss = loss_of(learner, rule)
    gradient = brainstate.transform.grad(lambda: loss(xs[0], 0.0), learner.param_states)
    expected = oracle.bptt(model.plain, follow, model.parameters(), [model.dense(xs[0])], start)
    by_key = {path[-1]: value for path, value in brainstate.transform.jit(gradient)().items()}
    testing.compare(by_key, expected).check(1e-12)


@pytest.mark.parametrize('name', ['embedding', 'lora', 'einsum_shared'])
@pytest.mark.parametrize('decay', [None, DECAY], ids=['d_rtrl', 'pp_prop'])
def test_the_oracle_for_users_knows_the_op(name, decay):
    model, xs = Driven(OP_MODELS[name], 'two'), OP_MODELS[name].inputs(STEPS, BATCH)
    brainstate.nn.init_all_states(model, BATCH)
    found = testing.recurrence(model, xs, step_fn=lambda x: oracle.losses_of(model(x)), decay=decay)
    expected = truth(None, xs, name, 'two', 'd_rtrl' if decay is None else 'pp_prop', 'per step')
    testing.compare({path[-1]: value for path, value in found.items()}, expected).check(1e-11)


IN_KERNELS = {
    'trace_carry': [
        'grouped_matmul',
        'einsum_shared',
        'einsum_every_class',
        'lora',
        'conv',
        'conv_grouped',
    ],
    'sparse_carry': ['sparse_matmul', 'sparse_matmul_fixed_number', 'sparse_matmul_shared'],
}


@pytest.mark.parametrize(
    ('kernel', 'name'),
    [
        pytest.param(kernel, name, marks=() if name in FIRST else pytest.mark.slow)
        for kernel, names in IN_KERNELS.items()
        for name in names
    ],
)
def test_kernels_carry_the_trace_of_an_op(kernel, name):
    with brainstate.environ.context(precision=32):
        learner, xs = compiled(name, 'two', 'd_rtrl', 'pieces', backend='interpret')
        chosen = {c.implementation for c in learner.choices if c.op == kernel}
        gradient = found(learner, xs, 'd_rtrl', 'pieces')
    assert chosen and 'jax' not in chosen
    expected = truth(learner, OP_MODELS[name].inputs(STEPS, BATCH), name, 'two', 'd_rtrl', 'pieces')
    testing.compare(gradient, expected).check(1e-5)
