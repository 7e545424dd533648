"""Names that a module still serves, each time with a warning that says what to use instead."""

import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ['Superseded', 'superseded']


class Superseded(NamedTuple):
    """Where a deprecated name is found, what to use instead, and since when."""

    home: str
    successor: str
    since: str = ''


def superseded(module: str, name: str, names: Mapping[str, Superseded]) -> Any:
    """What a module's ``__getattr__`` returns: a deprecated name, with a ``DeprecationWarning``."""
    if name not in names:
        raise AttributeError(f'module {module!r} has no attribute {name!r}')
    home, successor, since = names[name]
    # `from module import name` looks whether the name is there, and then gets it.
    if sys._getframe(2).f_globals.get('__name__') != 'importlib._bootstrap':
        warnings.warn(
            f'{module}.{name} is deprecated{since and " since " + since}, and will be removed. '
            f'Use {successor} instead.',
            DeprecationWarning,
            stacklevel=3,
        )
    return getattr(importlib.import_module(home), name)
