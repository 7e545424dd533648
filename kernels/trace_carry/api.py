"""The checked entry point of ``trace_carry``."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..planes import Plane, check_planes
from ..trace_step import trace_step
from . import blocked

__all__ = ['trace_carry']


def trace_carry(
    rules: Any,
    x: jax.Array | None,
    P: Sequence[Sequence[Plane]],
    u: Sequence[Plane],
    trace: Sequence[Any],
    signal: Sequence[Plane] | None = None,
    *,
    seed: jax.Array | None = None,
    live: jax.Array | None = None,
    w: Plane = None,
    total: Any = None,
    overwrite: bool = True,
    backend: Backend = PLAIN,
) -> tuple[tuple[Any, ...], Any]:
    """The trace of one op after a window of K steps, and what a signal reads of the one before.

    ``e_K[s] = sum_q P[s][q] e_0[q] + sum_t u_t[s] (x) x_t`` and
    ``sum_t w_t (x) x_t + sum_q signal[q] . e_0[q]``

    Parameters
    ----------
    rules : object with ``decay``, ``outer_sum`` and ``contract``
        The op's trace rules.
    x : array or None
        The op's inputs, of shape ``(K, ...)``; None for an op of weights alone.
    P : sequence of sequence of array or None
        How the group's exit depends on its entry, as ``adjoint_scan`` gives it.
    u : sequence of array or None
        Per plane, how the exit depends on the op's output at each step.
    trace : sequence
        The trace at the entry, per plane; None for planes that are not kept.
    signal : sequence of array or None, optional
        What the loss says of the states at the entry, per plane.
    seed : int array, optional
        Rounds what is stored in bfloat16 up or down at random, with the right mean: one number for
        each time that a trace is written.
    live : bool array, optional
        A flag; if it is not set, the old trace counts as zero, whatever it holds.
    w : array, optional
        What the loss says of the op's output at each step, counted with what the signal reads.
    total : dict, optional
        The weights' gradient by ``w`` and ``x``, given with ``w``. A kernel makes the weight's
        itself, so that nobody else has to.
    overwrite : bool
        Whether nobody wants the old trace any more. If somebody does, such as the caller of a
        compiled function that takes it as an argument, it would have to be copied first.
    backend : Backend
        What to run it with.

    Returns
    -------
    trace : tuple
        Per plane, the trace at the exit in the type of the old; None if it is not kept.
    read : dict or None
        What the signal reads, shaped like the weights, and ``total``, of whose entries it has no
        more; None if there is neither.
    """
    check_planes('trace_carry', len(trace), P=P, u=u, signal=signal)
    if x is not None and len(x) == 1:
        f = [None if p is None else p[0] for p in u]
        now = None if w is None else w[0]
        options: Any = dict(seed=seed, live=live, w=now, total=total, backend=backend)
        return trace_step(rules, x[0], P, f, trace, signal, **options)

    def bind(function: Any) -> Any:
        return functools.partial(function, rules)

    on_cpu = functools.partial(blocked.trace_carry, rules, overwrite=overwrite)
    operands = x, P, u, trace, signal, seed, live, w, total
    return dispatch.run('trace_carry', backend, bind, *operands, cpu=on_cpu)
