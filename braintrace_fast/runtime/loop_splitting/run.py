"""Run a split loop: once, ahead, in order, at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._compat import Var
from .equations import evaluate
from .stages import SplitLoop
from .sums import invariant_value

__all__ = ['Recorded', 'Show', 'record', 'results', 'run']

Arrays = list[jax.Array]
Show = Callable[[jax.Array, Arrays], None]
"""Called in order with the number of a step and its flat ``ys``."""


class Recorded(NamedTuple):
    """What is left of the steps that ran in order, for what is computed at once.

    Attributes
    ----------
    kept, foreseen : list of array
        What the steps computed, and what was computed ahead of them: ``(steps, ...)``.
    states : list of array
        Values of states before every step, and after the last: ``(steps + 1, ...)``.
    """

    kept: Arrays
    foreseen: Arrays
    states: Arrays

    def cut(self, start: Any, steps: int) -> 'Recorded':
        """The same for some of the steps."""

        def some(arrays: Arrays, steps: int) -> Arrays:
            return [lax.dynamic_slice_in_dim(a, start, steps) for a in arrays]

        return Recorded(
            some(self.kept, steps), some(self.foreseen, steps), some(self.states, steps + 1)
        )


def run(split: SplitLoop, carry: Arrays, xs: Arrays, show: Show) -> tuple[Arrays, Arrays, Arrays]:
    """The last carried values, the ``ys`` and the sums of the terms, all flat.

    Those ``ys`` that are invariant have a leading axis of 1.
    """
    last, recorded = record(split, carry, xs, show)
    return last, *results(split, carry, xs, recorded)


def record(split: SplitLoop, carry: Arrays, xs: Arrays, show: Show) -> tuple[Arrays, Recorded]:
    """The last carried values, and what is left for the rest."""
    whole = _whole(split, _invariant_values(split, carry))
    foreseen = _ahead(split, whole, xs)
    last, kept, states = _in_order(split, whole, carry, [*xs, *foreseen], show)
    return last, Recorded(kept, foreseen, states)


def results(
    split: SplitLoop, carry: Arrays, xs: Arrays, recorded: Recorded
) -> tuple[Arrays, Arrays]:
    """The ``ys`` and the sums of the terms of steps that were recorded.

    Of the carried values, only those matter that no step changes.
    """
    length, invariant = xs[0].shape[0], _invariant_values(split, carry)
    at_once = _at_once(split, _whole(split, invariant), recorded, xs)
    moved = dict(zip(split.results.at_once, at_once, strict=True))
    ys = [
        invariant_value(v, invariant)[None] if split.invariant.has(v) else moved[v]
        for v in split.body.ys
    ]
    return ys, [s.evaluate(moved, invariant, length) for s in split.results.sums]


def _whole(split: SplitLoop, invariant: dict[Var, jax.Array]) -> Callable[[], Arrays]:
    return lambda: [jnp.broadcast_to(invariant[v], v.aval.shape) for v in split.read]


def _invariant_values(split: SplitLoop, carry: Arrays) -> dict[Var, jax.Array]:
    """What is computed once; of uniform arrays, one number."""
    body = split.body
    values = dict(zip((*body.constvars, *body.old), (*body.constants, *carry), strict=True))
    computed = evaluate(split.first, body.given, split.once, [values[v] for v in body.given])
    return {
        v: lax.slice(a, (0,) * a.ndim, (1,) * a.ndim) if v in split.invariant.uniform else a
        for v, a in zip(split.once, computed, strict=True)
    }


def _ahead(split: SplitLoop, whole: Callable[[], Arrays], xs: Arrays) -> Arrays:
    schedule = split.schedule

    def step(xs: Arrays) -> Arrays:
        inputs = [*split.read, *split.body.xs]
        return evaluate(schedule.ahead, inputs, schedule.foreseen, [*whole(), *xs])

    return jax.vmap(step, axis_size=xs[0].shape[0])(xs)


def _in_order(
    split: SplitLoop, whole: Callable[[], Arrays], carry: Arrays, xs: Arrays, show: Show
) -> tuple[Arrays, Arrays, Arrays]:
    """The last carried values, what was kept of all steps, and states with one step more."""
    body, kept, places = split.body, split.deferred.kept, split.deferred.states
    inputs = [*split.read, *body.moving_old, *body.xs, *split.schedule.foreseen]
    outs = [*body.moving_new, *kept, *split.results.shown]
    moving, length = body.moving, xs[0].shape[0]

    def step(carried: Any, xs: Arrays) -> Any:
        number, old, states = carried
        computed = evaluate(split.schedule.in_order, inputs, outs, [*whole(), *old, *xs])
        new, end = computed[: len(moving)], len(moving) + len(kept)
        if split.results.shown:
            show(number, computed[end:])
        by_place = dict(zip(moving, new, strict=True))
        states = [
            lax.dynamic_update_index_in_dim(all_steps, by_place[place], number + 1, 0)
            for place, all_steps in zip(places, states, strict=True)
        ]
        return (number + 1, new, states), computed[len(moving) : end]

    room = [jnp.broadcast_to(carry[i], (length + 1, *carry[i].shape)) for i in places]
    start = jnp.zeros((), jnp.int32), [carry[i] for i in moving], room
    (_, ends, states), stacked = lax.scan(step, start, xs)
    last = dict(zip(moving, ends, strict=True))
    return [last.get(i, value) for i, value in enumerate(carry)], stacked, states


def _at_once(
    split: SplitLoop, whole: Callable[[], Arrays], recorded: Recorded, xs: Arrays
) -> Arrays:
    body, deferred, length = split.body, split.deferred, xs[0].shape[0]
    old, new = ([side[i] for i in deferred.states] for side in (body.old, body.new))
    inputs = [*split.read, *deferred.kept, *old, *new, *body.xs, *split.schedule.foreseen]

    def step(kept: Arrays, xs: Arrays) -> Arrays:
        return evaluate(deferred.eqns, inputs, split.results.at_once, [*whole(), *kept, *xs])

    before = [lax.slice_in_dim(a, 0, length) for a in recorded.states]
    after = [lax.slice_in_dim(a, 1, length + 1) for a in recorded.states]
    mapped = [*recorded.kept, *before, *after], [*xs, *recorded.foreseen]
    return jax.vmap(step, axis_size=length)(*mapped)
