"""The pytest plugin of braintrace_fast: the fixture ``etrace_benchmark``.

It lies beside the library, because pytest loads it at every start, and the library imports JAX.
"""

from collections.abc import Mapping
from typing import Any

import pytest

__all__ = ['EtraceBenchmark', 'etrace_benchmark']


class EtraceBenchmark:
    """Times a learner by turns with a baseline, and records what it takes.

    Parameters
    ----------
    benchmark : BenchmarkFixture
        The fixture of pytest-benchmark that keeps the times.

    Attributes
    ----------
    peak : bool
        Whether to measure the peak of memory too, which starts a process.
    """

    def __init__(self, benchmark: Any) -> None:
        self.benchmark = benchmark
        self.peak = True

    def __call__(
        self,
        learner: Any,
        *sequences: Any,
        step_fn: Any,
        baseline: Any = 'bptt',
        rounds: int | None = None,
        max_ratio: float | None = None,
        max_temp_bytes: int | None = None,
        max_peak_bytes: int | None = None,
        max_work: Mapping[str, int] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Measure ``learner.etrace_grad`` over sequences.

        Parameters
        ----------
        learner : ETraceVjpAlgorithm
            A compiled learner.
        *sequences
            Arrays with a leading axis of steps.
        step_fn : callable
            ``(run, *slices)``, which calls ``run``, a learner or a model, once and returns the loss
            of the step.
        baseline : 'bptt', learner or None
            What to compare with: BPTT through ``learner.model``, another learner, or nothing.
        rounds : int, optional
            How often each of the two runs; by default as often as ten seconds allow, from 2 to 15.
        max_ratio : float, optional
            The most that the ratio to the baseline may be. The test fails if even the lower
            quartile of the rounds is above; with ``--benchmark-disable`` nothing is timed, and
            this is not checked.
        max_temp_bytes, max_peak_bytes : int, optional
            The most bytes of temporaries that the compiled program may plan, and by which a fresh
            process may grow when it runs the program.
        max_work : dict, optional
            The most that may be counted in the compiled program: by ``'ops'``, ``'loop_ops'``,
            ``'flops'`` or ``'bytes'``.
        **options
            Arguments of ``etrace_grad``.

        Returns
        -------
        dict
            What was recorded in the benchmark's ``extra_info``.
        """
        from braintrace_fast import benchmarking

        program = benchmarking.online(learner, *sequences, step_fn=step_fn, **options)
        name, base = None, None
        if isinstance(baseline, str):
            if baseline != 'bptt':
                raise ValueError(f"baseline is {baseline!r}; give 'bptt', a learner or None.")
            name, base = 'bptt', benchmarking.bptt(learner.model, *sequences, step_fn=step_fn)
        elif baseline is not None:
            name = type(baseline).__name__
            base = benchmarking.online(baseline, *sequences, step_fn=step_fn, **options)
        info = self.measure(program, base, rounds=rounds, baseline_name=name)
        if not self.benchmark.disabled:  # one round is no ratio
            self.check('ratio_low', max_ratio, 'the ratio to the baseline, at its lower quartile,')
        self.check('temp_bytes', max_temp_bytes, 'the temporary bytes of the compiled program')
        self.check('peak_bytes', max_peak_bytes, 'the bytes by which a fresh process grew')
        for what, limit in (max_work or {}).items():
            if what not in info['work']:
                raise ValueError(f'max_work has {what!r}; choose among {sorted(info["work"])}.')
            self.check_number(info['work'][what], limit, f'the {what} of the compiled program')
        return info

    def measure(
        self,
        program: Any,
        baseline: Any = None,
        rounds: int | None = None,
        baseline_name: str | None = None,
        seconds: float = 10.0,
    ) -> dict[str, Any]:
        """Time a :class:`braintrace_fast.benchmarking.Program` by turns with another.

        Parameters
        ----------
        program, baseline : Program
            What to measure, and what to compare it with, if anything.
        rounds : int, optional
            How often each runs.
        baseline_name : str, optional
            What the baseline is called in the record.
        seconds : float
            How long to go on if the rounds are not given; there are from 2 to 15.
        """
        import statistics
        import time

        from braintrace_fast.benchmarking import Ratio

        times: dict[str, list[float]] = {'own': [], 'baseline': []}

        def timed(name: str, run: Any) -> Any:
            start = time.perf_counter()
            result = run()
            times[name].append(time.perf_counter() - start)
            return result

        def take_turn() -> None:
            if baseline is not None:
                timed('baseline', baseline)

        take_turn()
        timed('own', program)
        if rounds is None:
            rounds = int(min(max(seconds / sum(sum(t) for t in times.values()), 2), 15))
        for first in times.values():  # what is slow about a first run is not the program
            first.clear()
        self.benchmark.pedantic(lambda: timed('own', program), setup=take_turn, rounds=rounds)
        info: dict[str, Any] = {
            'steps': program.steps,
            'seconds_per_step': statistics.median(times['own']) / program.steps,
            'state_bytes': program.state_bytes,
            **program.memory,
            'work': program.work._asdict(),
        }
        if baseline is not None:
            ratio = Ratio.of(times['own'], times['baseline'])
            info |= {
                'baseline': baseline_name,
                'baseline_seconds_per_step': statistics.median(times['baseline']) / baseline.steps,
                'ratio': ratio.value,
                'ratio_low': ratio.low,
                'ratio_high': ratio.high,
            }
        if self.peak:
            info['peak_bytes'] = program.peak_bytes()
        self.benchmark.extra_info.update(info)
        return self.benchmark.extra_info

    def check(self, name: str, limit: float | None, meaning: str) -> None:
        """Fail if a recorded number is above a limit."""
        remedy = 'choose a baseline' if name == 'ratio_low' else 'let `peak` be True'
        found = self.benchmark.extra_info.get(name)
        if limit is None:
            return
        if found is None:
            pytest.fail(f'No {name} was measured to hold against {limit:g}: {remedy}.')
        self.check_number(found, limit, meaning)

    @staticmethod
    def check_number(found: float, limit: float, meaning: str) -> None:
        """Fail if a number is above a limit."""
        if found > limit:
            pytest.fail(f'Expected {meaning} to be at most {limit:g}, found {found:.4g}.')


@pytest.fixture
def etrace_benchmark(request: pytest.FixtureRequest) -> EtraceBenchmark:
    """Time a learner by turns with a baseline; see ``docs/benchmarking.md`` of braintrace_fast."""
    if not request.config.pluginmanager.hasplugin('benchmark'):
        pytest.fail(
            "etrace_benchmark needs pytest-benchmark: pip install 'braintrace-fast[bench]', and do "
            'not disable its plugin.'
        )
    return EtraceBenchmark(request.getfixturevalue('benchmark'))
