"""``python -m tests.fuzz SECONDS``: random programs until the time is over; any number by hand.

Each failure is printed as a program, after what is wrong with it, and kept under ``build/fuzz``.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

from tests.fuzz.programs import FEATURES
from tests.fuzz.run import run, todays_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('seconds', type=float, nargs='?', default=60)
    parser.add_argument('--seed', type=int, help='repeat one program; by default a row from today')
    parser.add_argument('--without', nargs='*', default=[], choices=FEATURES, metavar='FEATURE')
    options = parser.parse_args()
    jax.config.update('jax_disable_most_optimizations', True)
    first, count = options.seed, 1
    if first is None:
        first, count = todays_seed(), None
    features = [name for name in FEATURES if name not in options.without]
    folder = Path('build/fuzz')
    folder.mkdir(parents=True, exist_ok=True)
    result = run(first, options.seconds, folder, count, features, report=print)
    for failure in result.failures:
        print(f'\n{"=" * 100}\n{failure}')
    print(f'\n{result}')
    return bool(result.failures)


if __name__ == '__main__':
    sys.exit(main())
