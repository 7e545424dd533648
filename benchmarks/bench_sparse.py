"""A sparse network beside the same network as a dense matrix with a mask: time and memory."""

import pytest

from benchmarks.contenders import build

BUDGET = '24MB'
"""For windows of a few steps: with all steps in one, their factors take most of the memory."""


def total_bytes(program):
    """All that a program holds: arguments, results and temporaries."""
    return sum(program.memory.values())


@pytest.mark.benchmark(group='masked matrix')
@pytest.mark.parametrize('contender', ['d_rtrl fresh'])
def test_gradient_beside_a_masked_matrix(etrace_benchmark, suite, contender):
    if suite.full:
        pytest.skip('the masked matrix of a whole brain takes 77 GB')
    errors = suite.errors('fly', contender)
    sizes = suite.sizes('fly')
    program, baseline = (
        build('fly', contender, sizes | {'dense': dense}, memory_budget=BUDGET)
        for dense in (False, True)
    )
    etrace_benchmark.peak = False
    info = etrace_benchmark.measure(
        program, baseline, baseline_name='masked matrix', seconds=suite.seconds
    )
    info |= {
        'workload': 'fly',
        'contender': contender,
        'gradient_errors': errors,
        'baseline_memory': baseline.memory,
        'times_less_memory': total_bytes(baseline) / total_bytes(program),
    }
