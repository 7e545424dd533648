"""What this library has in place of a private name of the reference, found by one rule.

A name that is public in the reference is this library's public name, whichever private module a
test takes it from. Any other name has a counterpart if a module of this library defines that name
at its top level, or `RENAMED` says where.
"""

import ast
import functools
import importlib
from pathlib import Path
from typing import Any

from .readers import READERS

__all__ = ['counterpart', 'has_counterpart', 'own_attributes', 'private_attributes']

LIBRARY = Path(__file__).parents[1] / 'braintrace_fast'
RENAMED: dict[str, str] = {**READERS}
"""By ``module.name`` of the reference, ``module:name`` of this library."""


@functools.cache
def _definitions() -> dict[str, str]:
    """By name, the module of this library that defines it at its top level."""
    found: dict[str, str] = {}
    for file in sorted(LIBRARY.rglob('*.py')):
        module = '.'.join(file.relative_to(LIBRARY.parent).with_suffix('').parts)
        for node in ast.parse(file.read_text('utf-8')).body:
            for name in _defined(node):
                found.setdefault(name, module.removesuffix('.__init__'))
    return found


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _place(module: str, name: str) -> str | None:
    """``module:name`` of this library, or None."""
    if (renamed := RENAMED.get(f'{module}.{name}')) is not None:
        return renamed
    if module == 'braintrace._compatible_imports' and name in _compat_names():
        return f'braintrace_fast._compat:{name}'
    public = importlib.import_module('braintrace_fast')
    for package in (public, public.nn):
        if name in package.__all__:
            return f'{package.__name__}:{name}'
    if name in public.DEPRECATED:
        return f'braintrace_fast:{name}'
    home = _definitions().get(name)
    return None if home is None else f'{home}:{name}'


@functools.cache
def _compat_names() -> frozenset[str]:
    return frozenset(importlib.import_module('braintrace_fast._compat').__all__)


def has_counterpart(module: str, name: str) -> bool:
    """Whether `counterpart` finds something."""
    return _place(module, name) is not None


def counterpart(module: str, name: str) -> Any:
    """Our object for a name of a private module of the reference, or None."""
    place = _place(module, name)
    if place is None:
        return None
    home, _, attribute = place.partition(':')
    return getattr(importlib.import_module(home), attribute)


def private_attributes(folder: Path, tests: bool = False) -> frozenset[str]:
    """Names with one leading underscore that sources define: methods, attributes, functions."""
    found: set[str] = set()
    for file in sorted(folder.rglob('*.py')):
        if tests or not file.stem.endswith('_test'):
            for node in ast.walk(ast.parse(file.read_text('utf-8'))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    found.update(_defined(node))
    return frozenset(name for name in found if name.startswith('_') and not name.startswith('__'))


@functools.cache
def own_attributes() -> frozenset[str]:
    """The same of this library."""
    return private_attributes(LIBRARY)
