"""Which tests of the reference are about its internals, read off their sources.

The rule: a test is about internals if it, or a function, class, fixture or constant of a test file
that it uses,

1. names an object of a private module that is not public and has no counterpart here, or the list
   of its names (``__all__``), or
2. names an attribute with one leading underscore that the reference's sources define and ours do
   not, be it to read, to call, to override or to patch it.
"""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .alias import NAME, is_test_source
from .counterparts import has_counterpart, own_attributes, private_attributes
from .readers import READERS

__all__ = ['internal_names']

SET_UP = ('setup_method', 'setup_class', 'setUp', 'setUpClass', 'setup_module')


@dataclass
class _Source:
    """A module of tests: its definitions by name, and where its imported names come from."""

    module: str
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)


@functools.cache
def _source(root: Path, module: str) -> _Source:
    path = root.joinpath(*module.split('.'))
    file = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    tree = ast.parse(file.read_text('utf-8'))
    source = _Source(module, imported=dict(_imports(tree, module)))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            source.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.If | ast.With | ast.For):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    source.definitions[part.id] = node
    return source


def _imports(tree: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """Local name and dotted name of everything of the reference that a module imports."""
    package = module.split('.')[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split('.')[0] == NAME:
                    yield (name.asname, name.name) if name.asname else (NAME, NAME)
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else []
            origin = '.'.join([*anchor, *filter(None, [node.module])])
            if origin.split('.')[0] == NAME:
                for name in node.names:
                    yield name.asname or name.name, f'{origin}.{name.name}'


@functools.cache
def _hidden_attributes(root: Path) -> frozenset[str]:
    return private_attributes(root / NAME) - own_attributes()


def _is_module(root: Path, dotted: str) -> bool:
    path = root.joinpath(*dotted.split('.'))
    return path.is_dir() or path.with_suffix('.py').is_file()


def _chain(node: ast.expr) -> list[str] | None:
    """The parts of ``a.b.c``, or None if it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *parts[::-1]] if isinstance(node, ast.Name) else None


class _Reader:
    """Collects the internal names that a definition uses, with all that it uses in turn."""

    def __init__(self, root: Path, subject: str = '') -> None:
        self.root, self.subject = root, subject
        self.found: set[str] = set()
        self.seen: set[tuple[str, str]] = set()

    def read(self, source: _Source, node: ast.AST, own: frozenset[str] = frozenset()) -> None:
        local = {**source.imported, **dict(_imports(node, source.module))}
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute | ast.Name) and (chain := _chain(part)):
                self._name(source, local, chain)
            if isinstance(part, ast.arg):
                self._name(source, local, [part.arg])
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                self._attribute(part.name, own | {part.name} if part is node else own)
            elif isinstance(part, ast.Attribute):
                self._attribute(part.attr, own)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                self._attribute(part.value.rpartition('.')[2], own)

    def _attribute(self, name: str, own: frozenset[str]) -> None:
        if name in _hidden_attributes(self.root) and name not in own:
            self.found.add(f'.{name}')

    def _name(self, source: _Source, local: dict[str, str], chain: list[str]) -> None:
        first, *rest = chain
        if first in local:
            self._dotted([*local[first].split('.'), *rest])
        elif first in source.definitions and (source.module, first) not in self.seen:
            self.seen.add((source.module, first))
            self.read(source, source.definitions[first], frozenset({first}))

    def _dotted(self, parts: list[str]) -> None:
        depth = 1
        while depth < len(parts) and _is_module(self.root, '.'.join(parts[: depth + 1])):
            depth += 1
        module, names = '.'.join(parts[:depth]), parts[depth:]
        if not names:
            return
        if is_test_source(module):
            other = _source(self.root, module)
            self._name(other, other.imported, [names[0]])
        elif any(part.startswith('_') for part in parts[1 : depth + 1]):
            if not self._is_offered(module, names[0]):
                self.found.add(f'{module}.{names[0]}')

    def _is_offered(self, module: str, name: str) -> bool:
        """Whether a test may use a name of a private module."""
        if name.startswith('__'):
            return name != '__all__'
        is_tested = module == self.subject and f'{module}.{name}' in READERS
        return has_counterpart(module, name) and not is_tested


def internal_names(root: Path, module: str, classes: tuple[str, ...], test: str) -> list[str]:
    """The internal names that a test uses, sorted; an attribute begins with a full stop.

    Parameters
    ----------
    root : Path
        The unpacked source distribution.
    module : str
        The module of the test.
    classes : tuple of str
        The classes that it is a method of, outermost first.
    test : str
        The name of its function.
    """
    source, reader = _source(root, module), _Reader(root, module.removesuffix('_test'))
    scope: list[ast.stmt] = list(source.definitions.values())
    own: set[str] = set()
    for name in classes:
        owner = next(n for n in scope if isinstance(n, ast.ClassDef) and n.name == name)
        own |= {n.name for n in ast.walk(owner) if isinstance(n, ast.FunctionDef)}
        scope = owner.body
        used = _methods_used(owner, test)
        for node in scope:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name in used:
                reader.read(source, node, frozenset(own))
    for node in scope:
        if isinstance(node, ast.FunctionDef) and node.name == test:
            reader.read(source, node, frozenset(own | {test}))
    return sorted(reader.found)


def _methods_used(owner: ast.ClassDef, test: str) -> set[str]:
    """The methods of a class that a test calls or has as fixtures, and those they use in turn."""
    methods = {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef)}
    used: set[str] = set()
    waiting = [test, *SET_UP]
    while waiting:
        name = waiting.pop()
        if name in used or name not in methods:
            continue
        used.add(name)
        for part in ast.walk(methods[name]):
            if isinstance(part, ast.Attribute):
                waiting.append(part.attr)
            elif isinstance(part, ast.arg):
                waiting.append(part.arg)
    return used - {test}
