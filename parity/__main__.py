"""Count how many of braintrace's own tests pass here.

Run ``make parity``, or in its environment ``python -m parity --help``.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .examples import run_examples
from .report import BAR, as_page, as_table, check_reasons, count
from .run import BUILD, ROOT, Outcome, fetch, run

PAGE = ROOT / 'docs' / 'parity.md'
FAIL_THERE = Path(__file__).parent / 'fail_on_reference.txt'
SAMPLE = ('_op/grouped_test', '_op/dense_test', '_compiler/graph_test', 'nn/_rnn_test')
"""Files that take a few minutes, one or more of each part of the library."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m parity', description=__doc__)
    parser.add_argument('files', nargs='*', help='parts of names of files; by default all')
    parser.add_argument('--sample', action='store_true', help='a few files only')
    parser.add_argument('--workers', type=int, default=2, help='processes side by side')
    parser.add_argument('--seconds', type=int, default=120, help='the limit of one test')
    parser.add_argument('--examples', type=Path, help='run the examples of a checkout instead')
    parser.add_argument('--limit', type=int, default=240, help='seconds that an example may take')
    parser.add_argument('--short', action='store_true', help='examples with small arguments')
    parser.add_argument(
        '--reference', action='store_true', help='run what failed last on the reference itself'
    )
    return parser.parse_args()


def main() -> int:
    """Returns whether anything is wrong, as a status."""
    given, start = _arguments(), time.monotonic()
    if given.examples is not None:
        return _examples(given)
    sources = fetch()
    parts = SAMPLE if given.sample else given.files
    files = sorted(sources.rglob('*_test.py'))
    if parts:
        files = [file for file in files if any(part in str(file) for part in parts)]
    if given.reference:
        return _reference(sources, files, given)
    found = run(sources, files, workers=given.workers, seconds=given.seconds)
    _set_aside(found)
    last = BUILD / ('part.json' if parts else 'outcomes.json')
    last.write_text(json.dumps(found, indent=1), 'utf-8')
    counts = count(found)
    faults = check_reasons(found, stale=not parts)
    print(as_table(counts), *faults, sep='\n')
    share = counts[''].share
    print(f'==> {100 * share:.1f} % in {time.monotonic() - start:.0f} s, {len(faults)} faults')
    if not parts:
        PAGE.write_text(as_page(found, counts), 'utf-8')
        print(f'==> written: {PAGE.relative_to(ROOT)}')
    return bool(faults) or share < BAR


def _set_aside(found: dict[str, Outcome]) -> None:
    """Tests that fail on the reference too do not count."""
    for test in FAIL_THERE.read_text('utf-8').splitlines() if FAIL_THERE.exists() else ():
        if test in found and found[test]['outcome'] in ('failed', 'crashed'):
            found[test] = {'outcome': 'skipped', 'why': 'fails on the reference too'}


def _reference(sources: Path, files: Sequence[Path], given: argparse.Namespace) -> int:
    """Record which of the tests that failed last fail on the reference."""
    last = BUILD / ('part.json' if given.files or given.sample else 'outcomes.json')
    found = json.loads(last.read_text('utf-8'))
    failed = {test for test, row in found.items() if row['outcome'] in ('failed', 'crashed')}
    files = [file for file in files if any(str(file.relative_to(sources)) in t for t in failed)]
    there = run(sources, files, workers=given.workers, only=failed, reference=True)
    known = set(FAIL_THERE.read_text('utf-8').splitlines()) if FAIL_THERE.exists() else set()
    known |= {test for test, row in there.items() if row['outcome'] in ('failed', 'crashed')}
    FAIL_THERE.write_text(''.join(f'{test}\n' for test in sorted(known)), 'utf-8')
    return 0


def _examples(given: argparse.Namespace) -> int:
    rows = run_examples(
        given.examples, given.files, workers=given.workers, seconds=given.limit, short=given.short
    )
    rows = [row for row in rows if row['there'] == 'passed']
    passed = sum(row['here'] == 'passed' for row in rows)
    print(f'==> {passed} of {len(rows)} examples that run on the reference run here')
    return passed < len(rows)


if __name__ == '__main__':
    sys.exit(main())
