"""What ``etrace_grad`` gains over a loop over steps by hand, as a Markdown table.

::

    python -m benchmarks.migration [--rounds 9] [--set steps=5 size=8] [workload ...]

The loop is the one that users of braintrace write: the gradient of each step, summed in a scan,
compiled as a whole. It runs with either library, and `etrace_grad` beside it, by turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from braintrace_fast import benchmarking, testing
from braintrace_fast.benchmarking import Program, Ratio

from .contenders import Contender, learner, library, truth
from .workloads import WORKLOADS, step_loss

__all__ = ['WAYS', 'check', 'main', 'measure', 'table']

Sizes = Mapping[str, Any]


def by_hand(made: Any, *sequences: jax.Array) -> Program:
    """The sum of the gradients of all steps, as a loop over a learner."""
    weights = made.param_states

    def step(total: Any, slices: Any) -> Any:
        grads = brainstate.transform.grad(lambda: step_loss(made, *slices), weights)()
        return jax.tree.map(jnp.add, total, grads), None

    def run(*given: jax.Array) -> Any:
        zeros = {path: jax.tree.map(jnp.zeros_like, state.value) for path, state in weights.items()}
        return brainstate.transform.scan(step, zeros, given)[0]

    return Program(run, *sequences, steps=len(sequences[0]))


def by_etrace_grad(trace: str) -> Callable[..., Program]:
    def made_program(made: Any, *sequences: jax.Array) -> Program:
        options = {'reduction': 'sum', 'trace': trace}
        return benchmarking.online(made, *sequences, step_fn=step_loss, **options)

    return made_program


WAYS: dict[str, tuple[str, Callable[..., Program]]] = {
    'a loop by hand, braintrace': ('braintrace', by_hand),
    'the same loop here': ('braintrace_fast', by_hand),
    '`etrace_grad`': ('braintrace_fast', by_etrace_grad('carry')),
    "`etrace_grad(..., trace='fresh')`": ('braintrace_fast', by_etrace_grad('fresh')),
}
"""By name: the library of the learner, and what to do with it. The first is the baseline."""
BASELINE = next(iter(WAYS))


def build(workload: str, way: str, sizes: Sizes) -> Program:
    name, make = WAYS[way]
    work = WORKLOADS[workload]
    model = work.make(library(name), sizes)
    brainstate.nn.init_all_states(model, batch_size=sizes['batch'])
    sequences = work.sequences(sizes)
    return make(learner(Contender('d_rtrl', name), model, sequences[0][0]), *sequences)


def check(workload: str, way: str) -> float:
    """The largest relative error of a small copy in float64; an error if it is ours and wrong."""
    with brainstate.environ.context(precision=64):
        gradients = build(workload, way, WORKLOADS[workload].small_copy())()
    comparison = testing.compare(gradients, truth(workload, 'd_rtrl'))
    if WAYS[way][0] == 'braintrace_fast':
        comparison.check(1e-9)
    return comparison.worst


def measure(workload: str, rounds: int, sizes: Sizes) -> dict[str, list[float]]:
    """Seconds of each way, by turns; what is slow about a first run is left out."""
    programs = {way: build(workload, way, sizes) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way, program in programs.items():
            start = time.perf_counter()
            program()
            if turn:
                seconds[way].append(time.perf_counter() - start)
    return seconds


def table(workload: str, rounds: int, sizes: Sizes) -> list[str]:
    """A row for each way."""
    errors = {way: check(workload, way) for way in WAYS}
    seconds = measure(workload, rounds, sizes)
    rows = []
    for way, times in seconds.items():
        ratio = Ratio.of(times, seconds[BASELINE])
        gain = _two_digits(1 / ratio.value)
        spread = f'{_two_digits(1 / ratio.high)} to {_two_digits(1 / ratio.low)}'
        milliseconds = 1e3 * statistics.median(times) / sizes['steps']
        cells = (workload, way, f'{milliseconds:.3g}', f'{gain} ({spread})')
        rows.append('| ' + ' | '.join((*cells, f'{errors[way]:.0e}')) + ' |')
    return rows


def _two_digits(number: float) -> str:
    return f'{float(f"{number:.2g}"):g}'


def main(arguments: list[str] | None = None) -> None:
    """Print the table of the workloads that are named."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks.migration')
    parser.add_argument('workloads', nargs='*', default=['lif', 'lif_expon own', 'gru'])
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--set', nargs='*', default=[], metavar='size=n', help='other sizes')
    given = parser.parse_args(arguments)
    others = {name: int(value) for name, value in (pair.split('=') for pair in given.set)}
    reference = library('braintrace')
    print(f'braintrace {reference.__version__}, jax {jax.__version__}, {given.rounds} rounds\n')
    print('| workload | way | ms per step | times as fast (quartiles) | gradient is off by |')
    print('| --- | --- | --- | --- | --- |')
    with brainstate.environ.context(dt=1.0 * u.ms):
        for workload in given.workloads:
            for row in table(workload, given.rounds, WORKLOADS[workload].sized(**others)):
                print(row, flush=True)


if __name__ == '__main__':
    main()
