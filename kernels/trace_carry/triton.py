"""``trace_carry`` on a GPU, for ops whose trace is an outer product.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.outer.triton`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from ..outer import triton
from ..outer.operands import reason, run
from ..planes import Plane
from . import reference

__all__ = ['supports', 'trace_carry']


def supports(
    rules: Any,
    x: jax.Array | None,
    P: Sequence[Sequence[Plane]],
    u: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    seed: Any = None,
    live: Any = None,
) -> str | None:
    """Why there is no kernel for these operands, with whatever seed and flag; or None."""
    return reason(triton.supports, rules, x, P, u, trace, signal, window=True)


def trace_carry(
    rules: Any,
    x: jax.Array,
    P: Sequence[Sequence[Plane]],
    u: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    seed: Any = None,
    live: Any = None,
    *,
    interpret: bool = False,
) -> tuple[tuple[Any, ...], Any]:
    """See :func:`braintrace_fast.kernels.trace_carry.trace_carry`.

    With a ``seed``, planes of bfloat16 are rounded stochastically.
    """
    launch = partial(triton.launch, name='trace_carry', interpret=interpret)
    return run(launch, reference.trace_carry, x, P, u, trace, signal, seed, live, window=True)
