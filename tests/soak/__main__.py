"""Kills a learner at random moments until it has seen a whole stream, and compares.

``python -m tests.soak --steps 20000`` runs by hand what the slow tests run for a minute. A failure
is repeated, but for the moments of the kills, by the seed that is printed.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RULES = ('d_rtrl', 'pp_prop')
GROWTH = 16 * 2**20
"""Bytes by which a process may grow; the arrays of all states take a hundredth of it."""


def start(rule: str, steps: int, result: Path, *options: object) -> subprocess.Popen:
    command = [sys.executable, '-m', 'tests.soak.worker', '--rule', rule, '--steps', steps]
    environment = {'JAX_PLATFORMS': 'cpu'} | os.environ
    return subprocess.Popen(
        [str(part) for part in (*command, '--result', result, *options)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def follow(worker: subprocess.Popen, kill_after: int | None, rng: random.Random, show: bool) -> str:
    """Read what a worker prints, and kill it after so many lines; returns the last one."""
    last = ''
    for count, line in enumerate(worker.stdout):
        last = line.strip()
        if show and last.startswith('at'):
            print(f'\r{last:12}', end='', flush=True)
        if count == kill_after:
            time.sleep(rng.random() * 0.01)
            worker.kill()
    worker.stdout.close()
    worker.wait()
    return last


def soak(rule: str, steps: int, kills: int, seed: int, folder: Path, show: bool = False) -> None:
    """Run a stream at once and with kills, and fail if memory grew or the results differ."""
    rng = random.Random(f'{rule} {seed}')
    whole, found, path = folder / 'whole.npz', folder / 'found.npz', folder / 'learner.npz'
    check_end(follow(start(rule, steps, whole), None, rng, show), rule, seed, show)
    killed = 0
    while not found.exists():
        options = '--path', path, '--seed', rng.randrange(10**6)
        lines = max(2 * steps // 32 // (kills + 1), 2)
        kill_after = rng.randrange(lines) if killed < kills else None
        last = follow(start(rule, steps, found, *options), kill_after, rng, show)
        if show:
            print(f'\r{rule}, seed {seed}: killed {killed} times; last: {last}')
        if kill_after is None:
            check_end(last, rule, seed, show)
        killed += 1
    with np.load(whole) as a, np.load(found) as b:
        same = [np.array_equal(a[k], b[k], equal_nan=True) for k in a.files]
        if a.files != b.files or not all(same) or not all(np.isfinite(a[k]).all() for k in a.files):
            raise AssertionError(f'{rule}, seed {seed}: arrays differ or are not finite: {same}')
    rest = sorted(p.name for p in folder.iterdir())
    if rest != ['found.npz', 'learner.npz', 'whole.npz']:
        raise AssertionError(f'{rule}, seed {seed}: files were left: {rest}')


def check_end(last: str, rule: str, seed: int, show: bool) -> None:
    if not last.startswith('grown'):
        raise AssertionError(f'{rule}, seed {seed}: a worker failed after {last!r}; see above.')
    grown = int(last.split()[1])
    if show:
        print(f'\r{rule}, seed {seed}: ran to the end, memory grew by {grown / 2**20:.1f} MB')
    if grown > GROWTH:
        raise AssertionError(f'{rule}, seed {seed}: memory grew by {grown} bytes.')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--steps', type=int, default=20_000)
    parser.add_argument('--kills', type=int, default=10)
    parser.add_argument('--seed', type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    for name in RULES:
        with tempfile.TemporaryDirectory() as scratch:
            soak(name, args.steps, args.kills, args.seed, Path(scratch), show=True)
    print(f'seed {args.seed}: bit by bit the same')
