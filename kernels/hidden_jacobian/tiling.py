"""How positions are laid out for kernels."""

import math
from collections.abc import Sequence

__all__ = ['as_rows']


def as_rows(varshape: Sequence[int], flat: bool = False) -> tuple[int, int]:
    """Positions as rows and columns, the columns being the last axis; as one row if ``flat``."""
    if flat or not varshape:
        return 1, math.prod(varshape)
    return math.prod(varshape[:-1]), varshape[-1]
