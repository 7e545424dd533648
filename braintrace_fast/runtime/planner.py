"""How many steps a window has: its memory against a budget, and how many steps are worth it."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from .._typing import PyTree
from ..errors import NotSupportedError
from .memory_budget import default_budget, parse_bytes, show_bytes
from .window_memory import Count, count_window, tree_bytes

__all__ = [
    'Count',
    'Plan',
    'Traits',
    'count_window',
    'default_budget',
    'outlook',
    'parse_bytes',
    'plan_windows',
    'show_bytes',
    'split',
    'tree_bytes',
]

ENOUGH = 100
"""Steps of a window that carries a trace. Touching the trace costs as much as a few steps, whatever
the sizes: longer windows are a few per cent faster at best, and take memory in proportion."""

ENOUGH_IF_SMALL = 50
"""The same where the trace is small. Longer windows are no faster, and slower once their arrays do
not fit into caches: even where no trace is carried, one window of all steps does not pay."""

LITTLE = 2**22
"""A window may have more steps than that as long as they take so few bytes: in small windows, the
overhead dominates."""

GENEROUS = 2
"""So many times what a step computes and what is carried is an upper bound of what a window takes,
without counting."""

AT_ONCE = 2
"""Fresh sequences of so many times more steps than pay in a window still run in a single one. More
would be slower for want of caches, and take memory in proportion."""

CHEAP = 1
"""A trace of at most so many times the bytes that a step computes is cheaper to carry than a second
forward pass is."""

CACHED = 2**24
"""On CPUs, steps that go backwards are worked through in blocks of about so many bytes: those stay
in caches, and new pages of memory cost time. All steps run forwards first."""

RECORDED, LONG = 2**26, 1000
"""On CPUs, no more bytes than this are kept of steps that ran forwards, and of no more steps: of
longer sequences there is a second forward pass, and memory that does not grow."""

FEW = 10
"""Steps of a block that pay, however many bytes they take."""

LATITUDE = 1.5
"""How many times more windows are taken if all then have the same length."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How sequences were cut into windows, and why.

    Attributes
    ----------
    windows : tuple of tuple of int
        How many windows there are of which length: ``((count, steps), ...)``.
    reason : str
        What decided.
    budget : int
        The bytes that a window may take.
    count : Count or None
        The memory of a window, or an upper bound; None if it was not counted.
    parts : dict
        Bytes that each factor and signal adds per step, by the name of the factor.
    trace : int
        The bytes of the trace.
    backwards : bool
        Whether the last window runs first, and none carries a trace.
    block : int or None
        How many steps of a window at most are worked through at a time, the last ones first, after
        all have run forwards; None for all.
    """

    windows: tuple[tuple[int, int], ...]
    reason: str
    budget: int
    count: Count | None = None
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    trace: int = 0
    backwards: bool = False
    block: int | None = None

    @property
    def steps(self) -> int:
        """The steps of the longest window."""
        return max(steps for _, steps in self.windows)

    @property
    def bytes(self) -> int | None:
        """What the longest window takes, if it was counted."""
        return None if self.count is None else self.count.bytes(self.block or self.steps)

    def describe(self, parts: Mapping[str, PyTree], trace: PyTree) -> 'Plan':
        """The same plan, with the bytes of a step's factors and signals and of the trace."""
        sizes = {name: tree_bytes(part) for name, part in parts.items()}
        return dataclasses.replace(self, parts=sizes, trace=tree_bytes(trace))

    def lines(self) -> list[str]:
        """The plan in words."""
        length = sum(count * steps for count, steps in self.windows)
        cut = ' and '.join(f'{count} x {steps} steps' for count, steps in self.windows)
        order = ', from the last to the first' if self.backwards else ''
        blocks = '' if self.block is None else f', in blocks of {self.block}'
        lines = [f'{length} steps as {cut}{blocks}{order}: {self.reason}']
        full = self.bytes
        if self.count is not None and full is not None:
            fits = 'within' if full <= self.budget else 'MORE THAN'
            lines.append(
                f'a window takes {show_bytes(full)}, {fits} the budget of '
                f'{show_bytes(self.budget)}; one step alone takes '
                f'{show_bytes(self.count.bytes(1))}'
            )
        if self.parts:
            parts = ', '.join(f'{k} {show_bytes(size)}' for k, size in self.parts.items() if size)
            lines.append(f'per step: {parts}; the trace: {show_bytes(self.trace)}')
        return lines


class Traits(NamedTuple):
    """What the planner has to know of windows.

    Attributes
    ----------
    step_bytes : int
        The bytes of all that a step computes.
    state_bytes : int
        Those of the states that it changes.
    is_small : bool
        Whether the engine's trace is no larger than what is computed in a step.
    refuses_backwards : str or None
        Why windows cannot run from the last to the first; None if they can.
    can_carry : bool
        Whether a trace can be carried at all.
    is_cached : bool
        Whether what is small is faster to read and write, as on CPUs.
    recorded_bytes : int
        The bytes that are kept of a step for what is computed after all steps ran forwards.
    carried_bytes : int
        The bytes of a step that a trace is carried past it by: inputs of ops, and ``u``. None if
        windows that carry one cannot be worked through in blocks, as without a gradient.
    """

    step_bytes: int
    state_bytes: int
    is_small: bool = False
    refuses_backwards: str | None = None
    can_carry: bool = True
    is_cached: bool = False
    recorded_bytes: int = 0
    carried_bytes: int | None = None

    @property
    def enough(self) -> int:
        """The steps of a window that are worth it, whatever a step takes."""
        return ENOUGH_IF_SMALL if self.is_small else ENOUGH

    def at_once(self, count: Count) -> int:
        """The steps of fresh sequences that are one window, without blocks."""
        return min(AT_ONCE * self.enough, self._cached_steps(count))

    def block(self, count: Count) -> int:
        """The steps that are worked through at a time where windows go backwards."""
        return min(self.enough, self._cached_steps(count))

    def recorded_steps(self) -> int:
        """The steps that may run forwards before any is worked through."""
        return min(LONG, RECORDED // max(self.recorded_bytes, 1))

    def _cached_steps(self, count: Count) -> int:
        return max(FEW, CACHED // max(count.per_step, 1)) if self.is_cached else sys.maxsize

    def carries_anyway(self, trace: int) -> str | None:
        """Why fresh windows carry a trace of so many bytes; None if they go backwards instead."""
        if self.is_small:
            return 'the trace is small'
        if self.refuses_backwards is not None:
            return self.refuses_backwards
        if self.can_carry and trace <= CHEAP * self.step_bytes:
            return f'a trace of {show_bytes(trace)} costs less than a second forward pass'
        return None


def outlook(traits: Traits, trace: int, budget: int) -> list[str]:
    """How sequences will be cut, in words, before there are any."""
    lines = [f'none yet; a window may take {show_bytes(budget)}']
    if traits.is_small:
        return [*lines, f'the trace takes {show_bytes(trace)}']
    carries = traits.carries_anyway(trace)
    longer = 'windows run from the last to the first' if carries is None else carries
    carried = f'the trace takes {show_bytes(trace)}' if traits.can_carry else 'no trace is carried'
    at_once = f'no trace for up to {AT_ONCE * traits.enough} steps'
    return [
        *lines,
        f"with trace='carry': {carried}",
        f"with trace='fresh': {at_once}; for more, {longer}",
    ]


def plan_windows(
    window: Callable[..., Any],
    inputs: PyTree,
    args: tuple[Any, Any, Any],
    every: int | None,
    fresh: bool,
    budget: int,
    traits: Traits,
) -> Plan:
    """Choose windows.

    Fresh sequences need no trace in a single window, nor in windows that run from the last to the
    first. The latter takes a second forward pass, and is chosen unless carrying the trace is
    cheaper.

    Tracing a window takes as long as compiling a few kernels. It is not done where an upper bound
    says that everything fits.

    Parameters
    ----------
    window : callable
        ``(inputs, total, entry, index)``; without a trace at the entry it makes none at the exit.
    inputs : PyTree
        The sequences.
    args : tuple
        The other arguments of the first window.
    every : int, optional
        The most steps of a window, if memory is not to decide.
    fresh : bool
        Whether the trace is zero before the sequences and not wanted after them.
    budget : int
        The bytes that a window may take.
    traits : Traits
        What else matters.
    """
    length, least = jax.tree.leaves(inputs)[0].shape[0], traits.enough
    carries = traits.carries_anyway(tree_bytes(args[1])) if fresh else 'it is wanted'
    backwards = carries is None
    if every is not None:
        windows = split(length, every)
        several = windows != ((1, length),)
        if fresh and several and not backwards:
            _check_carry(traits)
        return Plan(windows, f'trace_every={every}', budget, backwards=backwards and several)
    rough = Count(GENEROUS * tree_bytes(args), GENEROUS * traits.step_bytes)
    at_once = traits.at_once(rough) if backwards else least
    if length <= min(least, at_once) and rough.bytes(length) <= budget:
        reason = 'all fit, and need no trace' if fresh and not traits.is_small else 'all fit'
        return Plan(((1, length),), f'{reason}, by a rough count', budget, rough)
    if fresh and not traits.is_small:
        plan = _without_trace(window, inputs, args, budget, traits, rough, backwards)
        if plan is not None:
            return plan
        _check_carry(traits)
    count = count_window(window, inputs, *args)
    if not fresh and (plan := _carried_in_blocks(length, budget, traits, count)) is not None:
        return plan
    steps, reason = _longest_that_pay(length, least, budget, count)
    if fresh and not traits.is_small and carries is not None:
        reason = f'{reason}; {carries}'
    return Plan(split(length, steps, even=True), reason, budget, count)


def _check_carry(traits: Traits) -> None:
    """Refuse several fresh windows that do not go backwards, where a trace cannot be carried."""
    if not traits.can_carry:
        raise NotSupportedError(
            "With trace='fresh', these sequences would be several windows, which carry a trace if "
            f'they cannot run from the last to the first: {traits.refuses_backwards}. But the '
            'trace of this model cannot be carried. Give shorter sequences or a larger '
            'memory_budget (and no trace_every), so that all steps are one window; or remove the '
            'reason.'
        )


def _without_trace(
    window: Callable[..., Any],
    inputs: PyTree,
    args: tuple[Any, Any, Any],
    budget: int,
    traits: Traits,
    rough: Count,
    backwards: bool,
) -> Plan | None:
    """One window, or blocks or windows backwards; None if none is to be."""
    length, most = jax.tree.leaves(inputs)[0].shape[0], AT_ONCE * traits.enough
    count, how = rough, ', by a rough count'
    short = length <= traits.at_once(rough) or not (backwards and traits.is_cached)
    if not short or rough.bytes(most if backwards else length) > budget:
        count, how = count_window(window, inputs, args[0], None, args[2]), ''
    most = traits.at_once(count) if backwards else most
    most = max(most, LITTLE // max(count.per_step, 1))
    if (length <= most or traits.refuses_backwards) and count.bytes(length) <= budget:
        return Plan(((1, length),), f'all fit, and need no trace{how}', budget, count)
    if not backwards:
        return None
    plan = _in_blocks(length, budget, traits, count) or _backwards(length, budget, traits, count)
    instead = f', instead of one of {show_bytes(tree_bytes(args[1]))}' if traits.can_carry else ''
    return dataclasses.replace(plan, reason=f'{plan.reason}{how}; no trace{instead}')


def _in_blocks(length: int, budget: int, traits: Traits, count: Count) -> Plan | None:
    """One window that is worked through in blocks, or several; None if they do not fit.

    Several are so long that what is kept of their steps takes as much as the states at all entries.
    """
    if not traits.is_cached:
        return None
    block, most = traits.block(count), traits.recorded_steps()
    balanced = math.isqrt(length * traits.state_bytes // max(traits.recorded_bytes, 1))
    for steps in (length, max(block, min(balanced, most))):
        windows = split(length, steps, even=True)
        number, longest = sum(num for num, _ in windows), max(steps for _, steps in windows)
        held = longest * traits.recorded_bytes + (number > 1) * number * traits.state_bytes
        whole = count._replace(fixed=count.fixed + held)
        fitting = min(block, whole.steps(budget))
        if longest <= max(block, most) and fitting:
            reason = f'more than {block} steps at a time gain little'
            if fitting < block:
                reason = f'at most {fitting} steps at a time fit'
            own = fitting if fitting < longest else None
            return Plan(windows, reason, budget, whole, backwards=True, block=own)
    return None


def _carried_in_blocks(length: int, budget: int, traits: Traits, count: Count) -> Plan | None:
    """Windows that touch the trace once each, worked through in blocks; None if they do not pay.

    Of every step there is kept what it recorded, and what the trace is carried by.
    """
    if traits.carried_bytes is None or not traits.is_cached:
        return None
    if traits.is_small or traits.refuses_backwards is not None:
        return None
    kept = traits.recorded_bytes + traits.carried_bytes
    block, most = traits.block(count), min(AT_ONCE * traits.enough, RECORDED // max(kept, 1))
    windows = split(length, max(block, most), even=True)
    longest = max(steps for _, steps in windows)
    whole = count._replace(fixed=count.fixed + longest * kept)
    if longest <= block or whole.steps(budget) < block:
        return None
    reason = f'more than {block} steps at a time gain little'
    return Plan(windows, reason, budget, whole, block=block)


def _backwards(length: int, budget: int, traits: Traits, count: Count) -> Plan:
    """Windows from the last to the first, and the states at the entry of each."""

    def with_entries(windows: float) -> Count:
        return count._replace(fixed=count.fixed + int(traits.state_bytes * windows))

    enough = traits.block(count)
    steps, _ = _longest_that_pay(length, enough, budget, count)
    at_most = with_entries(LATITUDE * -(-length // steps))
    steps, reason = _longest_that_pay(length, enough, budget, at_most)
    windows = split(length, steps, even=True)
    number = sum(count for count, _ in windows)
    return Plan(windows, reason, budget, with_entries(number), backwards=True)


def _longest_that_pay(length: int, least: int, budget: int, count: Count) -> tuple[int, str]:
    """The steps of windows that are no longer than fits and than pays; and what decided."""
    fitting, enough = count.steps(budget), max(least, LITTLE // max(count.per_step, 1))
    steps = min(fitting, enough, length)
    if steps == length:
        reason = 'all fit'
    elif steps == enough:
        reason = f'more than {enough} steps gain little'
    elif fitting:
        reason = f'at most {fitting} steps fit'
    else:
        reason = 'not even one step fits'
    return max(steps, 1), reason


def split(length: int, steps: int, even: bool = False) -> tuple[tuple[int, int], ...]:
    """Cut a length into as few windows as possible, of nearly equal length.

    Parameters
    ----------
    length : int
        The number of steps of the sequences.
    steps : int
        The most steps of a window.
    even : bool
        Whether to take a few more windows if all then have the same length, so that one program
        serves them all.

    Returns
    -------
    tuple of tuple of int
        How many windows of which length.

    Examples
    --------
    >>> from braintrace_fast.runtime.planner import split
    >>> split(2000, 90), split(2000, 90, even=True)
    (((1, 86), (22, 87)), ((25, 80),))
    """
    number = -(-length // steps)
    if even:
        candidates = range(number, min(length, int(number * LATITUDE)) + 1)
        number = next((n for n in candidates if length % n == 0), number)
    short, longer = divmod(length, number)
    both = [(longer, short + 1), (number - longer, short)]
    # A window by itself goes first: after a loop, XLA would begin it early and keep both in memory.
    return tuple(sorted((pair for pair in both if pair[0]), key=lambda pair: pair[0] != 1))
