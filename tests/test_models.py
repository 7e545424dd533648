"""The table of models itself: alive, and what it says of each model confirmed by brute force."""

from functools import reduce

import brainstate
import jax
import numpy as np
import pytest

from tests.marks import slow_if_one_of_many
from tests.models import MODELS, ModelCase
from tests.oracles.dense import factor_oracle, weight_oracle
from tests.oracles.step import StateValues, random_projection, run, state_values, step_function

STEPS = 12

every_model = pytest.mark.parametrize('case', MODELS.values(), ids=MODELS)
# Patterns do not depend on the batch: without it, a few models stand for all.
UNBATCHED = ['lstm', 'gif_expon', 'units', 'learned_leak', 'hidden_group_state', 'scan']


@every_model
@pytest.mark.parametrize('precision, batch', [(32, 2), (64, None)], ids=['float32', 'float64'])
def test_runs_alive_in_the_precision_asked_for(case: ModelCase, precision, batch):
    with brainstate.environ.context(precision=precision):
        model, inputs = case.build(batch)
        outputs = brainstate.transform.for_loop(model, inputs(0, 3 * STEPS))
        params, hidden, _ = state_values(model)
    values = [np.asarray(leaf) for leaf in jax.tree.leaves((outputs, params, hidden))]
    assert {value.dtype for value in values} == {np.dtype(f'float{precision}')}
    assert all(np.isfinite(value).all() for value in values)
    (output,) = map(np.asarray, jax.tree.leaves(outputs))
    assert np.ptp(output) > 0
    if case.spiking:
        assert set(np.unique(output)) == {0, 1}
        assert 0.05 < output.mean() < 0.95


@every_model
def test_expectation_covers_all_states_in_their_order(case: ModelCase):
    model, _ = case.build(None)
    states = model.states()
    groups, relations = case.expected.groups, case.expected.relations
    order = {path: i for i, path in enumerate(model.states(brainstate.HiddenState))}
    assert {path for group in groups for path in group} == set(order)
    assert [list(group) for group in groups] == [sorted(group, key=order.get) for group in groups]
    assert list(groups) == sorted(groups, key=lambda group: order[group[0]])
    for group, pattern in zip(groups, case.expected.patterns, strict=True):
        planes = sum(states[path].num_state for path in group)
        assert [len(row) for row in pattern] == [planes] * planes
    for _, group, reached in relations:
        assert len(reached) == len(case.expected.patterns[group])
    traced = {path for path, _, _ in relations} | set(case.expected.biases.values())
    assert traced.isdisjoint(case.expected.untraced)
    assert traced | set(case.expected.untraced) == set(model.states(brainstate.ParamState))


@every_model
def test_every_parameter_has_a_gradient(case: ModelCase, x64):
    model, inputs = case.build(2)
    xs, start, step = inputs(1, 3), state_values(model), step_function(model)

    def projection(params: StateValues) -> jax.Array:
        outputs, trajectory = run(step, start._replace(params=params), xs)
        return random_projection((outputs, trajectory[-1].hidden))

    gradient = jax.jit((jax.jacfwd if case.forward_mode else jax.grad)(projection))(start.params)
    for path, leaves in gradient.items():
        for leaf in jax.tree.leaves(leaves):
            assert np.isfinite(leaf).all()
            assert np.any(leaf != 0), path


@pytest.mark.parametrize(
    'name, batch',
    [
        *(pytest.param(name, 2, marks=slow_if_one_of_many(name)) for name in MODELS),
        *((name, None) for name in UNBATCHED),
    ],
)
def test_patterns_and_relations_are_those_of_dense_jacobians(name, batch, x64):
    case = MODELS[name]
    model, inputs = case.build(batch)
    expected, xs = case.expected, inputs(2, STEPS)
    _, trajectory = run(jax.jit(step_function(model)), state_values(model), xs)
    steps = list(zip(trajectory[:-1], xs, strict=True))
    factors = factor_oracle(model, expected.groups, forward_mode=case.forward_mode)
    nonzero = [jax.tree.map(lambda plane: bool(np.any(plane)), factors(*s)) for s in steps]
    reached = reduce(lambda a, b: jax.tree.map(lambda x, y: int(x or y), a, b), nonzero)
    assert reached.D == [[list(row) for row in pattern] for pattern in expected.patterns]

    weights = weight_oracle(model)
    sources = [set.union(*call) for call in zip(*(weights(*s) for s in steps), strict=True)]
    relations = [
        (sources[call], group, tuple(planes))
        for call, groups in enumerate(reached.f)
        for group, planes in enumerate(groups)
        if planes and any(planes)
    ]
    biases = [expected.biases.get(i) for i in range(len(expected.relations))]
    assert relations == [
        ({weight, bias} - {None}, group, planes)
        for (weight, group, planes), bias in zip(expected.relations, biases, strict=True)
    ]


@pytest.mark.parametrize('case', [c for c in MODELS.values() if c.expected.untraced], ids=repr)
def test_untraced_weights_are_so_for_the_reason_given(case: ModelCase, x64):
    model, inputs = case.build(2)
    xs, step = inputs(3, STEPS), jax.jit(step_function(model))
    _, trajectory = run(step, state_values(model), xs)
    start = trajectory[-2]

    def projection(params: StateValues) -> jax.Array:
        return random_projection(step(params, start.hidden, start.others, xs[-1])[1])

    marked = set().union(*weight_oracle(model)(start, xs[-1]))
    gradient = jax.grad(projection)(start.params)
    for path, reason in case.expected.untraced.items():
        reaches_hidden = any(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient[path]))
        # With the inputs of ops cut off, a weight whose ops end in other ops has no effect left.
        assert (path in marked, reaches_hidden) in {
            'plain': [(False, True), (False, False)],
            'readout': [(True, False)],
            'weight_to_weight': [(False, True)],
            'mixing': [(True, True)],
        }[reason]
