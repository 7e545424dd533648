"""Gradients of whole sequences: every workload, every contender, by turns with BPTT."""

import pytest

from benchmarks.contenders import CONTENDERS, build, gradient_errors
from benchmarks.workloads import WORKLOADS

QUICK = {'lif', 'lif_expon', 'gru'}
LONG = {400: [c for c in CONTENDERS if c != 'd_rtrl 256MB'], 2000: ['d_rtrl 256MB', 'd_rtrl fresh']}
"""Contenders of the longer runs of the basic workloads."""


def cases():
    for workload in WORKLOADS:
        for contender in CONTENDERS:
            if contender not in ('bptt', 'd_rtrl 256MB'):
                quick = workload in QUICK and 'eprop' not in contender.lower()
                marks = [pytest.mark.quick] if quick else []
                yield pytest.param(workload, None, contender, marks=marks)
        if workload in ('lif', 'lif_expon'):
            for steps, contenders in LONG.items():
                yield from ((workload, steps, c) for c in contenders if c != 'bptt')


@pytest.mark.benchmark(group='gradient')
@pytest.mark.parametrize(('workload', 'steps', 'contender'), cases())
def test_gradient(etrace_benchmark, suite, workload, steps, contender):
    errors = gradient_errors(workload, contender)
    sizes = suite.sizes(workload, **({'steps': steps} if steps else {}))
    baseline = suite.baseline(workload, sizes)
    program = build(workload, contender, sizes)
    info = etrace_benchmark.measure(program, baseline, baseline_name='bptt', seconds=suite.seconds)
    info |= {
        'workload': workload,
        'contender': contender,
        'gradient_errors': errors,
        'baseline_memory': baseline.memory,
    }
