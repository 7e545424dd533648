"""``factored_trace`` and ``smooth`` as scans that a kernel can run."""

from collections.abc import Callable
from numbers import Real
from typing import Any

import jax

from ..scan.window import Scan, mixed
from .operands import FactoredOperands, SmoothOperands
from .reference import recurrence, smoothing

__all__ = ['as_scan', 'entry_points', 'smooth_as_scan']


def as_scan(operands: FactoredOperands) -> Scan:
    """The forward walk of ``fhat``."""
    body, init = recurrence(float(operands.decay)), tuple(map(tuple, operands.start))
    return Scan('factored_trace', body, init, (operands.D, operands.f), init[0][0].dtype)


def smooth_as_scan(operands: SmoothOperands) -> Scan:
    """The walk of what a step of ``xhat`` leaves to the next."""
    x, left = operands.x, operands.left
    init, dtype = (0.0, x.dtype) if left is None else (left, left.dtype)
    body = smoothing(float(operands.decay))
    return Scan('smooth', body, init, x, dtype, reverse=operands.reverse)


def _computed(decay: Any) -> str | None:
    """Why a decay that is computed has no kernel; None if it is a number."""
    if isinstance(decay, Real):
        return None
    return f'the decay is of {type(decay).__name__}, and kernels take it as a number'


def entry_points(platform: Any) -> tuple[Callable[..., Any], ...]:
    """``supports``, ``factored_trace``, ``supports_smooth`` and ``smooth`` on a platform."""

    def supports(operands: FactoredOperands) -> str | None:
        """Why there is no kernel of ``factored_trace`` for these operands, or None."""
        reason = _computed(operands.decay) or mixed(operands.start)
        return reason or platform.supports(as_scan(operands))

    def factored_trace(operands: FactoredOperands, *, interpret: Any = False) -> tuple[Any, Any]:
        """See :func:`braintrace_fast.kernels.factored_trace.factored_trace`."""
        return platform.run(as_scan(operands), interpret=interpret)

    def supports_smooth(operands: SmoothOperands) -> str | None:
        """Why there is no kernel of ``smooth`` for these operands, or None."""
        return _computed(operands.decay) or platform.supports(smooth_as_scan(operands))

    def smooth(operands: SmoothOperands, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
        """See :func:`braintrace_fast.kernels.factored_trace.smooth`."""
        return platform.run(smooth_as_scan(operands), interpret=interpret)

    return supports, factored_trace, supports_smooth, smooth
