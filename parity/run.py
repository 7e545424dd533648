"""Runs the reference's test files, each in a process of its own."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ['Outcome', 'fetch', 'run']

ROOT = Path(__file__).parents[1]
BUILD = ROOT / 'build' / 'parity'
VERSION = '0.2.6'
FLAGS = '--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
ATTEMPTS = 4
"""How often a file is taken up again after its process ended early."""

Outcome = dict[str, str]
"""`outcome` (passed, failed, crashed, skipped or internal) and `why`."""


def fetch() -> Path:
    """The unpacked source distribution of the reference, downloaded if it is not there yet."""
    sources = BUILD / f'braintrace-{VERSION}'
    if not sources.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        archive = BUILD / f'braintrace-{VERSION}.tar.gz'
        if not archive.exists():
            wanted = ['--no-deps', '--no-binary', ':all:', f'braintrace=={VERSION}']
            command = [sys.executable, '-m', 'pip', 'download', '--quiet', *wanted]
            subprocess.run([*command, '--dest', str(BUILD)], check=True)
        with tarfile.open(archive) as packed:
            packed.extractall(BUILD, filter='data')
    return sources


def run(
    sources: Path,
    files: Sequence[Path],
    *,
    workers: int = 2,
    seconds: int = 120,
    only: set[str] | None = None,
    reference: bool = False,
) -> dict[str, Outcome]:
    """By test, how it ended.

    Parameters
    ----------
    sources : Path
        The unpacked source distribution.
    files : sequence of Path
        The test files to run.
    workers : int
        How many processes run side by side.
    seconds : int
        The limit of one test.
    only : set of str, optional
        The tests to run; by default all that ask for public behaviour.
    reference : bool
        Whether the reference itself is tested.
    """
    folder = BUILD / ('reference' if reference else 'outcomes')
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(BUILD / 'cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.05',
        'JAX_ENABLE_X64': '0',
        'MPLBACKEND': 'Agg',
        'XLA_FLAGS': FLAGS,
        'PYTHONPATH': str(sources) if reference else str(ROOT),
        'PARITY_SOURCES': str(sources),
        'PARITY_SECONDS': str(seconds),
    }
    if reference:
        environment['PARITY_TARGET'] = 'reference'
        environment['PYTHONPATH'] = os.pathsep.join([str(sources), str(ROOT)])
    if only is not None:
        chosen = folder / 'only.json'
        chosen.write_text(json.dumps(sorted(only)), 'utf-8')
        environment['PARITY_ONLY'] = str(chosen)
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(_run_file, sources, file, folder, environment) for file in files]
        return {test: row for job in jobs for test, row in job.result().items()}


def _run_file(
    sources: Path, file: Path, folder: Path, environment: dict[str, str]
) -> dict[str, Outcome]:
    relative = str(file.relative_to(sources))
    name = relative.removesuffix('.py').replace(os.sep, '.')
    outcomes = folder / f'{name}.jsonl'
    outcomes.unlink(missing_ok=True)
    options = [
        '-p',
        'parity.plugin',
        '-p',
        'no:cacheprovider',
        '-p',
        'no:xdist',
        '-q',
        '--tb=short',
    ]
    command = [sys.executable, '-m', 'pytest', *options, '-c', 'pyproject.toml', relative]
    environment = {**environment, 'PARITY_OUTCOMES': str(outcomes)}
    with (folder / f'{name}.log').open('w') as log:
        for _ in range(ATTEMPTS):
            ended = subprocess.run(
                command, cwd=sources, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            if ended.returncode in (0, 1, 2, 5):
                break
    found = _read(outcomes)
    counts = {kind: sum(row['outcome'] == kind for row in found.values()) for kind in KINDS}
    print(relative, *(f'{n} {kind}' for kind, n in counts.items() if n), sep='  ', flush=True)
    return found


KINDS = ('passed', 'failed', 'crashed', 'skipped', 'internal')


def _read(outcomes: Path) -> dict[str, Outcome]:
    """The last row of each test counts."""
    found: dict[str, Outcome] = {}
    lines = outcomes.read_text('utf-8').splitlines() if outcomes.exists() else []
    for row in map(json.loads, lines):
        found[row['test']] = {'outcome': row['outcome'], 'why': row['why']}
    return found
