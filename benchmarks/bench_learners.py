"""Gradients of whole sequences: every workload, every contender, by turns with BPTT."""

import pytest

from benchmarks.contenders import CONTENDERS, build
from benchmarks.workloads import WORKLOADS

BASIC = ('lif', 'lif_expon')
QUICK = {*BASIC, 'gru'}
LEARNERS = [name for name in CONTENDERS if name not in ('bptt', 'd_rtrl 256MB')]
LONG = {
    200: ['d_rtrl fresh', 'd_rtrl 256MB'],
    400: [name for name in LEARNERS if 'eprop' not in name.lower()],
    2000: ['d_rtrl fresh', 'd_rtrl 256MB'],
    5000: ['d_rtrl fresh'],
}
"""Contenders of the longer runs of the basic workloads."""
OWN = [name for name in WORKLOADS if name.endswith(' own') or name == 'gru dense']
"""Workloads whose neurons differ: what is carried for them is never the same for two."""


def cases():
    for workload in WORKLOADS:
        # One workload is enough to time braintrace's e-prop.
        for contender in LEARNERS if workload == 'lif_expon' else LEARNERS[:-1]:
            if not WORKLOADS[workload].takes(contender):
                continue
            quick = workload in QUICK and 'eprop' not in contender.lower()
            marks = [pytest.mark.quick] if quick else []
            yield pytest.param(workload, None, contender, marks=marks)
    for workload in BASIC:
        for steps, contenders in LONG.items():
            yield from ((workload, steps, contender) for contender in contenders)
    for workload in OWN:
        yield from ((workload, 400, name) for name in ('d_rtrl fresh', 'd_rtrl carry', 'pp_prop'))


@pytest.mark.benchmark(group='gradient')
@pytest.mark.parametrize(('workload', 'steps', 'contender'), cases())
def test_gradient(etrace_benchmark, suite, workload, steps, contender):
    errors = suite.errors(workload, contender)
    sizes = suite.sizes(workload, **({'steps': steps} if steps else {}))
    baseline = suite.baseline(workload, sizes)
    program = build(workload, contender, sizes)
    info = etrace_benchmark.measure(program, baseline, baseline_name='bptt', seconds=suite.seconds)
    info |= {
        'workload': workload,
        'contender': contender,
        'gradient_errors': errors,
        'baseline_memory': baseline.memory,
        'sequence_bytes': sum(a.nbytes for a in WORKLOADS[workload].sequences(sizes)),
    }
