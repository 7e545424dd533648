"""From the results of a run to a table in the terminal, and to pictures.

python -m benchmarks.report benchmarks/results/bench.json --plot docs/scaling.png
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ['Goal', 'exponents', 'load', 'main', 'static_bytes', 'table']

Result = dict[str, Any]

COMPILED = Path(__file__).parents[1] / 'docs' / 'accelerators.md'
"""What the kernels compile to, as `make accelerators` keeps it."""

TWO_STATES = 'S=2, ', 'lif_expon, '

BUDGET, FLAT = 256_000_000, 1.1
"""Bytes that a window may take, and how much more of them for ten times the steps is still flat."""

IDEAL_TIME = {'size': 2, 'batch': 1, 'states': 1, 'steps': 0}
"""Exponents of the time per step: that of the matrix products, and none in the steps."""
IDEAL_MEMORY = {
    'bptt': {'size': 1, 'batch': 1, 'states': 1, 'steps': 1},
    'd_rtrl fresh': {'size': 1, 'batch': 1, 'states': 1, 'steps': 0},
    'd_rtrl carry': {'size': 1, 'batch': 1, 'states': 1, 'steps': 0},
}
"""Exponents of temporary memory: that of a window, up to its budget. Traces are not temporary."""


class Goal(NamedTuple):
    """A ratio that is aimed at; the report says on which side a measurement falls."""

    group: str
    workload: str
    contender: str
    against: str
    most: float
    long: bool = False
    """Whether it is for runs of 2000 steps and more, and not for shorter ones."""


GOALS = [
    *(Goal('gradient', w, 'd_rtrl fresh', 'bptt', 0.7) for w in ('lif', 'lif_expon')),
    Goal('gradient', 'lif', 'd_rtrl carry', 'bptt', 1.1),
    Goal('gradient', 'lif_expon', 'd_rtrl carry', 'bptt', 1.2),
    *(Goal('gradient', w, 'd_rtrl 256MB', 'bptt', 1.2, True) for w in ('lif', 'lif_expon')),
    *(Goal('gradient', w, 'd_rtrl fresh', 'bptt', 0.75, True) for w in ('lif', 'lif_expon')),
    Goal('gradient', 'lif', 'd_rtrl fresh', 'braintrace D_RTRL', 1 / 80),
    Goal('gradient', 'lif_expon', 'd_rtrl fresh', 'braintrace D_RTRL', 1 / 150),
    *(Goal('gradient', w, 'pp_prop', 'braintrace pp_prop', 1 / 1.5) for w in ('lif', 'lif_expon')),
    Goal('gradient', 'fly', 'd_rtrl fresh', 'bptt', 1.0),
    Goal('masked matrix', 'fly', 'd_rtrl fresh', 'masked matrix', 1 / 5),
    Goal('updates', 'lif', 'd_rtrl carry', 'braintrace D_RTRL', 1 / 3),
    Goal('updates', 'lif_expon', 'd_rtrl carry', 'braintrace D_RTRL', 1 / 8),
    *(
        Goal('first gradient', w, c, p, 1.2)
        for w in ('lif', 'lif_expon')
        for c, p in (('d_rtrl carry', 'braintrace D_RTRL'), ('pp_prop', 'braintrace pp_prop'))
    ),
]


def load(path: Path) -> list[Result]:
    """What the benchmarks of a run recorded, each with its group and name."""
    entries = json.loads(path.read_text('utf-8'))['benchmarks']
    return [{'group': e['group'], 'name': e['name'], **e['extra_info']} for e in entries]


def table(results: Sequence[Result]) -> str:
    """All contenders, workload by workload."""
    head = ['contender', 'time per step', 'ratio', '(quartiles)', 'to', 'gradient error']
    rows: list[list[str]] = [[*head, 'peak', 'temporary', 'state']]
    for (group, workload, steps), contenders in _by_workload(results):
        rows += [[], [f'{group}: {workload}' + (f', T = {steps}' if group == 'gradient' else '')]]
        base = contenders[0]
        if base['baseline'] == 'bptt':
            planned = base['baseline_memory']['temp_bytes']
            times = [r['baseline_seconds_per_step'] for r in contenders]
            rows.append(
                ['bptt', _time(float(np.median(times))), '1.00', '', '', '', '', _size(planned)]
            )
        rows += [_row(r) for r in contenders]
        if group == 'kernels':
            operands, by_target = static_bytes(workload)
            sizes = ', '.join(f'{target} {_size(size)}' for target, size in by_target.items())
            rows.append([f'  as compiled for {operands}: {sizes}'])
        if group == 'trace in place':
            rate = contenders[0]['bytes_per_second'] / 1e9
            rows.append([f'  one pass reads and writes the trace, in place: {rate:.0f} GB/s'])
    wide = [row for row in rows if len(row) > 1]
    widths = [max(len(row[i]) for row in wide if i < len(row)) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f'{cell:>{w}}' if i else f'  {cell:{w}}'
            for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append('  '.join(cells) if len(row) > 1 else ''.join(row))
    return '\n'.join(
        [
            *lines,
            '',
            'ratio: of medians, by turns in one process; its quartiles are those of the rounds.',
            'gradient error: the largest of any parameter, and of the traced ones, against the',
            '  oracle on a small copy in float64. An error of 1 is a gradient that is missing.',
            'peak: growth of a fresh process that runs the program once. temporary: what the',
            "  compiler's memory analysis plans. state: what is carried from call to call.",
            'as compiled: the bytes that the kernel moves on each accelerator, from',
            '  docs/accelerators.md; none was at hand, so there is no time of it.',
        ]
    )


def static_bytes(op: str, page: Path = COMPILED) -> tuple[str, dict[str, int]]:
    """The bytes that an op's kernel moves by target, for some operands of two states."""
    lines = page.read_text('utf-8').split(f'\n## {op}\n', 1)[1].split('\n## ')[0].splitlines()
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line]
    _, _, *rows = (dict(zip(cells[0], row, strict=True)) for row in cells)
    sizes: dict[str, dict[str, int]] = {}
    for row in rows:
        operands = row['operands']
        if row['type'] == 'float32' and operands.startswith(TWO_STATES) and '(8, ' in operands:
            size = int(row['bytes moved'].replace(',', ''))
            sizes.setdefault(operands, {})[row['target']] = size
    return next(iter(sizes.items()))


def _by_workload(results: Sequence[Result]) -> Iterator[tuple[tuple[str, str, int], list[Result]]]:
    keys = dict.fromkeys(
        (r['group'], r['workload'], r['steps']) for r in results if 'axis' not in r
    )
    for key in keys:
        yield (
            key,
            [
                r
                for r in results
                if 'axis' not in r and (r['group'], r['workload'], r['steps']) == key
            ],
        )


def _row(result: Result) -> list[str]:
    errors = ' / '.join(f'{e:.0e}' for e in result['gradient_errors'].values())
    return [
        result['contender'],
        _time(result['seconds_per_step']),
        f'{result["ratio"]:.3g}',
        f'({result["ratio_low"]:.3g} to {result["ratio_high"]:.3g})',
        result['baseline'],
        errors,
        *(_size(result.get(name)) for name in ('peak_bytes', 'temp_bytes', 'state_bytes')),
    ]


def goals(results: Sequence[Result]) -> str:
    """Each goal that was measured, and on which side of it the measurement falls."""
    lines = ['', 'goals, where measured:']
    for goal in GOALS:
        for key, contenders in _by_workload(results):
            if key[:2] != goal[:2] or (key[2] >= 2000) != goal.long:
                continue
            ratio = _ratio(contenders, goal.contender, goal.against)
            if ratio is not None:
                side = 'met' if ratio <= goal.most else 'MISSED'
                steps = f', T = {key[2]}' if goal.group == 'gradient' else ''
                lines.append(
                    f'  {goal.group}, {goal.workload}{steps}: {goal.contender} takes '
                    f'{_times(ratio)} {goal.against}, at most {_times(goal.most)} wanted: {side}'
                )
    return '\n'.join(lines)


def memory_goals(results: Sequence[Result]) -> str:
    """Whether temporaries keep within a budget, or below BPTT's, and do not grow with the steps."""
    lines = []
    runs_of: dict[tuple[str, str], dict[int, Result]] = {}
    for r in results:
        if 'axis' not in r and r['contender'] in ('d_rtrl 256MB', 'd_rtrl fresh'):
            runs_of.setdefault((r['workload'], r['contender']), {})[r['steps']] = r
    for (workload, contender), runs in runs_of.items():
        if not {200, 2000} <= set(runs):
            continue
        runs = {steps: run for steps, run in runs.items() if steps >= 200}
        planned = {steps: run['temp_bytes'] for steps, run in runs.items()}
        given = {r['argument_bytes'] - r['sequence_bytes'] for r in runs.values()}
        longest = max(planned)
        below = planned[longest] <= runs[longest]['baseline_memory']['temp_bytes']
        budgeted = contender == 'd_rtrl 256MB'
        sides = {
            **({'within the budget': max(planned.values()) <= BUDGET} if budgeted else {}),
            'flat': all(a <= FLAT * planned[200] for t, a in planned.items() if t >= 2000),
            'arguments grow by the sequences alone': len(given) == 1,
            **({} if budgeted else {"below BPTT's": below}),
        }
        lines.append(
            f'  temporaries, {workload}, {contender}: '
            + ', '.join(f'{_size(size)} at T = {steps}' for steps, size in sorted(planned.items()))
            + ': '
            + ', '.join(
                f'{what}: {"met" if is_met else "MISSED"}' for what, is_met in sides.items()
            )
        )
    return '\n'.join(lines)


def _ratio(contenders: Sequence[Result], contender: str, against: str) -> float | None:
    """The ratio to the baseline, or to another contender by way of it."""
    ratios = {r['contender']: r for r in contenders}
    if contender not in ratios:
        return None
    own = ratios[contender]
    if own['baseline'] == against:
        return float(own['ratio'])
    return float(own['ratio'] / ratios[against]['ratio']) if against in ratios else None


def exponents(results: Sequence[Result]) -> dict[tuple[str, str], tuple[float, float]]:
    """By axis and contender, the fitted exponents of the time per step and of the memory."""
    fits = {}
    for axis, contender, points in _curves(results):
        x = np.log([p['value'] for p in points])
        fits[axis, contender] = tuple(
            float(np.polyfit(x, np.log([max(p[name], 1e-12) for p in points]), 1)[0])
            for name in ('seconds_per_step', 'temp_bytes')
        )
    return fits


def _curves(results: Sequence[Result]) -> Iterator[tuple[str, str, list[Result]]]:
    along_axes = [r for r in results if 'axis' in r]
    for axis, contender in dict.fromkeys((r['axis'], r['contender']) for r in along_axes):
        points = [r for r in along_axes if (r['axis'], r['contender']) == (axis, contender)]
        if len(points) > 1:
            yield axis, contender, sorted(points, key=lambda r: r['value'])


def scaling(results: Sequence[Result]) -> str:
    """The fitted exponents beside the ideal ones."""
    lines = ['', 'exponents, fitted (ideal):   time per step     temporary bytes']
    for (axis, contender), (time, memory) in exponents(results).items():
        ideal = IDEAL_MEMORY[_kind(contender)][axis]
        lines.append(
            f'  {axis:8} {contender:16} {time:8.2f} ({IDEAL_TIME[axis]}) {memory:14.2f} ({ideal})'
        )
    memory = {
        p['value']: p['temp_bytes']
        for axis, contender, points in _curves(results)
        if (axis, contender) == ('steps', 'd_rtrl 256MB')
        for p in points
    }
    if {200, 2000} <= set(memory):
        lines.append(
            f'  temporary bytes under a budget of 256 MB: {_size(memory[200])} at T = 200, '
            f'{_size(memory[2000])} at T = 2000'
        )
    return '\n'.join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw time per step and memory along each axis, with the ideal slopes."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    names = {'size': 'neurons n', 'batch': 'batch B', 'states': 'states S', 'steps': 'steps T'}
    figure, rows = plt.subplots(2, 4, figsize=(13, 5.6), layout='constrained', sharex='col')
    fits = exponents(results)
    for axis, contender, points in _curves(results):
        kind, column = _kind(contender), list(names).index(axis)
        color = f'C{list(IDEAL_MEMORY).index(kind)}'
        x = np.array([p['value'] for p in points], float)
        ideals = IDEAL_TIME[axis], IDEAL_MEMORY[kind][axis]
        values = (
            [p['seconds_per_step'] * 1e3 for p in points],
            [p['temp_bytes'] / 1e6 for p in points],
        )
        for axes, y, fit, ideal in zip(
            rows[:, column], values, fits[axis, contender], ideals, strict=True
        ):
            axes.loglog(x, y, 'o-', color=color, markersize=4, label=f'{kind}: {fit:.2f} ({ideal})')
            axes.loglog(x, y[-1] * (x / x[-1]) ** ideal, ':', color=color, linewidth=1)
            axes.legend(fontsize=7, title='fitted (ideal) exponent', title_fontsize=7)
    for column, name in enumerate(names.values()):
        rows[1, column].set_xlabel(name)
        ticks = sorted({r['value'] for r in results if r.get('axis') == list(names)[column]})
        rows[1, column].set_xticks(ticks, ticks)
        rows[1, column].minorticks_off()
    rows[0, 0].set_ylabel('time per step (ms)')
    rows[1, 0].set_ylabel('temporary memory (MB)')
    figure.suptitle(
        'Recurrent adaptive neurons, a loss at every step, on a CPU; dotted: ideal slopes'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _kind(contender: str) -> str:
    return 'd_rtrl carry' if contender == 'd_rtrl 256MB' else contender


def _time(seconds: float) -> str:
    return f'{seconds:.2f} s' if seconds > 1 else f'{seconds * 1e3:.3f} ms'


def _times(ratio: float) -> str:
    return f'{ratio:.2f} x' if ratio > 0.5 else f'1/{1 / ratio:.1f} of'


def _size(size: int | None) -> str:
    return '' if size is None else f'{size / 1e6:.1f} MB'


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('results', type=Path, nargs='+')
    parser.add_argument('--plot', type=Path, help='where to draw the scaling, if it was measured')
    options = parser.parse_args(arguments)
    results = [result for path in options.results for result in load(path)]
    print(table(results))
    print(*filter(None, [goals(results), memory_goals(results)]), sep='\n')
    if exponents(results):
        print(scaling(results))
        if options.plot:
            plot(results, options.plot)
            print(f'\nwrote {options.plot}')


if __name__ == '__main__':
    main()
