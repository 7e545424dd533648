"""The report says what was measured, and on which side of a goal it falls."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_kernels, report

ROOT = Path(__file__).resolve().parents[2]


def gradient(contender, ratio, baseline='bptt'):
    return {
        'workload': 'lif',
        'steps': 50,
        'contender': contender,
        'seconds_per_step': ratio * 1e-3,
        'baseline': baseline,
        'baseline_seconds_per_step': 1e-3,
        'baseline_memory': {'temp_bytes': 5e6},
        'ratio': ratio,
        'ratio_low': 0.9 * ratio,
        'ratio_high': 1.1 * ratio,
        'gradient_errors': {'all': 1.0, 'traced': 1e-16},
        'peak_bytes': 12e6,
        'temp_bytes': 3e6,
        'state_bytes': 1e6,
    }


def point(axis, value, exponent):
    return {
        'axis': axis,
        'value': value,
        'contender': 'd_rtrl 256MB',
        'seconds_per_step': 1e-4 * value**exponent,
        'temp_bytes': 1e6,
        'gradient_errors': {},
    }


@pytest.fixture
def results(tmp_path):
    found = [
        ('gradient', gradient('d_rtrl fresh', 0.5)),
        ('gradient', gradient('d_rtrl carry', 1.4)),
        ('gradient', gradient('braintrace D_RTRL', 60.0)),
        *(('scaling', point('batch', value, 0.8)) for value in (1, 4, 16)),
        *(('scaling', point('steps', value, 0.0)) for value in (50, 500)),
    ]
    entries = [
        {'group': g, 'name': f'test[{i}]', 'extra_info': e} for i, (g, e) in enumerate(found)
    ]
    path = tmp_path / 'results.json'
    path.write_text(json.dumps({'benchmarks': entries}))
    return path


def test_the_report_has_every_contender_the_goals_and_the_exponents(results, tmp_path, capsys):
    report.main([str(results), '--plot', str(tmp_path / 'scaling.png')])
    shown = capsys.readouterr().out
    for text in ('gradient: lif, T = 50', '0.500 ms', '(0.45 to 0.55)', '12.0 MB', '1e+00 / 1e-16'):
        assert text in shown
    assert 'd_rtrl fresh takes 1/2.0 of bptt, at most 0.70 x wanted: met' in shown
    assert 'd_rtrl carry takes 1.40 x bptt, at most 1.10 x wanted: MISSED' in shown
    assert 'd_rtrl fresh takes 1/120.0 of braintrace D_RTRL, at most 1/80.0 of wanted: met' in shown
    assert (tmp_path / 'scaling.png').stat().st_size > 1000


@pytest.mark.parametrize(
    ('planned', 'grown', 'sides'),
    [
        ((30, 31), 0, ('met', 'met', 'met')),
        ((30, 40), 0, ('met', 'MISSED', 'met')),
        ((280, 280), 8, ('MISSED', 'met', 'MISSED')),
    ],
)
def test_memory_is_held_to_the_budget_and_to_the_shorter_run(planned, grown, sides):
    runs = [
        gradient('d_rtrl 256MB', 0.8)
        | {'steps': steps, 'temp_bytes': size * 1e6}
        | {'sequence_bytes': 10 * steps, 'argument_bytes': 10 * steps + 5 + grown * (steps > 200)}
        for steps, size in zip((200, 2000), planned, strict=True)
    ]
    shown = report.memory_goals(runs)
    fresh = report.memory_goals([run | {'contender': 'd_rtrl fresh'} for run in runs])
    assert "below BPTT's: MISSED" in fresh and f'flat: {sides[1]}' in fresh
    assert 'budget' not in fresh
    names = 'within the budget', 'flat', 'arguments grow by the sequences alone'
    assert ', '.join(f'{n}: {side}' for n, side in zip(names, sides, strict=True)) in shown


def test_exponents_are_fitted(results):
    fits = report.exponents(report.load(results))
    np.testing.assert_allclose(fits['batch', 'd_rtrl 256MB'], (0.8, 0.0), atol=1e-9)


def test_the_bytes_of_every_kernel_are_in_the_table():
    for op in bench_kernels.KERNELS:
        found = {**gradient('reference', 0.4, 'formula'), 'workload': op, 'group': 'kernels'}
        operands, sizes = report.static_bytes(op)
        assert '(8, ' in operands and all(size > 0 for size in sizes.values())
        tpus = [] if op.startswith('sparse') else ['v4', 'v5e', 'v5p', 'v6e', 'tpu7x']
        assert list(sizes) == ['sm_80', 'sm_90', 'sm_100', *tpus]
        line = f'as compiled for {operands}: sm_80 {sizes["sm_80"] / 1e6:.1f} MB, sm_90 '
        assert line in report.table([found])


def test_every_kernel_with_a_definition_is_in_the_registry():
    folders = {path.parent.name for path in (ROOT / 'kernels').glob('*/reference.py')}
    assert folders == set(bench_kernels.KERNELS)
