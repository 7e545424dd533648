"""Fails when the library got slower than what is recorded in ``baseline.json``.

    python -m benchmarks.gate work                      counted work: sound on a busy machine
    python -m benchmarks.gate ratios RESULTS.json ...   ratios of runs, beyond their spread

``--record`` writes what was measured into the file instead.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import brainstate
import saiunit as u

from .contenders import build
from .report import load
from .workloads import WORKLOADS

__all__ = ['compare_ratios', 'compare_work', 'counted_work', 'main']

BASELINE = Path(__file__).with_name('baseline.json')
WORK_TOLERANCE = 0.05
"""Counts are exact; this much may come from the instructions that another processor has."""
LEAST_TOLERANCE = 0.1
"""Ratios differ by this much from day to day, however narrow the spread of one run is."""


def work_cases() -> Iterator[tuple[str, str]]:
    """Workloads and contenders whose work is counted; ``updates`` changes weights in every step."""
    carried = [name for name, work in WORKLOADS.items() if work.takes('d_rtrl carry')]
    yield from ((workload, 'd_rtrl carry') for workload in carried)
    yield from (('lif_expon', c) for c in ('d_rtrl fresh', 'pp_prop', 'eprop', 'updates'))


def counted_work(workload: str, contender: str, **sizes: int) -> dict[str, int]:
    """The work of a contender, counted in its compiled program, and its temporary bytes."""
    sized = WORKLOADS[workload].sized(**sizes)
    if contender == 'updates':
        program = build(workload, 'd_rtrl carry', sized, update=1e-3)
    else:  # a budget of its own: the default depends on what is free
        program = build(workload, contender, sized, memory_budget='1GB')
    return {**program.work._asdict(), 'temp_bytes': program.memory['temp_bytes']}


def compare_work(
    measured: Mapping[str, Mapping[str, int]], recorded: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """What does more work than recorded."""
    problems = [f'{name}: not recorded' for name in measured if name not in recorded]
    for name, counts in measured.items():
        for what, count in counts.items():
            most = recorded.get(name, counts)[what] * (1 + WORK_TOLERANCE)
            if count > most:
                problems.append(
                    f'{name}: {what} {count:,}, recorded {recorded[name][what]:,} '
                    f'({count / max(recorded[name][what], 1) - 1:+.0%})'
                )
    return problems


def compare_ratios(
    measured: Mapping[str, Mapping[str, float]], recorded: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Ratios above the recorded ones by more than both spreads together, and missing ones."""
    problems = [f'{name}: not recorded' for name in measured if name not in recorded]
    problems += [f'{name}: not measured' for name in recorded if name not in measured]
    for name in [name for name in measured if name in recorded]:
        now, then = measured[name], recorded[name]
        spreads = [(r['ratio_high'] - r['ratio_low']) / r['ratio'] for r in (now, then)]
        tolerance = max(LEAST_TOLERANCE, sum(spreads))
        if now['ratio'] > then['ratio'] * (1 + tolerance):
            problems.append(
                f'{name}: ratio {now["ratio"]:.3g}, recorded {then["ratio"]:.3g}, '
                f'tolerance {tolerance:.0%}'
            )
    return problems


def ratios_of(*paths: Path) -> dict[str, dict[str, float]]:
    """The ratios of this library's contenders in runs, by name.

    The spread of several runs covers all of them: processes differ more than rounds do, by where
    their memory happens to lie.
    """
    combine = {'ratio': statistics.median, 'ratio_low': min, 'ratio_high': max}
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for result in (r for path in paths for r in load(path)):
        if 'ratio' in result and not result['contender'].startswith('braintrace'):
            runs.setdefault(result['name'], []).append(result)
    return {
        name: {what: of(r[what] for r in results) for what, of in combine.items()}
        for name, results in runs.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, or record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('what', choices=['work', 'ratios'])
    parser.add_argument('results', type=Path, nargs='*')
    parser.add_argument('--record', action='store_true')
    options = parser.parse_args(arguments)
    recorded: dict[str, Any] = json.loads(BASELINE.read_text('utf-8')) if BASELINE.exists() else {}
    measured: dict[str, Any]
    if options.what == 'work':
        with brainstate.environ.context(dt=1.0 * u.ms):
            measured = {f'{w} {c}': counted_work(w, c) for w, c in work_cases()}
        problems = compare_work(measured, recorded.get('work', {}))
        if recorded.get('jax') != version('jax') and not options.record:
            problems = [
                f'the work was recorded with jax {recorded.get("jax")}, and this is '
                f'{version("jax")}, whose compiler differs: record it anew'
            ]
    elif not options.results:
        parser.error('ratios needs the results of a run.')
    else:
        measured = ratios_of(*options.results)
        problems = compare_ratios(measured, recorded.get('ratios', {}))
    if options.record:
        kept = {**recorded, options.what: measured}
        if options.what == 'work':
            kept['jax'] = version('jax')
        BASELINE.write_text(json.dumps(kept, indent=1) + '\n', 'utf-8')
        print(f'recorded {len(measured)} entries of {options.what}')
    elif problems:
        sys.exit('slower than recorded:\n  ' + '\n  '.join(problems))
    else:
        print(f'{len(measured)} entries of {options.what} are within what is recorded')


if __name__ == '__main__':
    main()
