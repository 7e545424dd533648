"""The fixture `etrace_benchmark`, as a user's tests see it."""

import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip('pytest_benchmark', reason='needs the bench extra')
pytest_plugins = ['pytester']

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ('-p', 'pytest_braintrace_fast', '-p', 'no:cacheprovider')
MODEL = """
import brainstate
import jax.numpy as jnp
import braintrace_fast as braintrace

def loss(run, x):
    return jnp.mean(run(x) ** 2)

def learner(rule='d_rtrl'):
    return braintrace.compile(braintrace.nn.GRUCell(3, 4), rule, jnp.ones((2, 3)), batch_size=2,
                              **({'decay_or_rank': 0.9} if rule == 'pp_prop' else {}))

XS = jnp.ones((5, 2, 3))
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(filter(None, paths)))
    # On a worker of xdist, pytest-benchmark measures nothing.
    monkeypatch.delenv('PYTEST_XDIST_WORKER', raising=False)


def run(pytester, body, *options):
    pytester.makepyfile(MODEL + body)
    return pytester.runpytest_inprocess(*PLUGIN, '-p', 'no:xdist', '-W', 'ignore', *options)


def test_times_ratio_memory_and_bytes_are_recorded(pytester):
    body = """
def test_speed(etrace_benchmark):
    info = etrace_benchmark(learner(), XS, step_fn=loss, rounds=3, trace='fresh')
    assert info['ratio'] > 0
"""
    run(pytester, body, '--benchmark-json=out.json').assert_outcomes(passed=1)
    (entry,) = json.loads((pytester.path / 'out.json').read_text())['benchmarks']
    info = entry['extra_info']
    assert len(entry['stats']['data']) == 3
    assert info['baseline'] == 'bptt'
    assert info['steps'] == 5
    assert 0 < info['ratio_low'] <= info['ratio_high']
    assert info['seconds_per_step'] == pytest.approx(entry['stats']['median'] / 5, rel=0.2)
    assert info['temp_bytes'] > 0
    assert info['peak_bytes'] >= 0
    assert info['work']['bytes'] > 0


@pytest.mark.parametrize(
    ('limit', 'message'),
    [
        ('max_ratio=1e-9', 'ratio to the baseline'),
        ('max_temp_bytes=1', 'temporary bytes of the compiled program'),
        ('max_peak_bytes=1', 'bytes by which a fresh process grew'),
        ("max_work={'flops': 1}", 'the flops of the compiled program'),
        ("max_work={'seconds': 1}", "max_work has 'seconds'; choose among"),
        ('baseline=None, max_ratio=1.0', 'choose a baseline'),
        ("baseline='magic'", "give 'bptt', a learner or None"),
    ],
)
def test_a_limit_fails_the_test_and_says_what_was_found(pytester, limit, message):
    body = f"""
def test_speed(etrace_benchmark):
    etrace_benchmark.peak = {'peak' in limit}
    etrace_benchmark(learner(), XS, step_fn=loss, rounds=2, {limit})
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f'E *{message}*'])


def test_with_benchmarks_disabled_only_what_is_counted_is_checked(pytester):
    body = """
def test_ratio(etrace_benchmark):
    etrace_benchmark.peak = False
    etrace_benchmark(learner(), XS, step_fn=loss, max_ratio=1e-9)

def test_bytes(etrace_benchmark):
    etrace_benchmark.peak = False
    etrace_benchmark(learner(), XS, step_fn=loss, max_temp_bytes=1)
"""
    run(pytester, body, '--benchmark-disable').assert_outcomes(passed=1, failed=1)


def test_another_learner_is_a_baseline(pytester):
    body = """
def test_speed(etrace_benchmark):
    etrace_benchmark.peak = False
    info = etrace_benchmark(learner(), XS, step_fn=loss, rounds=2, baseline=learner('pp_prop'))
    assert info['baseline'] == 'pp_prop'
    assert 'peak_bytes' not in info
"""
    run(pytester, body).assert_outcomes(passed=1)


def test_without_pytest_benchmark_only_tests_that_ask_for_it_fail(pytester):
    body = """
def test_plain():
    assert learner()

def test_speed(etrace_benchmark):
    etrace_benchmark(learner(), XS, step_fn=loss)
"""
    result = run(pytester, body, '-p', 'no:benchmark')
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(['*needs pytest-benchmark*'])


def test_the_plugin_imports_nothing_that_its_user_does_not(pytester):
    pytester.makepyfile("""
import sys

def test_modules():
    assert 'pytest_braintrace_fast' in sys.modules
    assert not {'jax', 'brainstate', 'braintrace_fast'} & set(sys.modules)
""")
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)


def test_the_example_of_the_documentation_runs(pytester):
    text = (ROOT / 'docs' / 'benchmarking.md').read_text('utf-8')
    (example,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    pytester.makepyfile(example)
    result = pytester.runpytest_inprocess(*PLUGIN, '-p', 'no:xdist', '--benchmark-json=out.json')
    result.assert_outcomes(passed=1)
