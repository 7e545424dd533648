"""How the eligibility trace of an op is built, decayed and read."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

__all__ = ['TraceRules', 'Weights']

Weights = dict[str, jax.Array]


@dataclass(frozen=True)
class TraceRules:
    """How an op's eligibility trace is built, decayed and read.

    A *plane* is an array shaped like the op's output ``y`` (with more leading batch axes than ``y``
    where an op without input feeds a batched group). A *trace* is a dictionary with one array per
    trainable input, in the coordinates of the weight as the op receives it, not summed over batch.
    With ``J = d y / d weight`` at one position, in the notation of the design (section 3), for one
    state plane:

    ============= ======================================= =================================
    rule          formula                                 where it is used
    ============= ======================================= =================================
    ``outer``     ``plane (x) x = plane * J(x)``          ``f_t (x) x_t``
    ``outer_sum`` ``sum_t plane_t (x) x_t``               ``sum_t x_t (x) u_t`` of a window
    ``decay``     ``plane * trace``                       ``D_t e_{t-1}`` and ``P_0 e_0``
    ``contract``  ``sum_batch plane * trace``             ``L_t D_t e_{t-1}`` and ``nu_1 e_0``
    ============= ======================================= =================================

    A zero trace has the shapes of ``jax.eval_shape(outer, x, plane)``.

    Parameters
    ----------
    outer : Callable
        ``(x, plane, **params) -> trace``.
    outer_sum : Callable
        ``(x, plane, **params) -> trace``, both with a leading time axis that is summed over.
    decay : Callable
        ``(plane, trace, **params) -> trace``.
    contract : Callable
        ``(plane, trace, **params) -> weights``, arrays shaped like the weights.
    is_outer : bool
        Whether ``x`` and plane have the same leading axes, the trace of ``'weight'`` is the outer
        product of their last ones, and every other entry of the trace is the plane itself: that
        is what kernels are made for. Planes and traces that are uniform over outputs then have
        size one in their last axis, which the rules must broadcast.
    groups : int
        With ``is_outer``: how many axes (0 or 1) in front of the last ones number groups, each with
        a weight of its own. All axes in front of them share the weights.
    entries : Callable, optional
        ``(**params) -> (rows, cols)``: for an op whose weight has entries ``p`` at some places of
        a matrix. ``x`` and plane have the same leading axes, the trace of ``'weight'`` is
        ``x[..., rows[p]] * plane[..., cols[p]]``, decays by ``plane[..., cols[p]]``, and every
        other entry of the trace is the plane itself: there are kernels for that too.
    operand, plane_view : Callable, optional
        ``(x, **params)`` and ``(plane, **params)``: what the rules, and kernels, are given in place
        of ``x`` and of planes. For an op that is an outer product in other coordinates than its
        own: after a transposition, say. They take any number of leading axes.
    keeps_input : bool
        Whether a plane of the trace that is uniform over positions is kept as a filtered input,
        and made into a trace where it is read. The input and the output must have their examples
        in front, the trace of ``'weight'`` must be linear in ``x``, and every other entry the
        plane itself.
    weight_view : Callable, optional
        ``(weights, **params) -> weights``: the weights, those that are given, in the coordinates
        of the trace. What ``contract`` gives is pulled back through it.
    takes_weights : bool
        Whether ``outer`` and ``outer_sum`` take the weights too, as a keyword ``weights``: for an
        op that is not linear in them. Its primitive then has ``needs_weights``.

    Notes
    -----
    ``params`` are the parameters of the op's equation and its auxiliary operands by name, as
    everywhere in :class:`ETPPrimitive`.
    """

    outer: Callable[..., Weights]
    outer_sum: Callable[..., Weights]
    decay: Callable[..., Weights]
    contract: Callable[..., Weights]
    is_outer: bool = False
    groups: int = 0
    entries: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    keeps_input: bool = False
    operand: Callable[..., jax.Array] | None = None
    plane_view: Callable[..., jax.Array] | None = None
    weight_view: Callable[..., Weights] | None = None
    takes_weights: bool = False
