"""Runs the examples of a checkout of the reference, on it and here."""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .run import BUILD, ROOT

__all__ = ['run_examples']

SHELL = ('%', '!', '?')


def run_examples(checkout: Path, *, workers: int = 2, seconds: int = 600) -> list[list[str]]:
    """Rows of file, how it ended on the reference, and how here.

    Parameters
    ----------
    checkout : Path
        A folder; all scripts below folders named like examples, and all notebooks, are run.
    workers : int
        How many run side by side.
    seconds : int
        The limit of one.
    """
    files = sorted(path for path in checkout.rglob('*') if _is_example(path.relative_to(checkout)))
    with ThreadPoolExecutor(workers) as pool:
        rows = list(pool.map(lambda file: _compare(checkout, file, seconds), files))
    (BUILD / 'examples.json').write_text(json.dumps(rows, indent=1), 'utf-8')
    return rows


def _is_example(path: Path) -> bool:
    if path.suffix == '.ipynb':
        return '.ipynb_checkpoints' not in path.parts
    folders = any('example' in part for part in path.parts[:-1])
    return path.suffix == '.py' and folders and not path.stem.endswith('_test')


def _compare(checkout: Path, file: Path, seconds: int) -> list[str]:
    there = _run(file, 'braintrace', seconds)
    here = _run(file, 'braintrace_fast', seconds) if there == 'passed' else 'not run'
    row = [str(file.relative_to(checkout)), there, here]
    print(*row, sep='  ', flush=True)
    return row


def source_of(file: Path) -> str:
    """The code of a script or notebook; commands of the notebook's shell are left out."""
    text = file.read_text('utf-8')
    if file.suffix != '.ipynb':
        return text
    cells = [cell for cell in json.loads(text)['cells'] if cell['cell_type'] == 'code']
    lines = [line for cell in cells for line in [*''.join(cell['source']).splitlines(), '']]
    return '\n'.join('pass' if line.startswith(SHELL) else line for line in lines)


def with_import(source: str, target: str) -> str:
    """The same code with its import line changed, and nothing else."""
    lines = []
    for line in source.splitlines():
        bare = line.strip()
        if bare in ('import braintrace', 'import braintrace as braintrace'):
            line = line.replace(bare, f'import {target} as braintrace')
        elif bare.startswith(('import braintrace as ', 'from braintrace ', 'from braintrace.')):
            line = line.replace('braintrace', target, 1)
        lines.append(line)
    return '\n'.join(lines) + '\n'


def _run(file: Path, target: str, seconds: int) -> str:
    """How a script ended, from the folder that it lies in, which is first on the path."""
    environment = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'MPLBACKEND': 'Agg',
        'PYTHONPATH': os.pathsep.join([str(file.parent), str(ROOT)]),
    }
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f'{file.stem}.py'
        script.write_text(with_import(source_of(file), target), 'utf-8')
        try:
            ended = subprocess.run(
                [sys.executable, str(script)],
                cwd=file.parent,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f'still running after {seconds} s'
    if ended.returncode == 0:
        return 'passed'
    return 'failed: ' + (ended.stderr.strip().splitlines() or ['no message'])[-1][:200]
