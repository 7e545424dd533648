"""The checked entry point of ``trace_step``."""

from collections.abc import Sequence
from typing import Any

import jax

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..outer.operands import TraceOperands
from ..planes import OpRules, Plane, check_planes

__all__ = ['trace_step']


def trace_step(
    rules: OpRules,
    x: jax.Array | None,
    D: Sequence[Sequence[Plane]],
    f: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    *,
    seed: jax.Array | None = None,
    live: jax.Array | None = None,
    w: Plane = None,
    total: Any = None,
    backend: Backend = PLAIN,
) -> tuple[tuple[Any, ...], Any]:
    """The trace of one op after a step, and what a signal reads of the trace before.

    ``e'[s] = sum_q D[s][q] e[q] + f[s] (x) x`` and ``w (x) x + sum_q signal[q] . e[q]``

    Parameters
    ----------
    rules : object with ``outer(x, plane)``, ``decay(plane, trace)`` and ``contract(plane, trace)``
        The op's trace rules.
    x : array or None
        The op's input; None for an op of weights alone.
    D : sequence of sequence of array or None
        ``D[s][q]``; None where it is structurally zero.
    f : sequence of array or None
        ``f[s]``, likewise.
    trace : sequence
        The trace before the step, per plane; None for planes that are not kept.
    signal : sequence of array or None, optional
        The cotangent of the states before the step, per plane.
    seed : int array, optional
        Rounds what is stored in bfloat16 up or down at random, with the right mean. Each time that
        a trace is written takes another one.
    live : bool array, optional
        A flag; if it is not set, the old trace counts as zero, whatever it holds.
    w : array, optional
        The cotangent of the op's output, whose product with ``x`` is added to what is read.
    total : dict, optional
        That product, shaped like the weights, given with ``w``. A kernel computes the weight's
        entry itself, so that XLA can drop it.
    backend : Backend
        What to run it with.

    Returns
    -------
    trace : tuple
        Per plane, the trace after the step in the type of the old; None if it is not kept.
    read : dict or None
        What the signal reads plus ``total``, shaped like the weights, with the entries of
        ``total`` if that is given; None if there is neither.
    """
    check_planes('trace_step', len(trace), D=D, f=f, signal=signal)
    operands = TraceOperands(rules, x, D, f, trace, signal, seed, live, w, total)
    return dispatch.run(operands.op('step'), backend, operands)
