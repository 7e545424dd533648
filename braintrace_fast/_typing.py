"""Names for the types that pass between the layers."""

from typing import Any

__all__ = ['Path', 'PyTree']

Path = tuple[Any, ...]
"""Where a state lives in its module: attribute names and list indices."""

PyTree = Any
