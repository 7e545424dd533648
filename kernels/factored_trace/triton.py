"""``factored_trace`` and ``smooth`` on a GPU: the steps of the reference, on state in registers.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.triton`.
"""

from collections.abc import Sequence

import jax

from ..planes import Plane
from ..scan import triton
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
    return fixed(decay) or mixed(start) or triton.supports(as_scan(D, f, start, decay))


def supports_smooth(x: jax.Array, start: jax.Array, decay: float) -> str | None:
    """Why there is no kernel of ``smooth`` for these operands, or None."""
    return fixed(decay) or triton.supports(smooth_as_scan(x, start, decay))


def factored_trace(
    D: Sequence[Sequence[Plane]],
    f: Sequence[Sequence[Plane]],
    start: Sequence[Sequence[jax.Array]],
    decay: float,
    *,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], ...]:
    """See :func:`braintrace_fast.kernels.factored_trace.factored_trace`."""
    return triton.run(as_scan(D, f, start, decay), interpret=interpret)[1]


def smooth(x: jax.Array, start: jax.Array, decay: float, *, interpret: bool = False) -> jax.Array:
    """See :func:`braintrace_fast.kernels.factored_trace.smooth`."""
    return triton.run(smooth_as_scan(x, start, decay), interpret=interpret)[1]
