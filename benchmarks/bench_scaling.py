"""Time per step and memory against the number of neurons, batch, states and steps."""

import pytest

from benchmarks.contenders import build

AXES = {
    'size': (128, 256, 512, 1024, 2048),
    'batch': (1, 8, 32, 128),
    'states': (1, 2, 3, 4, 5),
    'steps': (50, 200, 2000, 5000),
}
POINT = dict(inputs=128, size=256, states=2, batch=16, steps=50, rate=0.1)
"""Where the axes cross, on the adaptive neurons of the workload ``gif``."""


def cases():
    for axis, values in AXES.items():
        carry = 'd_rtrl 256MB' if axis == 'steps' else 'd_rtrl carry'
        for value in values:
            yield from ((axis, value, contender) for contender in ('bptt', 'd_rtrl fresh', carry))


@pytest.mark.benchmark(group='scaling')
@pytest.mark.parametrize(('axis', 'value', 'contender'), cases())
def test_scaling(etrace_benchmark, suite, axis, value, contender):
    errors = suite.errors('gif', contender)
    sizes = suite.sizes('gif', **{**POINT, axis: value})
    program = build('gif', contender, sizes)
    baseline = None if contender == 'bptt' else suite.baseline('gif', sizes)
    etrace_benchmark.peak = False
    info = etrace_benchmark.measure(
        program, baseline, baseline_name='bptt', seconds=suite.seconds / 2
    )
    info |= {'axis': axis, 'value': value, 'contender': contender, 'gradient_errors': errors}
