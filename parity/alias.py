"""The import alias: ``braintrace`` and its private modules, made of this library.

Test files and the helpers that only tests import are loaded from the source distribution. All other
private modules are stand-ins, whose names are this library's where it has them, else `Internal`.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .counterparts import counterpart

__all__ = ['Internal', 'install']

NAME = 'braintrace'
TARGET = 'braintrace_fast'
HELPERS = ('_testing', 'tests', 'op_rule_oracle')
"""Parts of module names that hold nothing but helpers of tests."""


def is_test_source(module: str) -> bool:
    """Whether a module of the source distribution is a test or a helper of tests."""
    parts = module.split('.')
    return parts[-1].endswith('_test') or any(part in HELPERS for part in parts)


class Internal:
    """A private name of the reference that has no counterpart: a test that uses it is skipped.

    While files are imported and collected nothing runs yet: then it may be passed around, called
    and subscripted, with the same as the result.
    """

    in_test = False

    def __init__(self, name: str) -> None:
        self.__dict__['name'] = name

    def _use(self, *args: Any, **kwargs: Any) -> 'Internal':
        if Internal.in_test:
            pytest.skip(f'internal: {self.__dict__["name"]}')
        return self

    __call__ = __getitem__ = _use

    def _take_apart(self, *args: Any) -> Any:
        self._use()
        return iter((self,))

    __iter__ = _take_apart

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or not Internal.in_test:
            raise AttributeError(name)
        return self._use()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        self._use()
        return ()

    def __repr__(self) -> str:
        return f'Internal({self.__dict__["name"]!r})'


class _StandIn(ModuleType):
    """A private module: what it defines or imports is made of this library."""

    def __init__(self, name: str, source: Path) -> None:
        super().__init__(name)
        self.__dict__['_words'] = frozenset(re.findall(r'\w+', source.read_text('utf-8')))

    def __getattr__(self, name: str) -> Any:
        if name == '__all__':  # of what it exports, that which is public
            public = importlib.import_module(TARGET).__all__
            return [one for one in public if one in self.__dict__['_words']]
        if name.startswith('__') or name not in self.__dict__['_words']:
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        found = counterpart(self.__name__, name)
        return Internal(f'{self.__name__}.{name}') if found is None else found


class _Alias(ModuleType):
    """A public module of this library under the reference's name."""

    def __init__(self, name: str, target: ModuleType) -> None:
        super().__init__(name, target.__doc__)
        self.__dict__['_target'] = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') and not name.startswith('__'):
            found = counterpart(self.__name__, name)
            return Internal(f'{self.__name__}.{name}') if found is None else found
        return getattr(self.__dict__['_target'], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__['_target'])


class _Finder:
    """Makes the modules; what is a test is left to the finders that read files."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        folder = self.sources.joinpath(*name.split('.'))
        known = folder.is_dir() or folder.with_suffix('.py').is_file()
        if name.split('.')[0] != NAME or is_test_source(name) or not known:
            return None
        spec = ModuleSpec(name, self, is_package=folder.is_dir())
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(folder))
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if any(part.startswith('_') for part in spec.name.split('.')):
            folder = self.sources.joinpath(*spec.name.split('.'))
            file = folder / '__init__.py' if folder.is_dir() else folder.with_suffix('.py')
            return _StandIn(spec.name, file)
        module = _Alias(spec.name, importlib.import_module(TARGET + spec.name[len(NAME) :]))
        module.__path__ = spec.submodule_search_locations or []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: all is looked up on demand."""


def install(sources: Path) -> None:
    """Let ``import braintrace`` mean this library from now on.

    Parameters
    ----------
    sources : Path
        The unpacked source distribution: the folder that holds ``braintrace/``.
    """
    for name in [name for name in sys.modules if name.split('.')[0] == NAME]:
        raise RuntimeError(f'{name} is imported already: it would be tested in place of {TARGET}.')
    sys.meta_path.insert(0, _Finder(sources))
    importlib.import_module(NAME)
