"""How many steps a window may have: its memory, counted, against a budget.

A window is traced once for a number of steps that stands for any other. Each of its arrays then has
a size of ``fixed + steps * per_step`` bytes, and so has the sum of those that live at one moment.
The largest window is the one for which no moment exceeds the budget.
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

from .._compat import Atom, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params, open_jaxpr
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

LATITUDE = 1.25
"""How many times more windows are taken if all then have the same length."""

SHOWN = 20
"""How many windows a progress bar shows, at least."""

STAND_IN = 10007
"""Stands for the number of steps: it and (itself - 1) / 2 are prime, so no other size divides."""

ELEMENTWISE = frozenset(
    """
    abs acos add add_any and asin atan atan2 broadcast_in_dim cbrt ceil clamp concatenate
    convert_element_type copy cos cosh div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge
    gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg nextafter not or pad
    pow reduce_precision rem reshape round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh transpose
    xor
    """.split()
)
"""What a compiler computes on the way into its only reader, without an array of its own."""

REDUCTIONS = frozenset('reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or'.split())

VIEWS = frozenset('reshape squeeze expand_dims stop_gradient copy'.split())
"""What shares the memory of its operand."""


class Size(NamedTuple):
    """``fixed + steps * per_step`` bytes."""

    fixed: int
    per_step: int

    def of(self, steps: int) -> int:
        """The bytes for a number of steps."""
        return self.fixed + steps * self.per_step


@dataclasses.dataclass(frozen=True)
class Count:
    """The memory of a window, by its number of steps.

    Attributes
    ----------
    moments : tuple of Size
        What lives at each moment that is the fullest for some number of steps.

    Examples
    --------
    >>> from braintrace_fast.runtime.planner import Count, Size
    >>> count = Count((Size(1000, 10), Size(0, 60)))
    >>> count.bytes(2), count.bytes(100), count.steps(3000)
    (1020, 6000, 50)
    """

    moments: tuple[Size, ...]

    def bytes(self, steps: int) -> int:
        """What a window of so many steps takes."""
        return max(moment.of(steps) for moment in self.moments)

    def steps(self, budget: int) -> int:
        """The most steps within a budget; 0 if not even one is."""
        if self.bytes(1) > budget:
            return 0
        growing = [m for m in self.moments if m.per_step]
        return min([(budget - m.fixed) // m.per_step for m in growing], default=2**31 - 1)


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
        The memory of a window; None if it was not looked at.
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
    pbar: Any,
    budget: int,
) -> Plan:
    """Choose windows.

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
    pbar : optional
        A progress bar; windows are then at least 20.
    budget : int
        The bytes that a window may take.
    """
    length = jax.tree.leaves(inputs)[0].shape[0]
    if every is not None:
        return Plan(split(length, every), f'trace_every={every}', budget)
    most = length if pbar is None else max(length // SHOWN, 1)
    if fresh and most == length:
        count = count_window(window, inputs, args[0], None, args[2])
        if count.steps(budget) >= length:
            return Plan(((1, length),), 'all fit, and need no trace', budget, count)
    count = count_window(window, inputs, *args)
    steps = count.steps(budget)
    windows = split(length, max(min(steps, most), 1), even=True)
    if steps >= most:
        reason = 'all fit' if most == length else 'enough for the progress bar'
    elif steps:
        reason = f'at most {steps} steps fit'
    else:
        reason = 'not even one step fits'
    return Plan(windows, reason, budget, count)


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
    (((22, 87), (1, 86)), ((25, 80),))
    """
    number = -(-length // steps)
    if even:
        candidates = range(number, min(length, int(number * LATITUDE)) + 1)
        number = next((n for n in candidates if length % n == 0), number)
    short, longer = divmod(length, number)
    both = ((longer, short + 1), (number - longer, short))
    return tuple((count, size) for count, size in both if count)


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
    >>> count_window(lambda x: x.T @ x, jnp.ones((5, 100))).moments
    (Size(fixed=40000, per_step=400),)
    """
    stood_in = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((STAND_IN, *a.shape[1:]), a.dtype), inputs
    )
    function = brainstate.transform.StatefulFunction(window, name='window')
    closed = function.make_jaxpr(stood_in, *args).get_jaxpr(stood_in, *args)
    jaxpr, _ = open_jaxpr(closed)
    held = Size(0, sum(_size(v).per_step for v in jaxpr.invars))
    moments = {Size(m.fixed, m.per_step + held.per_step) for m in _moments(jaxpr)}
    return Count(_fullest(moments or {held}))


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
    device = jax.config.jax_default_device or jax.local_devices()[0]
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


def _fullest(moments: set[Size]) -> tuple[Size, ...]:
    """Those that no other exceeds both in fixed bytes and in bytes per step."""
    best: list[Size] = []
    for moment in sorted(moments, reverse=True):
        if not best or moment.per_step > best[-1].per_step:
            best.append(moment)
    return tuple(best)


def _size(atom: Atom) -> Size:
    if isinstance(atom, Literal):
        return Size(0, 0)
    item = getattr(atom.aval.dtype, 'itemsize', 4)
    elements = math.prod(atom.aval.shape)
    for steps in (STAND_IN, STAND_IN - 1):
        if elements and elements % steps == 0:
            return Size(0, elements // steps * item)
    return Size(elements * item, 0)


def _moments(jaxpr: Jaxpr) -> list[Size]:
    """What lives when each equation runs, without the inputs of the jaxpr."""
    memory = _Memory(jaxpr)
    last = {v: i for i, (eqn, reads) in enumerate(memory.made) for v in (*reads, *eqn.outvars)}
    last.update(dict.fromkeys(memory.results, len(memory.made)))
    ends: dict[int, list[Var]] = {}
    for v, place in last.items():
        ends.setdefault(place, []).append(v)
    live: set[Var] = set()
    fixed = per_step = 0
    found = []
    for place, (eqn, _) in enumerate(memory.made):
        for v in eqn.outvars:
            if memory.owner(v) is v and v not in live:
                live.add(v)
                fixed, per_step = fixed + _size(v).fixed, per_step + _size(v).per_step
        inner = [m for sub in jaxprs_in_params(eqn.params) for m in _moments(open_jaxpr(sub)[0])]
        moved = _moved(eqn)
        for m in _fullest({*inner, moved}):
            found.append(Size(fixed + m.fixed, per_step + m.per_step))
        for v in ends.get(place, ()):
            if v in live:
                live.remove(v)
                fixed, per_step = fixed - _size(v).fixed, per_step - _size(v).per_step
    return found


def _moved(eqn: JaxprEqn) -> Size:
    """Operands of a batched product, which are copied into its order of axes."""
    if eqn.primitive.name != 'dot_general' or not eqn.params['dimension_numbers'][1][0]:
        return Size(0, 0)
    sizes = [_size(v) for v in eqn.invars]
    return Size(sum(s.fixed for s in sizes), sum(s.per_step for s in sizes))


class _Memory:
    """Which equations of a jaxpr make arrays, and which arrays they read."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.readers: dict[Var, list[JaxprEqn | None]] = {}
        for eqn in jaxpr.eqns:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self.readers.setdefault(v, []).append(eqn)
        for v in jaxpr.outvars:
            if not isinstance(v, Literal):
                self.readers.setdefault(v, []).append(None)
        self.made: list[tuple[JaxprEqn, list[Var]]] = []
        self._reads: dict[Var, list[Var]] = {}
        for eqn in jaxpr.eqns:
            reads = [r for v in eqn.invars if not isinstance(v, Literal) for r in self.behind(v)]
            if self._fused(eqn) or eqn.primitive.name in VIEWS:
                self._reads[eqn.outvars[0]] = list(dict.fromkeys(reads))
            else:
                self.made.append((eqn, list(dict.fromkeys(reads))))
        self.results = {
            r for v in jaxpr.outvars if not isinstance(v, Literal) for r in self.behind(v)
        }

    def behind(self, v: Var) -> Sequence[Var]:
        """The arrays that are read when a variable is."""
        return self._reads.get(v, (v,))

    def owner(self, v: Var) -> Var:
        """The variable whose memory a variable has."""
        return v if v not in self._reads else self._reads[v][0]

    def _fused(self, eqn: JaxprEqn) -> bool:
        """Whether the result is computed on the way into its only reader."""
        if eqn.primitive.name not in ELEMENTWISE:
            return False
        readers = self.readers.get(eqn.outvars[0], [])
        cheap = eqn.primitive.name in ('broadcast_in_dim', 'iota')
        return (len(readers) == 1 or cheap) and all(
            r is not None and r.primitive.name in ELEMENTWISE | REDUCTIONS for r in readers
        )
