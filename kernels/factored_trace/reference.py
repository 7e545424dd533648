"""The definition of ``factored_trace`` in plain JAX, which is also what runs without a kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..planes import add, times, walk
from .operands import FactoredOperands, SmoothOperands

__all__ = ['factored_trace', 'recurrence', 'smooth', 'smoothing']


def smooth(operands: SmoothOperands) -> tuple[jax.Array, jax.Array]:
    """See :func:`braintrace_fast.kernels.factored_trace.smooth`."""
    x, left = operands.x, operands.left
    start = jnp.zeros(x.shape[1:], x.dtype) if left is None else left
    return lax.scan(smoothing(operands.decay), start, x, reverse=operands.reverse)


def factored_trace(operands: FactoredOperands) -> tuple[Any, Any]:
    """See :func:`braintrace_fast.kernels.factored_trace.factored_trace`."""
    start = tuple(map(tuple, operands.start))
    return walk(recurrence(operands.decay), start, (operands.D, operands.f))


def smoothing(decay: float) -> Callable[[Any, Any], Any]:
    """One step of :func:`smooth`, from what the step before left, for ``lax.scan``."""

    def body(left: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = left + now.astype(left.dtype)
        return decay * new, new

    return body


def recurrence(decay: float) -> Callable[[Any, Any], Any]:
    """One step of :func:`factored_trace`, from ``fhat`` and ``(D, f)``, for ``lax.scan``."""

    def body(old: Any, step: Any) -> Any:
        D, f = step
        new = tuple(advanced(D, *op) for op in zip(f, old, strict=True))
        return new, new

    def advanced(D: Any, f: Any, old: Any) -> tuple[jax.Array, ...]:
        new = []
        for s, row in enumerate(D):
            past, now = add(map(times, row, old)), f[s]
            total = add(
                [
                    None if past is None else decay * past,
                    None if now is None else (1 - decay) * now,
                ]
            )
            total = jnp.zeros_like(old[s]) if total is None else total
            new.append(jnp.broadcast_to(total, old[s].shape))
        return tuple(new)

    return body
