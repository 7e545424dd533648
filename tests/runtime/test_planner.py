"""Windows are as long as the memory budget lets them be, by a count that XLA confirms."""

import dataclasses
import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import NotSupportedError
from braintrace_fast.runtime import memory_budget, planner
from braintrace_fast.runtime.planner import (
    Count,
    Plan,
    Traits,
    count_window,
    parse_bytes,
    plan_windows,
    split,
)
from tests.promotion import promoting

BATCH, N_IN, N = 8, 24, 64


class Leaky(brainstate.nn.Module):
    """Two state planes: the second reads the new value of the first.

    With one decay for all neurons, the trace of the first is the same for all, and is kept once.
    """

    def __init__(self, narrow=False):
        super().__init__()
        self.decay = 0.8 if narrow else jnp.linspace(0.7, 0.9, N)[None]
        self.layer = btf.nn.Linear(N_IN + N, N)
        self.readout = brainstate.nn.Linear(N, 3)

    def init_state(self, batch_size=None, **_):
        self.g = brainstate.HiddenState(jnp.zeros((batch_size, N)))
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, N)))

    def update(self, x):
        z = jnp.tanh(self.v.value)
        self.g.value = self.decay * self.g.value + self.layer(jnp.concatenate([x, z], axis=-1))
        self.v.value = 0.9 * self.v.value + self.g.value - z
        with promoting():  # brainstate broadcasts the bias
            return self.readout(jnp.tanh(self.v.value))


MODELS = {
    'two planes': Leaky,
    'a narrow plane': lambda: Leaky(narrow=True),
    'gru': lambda: btf.nn.GRUCell(N_IN, N),
    'lstm': lambda: btf.nn.LSTMCell(N_IN, N),
    'rnn': lambda: btf.nn.ValinaRNNCell(N_IN, N, activation='tanh'),
}
RULES = {'d_rtrl': {}, 'pp_prop': {'decay_or_rank': 0.9}}


# Fast ones have every rule, one or several planes, and one that is kept once.
FAST = {
    ('rnn', 'd_rtrl'),
    ('gru', 'pp_prop'),
    ('two planes', 'd_rtrl'),
    ('a narrow plane', 'd_rtrl'),
}
every_model_and_rule = pytest.mark.parametrize(
    ('model', 'rule'),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(MODELS, RULES)
    ],
)

pytestmark = pytest.mark.usefixtures('optimized')


def new_learner(model='two planes', rule='d_rtrl', **options):
    example = jnp.ones((BATCH, N_IN))
    return btf.compile(MODELS[model](), rule, example, batch_size=BATCH, **(RULES[rule] | options))


def temporary_bytes(learner, length, **options):
    """What XLA sets aside for a call of etrace_grad, besides its arguments and results."""

    def run(xs):
        return learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).mean(), **options)

    xs = jax.ShapeDtypeStruct((length, BATCH, N_IN), jnp.float32)
    function = brainstate.transform.StatefulFunction(run, return_only_write=False).make_jaxpr(xs)
    values = [state.value for state in function.get_state_trace(xs).states]
    compiled = jax.jit(function.jaxpr_call).lower(values, xs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture
def whole(monkeypatch):
    """Windows that carry a trace are not worked through in blocks."""
    monkeypatch.setattr(planner, 'RECORDED', 0)


@every_model_and_rule
def test_the_compiled_program_stays_within_the_budget(model, rule, whole):
    """And takes a good part of it, so that windows are not needlessly short."""
    learner = new_learner(model, rule)
    least = counted(learner)
    for steps in (5, 40):
        budget = least.bytes(steps)
        temporary = temporary_bytes(learner, 200, memory_budget=budget)
        assert learner.plan.steps == steps and learner.plan.bytes == budget
        assert budget / 4 < temporary <= budget


@pytest.mark.parametrize('model', ['rnn', 'two planes'])
def test_blocks_of_a_carried_window_stay_within_the_budget(model):
    learner = new_learner(model)
    for length in (200, 400, 2400):
        temporary = temporary_bytes(learner, length, memory_budget='1TB')
        plan = learner.plan
        assert plan.block and temporary <= plan.bytes
        assert plan.steps == 200  # so that memory does not grow
        temporary_bytes(learner, length, memory_budget=plan.bytes - 1)
        assert learner.plan.bytes < plan.bytes


def test_long_sequences_without_a_gradient_are_not_in_blocks():
    learner = new_learner('two planes')
    learner.etrace_evolve(jnp.ones((250, BATCH, N_IN)), memory_budget='1TB')
    assert learner.plan.block is None


def counted(learner, length=1000, **options):
    """By default so many steps that a rough count does not decide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, 'RECORDED', 0)
        temporary_bytes(learner, length, memory_budget='1TB', **options)
    return learner.plan.count


@every_model_and_rule
def test_a_rough_count_is_too_high(model, rule):
    learner = new_learner(model, rule)
    exact = counted(learner)
    for options in ({}, {'trace': 'fresh'}):
        rough = counted(learner, 30, **options)
        assert learner.plan.windows == ((1, 30),) and 'by a rough count' in learner.report(1)
        for steps in (1, 30, planner.ENOUGH):
            assert exact.bytes(steps) <= rough.bytes(steps) < 30 * exact.bytes(steps)


def test_what_fits_by_a_rough_count_is_not_traced(monkeypatch):
    learner, traced = new_learner(), []
    monkeypatch.setattr(planner, 'count_window', lambda *args: traced.append(1) or Count(1, 1))
    for length, budget, times in (30, '1TB', 0), (101, '1TB', 1), (30, '1MB', 1):
        temporary_bytes(learner, length, memory_budget=budget)
        assert len(traced) == times
        traced.clear()
    temporary_bytes(learner, 50, memory_budget='1TB', trace='fresh')
    assert not traced


@pytest.mark.parametrize('rule', RULES)
def test_memory_does_not_grow_with_the_sequence(rule):
    learner = new_learner('two planes', rule)
    budget = counted(learner).bytes(25)
    for short, long in [(200, 2000), (199, 1999)]:  # the second pair needs windows of two lengths
        temporary = [temporary_bytes(learner, n, memory_budget=budget) for n in (short, long)]
        assert max(temporary) <= budget
        assert temporary[1] <= 1.05 * temporary[0]


@pytest.mark.parametrize('model', ['gru', 'two planes'])
def test_fresh_memory_does_not_grow_with_the_sequence(model):
    learner = new_learner(model)
    short, *long = (
        temporary_bytes(learner, n, memory_budget='1TB', trace='fresh') for n in (200, 1999, 4000)
    )
    assert learner.plan.backwards and max(long) <= 1.1 * short
    assert temporary_bytes(learner, 4000, memory_budget='3MB', trace='fresh') <= 3e6
    assert learner.plan.backwards


def test_fresh_sequences_in_one_window_need_no_trace():
    learner = new_learner('gru')
    budget = counted(learner).bytes(30)
    temporary_bytes(learner, 30, memory_budget=budget)
    assert learner.plan.bytes == budget and learner.plan.windows == ((1, 30),)
    temporary_bytes(learner, 30, memory_budget=budget, trace='fresh')
    without = learner.plan
    assert without.windows == ((1, 30),) and without.reason == 'all fit, and need no trace'
    assert without.bytes < budget
    temporary_bytes(learner, 30, memory_budget=without.bytes, trace='fresh')
    assert learner.plan.windows == ((1, 30),)
    temporary_bytes(learner, 30, memory_budget=without.bytes - 1, trace='fresh')
    assert learner.plan.windows == ((1, 30),) and learner.plan.block < 30


def test_trace_every_overrides_the_budget():
    learner = new_learner('rnn', memory_budget=1)
    xs = jnp.ones((10, BATCH, N_IN))
    learner.etrace_evolve(xs, trace_every=4)
    assert learner.plan.windows == ((1, 4), (2, 3))
    assert 'trace_every=4' in learner.report(1)


def test_a_budget_that_is_too_small_gives_windows_of_one_step_and_says_so():
    learner = new_learner('rnn', memory_budget=1)
    learner.etrace_evolve(jnp.ones((3, BATCH, N_IN)))
    assert learner.plan.windows == ((3, 1),)
    assert 'not even one step fits' in learner.report(1)
    assert 'MORE THAN the budget of 1 B' in learner.report(1)


@pytest.mark.parametrize('budget', [1, '1MB', None])
def test_the_budget_does_not_change_the_gradient(budget):
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(7, BATCH, N_IN)), jnp.float32)

    def gradient(**options):
        brainstate.random.seed(0)
        learner = new_learner(**options)
        return learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum())

    in_windows, expected = gradient(memory_budget=budget), gradient(memory_budget='1TB')
    for a, b in zip(jax.tree.leaves(in_windows), jax.tree.leaves(expected), strict=True):
        assert np.any(b != 0)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(('model', 'outputs'), [('two planes', 2 * N), ('a narrow plane', N + 1)])
def test_the_report_explains_the_windows(model, outputs):
    learner = new_learner(model, memory_budget='3MB')
    assert 'Windows\n  none yet; a window may take 3.0 MB' in learner.report(1)
    temporary_bytes(learner, 1000)
    text = learner.report(1)
    cut = ' and '.join(f'{count} x {steps} steps' for count, steps in learner.plan.windows)
    assert f'1000 steps as {cut}: at most' in text
    assert 'within the budget of 3.0 MB' in text
    assert f'x {planner.show_bytes(4 * BATCH * (N_IN + N))}, f ' in text
    assert f'the trace: {planner.show_bytes(4 * BATCH * (N_IN + N + 1) * outputs)}' in text


def test_a_learner_without_windows_reports_none():
    learner = new_learner('gru', vjp_method='multi-step')
    assert 'Windows' not in learner.report(1)


def test_windows_cover_the_sequence_and_differ_by_one_step_at_most():
    for length in range(1, 60):
        for steps in range(1, 70):
            for even in (False, True):
                windows = split(length, steps, even)
                sizes = [size for _, size in windows]
                assert sum(count * size for count, size in windows) == length
                assert max(sizes) <= steps and max(sizes) - min(sizes) <= 1
                fewest = -(-length // steps)
                assert sum(count for count, _ in windows) <= planner.LATITUDE * fewest


def test_a_count_says_how_many_steps_fit():
    count = Count(fixed=100, per_step=7)
    for budget in range(90, 200):
        steps = count.steps(budget)
        assert steps == 0 or count.bytes(steps) <= budget
        assert count.bytes(steps + 1) > budget


def test_what_is_computed_on_the_way_is_not_counted():
    xs = jnp.ones((5, 10))
    plain = count_window(lambda x: jnp.cumsum(x, 0), xs)  # the input, and the sums
    fused = count_window(lambda x: jnp.cumsum(x, 0) * 2 + 1, xs)
    assert plain == Count(0, 80) and fused == Count(0, 120)


def test_a_callback_without_results_is_counted():
    def window(x):
        jax.debug.callback(lambda a: None, x[0])
        return jnp.cumsum(x, 0)

    assert count_window(window, jnp.ones((5, 10))) == Count(0, 80)


def test_counting_leaves_states_as_they_are():
    state = brainstate.ShortTermState(jnp.zeros(3))

    def window(x):
        state.value = state.value + x.sum(0)
        return x * 2

    count_window(window, jnp.ones((4, 3)))
    assert state.value.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ('text', 'number'),
    [(5, 5), ('7B', 7), ('1kB', 1000), ('1 KiB', 1024), ('2.5mb', 2500000), ('1GiB', 2**30)],
)
def test_budgets_are_numbers_or_text(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ('budget', 'error'),
    [('a lot', ValueError), ('5', ValueError), (0, ValueError), ('0MB', ValueError)]
    + [(-1, ValueError), (1.5, TypeError), (True, TypeError)],
)
def test_a_wrong_budget_is_refused(budget, error):
    with pytest.raises(error, match='memory_budget'):
        new_learner('rnn', memory_budget=budget)
    learner = new_learner('rnn')
    with pytest.raises(error, match='memory_budget'):
        learner.etrace_evolve(jnp.ones((2, BATCH, N_IN)), memory_budget=budget)


class Device:
    platform = 'gpu'

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(
    ('stats', 'budget'),
    [
        ({'bytes_limit': 20 * 2**30, 'bytes_in_use': 2 * 2**30}, 4 * 2**30),
        ({'bytes_limit': 8 * 2**30}, 2 * 2**30),
        (None, memory_budget.UNKNOWN),
    ],
)
def test_the_default_budget_is_a_share_of_what_is_free(monkeypatch, stats, budget):
    monkeypatch.setattr(jax, 'local_devices', lambda: [Device(stats)])
    assert planner.default_budget() == budget


def test_the_default_budget_of_a_processor():
    budget = planner.default_budget()
    assert budget >= 2**20 and budget & (budget - 1) == 0


def test_a_plan_is_plain_data():
    plan = Plan(((2, 5), (1, 4)), 'why', 100)
    assert plan.steps == 5 and plan.bytes is None
    assert dataclasses.replace(plan, budget=5).lines() == [
        '14 steps as 2 x 5 steps and 1 x 4 steps: why'
    ]


@pytest.mark.parametrize(
    ('rule', 'trace', 'steps'),
    [
        ('d_rtrl', 'carry', 100),
        ('d_rtrl', 'fresh', 200),
        ('pp_prop', 'carry', 50),
        ('pp_prop', 'fresh', 50),
    ],
)
def test_windows_are_short_where_the_trace_is_small(monkeypatch, rule, trace, steps):
    if trace == 'carry':
        monkeypatch.setattr(planner, 'RECORDED', 0)
    monkeypatch.setattr(planner, 'LITTLE', 1)
    learner = new_learner('gru', rule)
    temporary_bytes(learner, 200, memory_budget='1TB', trace=trace)
    assert learner.plan.windows == ((200 // steps, steps),)


@pytest.mark.parametrize(
    ('floats', 'small', 'longest'),
    [(2**22, False, 100), (2**12, False, 128), (2**22, True, 50), (2**12, True, 128)],
)
def test_windows_that_carry_a_trace_are_no_longer_than_pays(floats, small, longest):
    """100 or 50 steps, or those of 2**22 bytes if that is more; a budget may be larger."""

    def window(inputs, total, entry, index):
        return total, entry, jnp.cumsum(inputs, axis=0)

    inputs = jax.ShapeDtypeStruct((1000, floats), jnp.float32)
    args = (jnp.zeros(1),) * 3
    traits = Traits(4 * floats, 0, small)
    plan = plan_windows(window, inputs, args, None, False, 2**40, traits)
    assert plan.count.per_step == 8 * floats
    assert longest / 1.5 <= plan.steps <= longest and 'gain little' in plan.reason
    fresh = plan_windows(window, inputs, args, None, True, 2**40, traits)
    assert fresh.windows == plan.windows
    assert small or 'costs less' in fresh.reason  # a trace of 4 bytes


@pytest.mark.parametrize('carried', [False, True])
def test_fresh_windows_run_backwards_where_a_trace_is_large_or_cannot_be(carried):
    floats = 2**22

    def window(inputs, total, entry, index):
        return total, entry, jnp.cumsum(inputs, axis=0)

    def planned(length, budget=2**50, refuses=None):
        inputs = jax.ShapeDtypeStruct((length, floats), jnp.float32)
        args = jnp.zeros(1), jnp.zeros(4 * floats if carried else 0), jnp.zeros(1)
        traits = Traits(4 * floats, 2**20, False, refuses, can_carry=carried)
        return plan_windows(window, inputs, args, None, True, budget, traits)

    assert planned(200).windows == ((1, 200),) and not planned(200).backwards
    for length in (201, 1000, 5000):
        plan = planned(length)
        assert plan.backwards and plan.steps <= 100 and 'no trace' in plan.reason
        assert ('instead of one of 67.1 MB' in plan.reason) == carried
    tight = planned(5000, budget=50 * 2**25)
    assert tight.backwards and tight.bytes <= tight.budget  # the states at all entries included
    assert tight.count.fixed == 2**20 * sum(count for count, _ in tight.windows)
    forwards = planned(1000, refuses='for a reason')
    assert forwards.windows == ((1, 1000),)
    if carried:
        assert 'for a reason' in planned(1000, 50 * 2**25, 'for a reason').reason
    else:
        with pytest.raises(NotSupportedError, match='for a reason'):
            planned(1000, 50 * 2**25, 'for a reason')


@pytest.mark.parametrize(
    ('per_step', 'length', 'windows', 'block'),
    [
        (2**16, 200, ((1, 200),), None),
        (2**20, 16, ((1, 16),), None),
        (2**20, 160, ((1, 160),), 16),
        (2**20, 480, ((30, 16),), None),
        (2**23, 40, ((4, 10),), None),
        (2**21, 1600, ((64, 25),), 10),
        (2**13, 1000, ((1, 1000),), 100),
        (2**13, 1200, ((12, 100),), None),
    ],
)
def test_on_cpus_fresh_sequences_are_worked_through_in_blocks(per_step, length, windows, block):
    """Of 2**24 bytes; and nothing is computed twice as long as 2**26 bytes hold all steps."""
    floats = per_step // 8  # each is there twice

    def window(inputs, total, entry, index):
        return total, entry, jnp.cumsum(inputs, axis=0)

    inputs = jax.ShapeDtypeStruct((length, floats), jnp.float32)
    args = jnp.zeros(1), jnp.zeros(per_step), jnp.zeros(1)
    elsewhere = Traits(per_step // 2, per_step // 8, recorded_bytes=per_step // 4)
    traits = elsewhere._replace(is_cached=True)
    plan = plan_windows(window, inputs, args, None, True, 2**50, traits)
    assert plan.windows == windows and plan.block == block
    assert plan.backwards == (block is not None or windows[0][0] > 1)
    held = plan.steps * per_step // 4 if plan.backwards else 0
    assert plan.bytes >= held + (block or plan.steps) * per_step
    tight = plan_windows(window, inputs, args, None, True, plan.bytes - 1, traits)
    assert tight.bytes < plan.bytes
    other = plan_windows(window, inputs, args, None, True, 2**50, elsewhere)
    assert other.steps >= min(length, 64) and other.block is None


@pytest.mark.parametrize(
    ('per_step', 'length', 'windows', 'block'),
    [
        (2**16, 100, ((1, 100),), None),
        (2**16, 200, ((1, 200),), 100),
        (2**20, 480, ((4, 120),), 16),
        (2**23, 40, ((1, 40),), None),
        (2**13, 3000, ((15, 200),), 100),
    ],
)
def test_on_cpus_windows_that_carry_a_trace_are_worked_through_in_blocks(
    per_step, length, windows, block
):
    """As long as 2**26 bytes hold what is kept of a step."""
    floats = per_step // 8

    def window(inputs, total, entry, index):
        return total, entry, jnp.cumsum(inputs, axis=0)

    inputs = jax.ShapeDtypeStruct((length, floats), jnp.float32)
    args = jnp.zeros(1), jnp.zeros(per_step), jnp.zeros(1)
    elsewhere = Traits(
        per_step // 2, per_step // 8, recorded_bytes=per_step // 4, carried_bytes=per_step // 4
    )
    traits = elsewhere._replace(is_cached=True)
    plan = plan_windows(window, inputs, args, None, False, 2**50, traits)
    assert plan.windows == windows and plan.block == block and not plan.backwards
    tight = plan_windows(window, inputs, args, None, False, plan.bytes - 1, traits)
    assert tight.block is None
    whole = {'refuses_backwards': 'for a reason'}, {'carried_bytes': None}
    for other in (elsewhere, *(traits._replace(**one) for one in whole)):
        assert plan_windows(window, inputs, args, None, False, 2**50, other).block is None
