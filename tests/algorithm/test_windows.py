"""Windows give what the step-by-step engines give, and the recurrence."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.runtime import planner
from tests.algorithm.learning import (
    ALGORITHMS,
    add_trees,
    at,
    begin,
    check,
    cut_into,
    learning,
    set_states,
)
from tests.algorithm.test_signals import RULES
from tests.algorithm.test_table import every_algorithm, most_models_slowly, skip_if_positions_mix
from tests.models import MODELS
from tests.oracles.recurrence import BATCH, STEPS, recurrence_of, step_loss


def in_windows(learned, **options):
    loss = step_loss(learned.model)
    step = functools.partial(loss, learned.learner)
    return learned.learner.etrace_grad(learned.xs, step_fn=step, reduction='sum', **options)


def some_models(*names):
    return pytest.mark.parametrize('case', [MODELS[n] for n in names], ids=names)


def quickly(*names):
    """All models, the others as slow tests."""
    cases = [
        pytest.param(case, id=name, marks=() if name in names else pytest.mark.slow)
        for name, case in MODELS.items()
    ]
    return pytest.mark.parametrize('case', cases)


@most_models_slowly
def test_windows_give_the_gradient_of_the_recurrence(case, x64):
    skip_if_positions_mix(case)
    learned = learning(case, 'd_rtrl')
    begin(learned)
    check(in_windows(learned, trace_every=3), recurrence_of(case, 'd_rtrl'), rtol=1e-10)


@some_models('vanilla', 'lstm', 'lif_expon', 'gif_expon', 'units', 'shared_weight', 'checkpoint')
def test_windows_of_pp_prop_give_the_gradient_of_its_recurrence(case, x64):
    learned = learning(case, 'pp_prop')
    begin(learned)
    check(in_windows(learned, trace_every=3), recurrence_of(case, 'pp_prop'), rtol=1e-10)


SOME = ('lif_expon', 'learned_leak', 'output_reads_y')


@every_algorithm
@some_models(*SOME)
@pytest.mark.parametrize('every', [1, 4])
def test_a_window_leaves_the_trace_that_steps_leave(case, algorithm, every, x64):
    learned = learning(case, algorithm)
    begin(learned)
    by_step = add_trees([learned.step(at(learned.xs, t)) for t in range(STEPS)])
    expected = jax.tree.map(jnp.copy, [s.value for s in learned.learner.own_states])
    begin(learned)
    check(in_windows(learned, trace_every=every), by_step, rtol=1e-10)
    found = [s.value for s in learned.learner.own_states]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@quickly('gru', 'lif_expon', 'output_reads_y', 'units')
@pytest.mark.parametrize('rule', ['d_rtrl', 'filter'])
def test_a_window_in_blocks_leaves_the_gradient_and_the_trace_of_a_whole_one(
    monkeypatch, case, rule, x64
):
    monkeypatch.setitem(ALGORITHMS, 'filter', RULES['filter'])
    learned = learning(case, rule)
    if learned.learner.engine.refuses_windows():
        pytest.skip('a weight varies in time')
    results = []
    for steps, block in ((3, None), (STEPS, 4), (3, 2)):
        cut_into(monkeypatch, steps, block, backwards=False)
        begin(learned)
        found = in_windows(learned)
        assert learned.learner.plan.block == block
        results.append((found, [s.value for s in learned.learner.own_states]))
    (expected, before), *others = results
    for found, after in others:
        check(found, expected, rtol=1e-10)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@every_algorithm
@quickly('vanilla', 'lif_expon')
def test_evolved_then_differentiated(case, algorithm, x64):
    learned = learning(case, algorithm)
    learner, xs = learned.learner, learned.xs
    begin(learned)
    for t in range(4):
        learner(at(xs, t))
    expected = add_trees([learned.step(at(xs, t)) for t in range(4, STEPS)])
    begin(learned)
    first = jax.tree.map(lambda a: a[:4], xs)
    last = jax.tree.map(lambda a: a[4:], xs)
    learner.etrace_evolve(first, trace_every=3)
    step = functools.partial(step_loss(learned.model), learner)
    check(learner.etrace_grad(last, step_fn=step, reduction='sum'), expected, rtol=1e-10)


@every_algorithm
@quickly('vanilla', 'lif_expon')
def test_several_calls_give_the_gradient_of_one(case, algorithm, x64):
    learned = learning(case, algorithm)
    begin(learned)
    whole = in_windows(learned)
    begin(learned)
    step = functools.partial(step_loss(learned.model), learned.learner)
    pieces = [
        jax.tree.map(lambda a, s=s: a[s], learned.xs)
        for s in (slice(1), slice(1, 4), slice(4, None))
    ]
    found = [learned.learner.etrace_grad(p, step_fn=step, reduction='sum') for p in pieces]
    check(add_trees(found), whole, rtol=1e-10)


@every_algorithm
@some_models('vanilla', 'lif_expon')
@pytest.mark.parametrize('every', [None, 2])
def test_fresh_sequences_know_nothing_of_those_before(case, algorithm, every, x64):
    learned = learning(case, algorithm)
    begin(learned)
    expected = in_windows(learned)
    after = in_windows(learned)  # goes on from there
    begin(learned)
    in_windows(learned)
    fresh = in_windows_from_start(learned, trace='fresh', trace_every=every)
    check(fresh, expected, rtol=1e-10)
    assert int(learned.learner.running_index.value) == 0
    check(in_windows_from_start(learned), expected, rtol=1e-10)
    assert not np.allclose(jax.tree.leaves(after)[0], jax.tree.leaves(expected)[0])


def in_windows_from_start(learned, **options):
    """With the model's states set back, and the trace as it is."""
    set_states(learned.model, learned.start)
    return in_windows(learned, **options)


def test_fresh_windows_build_no_trace_unless_that_is_cheaper(monkeypatch):
    learner = btf.compile(btf.nn.GRUCell(30, 40), 'd_rtrl', jnp.ones((BATCH, 30)), batch_size=BATCH)
    xs = jnp.ones((5, BATCH, 30))

    def builds_a_trace(**options):
        function = brainstate.transform.StatefulFunction(
            lambda: learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), **options)
        )
        return (BATCH, 70, 40) in set(made_shapes(function.make_jaxpr().get_jaxpr().jaxpr))

    assert builds_a_trace(trace='carry')
    assert not builds_a_trace(trace='fresh')
    assert not builds_a_trace(trace='fresh', trace_every=2)
    monkeypatch.setattr(planner, 'CHEAP', 1e6)
    assert builds_a_trace(trace='fresh', trace_every=2)


def made_shapes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from made_shapes(getattr(inner, 'jaxpr', inner))


@every_algorithm
@quickly('lif_expon')
def test_masks_weigh_the_losses(case, algorithm, x64):
    learned = learning(case, algorithm)
    mask = np.array([0.0, 1.0, 0.5, 0.0, 2.0, 1.0])
    begin(learned)
    steps = [learned.step(at(learned.xs, t)) for t in range(STEPS)]
    weighed = [jax.tree.map(lambda g, w=w: w * g, g) for w, g in zip(mask, steps, strict=True)]
    for reduction, scale in (('sum', 1.0), ('mean', mask.sum())):
        true = jax.tree.map(lambda g, scale=scale: g / scale, add_trees(weighed))
        begin(learned)
        step = functools.partial(step_loss(learned.model), learned.learner)
        options = dict(step_fn=step, mask=mask, reduction=reduction, trace_every=4)
        check(learned.learner.etrace_grad(learned.xs, **options), true, rtol=1e-10)


@pytest.mark.parametrize(
    ('every', 'error'), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_a_wrong_trace_every_is_refused(every, error):
    learned = learning(MODELS['gru'], 'd_rtrl')
    begin(learned)
    with pytest.raises(error, match='trace_every'):
        in_windows(learned, trace_every=every)


def test_an_unknown_trace_is_refused():
    learned = learning(MODELS['gru'], 'd_rtrl')
    with pytest.raises(ValueError, match="'carry', 'fresh'"):
        in_windows(learned, trace='keep')


def test_an_op_without_trace_rules_learns_in_fresh_windows(x64):
    scaled = btf.register_primitive(
        'test_windows_scaled', lambda x, weight: 2 * (x @ weight), batched=True
    )

    class Cell(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.W = brainstate.ParamState(brainstate.random.normal(size=(7, 4)))

        def init_state(self, batch_size=None, **_):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4), jnp.float64))

        def update(self, x):
            seen = jnp.concatenate([x, self.h.value], -1)
            self.h.value = jnp.tanh(scaled.bind(seen, self.W.value) + 0.5 * self.h.value)
            return self.h.value

    model = Cell()
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)))
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=BATCH)
    options = dict(step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction='sum')
    with pytest.raises(btf.NotSupportedError, match="trace='fresh'"):
        learner.etrace_grad(xs, **options)
    found = learner.etrace_grad(xs, trace='fresh', **options)
    model.h.value = jnp.zeros_like(model.h.value)
    true = testing.recurrence(model, xs, step_fn=lambda x: jnp.sum(model(x) ** 2))
    check(found, true, rtol=1e-10)
    choices = learner.with_backend('pallas').choices  # a window that starts from no trace
    assert {choice.op for choice in choices} == {'hidden_jacobian', 'adjoint_scan'}


class Remembering(brainstate.nn.Module):
    """Keeps the last output in a state that nobody reads."""

    def __init__(self):
        super().__init__()
        self.layer = btf.nn.Linear(7, 4)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4), jnp.float64))
        self.last = brainstate.HiddenState(jnp.zeros((batch_size, 4), jnp.float64))

    def update(self, x):
        self.last.value = 2 * self.h.value
        self.h.value = jnp.tanh(self.layer(jnp.concatenate([x, self.h.value], -1)))
        return self.h.value


@pytest.mark.parametrize('trace', ['carry', 'fresh'])
def test_a_state_that_nobody_reads_changes_nothing(trace, x64):
    model = Remembering()
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)))
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=BATCH)
    options = dict(reduction='sum', trace=trace, trace_every=4)
    found = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), **options)
    model.h.value = model.last.value = jnp.zeros_like(model.h.value)
    true = testing.recurrence(model, xs, step_fn=lambda x: jnp.sum(model(x) ** 2))
    check(found, true, rtol=1e-10)
