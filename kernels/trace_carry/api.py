"""The checked entry point of ``trace_carry``."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..outer.operands import TraceOperands
from ..planes import OpRules, Plane, check_planes
from ..trace_step import trace_step
from . import blocked

__all__ = ['trace_carry']


# The signature repeats that of `trace_step`: a window of one step is one.
def trace_carry(
    rules: OpRules,
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
    rules, trace, signal, seed, live, total, backend
        As :func:`braintrace_fast.kernels.trace_step.trace_step` takes them, with the rule
        ``outer_sum`` in place of ``outer``; the trace and the signal are those at the entry.
    x : array or None
        The op's inputs, of shape ``(K, ...)``; None for an op of weights alone.
    P : sequence of sequence of array or None
        How the group's exit depends on its entry, as ``adjoint_scan`` gives it.
    u : sequence of array or None
        Per plane, how the exit depends on the op's output at each step.
    w : array, optional
        The cotangent of the op's output at each step, which is counted with what the signal reads.
    overwrite : bool
        Whether nobody needs the old trace any more. If somebody does, such as the caller of a
        compiled function that takes it as an argument, it would have to be copied first.

    Returns
    -------
    tuple
        The trace at the exit and what is read, as of ``trace_step``.
    """
    check_planes('trace_carry', len(trace), P=P, u=u, signal=signal)
    if x is not None and len(x) == 1:
        f, now = jax.tree.map(lambda a: a[0], (u, w))
        options: Any = dict(seed=seed, live=live, w=now, total=total, backend=backend)
        return trace_step(rules, x[0], P, f, trace, signal, **options)
    operands = TraceOperands(rules, x, P, u, trace, signal, seed, live, w, total)
    on_cpu = functools.partial(blocked.trace_carry, overwrite=overwrite)
    return dispatch.run(operands.op('carry'), backend, operands, cpu=on_cpu)
