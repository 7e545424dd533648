"""How the compiler's records are shown."""

from typing import Any

import brainstate

__all__ = ['pretty']


def pretty(record: Any) -> str:
    """The fields of a named tuple, one per line."""
    mapping = brainstate.util.PrettyMapping(record._asdict(), type_name=type(record).__name__)
    return repr(mapping)
