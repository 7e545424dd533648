"""Compile every kernel for every device; print a table, and fail if something is wrong.

Run ``make accelerators``, or in its environment ``python -m accelerators --help``.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'  # before jax is imported: it would look for devices
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from .broken import BROKEN, escaped
from .cases import all_cases
from .checks import TARGETS, check
from .gpu import GPUS
from .report import HEADER, as_line, document, window_line
from .windows import check_windows, escaped_windows

PAGE = Path(__file__).parents[1] / 'docs' / 'accelerators.md'


def main() -> int:
    """Returns whether anything is wrong, as a status."""
    parser = argparse.ArgumentParser(prog='python -m accelerators', description=__doc__)
    parser.add_argument('--targets', nargs='+', choices=TARGETS, default=TARGETS)
    parser.add_argument('--jobs', type=int, default=2, help='processes that compile side by side')
    parser.add_argument('--page', type=Path, default=PAGE, help='where to write the table')
    given = parser.parse_args()
    start, targets = time.monotonic(), tuple(given.targets)
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context('spawn')) as pool:
        gpus = [target for target in targets if target in GPUS]
        passed = [pool.submit(escaped, target) for target in targets]
        passed += [pool.submit(escaped_windows, target) for target in gpus[:1]]
        checked = [pool.submit(check, make, targets) for make in all_cases()]
        launched = [pool.submit(check_windows, target) for target in gpus]
        print('| ' + ' | '.join(HEADER) + ' |', flush=True)
        rows = []
        for future in checked:
            found = future.result()
            rows += found
            print(*map(as_line, found), sep='\n', flush=True)
        windows = [row for future in launched for row in future.result()]
        print(*map(window_line, windows), sep='\n', flush=True)
        missed = [line for future in passed for line in future.result()]
    faults = [as_line(row) for row in rows if row.faults]
    faults += [window_line(row) for row in windows if row.faults]
    print(
        f'==> compiled {len(rows)} kernels and {len(windows)} windows in '
        f'{time.monotonic() - start:.0f} s, {len(faults)} are faulty; of {len(BROKEN)} kernels and '
        f'a window that are broken on purpose, {len(missed)} escaped'
    )
    print(*faults, *missed, sep='\n')
    if targets == TARGETS:
        given.page.write_text(document(rows, windows), 'utf-8')
        print(f'==> written: {os.path.relpath(given.page)}')
    return bool(faults or missed)


if __name__ == '__main__':
    sys.exit(main())
