"""The gate fails when an engine gets slower, and not when the machine is busy."""

import functools
import json

import pytest

from benchmarks import gate
from braintrace_fast.driver import windows

pytestmark = pytest.mark.usefixtures('promotes')  # brainstate's readout broadcasts its bias

SIZES = dict(inputs=6, size=10, outputs=3, steps=12, batch=2)


def count():
    return {'gru': gate.counted_work('gru', 'd_rtrl carry', **SIZES)}


def test_the_same_engine_passes():
    assert gate.compare_work(count(), count()) == []


def test_an_engine_that_touches_the_trace_in_every_step_fails(monkeypatch):
    recorded = count()
    plan = windows.plan_windows

    @functools.wraps(plan)
    def slow(window, inputs, args, every, *others, **options):
        return plan(window, inputs, args, 1, *others, **options)

    monkeypatch.setattr(windows, 'plan_windows', slow)
    problems = gate.compare_work(count(), recorded)
    assert any('gru: bytes' in problem for problem in problems)
    assert any('gru: ops' in problem for problem in problems)


def test_an_engine_that_multiplies_twice_fails(monkeypatch):
    recorded = count()
    loop = windows.StatefulLoop.__call__

    def slow(self, inputs, show=None):
        import jax
        import jax.numpy as jnp

        (outputs, (factors, signals)), grads = loop(self, inputs, show)
        noise = jax.tree.map(lambda a: jnp.einsum('kbo,kbp->kop', a, a).sum() * 1e-30, factors.f)
        extra = sum(jax.tree.leaves(noise))
        return (outputs, (factors, signals)), jax.tree.map(lambda g: g + extra, grads)

    monkeypatch.setattr(windows.StatefulLoop, '__call__', slow)
    assert any('gru: flops' in problem for problem in gate.compare_work(count(), recorded))


def test_work_that_was_never_recorded_is_a_problem():
    assert gate.compare_work({'new': {'ops': 1}}, {}) == ['new: not recorded']


def ratio(value, spread):
    return {'ratio': value, 'ratio_low': value - spread / 2, 'ratio_high': value + spread / 2}


@pytest.mark.parametrize(
    ('now', 'fails'),
    [
        (ratio(1.05, 0.02), False),
        (ratio(1.3, 0.02), True),
        (ratio(1.3, 0.6), False),  # the rounds differ by more than what was lost
        (ratio(2.5, 0.6), True),
        (ratio(0.5, 0.02), False),
    ],
)
def test_ratios_fail_beyond_their_spread(now, fails):
    assert bool(gate.compare_ratios({'a': now}, {'a': ratio(1.0, 0.04)})) == fails


def test_the_command_fails_on_slower_results_and_records_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gate, 'BASELINE', tmp_path / 'baseline.json')

    def results(value):
        entry = {'contender': 'pp_prop', **ratio(value, 0.02)}
        path = tmp_path / f'{value}.json'
        benchmarks = [{'group': 'gradient', 'name': 'test[a]', 'extra_info': entry}]
        path.write_text(json.dumps({'benchmarks': benchmarks}))
        return str(path)

    gate.main(['ratios', results(1.0), '--record'])
    gate.main(['ratios', results(1.05)])
    assert 'within what is recorded' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='ratio 2, recorded 1'):
        gate.main(['ratios', results(2.0)])
    gate.main(['ratios', *map(results, (0.9, 1.0, 1.8)), '--record'])  # runs that differ
    gate.main(['ratios', results(1.7)])
    with pytest.raises(SystemExit, match='ratio 2, recorded 1'):
        gate.main(['ratios', results(2.0)])


def test_ratios_that_lack_are_problems():
    problems = gate.compare_ratios({'new': ratio(1.0, 0.1)}, {'old': ratio(1.0, 0.1)})
    assert problems == ['new: not recorded', 'old: not measured']


def test_what_is_recorded_is_there_for_every_case():
    recorded = json.loads(gate.BASELINE.read_text('utf-8'))
    assert {f'{w} {c}' for w, c in gate.work_cases()} <= set(recorded['work'])
    assert recorded['ratios']
