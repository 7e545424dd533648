"""Count how many of braintrace's own tests pass here.

Run ``make parity``, or in its environment ``python -m parity --help``.
"""

import argparse
import json
import sys

from .run import BUILD, KINDS, fetch, run


def main() -> int:
    """Returns whether anything is wrong, as a status."""
    parser = argparse.ArgumentParser(prog='python -m parity', description=__doc__)
    parser.add_argument('files', nargs='*', help='parts of names of test files; by default all')
    parser.add_argument('--workers', type=int, default=2)
    parser.add_argument('--reference', action='store_true', help='test the reference itself')
    given = parser.parse_args()
    sources = fetch()
    files = sorted(sources.rglob('*_test.py'))
    if given.files:
        files = [file for file in files if any(part in str(file) for part in given.files)]
    found = run(sources, files, workers=given.workers, reference=given.reference)
    counts = {kind: sum(row['outcome'] == kind for row in found.values()) for kind in KINDS}
    print(counts)
    (BUILD / 'last.json').write_text(json.dumps(found, indent=1))
    return 0


if __name__ == '__main__':
    sys.exit(main())
