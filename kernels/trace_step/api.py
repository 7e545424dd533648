"""The checked entry point of ``trace_step``."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..planes import Plane, check_planes

__all__ = ['trace_step']


def trace_step(
    rules: Any,
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
        What the loss says of the states before the step, per plane.
    seed : int array, optional
        Rounds what is stored in bfloat16 up or down at random, with the right mean: one number for
        each time that a trace is written.
    live : bool array, optional
        A flag; if it is not set, the old trace counts as zero, whatever it holds.
    w : array, optional
        What the loss says of the op's output, counted with what the signal reads.
    total : dict, optional
        The weights' gradient by ``w`` and ``x``, given with ``w``. A kernel makes the weight's
        itself, so that nobody else has to.
    backend : Backend
        What to run it with.

    Returns
    -------
    trace : tuple
        Per plane, the trace after the step in the type of the old; None if it is not kept.
    read : dict or None
        What the signal reads, shaped like the weights, and ``total``, of whose entries it has no
        more; None if there is neither.
    """
    check_planes('trace_step', len(trace), D=D, f=f, signal=signal)

    def bind(function: Any) -> Any:
        return functools.partial(function, rules)

    return dispatch.run('trace_step', backend, bind, x, D, f, trace, signal, seed, live, w, total)
