"""Runs the examples of a checkout of the reference, on it and here."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .alias import NAME, TARGET
from .example_sources import Script, read_example, with_import
from .run import BUILD, FLAGS, ROOT, VERSION

__all__ = ['examples_section', 'run_examples']

RECORD = Path(__file__).parent / 'examples.json'
"""How each file ended, for the page."""
CACHE = BUILD / 'examples.json'
"""How each file ended on the reference, by what it contains."""
ERROR = re.compile(r'[\w.]*(Error|Exception|Exit|Interrupt)\b')
PATH = re.compile(r"\s*\(?'?/[^\s']+")
OUT_OF_TIME = re.compile(r'still running after (\d+) s')
LEAVE_OUT = ('.ipynb_checkpoints', 'tests')

Row = dict[str, str]
"""`file`, `form` (full or short), `there`, `here` and `note`."""


def run_examples(
    checkout: Path,
    parts: Sequence[str] = (),
    *,
    workers: int = 2,
    seconds: int = 240,
    short: bool = False,
) -> list[Row]:
    """How every example ended on the reference, and how here.

    Parameters
    ----------
    checkout : Path
        A folder. All notebooks with code are run, and all scripts in folders named like examples
        that say what happens when they are run.
    parts : sequence of str
        Parts of names of files; by default all are run.
    workers : int
        How many run side by side.
    seconds : int
        The limit of one run. Where the reference takes longer, the `main` of the script is run
        with small arguments.
    short : bool
        Whether that is done at once, for scripts that were not run on the reference before.
    """
    files = [file for file in _examples(checkout) if not parts or any(p in file for p in parts)]
    for target in (NAME, TARGET):
        _mirror(checkout, target)
    cache = json.loads(CACHE.read_text('utf-8')) if CACHE.exists() else {}
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(_compare, checkout, file, seconds, short, cache) for file in files]
        rows = [job.result() for job in jobs]
    _record(rows, partial=bool(parts))
    return rows


def _examples(checkout: Path) -> list[str]:
    paths = (path.relative_to(checkout) for path in sorted(checkout.rglob('*')))
    return [str(path) for path in paths if _is_example(checkout, path)]


def _is_example(checkout: Path, path: Path) -> bool:
    if any(part in LEAVE_OUT for part in path.parts):
        return False
    if path.suffix == '.ipynb':
        return bool(read_example(checkout / path, here=False).cells[1])
    folders = any('example' in part for part in path.parts[:-1])
    return path.suffix == '.py' and folders and '__main__' in (checkout / path).read_text('utf-8')


def _mirror(checkout: Path, target: str) -> None:
    """Write what scripts import from beside them, with its imports changed as well."""
    folder = _folder(target)
    shutil.rmtree(folder, ignore_errors=True)
    for file in checkout.rglob('*.py'):
        if any('example' in part for part in file.relative_to(checkout).parts[:-1]):
            copy = folder / file.relative_to(checkout)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text('utf-8')
            copy.write_text(with_import(text) if target == TARGET else text, 'utf-8')


def _folder(target: str) -> Path:
    return BUILD / 'examples' / target


def _compare(checkout: Path, file: str, seconds: int, short: bool, cache: dict[str, Row]) -> Row:
    content = hashlib.sha256((checkout / file).read_bytes()).hexdigest()[:16]
    known = cache.get(file, {})
    if (known.get('content'), known.get('version')) != (content, VERSION) or _ran_out(
        known, seconds
    ):
        form, there = _on_reference(checkout / file, file, seconds, short or bool(known))
        known = {'content': content, 'version': VERSION, 'form': form, 'there': there}
        cache[file] = known
        CACHE.write_text(json.dumps(cache, indent=1), 'utf-8')
    form, there = known['form'], known['there']
    script = read_example(checkout / file, here=True)
    start = time.monotonic()
    runs = there == 'passed' or OUT_OF_TIME.fullmatch(there)
    here = _run(script, file, TARGET, form, seconds) if runs else 'not run'
    row = {'file': file, 'form': form, 'there': there, 'here': here, 'note': _note(script)}
    print(file, form, there, here, f'{time.monotonic() - start:.0f} s', sep='  ', flush=True)
    return row


def _ran_out(known: Row, seconds: int) -> bool:
    """Whether a run on the reference ended at a limit of less time than there is now."""
    limit = OUT_OF_TIME.fullmatch(known.get('there', ''))
    return limit is not None and int(limit[1]) < seconds


def _on_reference(path: Path, file: str, seconds: int, short: bool) -> tuple[str, str]:
    """In which form a script is run, and how that ended on the reference."""
    script = read_example(path, here=False)
    there = '' if short else _run(script, file, NAME, 'full', seconds)
    if script.short is not None and (short or OUT_OF_TIME.fullmatch(there)):
        return 'short', _run(script, file, NAME, 'short', seconds)
    return 'full', there or _run(script, file, NAME, 'full', seconds)


def _note(script: Script) -> str:
    left_out, cells = script.cells
    if not left_out:
        return ''
    names = ', '.join(f'`{name.removeprefix(NAME + ".")}`' for name in script.missing)
    return f'{left_out} of {cells} cells left out, which need the private {names}'


def _run(script: Script, file: str, target: str, form: str, seconds: int) -> str:
    """How a script ended, run in the folder that it lies in."""
    path = _folder(target) / Path(file).with_suffix('.py')
    path = path if form == 'full' else path.with_name(f'short-{path.name}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script.text if form == 'full' else script.short or '', 'utf-8')
    environment = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(BUILD / 'cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.05',
        'XLA_FLAGS': FLAGS,
        'MPLBACKEND': 'Agg',
        'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
    }
    with path.with_suffix('.log').open('w') as log:
        try:
            ended = subprocess.run(
                [sys.executable, str(path)],
                cwd=path.parent,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f'still running after {seconds} s'
    if ended.returncode == 0:
        return 'passed'
    lines = path.with_suffix('.log').read_text('utf-8').splitlines()
    errors = [line for line in lines if ERROR.match(line)] or lines or ['no message']
    return 'failed: ' + PATH.sub('', errors[-1])[:120]


def _record(rows: Sequence[Row], *, partial: bool) -> None:
    """Keep the rows for the page; those of files that were not run stay."""
    old = json.loads(RECORD.read_text('utf-8')) if partial and RECORD.exists() else []
    by_file = {row['file']: row for row in [*old, *rows]}
    RECORD.write_text(json.dumps([by_file[f] for f in sorted(by_file)], indent=1) + '\n', 'utf-8')


def examples_section() -> str:
    """The part of the page on examples, empty if none was run."""
    if not RECORD.exists():
        return ''
    rows: list[Row] = json.loads(RECORD.read_text('utf-8'))
    run = [row for row in rows if row['there'] == 'passed']
    scripts = [row for row in run if row['file'].endswith('.py')]
    notebooks = [row for row in run if row['file'].endswith('.ipynb')]
    counts = [f'{_passed(scripts)} of {len(scripts)} scripts']
    counts += [f'{_passed(notebooks)} of {len(notebooks)} notebooks']
    table = [['file', 'form', 'on braintrace', 'here', 'note'], ['---'] * 5]
    table += [list(map(_cell, _cells(row))) for row in rows]
    lines = [f'| {" | ".join(cells)} |' for cells in table]
    return '\n'.join([SECTION.format(' and '.join(counts)), *lines, ''])


SECTION = """## Its examples

With nothing but their imports changed,
{} that run on braintrace run here to their end
(`make parity EXAMPLES=checkout`), but for cells of notebooks that use private names. What fails on
braintrace itself does not count; mostly it needs a data set, or a package that is not installed.
*Short* means that `main` was called with small arguments, to save time.
"""


def _passed(rows: Sequence[Row]) -> int:
    return sum(row['here'] == 'passed' for row in rows)


def _cells(row: Mapping[str, str]) -> list[str]:
    return [f'`{row["file"]}`', row['form'], row['there'], row['here'], row['note']]


def _cell(text: str) -> str:
    return text.replace('|', '\\|')
