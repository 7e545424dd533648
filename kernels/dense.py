"""Planes as whole arrays of float64: what the naive definitions of the ops compute with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ['dense']


def dense(planes: Any, shape: Sequence[int]) -> np.ndarray:
    """Nested lists of planes as one array, each plane of a shape; zero where a plane is None.

    Examples
    --------
    >>> import numpy as np
    >>> from braintrace_fast.kernels.dense import dense
    >>> dense([[np.ones(1), None], [None, np.arange(2)]], (2,)).tolist()
    [[[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]
    """
    if planes is None:
        return np.zeros(shape)
    if isinstance(planes, list | tuple):
        return np.stack([dense(plane, shape) for plane in planes])
    return np.broadcast_to(np.asarray(planes, np.float64), shape)
