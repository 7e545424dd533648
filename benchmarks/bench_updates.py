"""Weights updated in every step, and the time to a first gradient: by turns with braintrace."""

import gc
import statistics
import time

import brainstate
import jax
import pytest

import braintrace_fast
from benchmarks import contenders
from benchmarks.contenders import CONTENDERS, build
from benchmarks.workloads import WORKLOADS, step_loss
from braintrace_fast import benchmarking

pytest.importorskip('braintrace', reason='needs the bench extra')

PAIRS = {'d_rtrl carry': 'braintrace D_RTRL', 'pp_prop': 'braintrace pp_prop'}
CASES = [pytest.param('d_rtrl carry', marks=pytest.mark.quick), 'pp_prop']
RATE = 1e-6


@pytest.mark.benchmark(group='updates')
@pytest.mark.parametrize('contender', CASES)
@pytest.mark.parametrize('workload', ['lif', 'lif_expon'])
def test_update_in_every_step(etrace_benchmark, suite, workload, contender):
    errors = suite.errors(workload, contender, RATE)
    sizes = suite.sizes(workload, steps=20)
    program, baseline = (
        build(workload, name, sizes, update=RATE) for name in (contender, PAIRS[contender])
    )
    peer = PAIRS[contender]
    info = etrace_benchmark.measure(program, baseline, baseline_name=peer, seconds=suite.seconds)
    info |= {'workload': workload, 'contender': contender, 'gradient_errors': errors}


@pytest.mark.benchmark(group='trace in place')
@pytest.mark.parametrize('workload', ['lif', 'lif_expon'])
def test_update_beside_a_pass_over_the_trace(etrace_benchmark, suite, workload):
    """How near an update comes to the machine's bandwidth: to one pass over the trace."""
    errors = suite.errors(workload, 'd_rtrl carry', RATE)
    sizes = suite.sizes(workload, steps=20)
    program = build(workload, 'd_rtrl carry', sizes, update=RATE)
    traces = [s for s in program.states if isinstance(s, braintrace_fast.EligibilityTrace)]

    def scale(factor):
        for trace in traces:
            trace.value = jax.tree.map(lambda a: a * factor, trace.value)

    factors = jax.numpy.full(20, 0.99)
    baseline = benchmarking.Program(
        lambda xs: brainstate.transform.for_loop(scale, xs), factors, steps=20
    )
    info = etrace_benchmark.measure(
        program, baseline, baseline_name='one pass', seconds=suite.seconds
    )
    size = sum(leaf.nbytes for trace in traces for leaf in jax.tree.leaves(trace.value))
    rate = 2 * size / info['baseline_seconds_per_step']
    info |= {'workload': workload, 'contender': 'd_rtrl carry', 'gradient_errors': errors}
    info['bytes_per_second'] = rate


def first_gradient(workload, contender, sizes):
    """A fresh model, and how to get its gradient with nothing compiled before."""
    work, who = WORKLOADS[workload], CONTENDERS[contender]
    model = work.make(contenders.library(who.library), sizes)
    brainstate.nn.init_all_states(model, batch_size=sizes['batch'])
    sequences = work.sequences(sizes)

    def run():
        jax.clear_caches()
        gc.collect()
        start = time.perf_counter()
        learner = contenders.learner(who, model, sequences[0][0])
        benchmarking.online(learner, *sequences, step_fn=step_loss, **who.options)()
        return time.perf_counter() - start

    return run


@pytest.mark.benchmark(group='first gradient')
@pytest.mark.parametrize('contender', CASES)
@pytest.mark.parametrize('workload', ['lif', 'lif_expon'])
def test_time_to_first_gradient(benchmark, suite, workload, contender):
    errors = suite.errors(workload, contender)
    sizes = suite.sizes(
        workload, steps=2
    )  # more steps of braintrace's D-RTRL would be part of its time
    names, rounds = (contender, PAIRS[contender]), 3 if suite.seconds < 3 else 5
    # Models first: making them after the caches are cleared takes longer than what is timed.
    made = [[first_gradient(workload, name, sizes) for name in names] for _ in range(rounds + 1)]
    for run in made.pop():
        run()
    seconds = {name: [] for name in names}

    def baseline():
        seconds[names[1]].append(made[-1][1]())

    def own():
        seconds[names[0]].append(made.pop()[0]())

    benchmark.pedantic(own, setup=baseline, rounds=rounds)
    ratio = benchmarking.Ratio.of(seconds[names[0]], seconds[names[1]])
    benchmark.extra_info |= {
        'workload': workload,
        'contender': contender,
        'steps': 1,
        'seconds_per_step': statistics.median(seconds[names[0]]),
        'baseline': names[1],
        'baseline_seconds_per_step': statistics.median(seconds[names[1]]),
        'ratio': ratio.value,
        'ratio_low': ratio.low,
        'ratio_high': ratio.high,
        'gradient_errors': errors,
    }
