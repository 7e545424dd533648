"""``trace_step`` on a TPU, for ops whose trace is an outer product.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.outer.mosaic`.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..outer import mosaic
from ..outer.operands import entry_points
from ..planes import Plane
from . import reference

__all__ = ['redundant', 'supports', 'trace_step']

supports, trace_step = entry_points(mosaic, reference.trace_step, window=False)


def redundant(
    rules: Any,
    x: jax.Array,
    D: Sequence[Sequence[Plane]],
    f: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    seed: Any = None,
    live: Any = None,
    w: Plane = None,
    total: Any = None,
) -> str | None:
    """Why plain JAX moves as few bytes as the kernel, or None."""
    if seed is None and sum(e is not None for e in trace) <= 2:
        return 'XLA moves as few bytes for up to two planes'
    return None
