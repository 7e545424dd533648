"""How many steps a window may have: its memory, counted, against a budget.

A window is traced once for a number of steps that stands for any other. Each of its arrays then
either grows with the steps or does not. Those that grow are all counted, as if none were freed
before the end of the window: in which order a compiler runs what does not wait for each other is
not known. Of those that do not grow (traces, gradients), the fullest moment counts.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import brainstate
import jax

from .._compat import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxprs_in_params,
    open_jaxpr,
    scan_split,
)
from .._typing import PyTree

__all__ = [
    'Count',
    'Plan',
    'count_window',
    'default_budget',
    'parse_bytes',
    'plan_windows',
    'show_bytes',
    'split',
]

SHARE = 4
"""By default, windows take one part in so many of the memory that is free."""

UNKNOWN = 2**30
"""The default budget where no one says how much memory is free."""

ENOUGH = 100
"""Steps of a window that carries a trace. Touching the trace costs as much as a few steps, whatever
the sizes: longer windows are a few per cent faster at best, and take memory in proportion."""

ENOUGH_IF_SMALL = 50
"""The same where the trace is small. Longer windows are no faster, and slower once their arrays do
not fit into caches: even where none need be carried, one window of all steps is not worth it."""

LITTLE = 2**22
"""But a window may have as many steps as take so few bytes: small ones are all overhead."""

GENEROUS = 2
"""Times what a step computes and what is carried: more than a window takes, by no look at it."""

LATITUDE = 1.5
"""How many times more windows are taken if all then have the same length."""

STAND_IN = 10007
"""Stands for the number of steps: it and (itself - 1) / 2 are prime, so no other size divides."""

ELEMENTWISE = frozenset(
    """
    abs acos add add_any and asin atan atan2 broadcast_in_dim cbrt ceil clamp concatenate
    convert_element_type copy cos cosh div dynamic_slice eq erf erf_inv erfc exp exp2 expand_dims
    expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg
    nextafter not or pad pow reduce_precision rem reshape round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient
    sub tan tanh transpose xor
    """.split()
)
"""What a compiler computes on the way into its only reader, without an array of its own."""

FREE = frozenset('broadcast_in_dim dynamic_slice iota slice'.split())
"""What is computed on the way into each of its readers."""

REDUCTIONS = frozenset('reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or'.split())

SLICES = frozenset('dynamic_slice gather slice'.split())
"""What copies a part of its operand."""

VIEWS = frozenset('reshape squeeze expand_dims stop_gradient copy'.split())
"""What shares the memory of its operand."""


class Count(NamedTuple):
    """The memory of a window: ``fixed + steps * per_step`` bytes.

    Examples
    --------
    >>> from braintrace_fast.runtime.planner import Count
    >>> count = Count(fixed=1000, per_step=60)
    >>> count.bytes(10), count.steps(4000)
    (1600, 50)
    """

    fixed: int
    per_step: int

    def bytes(self, steps: int) -> int:
        """What a window of so many steps takes."""
        return self.fixed + steps * self.per_step

    def steps(self, budget: int) -> int:
        """The most steps within a budget; 0 if not even one is."""
        return max(budget - self.fixed, 0) // max(self.per_step, 1)


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
        The memory of a window, or more; None if it was not looked at.
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
        """What the longest window takes, if that was counted."""
        return None if self.count is None else self.count.bytes(self.steps)

    def describe(self, parts: Mapping[str, PyTree], trace: PyTree) -> 'Plan':
        """The same plan, with the bytes of a step's factors and signals and of the trace."""
        sizes = {name: tree_bytes(part) for name, part in parts.items()}
        return dataclasses.replace(self, parts=sizes, trace=tree_bytes(trace))

    def lines(self) -> list[str]:
        """The plan, told to a person."""
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

    To trace a window takes as long as to compile a few kernels. It is spared where a rough count,
    which is too high, says that all fits.

    Parameters
    ----------
    window : callable
        ``(inputs, total, entry, index)``; without a trace at the entry it makes none at the exit.
    inputs : PyTree
        The sequences.
    args : tuple
        The other arguments of the first window.
    every : int, optional
        The most steps of a window, if they are not to be chosen by memory.
    fresh : bool
        Whether the trace is zero before the sequences and not wanted after.
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
    without_trace = 'all fit, and need no trace'
    rough = Count(GENEROUS * tree_bytes(args), GENEROUS * step_bytes)
    if rough.bytes(length) <= budget and (fresh or length <= least):
        reason = without_trace if fresh else 'all fit'
        return Plan(((1, length),), f'{reason}, by a rough count', budget, rough)
    if fresh:
        count = count_window(window, inputs, args[0], None, args[2])
        if count.steps(budget) >= length:
            return Plan(((1, length),), without_trace, budget, count)
    count = count_window(window, inputs, *args)
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
    """Cut a length into as few windows as can be, of nearly equal length.

    Parameters
    ----------
    length : int
        The number of steps of the sequences.
    steps : int
        The most steps of a window.
    even : bool
        Whether to take some windows more if all then have the same length, which spares compiling
        two programs.

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


def count_window(window: Callable[..., Any], inputs: PyTree, *args: Any) -> Count:
    """Count the memory of a window by its number of steps.

    Parameters
    ----------
    window : callable
        ``(inputs, *args)``, which may use states. It is traced and not run.
    inputs : PyTree
        Arrays with a leading axis of steps, of any length.
    *args
        Further arguments, which do not depend on the number of steps.

    Returns
    -------
    Count

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.runtime.planner import count_window
    >>> count_window(lambda x: jnp.cumsum(x, axis=0), jnp.ones((5, 100)))
    Count(fixed=0, per_step=800)
    """
    stood_in = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((STAND_IN, *a.shape[1:]), a.dtype), inputs
    )
    function = brainstate.transform.StatefulFunction(window, name='window')
    closed = function.make_jaxpr(stood_in, *args).get_jaxpr(stood_in, *args)
    jaxpr, _ = open_jaxpr(closed)
    made = _count(jaxpr)
    return made._replace(per_step=made.per_step + sum(_size(v).per_step for v in jaxpr.invars))


def parse_bytes(budget: int | str) -> int:
    """A number of bytes, from itself or from text.

    Examples
    --------
    >>> from braintrace_fast.runtime.planner import parse_bytes
    >>> parse_bytes(1000), parse_bytes('256MB'), parse_bytes('1.5 GiB')
    (1000, 256000000, 1610612736)
    """
    if isinstance(budget, str):
        found = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*', budget, re.IGNORECASE)
        if found is None:
            raise ValueError(
                f"memory_budget is {budget!r}; give bytes, or text such as '256MB' or '2GiB'."
            )
        number, prefix, binary = found.groups()
        power = ' kmgt'.index(prefix.lower()) if prefix else 0
        budget = int(float(number) * (1024 if binary else 1000) ** power)
    elif isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(
            f"memory_budget is {budget!r}; it must be None, a Python int or text such as '256MB'."
        )
    if budget < 1:
        raise ValueError(f'memory_budget is {budget}; it must be at least one byte.')
    return budget


def default_budget() -> int:
    """A share of the memory that is free now.

    It is rounded down to a power of two: the same machine then mostly plans the same windows, and
    results do not differ in rounding from run to run.
    """
    free = _free_bytes()
    return UNKNOWN if free is None else 2 ** max(20, int(math.log2(max(free, 1) / SHARE)))


def tree_bytes(tree: PyTree) -> int:
    """The bytes of all arrays, or shapes, of a tree."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def show_bytes(number: int) -> str:
    """Bytes for people.

    Examples
    --------
    >>> from braintrace_fast.runtime.planner import show_bytes
    >>> show_bytes(512), show_bytes(21004288)
    ('512 B', '21.0 MB')
    """
    if number < 1000:
        return f'{number} B'
    power = min(int(math.log(number, 1000)), 4)
    return f'{number / 1000**power:.1f} {" kMGT"[power]}B'


def _free_bytes() -> int | None:
    device: Any = getattr(jax.config, 'jax_default_device', None) or jax.local_devices()[0]
    stats = None if isinstance(device, str) else device.memory_stats()
    if stats and 'bytes_limit' in stats:
        return stats['bytes_limit'] - stats.get('bytes_in_use', 0)
    if not isinstance(device, str) and device.platform != 'cpu':
        return None
    found = [free for free in (_system_free(), _container_free()) if free is not None]
    return min(found, default=None)


def _system_free() -> int | None:
    try:
        text = FilePath('/proc/meminfo').read_text('utf-8')
        found = re.search(r'MemAvailable:\s+(\d+) kB', text)
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2
    except (AttributeError, OSError, ValueError):
        return None


def _container_free() -> int | None:
    """What a control group leaves, where there is one with a limit."""
    for limit, used in (('memory.max', 'memory.current'), ('memory/memory.limit_in_bytes',) * 2):
        folder = FilePath('/sys/fs/cgroup')
        try:
            most = int((folder / limit).read_text('utf-8'))
            now = int((folder / used.replace('limit', 'usage')).read_text('utf-8'))
        except (OSError, ValueError):
            continue
        return max(most - now, 0)
    return None


def _size(atom: Atom) -> Count:
    if isinstance(atom, Literal):
        return Count(0, 0)
    elements = math.prod(atom.aval.shape)
    also_start = atom.aval.shape[:1] == (STAND_IN + 1,)  # which may be a size of the model
    for steps in (STAND_IN + 1,) if also_start else (STAND_IN, STAND_IN - 1):
        if elements and elements % steps == 0:
            return Count(0, elements // steps * atom.aval.dtype.itemsize)
    return Count(elements * atom.aval.dtype.itemsize, 0)


def _count(jaxpr: Jaxpr) -> Count:
    """What a jaxpr takes besides its inputs."""
    made, results = _made(jaxpr)
    last = {v: place for place, (_, reads, writes) in enumerate(made) for v in (*reads, *writes)}
    ends: dict[int, int] = {}
    fixed = fullest = per_step = 0
    own = {v for _, _, writes in made for v in writes}
    for v in own - results:
        ends[last[v]] = ends.get(last[v], 0) + _size(v).fixed
    for place, (eqn, _, writes) in enumerate(made):
        inner = [_inner_count(jaxpr) for jaxpr in _inside(eqn)]
        fixed += sum(_size(v).fixed for v in writes)
        fullest = max(fullest, fixed + max((count.fixed for count in inner), default=0))
        per_step += sum(_size(v).per_step for v in writes)
        per_step += max((count.per_step for count in inner), default=0)
        fixed -= ends.get(place, 0)
    return Count(fullest, per_step)


def _inner_count(jaxpr: Jaxpr) -> Count:
    """What a jaxpr inside an equation takes besides the equation's operands and results."""
    count = _count(jaxpr)
    results = sum(_size(v).per_step for v in jaxpr.outvars)
    return count._replace(per_step=max(count.per_step - results, 0))


def _made(jaxpr: Jaxpr) -> tuple[list[tuple[JaxprEqn, set[Var], list[Var]]], set[Var]]:
    """The equations that make arrays, with those that each reads and writes; and the results."""
    readers: dict[Var, list[str]] = {v: ['a result'] for v in jaxpr.outvars if _is_var(v)}
    last: dict[Var, JaxprEqn | None] = dict.fromkeys(readers)
    used = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in readers for v in eqn.outvars):
            used.append(eqn)
            for v in filter(_is_var, eqn.invars):
                readers.setdefault(v, []).append(eqn.primitive.name)
                last.setdefault(v, eqn)
    behind: dict[Var, set[Var]] = {}

    def arrays(atoms: Sequence[Atom]) -> set[Var]:
        return {array for v in atoms if _is_var(v) for array in behind.get(v, {v})}

    made = []
    for eqn in reversed(used):
        reads, name = arrays(eqn.invars), eqn.primitive.name
        if name in VIEWS or _is_fused(name, readers.get(eqn.outvars[0], [])):
            behind[eqn.outvars[0]] = reads
        else:
            in_place = {
                v: o
                for v, o in _in_place(eqn).items()
                if last.get(o) is eqn and set(readers[o][1:]) <= SLICES
            }
            behind |= {v: arrays([operand]) for v, operand in in_place.items()}
            written = [v for v in eqn.outvars if v in readers and v not in in_place]
            made.append((eqn, reads, written))
    return made, arrays(jaxpr.outvars)


def _inside(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs of an equation, of which one runs or all; only that of the platform if it asks."""
    inner = [open_jaxpr(sub)[0] for sub in jaxprs_in_params(eqn.params)]
    platforms = eqn.params.get('branches_platforms')
    if platforms is None:
        return inner
    names = {'gpu': {'cuda', 'rocm', 'gpu'}}.get(backend := jax.default_backend(), {backend})
    return [
        next(j for j, own in zip(inner, platforms, strict=True) if own is None or names & {*own})
    ]


def _in_place(eqn: JaxprEqn) -> dict[Var, Var]:
    """Results that take the memory of an operand, if nothing else reads the operand."""
    operands: Sequence[Any] = ()
    if eqn.primitive.name == 'dynamic_update_slice':
        operands = eqn.invars[:1]
    elif eqn.primitive.name == 'while':
        operands = eqn.invars[eqn.params['cond_nconsts'] + eqn.params['body_nconsts'] :]
    elif eqn.primitive.name == 'scan':
        first, number = scan_split(eqn)
        operands = eqn.invars[first : first + number]
    elif eqn.params.get('branches_platforms') is not None:
        (branch,) = _inside(eqn)
        within = {v: o for inner in branch.eqns for v, o in _in_place(inner).items()}
        outside = dict(zip(branch.invars, eqn.invars[1:], strict=True))
        operands = [outside.get(within.get(v)) for v in branch.outvars]
    taken = zip(eqn.outvars, operands, strict=False)  # a scan also has results that it stacks
    return {v: operand for v, operand in taken if operand is not None and _is_var(operand)}


def _is_fused(name: str, readers: Sequence[str]) -> bool:
    """Whether a result is computed on the way into its only reader."""
    single = len(readers) == 1 or name in FREE
    return name in ELEMENTWISE and single and all(r in ELEMENTWISE | REDUCTIONS for r in readers)


def _is_var(atom: Atom) -> bool:
    return not isinstance(atom, Literal)
