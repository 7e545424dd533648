"""``factored_trace`` and ``smooth`` on a TPU: the steps of the reference, on state in VMEM.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.mosaic`.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..planes import Plane
from ..scan import mosaic
from ..scan.window import mixed
from .operands import as_scan, fixed, smooth_as_scan

__all__ = ['factored_trace', 'smooth', 'supports', 'supports_smooth']


def supports(
    D: Sequence[Sequence[Plane]],
    f: Sequence[Sequence[Plane]],
    start: Sequence[Sequence[jax.Array]],
    decay: float,
) -> str | None:
    """Why there is no kernel of ``factored_trace`` for these operands, or None."""
    return fixed(decay) or mixed(start) or mosaic.supports(as_scan(D, f, start, decay))


def supports_smooth(x: jax.Array, start: jax.Array, decay: float) -> str | None:
    """Why there is no kernel of ``smooth`` for these operands, or None."""
    return fixed(decay) or mosaic.supports(smooth_as_scan(x, start, decay))


def factored_trace(
    D: Sequence[Sequence[Plane]],
    f: Sequence[Sequence[Plane]],
    start: Sequence[Sequence[jax.Array]],
    decay: float,
    *,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], ...]:
    """See :func:`braintrace_fast.kernels.factored_trace.factored_trace`."""
    return mosaic.run(as_scan(D, f, start, decay), interpret=interpret)[1]


def smooth(x: jax.Array, start: jax.Array, decay: float, *, interpret: Any = False) -> jax.Array:
    """See :func:`braintrace_fast.kernels.factored_trace.smooth`."""
    return mosaic.run(smooth_as_scan(x, start, decay), interpret=interpret)[1]
