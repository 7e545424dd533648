"""How many steps a window has: its memory against a budget, and how many steps are worth it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._typing import PyTree
from .memory_budget import default_budget, parse_bytes, show_bytes
from .window_memory import Count, count_window, tree_bytes

__all__ = [
    'Count',
    'Plan',
    'count_window',
    'default_budget',
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
    """

    windows: tuple[tuple[int, int], ...]
    reason: str
    budget: int
    count: Count | None = None
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    trace: int = 0

    @property
    def steps(self) -> int:
        """The steps of the longest window."""
        return max(steps for _, steps in self.windows)

    @property
    def bytes(self) -> int | None:
        """What the longest window takes, if it was counted."""
        return None if self.count is None else self.count.bytes(self.steps)

    def describe(self, parts: Mapping[str, PyTree], trace: PyTree) -> 'Plan':
        """The same plan, with the bytes of a step's factors and signals and of the trace."""
        sizes = {name: tree_bytes(part) for name, part in parts.items()}
        return dataclasses.replace(self, parts=sizes, trace=tree_bytes(trace))

    def lines(self) -> list[str]:
        """The plan in words."""
        length = sum(count * steps for count, steps in self.windows)
        cut = ' and '.join(f'{count} x {steps} steps' for count, steps in self.windows)
        lines = [f'{length} steps as {cut}: {self.reason}']
        if self.count is not None:
            full = self.count.bytes(self.steps)
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


def plan_windows(
    window: Callable[..., Any],
    inputs: PyTree,
    args: tuple[Any, Any, Any],
    every: int | None,
    fresh: bool,
    budget: int,
    step_bytes: int,
    small: bool = False,
) -> Plan:
    """Choose windows.

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
    step_bytes : int
        The bytes of all that a step computes.
    small : bool
        Whether the trace is no larger than what is computed in a step.
    """
    length = jax.tree.leaves(inputs)[0].shape[0]
    fresh, least = fresh and not small, ENOUGH_IF_SMALL if small else ENOUGH
    if every is not None:
        return Plan(split(length, every), f'trace_every={every}', budget)
    all_steps, without_trace = ((1, length),), 'all fit, and need no trace'
    rough = Count(GENEROUS * tree_bytes(args), GENEROUS * step_bytes)
    if rough.bytes(length) <= budget and (fresh or length <= least):
        reason = without_trace if fresh else 'all fit'
        return Plan(all_steps, f'{reason}, by a rough count', budget, rough)
    if fresh:
        count = count_window(window, inputs, args[0], None, args[2])
        if count.steps(budget) >= length:
            return Plan(all_steps, without_trace, budget, count)
    count = count_window(window, inputs, *args)
    return _longest_that_pay(length, least, budget, count)


def _longest_that_pay(length: int, least: int, budget: int, count: Count) -> Plan:
    """Windows that carry a trace, no longer than fits and than pays."""
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
    return Plan(split(length, max(steps, 1), even=True), reason, budget, count)


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
