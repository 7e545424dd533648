"""What the kernels share, and what differs between the versions of Pallas."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax

__all__ = ['result', 'split']


def result(shape: tuple[int, ...], dtype: Any, operands: Iterable[jax.Array]) -> Any:
    """The type of a kernel's result; inside ``shard_map`` it varies wherever an operand does."""
    varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in operands))
    manual = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def split(refs: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """The refs of a kernel, cut into as many as each part has; what is left comes last."""
    ends = list(accumulate(counts))
    return [refs[a:b] for a, b in pairwise([0, *ends, len(refs)])]
