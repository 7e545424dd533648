"""``factored_trace`` and ``smooth`` as scans that a kernel can run."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax

from ..planes import Plane
from ..scan.window import Scan
from .reference import recurrence, smoothing

__all__ = ['as_scan', 'fixed', 'smooth_as_scan']


def as_scan(
    D: Sequence[Sequence[Plane]],
    f: Sequence[Sequence[Plane]],
    start: Sequence[Sequence[jax.Array]],
    decay: float,
) -> Scan:
    """The forward walk of ``fhat``."""
    body, init = recurrence(float(decay)), tuple(map(tuple, start))
    return Scan('factored_trace', body, init, (D, f), start[0][0].dtype, final=False)


def smooth_as_scan(x: jax.Array, start: jax.Array, decay: float) -> Scan:
    """The forward walk of ``xhat``."""
    return Scan('smooth', smoothing(float(decay)), start, x, start.dtype, final=False)


def fixed(decay: Any) -> str | None:
    """Why a decay that is computed has no kernel."""
    if isinstance(decay, Real):
        return None
    return f'the decay is of {type(decay).__name__}, and kernels take it as a number'
