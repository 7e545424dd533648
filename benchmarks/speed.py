"""How long a gradient takes, as ratios to peers in the same process.

``python -m benchmarks.speed --steps 50 400`` checks the gradients against the recurrence in float64
on a small copy of the workload, then lets all contenders run by turns and prints the median time of
a step, its quartiles, and the ratio to BPTT. Machines are shared: only the ratios mean something.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence

import brainstate
import jax
import saiunit as u

import braintrace_fast
from braintrace_fast import testing

from .contenders import CONTENDERS, Gradient
from .workloads import RecurrentSpikes, sequences, step_loss

__all__ = ['check_gradients', 'main', 'timed_by_turns']

SMALL = dict(inputs=6, size=12, outputs=3)


def check_gradients(states: int, steps: int = 8, batch: int = 2) -> None:
    """Compare D-RTRL with the brute-force recurrence, from a zero trace, in float64.

    Raises
    ------
    AssertionError
        If they differ by more than rounding.
    """
    with brainstate.environ.context(precision=64):
        inputs = sequences(steps, batch, SMALL['inputs'], SMALL['outputs'])
        model = RecurrentSpikes(braintrace_fast, states, **SMALL)
        brainstate.nn.init_all_states(model, batch_size=batch)
        true = testing.recurrence(model, *inputs, step_fn=step_loss(model))
        learner = braintrace_fast.D_RTRL(model)
        learner.compile_graph(inputs[0][0])
        start = [(s, s.value) for s in model.states(brainstate.HiddenState).values()]
        for trace in ('fresh', 'carry'):
            for state, value in start:
                state.value = value
            learner.reset_state()
            found = learner.etrace_grad(
                *inputs, step_fn=step_loss(learner), reduction='sum', trace=trace, trace_every=None
            )
            testing.compare(found, true).check(1e-9)


def timed_by_turns(contenders: dict[str, Gradient], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each contender, which run one after the other in every round."""
    for run in contenders.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, nargs='+', default=[50])
    parser.add_argument('--states', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--only', nargs='+', choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args(arguments)
    warnings.simplefilter('ignore')
    brainstate.environ.set(dt=1.0 * u.ms)
    for states in options.states:
        check_gradients(states)
        for steps in options.steps:
            built = {
                name: CONTENDERS[name](steps, options.batch, states=states)
                for name in dict.fromkeys(['bptt', *options.only])
            }
            seconds = timed_by_turns(built, options.rounds)
            print(f'S = {states}, T = {steps}, batch {options.batch}: gradients checked')
            base = statistics.median(seconds['bptt'])
            for name, times in seconds.items():
                low, middle, high = statistics.quantiles([t * 1e3 / steps for t in times], n=4)
                print(
                    f'  {name:20} {middle:8.3f} ms a step ({low:.3f} to {high:.3f})  '
                    f'{middle * steps / base / 1e3:7.2f} x BPTT',
                    flush=True,
                )


if __name__ == '__main__':
    main()
