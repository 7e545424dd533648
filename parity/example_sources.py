"""The reference's examples as scripts that import this library instead: nothing else is changed.

What they take from private modules of the reference is taken from where this library keeps it. The
cells of a notebook that need a private name without a counterpart are left out, and with them
those that use what such a cell defines. The same is done on the reference, for a checkout that
is of another version than the one that is installed.
"""

import ast
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .alias import NAME, TARGET
from .counterparts import has_counterpart

__all__ = ['Script', 'read_example', 'with_import']

SHELL = ('%', '!', '?')
SMALL = {
    'n_epochs': 1,
    'n_batches_per_epoch': 2,
    'n_batches': 1,
    'num_batch': 4,
    'batch_size': 4,
    'n_rec': 8,
    'num_hidden': 8,
    'n_layer': 1,
    'n_seq': 8,
    'data_length': 4,
    't_sample': 10.0,
    't_delay': 10.0,
    't_test': 10.0,
}
"""Arguments of an example's ``main`` that make it short, in the manner of its smoke tests."""


@dataclass(frozen=True)
class Script:
    """The code of an example.

    Attributes
    ----------
    text : str
        The code.
    short : str, optional
        The same with a call of its ``main`` with small arguments, if it has a ``main``.
    missing : tuple of str
        Private names that are not there, or have no counterpart here.
    cells : tuple of int
        How many cells of a notebook are left out, and of how many.
    """

    text: str
    short: str | None = None
    missing: tuple[str, ...] = ()
    cells: tuple[int, int] = (0, 0)


def read_example(file: Path, *, here: bool) -> Script:
    """The code of a script or a notebook, for this library or for the reference."""
    text = file.read_text('utf-8')
    if file.suffix != '.ipynb':
        text = with_import(text) if here else text
        return Script(text, _shortened(text))
    cells = [''.join(c['source']) for c in json.loads(text)['cells'] if c['cell_type'] == 'code']
    cells = [_without_shell(cell) for cell in cells]
    kept, missing = _runnable(cells, has_counterpart if here else _on_reference)
    text = '\n\n'.join(with_import(cell) if here else cell for cell in kept)
    return Script(text, None, missing, (len(cells) - len(kept), len(cells)))


def _without_shell(cell: str) -> str:
    lines = cell.splitlines()
    return '\n'.join('pass' if line.lstrip().startswith(SHELL) else line for line in lines)


def _shortened(text: str) -> str | None:
    """All before the block that runs a script, and a call of its ``main`` with small arguments."""
    tree = ast.parse(text)
    mains = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == 'main'
    ]
    if not mains:
        return None
    starts = [node.lineno for node in tree.body if isinstance(node, ast.If) and _is_start(node)]
    lines = text.splitlines()[: starts[0] - 1] if starts else text.splitlines()
    arguments = mains[0].args
    takes = [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]]
    given = ', '.join(f'{name}={value!r}' for name, value in SMALL.items() if name in takes)
    return '\n'.join([*lines, f'main({given})', ''])


def _is_start(node: ast.If) -> bool:
    return any(isinstance(n, ast.Name) and n.id == '__name__' for n in ast.walk(node.test))


def with_import(source: str) -> str:
    """The same code with its imports of the reference changed."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            new = [_import(alias) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            new = _import_from(node)
        else:
            continue
        if any(TARGET in line or 'counterpart(' in line for line in new):
            span = slice(node.lineno - 1, node.end_lineno)
            blank = [''] * (len(lines[span]) - 1)
            lines[span] = [' ' * node.col_offset + '; '.join(new), *blank]
    return '\n'.join(lines) + '\n'


def _import(alias: ast.alias) -> str:
    if alias.name.split('.')[0] != NAME:
        return f'import {alias.name}' + (f' as {alias.asname}' if alias.asname else '')
    target = TARGET + alias.name[len(NAME) :]
    if alias.asname or alias.name == NAME:
        return f'import {target} as {alias.asname or NAME}'
    return f'import {target}; import {TARGET} as {NAME}'


def _import_from(node: ast.ImportFrom) -> list[str]:
    module = node.module or ''
    if node.level or module.split('.')[0] != NAME:
        return []
    lines = []
    for alias in node.names:
        name, local = alias.name, alias.asname or alias.name
        if _is_private(module, name):
            lines += ['from parity.counterparts import counterpart']
            lines += [f'{local} = counterpart({module!r}, {name!r})']
        else:
            lines.append(f'from {TARGET + module[len(NAME) :]} import {name} as {local}')
    return lines


def _is_private(module: str, name: str) -> bool:
    return any(part.startswith('_') for part in [*module.split('.'), name])


def _on_reference(module: str, name: str) -> bool:
    """Whether the installed reference has a name: a checkout may be of another version."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


def _runnable(
    cells: Sequence[str], has: Callable[[str, str], bool]
) -> tuple[list[str], tuple[str, ...]]:
    """The cells that can be run, and the private names that the others lack."""
    missing: list[str] = []
    lost: set[str] = set()
    known: set[str] = set()
    kept = []
    for cell in cells:
        tree = ast.parse(cell)
        private = [f'{m}.{n}' for m, n in _private_imports(tree) if not has(m, n)]
        bound = _bound(tree)
        if private or (_read(tree) - bound) & lost:
            missing += private
            lost |= bound - known
        else:
            lost -= bound
            known |= bound
            kept.append(cell)
    return kept, tuple(missing)


def _private_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == NAME:
            for alias in node.names:
                if _is_private(node.module or '', alias.name):
                    yield node.module or '', alias.name


def _read(tree: ast.AST) -> set[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    """The names that code binds, be it inside of a function."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name.split('.')[0] for alias in node.names)
    return found
