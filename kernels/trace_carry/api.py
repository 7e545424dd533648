"""The checked entry point of ``trace_carry``."""

from collections.abc import Sequence
from typing import Any

import jax

from ..planes import Plane
from . import reference

__all__ = ['trace_carry']


def trace_carry(
    rules: Any,
    x: jax.Array | None,
    P: Sequence[Sequence[Plane]],
    u: Sequence[Plane],
    trace: Sequence[Any] | None,
    kept: Sequence[bool],
) -> tuple[Any, ...]:
    """The trace of one op after a window of K steps.

    ``e_K[s] = sum_q P[s][q] e_0[q] + sum_t u_t[s] (x) x_t``

    Parameters
    ----------
    rules : object with ``decay(plane, trace)`` and ``outer_sum(x, planes)``
        The op's trace rules.
    x : array or None
        The op's inputs, of shape ``(K, ...)``; None for an op of weights alone.
    P : sequence of sequence of array or None
        How the group's exit depends on its entry, as ``adjoint_scan`` gives it.
    u : sequence of array or None
        Per plane, how the exit depends on the op's output at each step.
    trace : sequence, or None
        The trace at the entry, per plane; None for a trace of zeros.
    kept : sequence of bool
        Which planes of the trace are kept.

    Returns
    -------
    tuple
        Per plane, the trace at the exit; None for planes that are not kept, or that stay zero.
    """
    for name, found in (('P', P), ('u', u), *([] if trace is None else [('trace', trace)])):
        if len(found) != len(kept):
            raise ValueError(f'trace_carry: {name} has {len(found)} planes, expected {len(kept)}.')
    return reference.trace_carry(rules, x, P, u, trace, kept)
