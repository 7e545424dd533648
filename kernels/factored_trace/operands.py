"""``factored_trace`` and ``smooth`` as scans that a kernel can run."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import jax

from ..planes import Plane
from ..scan.window import Scan, mixed
from .reference import recurrence, smoothing

__all__ = ['as_scan', 'entry_points', 'smooth_as_scan']


def as_scan(
    D: Sequence[Sequence[Plane]],
    f: Sequence[Sequence[Plane]],
    start: Sequence[Sequence[jax.Array]],
    decay: float,
) -> Scan:
    """The forward walk of ``fhat``."""
    body, init = recurrence(float(decay)), tuple(map(tuple, start))
    return Scan('factored_trace', body, init, (D, f), start[0][0].dtype)


def smooth_as_scan(x: jax.Array, left: jax.Array | None, decay: float, reverse: bool) -> Scan:
    """The walk of what a step of ``xhat`` leaves to the next."""
    init, dtype = (0.0, x.dtype) if left is None else (left, left.dtype)
    return Scan('smooth', smoothing(float(decay)), init, x, dtype, reverse=reverse)


def _fixed(decay: Any) -> str | None:
    """Why a decay that is computed has no kernel."""
    if isinstance(decay, Real):
        return None
    return f'the decay is of {type(decay).__name__}, and kernels take it as a number'


def entry_points(platform: Any) -> tuple[Callable[..., Any], ...]:
    """``supports``, ``factored_trace``, ``supports_smooth`` and ``smooth`` on a platform."""

    def supports(
        D: Sequence[Sequence[Plane]],
        f: Sequence[Sequence[Plane]],
        start: Sequence[Sequence[jax.Array]],
        decay: float,
    ) -> str | None:
        """Why there is no kernel of ``factored_trace`` for these operands, or None."""
        return _fixed(decay) or mixed(start) or platform.supports(as_scan(D, f, start, decay))

    def factored_trace(
        D: Sequence[Sequence[Plane]],
        f: Sequence[Sequence[Plane]],
        start: Sequence[Sequence[jax.Array]],
        decay: float,
        *,
        interpret: Any = False,
    ) -> tuple[Any, Any]:
        """See :func:`braintrace_fast.kernels.factored_trace.factored_trace`."""
        return platform.run(as_scan(D, f, start, decay), interpret=interpret)

    def supports_smooth(
        x: jax.Array, left: jax.Array | None, decay: float, reverse: bool = False
    ) -> str | None:
        """Why there is no kernel of ``smooth`` for these operands, or None."""
        return _fixed(decay) or platform.supports(smooth_as_scan(x, left, decay, reverse))

    def smooth(
        x: jax.Array,
        left: jax.Array | None,
        decay: float,
        reverse: bool = False,
        *,
        interpret: Any = False,
    ) -> tuple[jax.Array, jax.Array]:
        """See :func:`braintrace_fast.kernels.factored_trace.smooth`."""
        return platform.run(smooth_as_scan(x, left, decay, reverse), interpret=interpret)

    return supports, factored_trace, supports_smooth, smooth
