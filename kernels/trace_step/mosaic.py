"""``trace_step`` on a TPU, for ops whose trace is an outer product.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.outer.mosaic`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from ..outer import mosaic
from ..outer.operands import reason, run
from ..planes import Plane
from . import reference

__all__ = ['redundant', 'supports', 'trace_step']


def supports(
    rules: Any,
    x: jax.Array | None,
    D: Sequence[Sequence[Plane]],
    f: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    seed: Any = None,
    live: Any = None,
) -> str | None:
    """Why there is no kernel for these operands, with whatever seed and flag; or None."""
    return reason(mosaic.supports, rules, x, D, f, trace, signal, window=False)


def redundant(
    rules: Any,
    x: jax.Array,
    D: Sequence[Sequence[Plane]],
    f: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    seed: Any = None,
    live: Any = None,
) -> str | None:
    """Why plain JAX moves as few bytes as the kernel, or None."""
    if seed is None and sum(e is not None for e in trace) <= 3:
        return 'XLA moves as few bytes for up to three planes'
    return None


def trace_step(
    rules: Any,
    x: jax.Array,
    D: Sequence[Sequence[Plane]],
    f: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    seed: Any = None,
    live: Any = None,
    *,
    interpret: Any = False,
) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_step.trace_step`.

    With a ``seed``, planes of bfloat16 are rounded stochastically.
    """
    launch = partial(mosaic.launch, name='trace_step', interpret=interpret)
    return run(launch, reference.trace_step, x, D, f, trace, signal, seed, live, window=False)
