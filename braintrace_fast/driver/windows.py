"""Sequences in windows: a loop over the steps of each, then one look at the trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Path, PyTree
from ..runtime.engine import BackwardEngine, Later, Steps, Trace
from ..runtime.factors import Entry, Values, as_window, stacked, without_zeros
from ..runtime.gradient import GradientSum
from ..runtime.loop_splitting import StatefulLoop
from ..runtime.memory_budget import on_cpu
from ..runtime.planner import Plan, Traits, plan_windows, split, tree_bytes

if TYPE_CHECKING:
    from .driver import Driver

__all__ = ['Driven', 'Sequences', 'WindowRequest', 'run_windows', 'window_traits']


class WindowRequest(NamedTuple):
    """What is asked of the windows into which sequences are cut.

    Attributes
    ----------
    every : int or None
        The most steps of a window; None to choose from memory.
    fresh : bool
        Whether to start and end with a trace of zeros.
    budget : int
        The bytes that a window may take.
    bar : callable or None
        A progress bar over the steps.
    """

    every: int | None
    fresh: bool
    budget: int
    bar: Callable[..., None] | None


class Sequences(NamedTuple):
    """Sequences to run over, and where to start.

    Attributes
    ----------
    inputs : tuple of PyTree
        The sequences.
    request : WindowRequest
        What is asked of the windows.
    entry : Entry
        The trace before the first step.
    elapsed : jax.Array
        The number of steps since it was zero.
    """

    inputs: tuple[PyTree, ...]
    request: WindowRequest
    entry: Entry
    elapsed: jax.Array


class Driven(NamedTuple):
    """What is left after sequences.

    Attributes
    ----------
    gradients : list
        Of the weights, in their order.
    outputs : PyTree
        What the steps returned, stacked.
    entry : Entry or None
        The trace after the last step; None if none was carried.
    elapsed : jax.Array
        Its number of steps.
    plan : Plan
        How the sequences were cut.
    """

    gradients: list[PyTree]
    outputs: PyTree
    entry: Entry | None
    elapsed: jax.Array
    plan: Plan


Step = Callable[..., tuple[Any, list[PyTree]]]
"""From slices to ``(outputs, (factors, signals))`` and the gradients of what is not traced."""


def run_windows(
    driver: 'Driver',
    step: Step,
    weights: Sequence[brainstate.State],
    paths: Sequence[Path | None],
    sequences: Sequences,
) -> Driven:
    """Run windows one after the other; for the parameters see :meth:`Driver.gradient`."""
    inputs, request, entry, elapsed = sequences
    inputs = jax.tree.map(jnp.asarray, inputs)
    window = _Window(driver, step, inputs, request.bar is not None, paths)
    total = jax.tree.map(jnp.zeros_like, [state.value for state in weights])
    plan = plan_windows(
        window,
        inputs,
        (total, entry, elapsed),
        request.every,
        request.fresh,
        request.budget,
        window.traits,
    ).describe(window.parts, entry.trace)
    run = _last_to_first if plan.backwards else _first_to_last
    return run(window, plan, sequences._replace(inputs=inputs), total)


def _first_to_last(
    window: '_Window', plan: Plan, sequences: Sequences, total: list[PyTree]
) -> Driven:
    """Run windows in their order, and carry the trace from one to the next."""
    inputs, request, entry, elapsed = sequences
    alone = plan.windows == ((1, plan.steps),)
    first, bar = elapsed, request.bar

    def body(carry: Any, inputs: Any) -> Any:
        total, entry, elapsed = carry
        done, show = elapsed - first, None
        if bar is not None:
            show = lambda i, ys: bar(done + i, carry=None, y=ys[0])  # noqa: E731
        if plan.block is None or entry is None:
            total, trace, outputs = window(inputs, total, entry, elapsed, show, alone)
        else:
            run = partial(window.in_blocks, block=plan.block)
            total, trace, outputs = run(inputs, total, entry, elapsed, show, alone)
        after = elapsed + _length(inputs)
        # Always set: with the count it takes one launch, and as a constant a copy of its own.
        entry = None if entry is None else Entry(trace, after != elapsed)
        return (total, entry, after), outputs

    carry: Any = (total, None if request.fresh and alone else entry, elapsed)
    outputs = []
    for start, count, steps in _pieces(plan.windows):
        if count == 1:
            carry, out = body(carry, _cut(inputs, start, steps))
        else:
            carry, out = _scan_windows(body, carry, inputs, start, count, steps)
        outputs.append(out)
    gradients, last, elapsed = carry
    return Driven(gradients, _joined(outputs), last, elapsed, plan)


def _last_to_first(
    window: '_Window', plan: Plan, sequences: Sequences, total: list[PyTree]
) -> Driven:
    """Run windows from the last to the first, each again from the states at its entry.

    A first pass finds those states, unless there is one window, which is worked through in blocks.
    What a window's losses say of the states at its entry is all that the window before it has to
    know, so there is no trace.
    """
    inputs, request, _, elapsed = sequences
    loop, bar = window.loop, request.bar
    nothing = window.nothing_later(inputs, total, elapsed)

    def before(entry: Any, inputs: Any, total: Any, later: Any, start: Any, done: Any) -> Any:
        show = None
        if bar is not None:
            show = lambda i, ys: bar(done + i, carry=None, y=ys[0])  # noqa: E731
        return window.before(entry, inputs, total, later, elapsed + start, show, plan.block)

    if plan.windows == ((1, plan.steps),):
        total, _, (outputs, _), moving = before(loop.moving, inputs, total, nothing, 0, 0)
        loop.write(moving)
        return Driven(total, outputs, None, elapsed, plan)

    moving, pieces, entries = loop.moving, [*_pieces(plan.windows)], []
    for start, count, steps in pieces:

        def forward(moving: Any, start: jax.Array, steps: int = steps) -> Any:
            return loop.advance(moving, _cut(inputs, start, steps)), moving

        starts = start + steps * jnp.arange(count, dtype=elapsed.dtype)
        moving, kept = lax.scan(forward, moving, starts)
        entries.append(kept)

    def body(carry: Any, at: Any, steps: int) -> Any:
        total, later, done = carry
        start, entry = at
        some = _cut(inputs, start, steps)
        total, later, (outputs, _), _ = before(entry, some, total, later, start, done)
        return (total, later, done + steps), outputs

    carry = total, nothing, jnp.zeros_like(elapsed)
    carry, outputs = _scan_backwards(body, carry, pieces, entries, elapsed.dtype)
    loop.write(moving)
    return Driven(carry[0], outputs, None, elapsed, plan)


def _scan_backwards(
    body: Callable[..., Any],
    carry: Any,
    pieces: Sequence[tuple[int, int, int]],
    given: Sequence[PyTree],
    dtype: Any,
) -> tuple[Any, PyTree]:
    """``body(carry, (start, given), steps)`` for pieces from the last to the first."""
    outputs = []
    for (start, count, steps), own in zip(reversed(pieces), reversed(given), strict=True):
        at = start + steps * jnp.arange(count, dtype=dtype), own
        carry, out = lax.scan(partial(body, steps=steps), carry, at, reverse=True)
        outputs.append(_unfolded(out))
    return carry, _joined(outputs[::-1])


def _joined(outputs: list[PyTree]) -> PyTree:
    """The outputs of all steps, from those of several windows."""
    if len(outputs) == 1:
        return outputs[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


class _Window:
    """The steps of a window as a loop, and what the engine makes of them."""

    def __init__(
        self,
        driver: 'Driver',
        step: Step,
        inputs: tuple[PyTree, ...],
        shows: bool,
        paths: Sequence[Path | None],
    ) -> None:
        self.driver = driver
        self.paths = paths
        self.loop = StatefulLoop(step, inputs, shows)
        self.like_outputs, (self.like_factors, signals) = self.loop.ys
        self.are_zero = self.loop.are_zero[1][1]
        self.like_signals = None if signals is None else without_zeros(signals, self.are_zero)

    @property
    def traits(self) -> Traits:
        """What the planner has to know."""
        traits = window_traits(
            self.driver,
            self.bytes_per_step,
            tree_bytes(self.loop.moving),
            self.loop.has_effects,
        )
        engine = self.driver.engine
        carried = None
        if isinstance(engine, BackwardEngine) and self.like_signals is not None:
            carried = engine.carried_bytes()
        return traits._replace(recorded_bytes=self.loop.recorded_bytes, carried_bytes=carried)

    @property
    def parts(self) -> Mapping[str, PyTree]:
        """The factors and signals of a step, by name."""
        signals = {} if self.like_signals is None else self.like_signals._asdict()
        return {**self.like_factors._asdict(), **signals}

    @property
    def bytes_per_step(self) -> int:
        """The bytes of all that a step computes and leaves."""
        return self.loop.bytes_per_step + tree_bytes(self.parts)

    def __call__(
        self,
        inputs: tuple[PyTree, ...],
        total: list[PyTree],
        entry: Entry | None,
        elapsed: jax.Array,
        show: Any = None,
        alone: bool = False,
    ) -> tuple[list[PyTree], Trace | None, PyTree]:
        """The sum of gradients, the trace after the window, and the outputs of its steps."""
        ys, grads = self.loop(inputs, show)
        outputs, steps, traced = self._recorded(ys, _length(inputs), entry, elapsed)
        trace = self.driver.engine.window(traced, steps, overwrite=not alone)
        return self._added(total, grads, traced), trace, outputs

    def in_blocks(
        self,
        inputs: tuple[PyTree, ...],
        total: list[PyTree],
        entry: Entry,
        elapsed: jax.Array,
        show: Any,
        alone: bool,
        block: int,
    ) -> tuple[list[PyTree], Trace, PyTree]:
        """The same as a call, worked through in blocks before the trace is touched."""
        engine, (params, _, _) = self.driver.engine, self.driver.executor.values()
        if not isinstance(engine, BackwardEngine):
            raise ValueError('The engine only runs forwards.')
        later = self.nothing_later(inputs, total, elapsed, carries=True)
        total, later, (outputs, kept), moving = self.before(
            self.loop.moving, inputs, total, later, elapsed, show, block, carries=True
        )
        self.loop.write(moving)
        traced = self._gradient_sum(params)
        trace = engine.carry_past(traced, entry, kept, later, elapsed, params, not alone)
        return self._added(total, None, traced), trace, outputs

    def before(
        self,
        moving: list[jax.Array],
        inputs: tuple[PyTree, ...],
        total: list[PyTree],
        later: Later | None,
        elapsed: jax.Array,
        show: Any = None,
        block: int | None = None,
        carries: bool = False,
    ) -> tuple[list[PyTree], Later, PyTree, list[jax.Array]]:
        """The same for a window that others follow, from states at its entry; it writes none.

        In the place of a trace is what later steps have to do with the states: with those at its
        end, which is given, and with those at its entry, which is returned. What need not be
        computed in order is computed for so many steps of a ``block`` at a time. Behind the outputs
        is what the engine keeps of the steps if it ``carries`` a trace past them. The states at the
        end of the window come last.
        """
        last, recorded = self.loop.record(moving, inputs, show)
        engine = self.driver.engine

        def add_block(carry: Any, at: Any, steps: int) -> Any:
            (total, later), (start, _) = carry, at
            some, own = (inputs, recorded)
            if steps < _length(inputs):
                some, own = _cut(inputs, start, steps), recorded.cut(start, steps)
            ys, grads = self.loop.results(some, own)
            outputs, told, traced = self._recorded(ys, steps, None, elapsed + start)
            if traced is None or not isinstance(engine, BackwardEngine):
                raise ValueError('There is no gradient, or an engine that only runs forwards.')
            later, kept = engine.window_before(traced, told, later, carries)
            return (self._added(total, grads, traced), later), (outputs, kept)

        length = _length(inputs)
        if block is None or length <= block:
            (total, later), outputs = add_block((total, later), (0, None), length)
        else:
            pieces = [*_pieces(split(length, block, even=True))]
            none = [None] * len(pieces)
            (total, later), outputs = _scan_backwards(
                add_block, (total, later), pieces, none, elapsed.dtype
            )
        return total, later, outputs, last

    def nothing_later(
        self,
        inputs: tuple[PyTree, ...],
        total: list[PyTree],
        elapsed: jax.Array,
        carries: bool = False,
    ) -> Later:
        """What goes from window to window, or block to block, behind the last one."""
        before = partial(self.before, carries=carries)
        some = _cut(inputs, 0, 1)
        shapes = jax.eval_shape(before, self.loop.moving, some, total, None, elapsed)
        return shapes[1].nothing()

    def _recorded(
        self, ys: Any, length: int, entry: Entry | None, elapsed: jax.Array
    ) -> tuple[PyTree, Steps, GradientSum | None]:
        """The outputs of a window, what the engine is told of it, and where gradients go."""
        outputs, (factors, signals) = ys
        links = self.driver.executor.runner.links
        outputs = stacked(outputs, length, self.like_outputs)
        factors = as_window(factors, links, length, self.like_factors)
        params, _, _ = self.driver.executor.values()
        traced = None
        if signals is not None:
            signals = without_zeros(signals, self.are_zero)
            signals = stacked(signals, length, self.like_signals)
            traced = self._gradient_sum(params)
        return outputs, Steps(entry, factors, elapsed, signals, params), traced

    def _gradient_sum(self, params: Values) -> GradientSum:
        """Where the gradients of traced weights go."""
        return GradientSum(self.driver.graph, params, jax.tree.map(jnp.zeros_like, params))

    def _added(
        self, total: list[PyTree], grads: list[PyTree] | None, traced: GradientSum | None
    ) -> list[PyTree]:
        """A sum of gradients, with those of a window added."""
        total = [*total] if grads is None else jax.tree.map(jnp.add, total, grads)
        by_path = {} if traced is None else traced.result()
        for place, path in enumerate(self.paths):  # a state may be named twice
            if path is not None:
                total[place] = jax.tree.map(jnp.add, total[place], by_path[path])
        return total


def window_traits(driver: 'Driver', step_bytes: int, state_bytes: int, has_effects: bool) -> Traits:
    """What the planner has to know of windows of steps that compute and change so much."""
    refuses = None
    if not isinstance(driver.engine, BackwardEngine):
        refuses = 'the engine only runs forwards'
    elif has_effects:
        refuses = 'a step has side effects, which must happen once'
    return Traits(
        step_bytes=step_bytes,
        state_bytes=state_bytes,
        is_small=driver.engine.is_small,
        refuses_backwards=refuses,
        can_carry=driver.engine.refuses_carry() is None,
        is_cached=on_cpu(),
    )


def _pieces(windows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Where windows of one length start, how many there are, and how long they are."""
    start = 0
    for count, steps in windows:
        yield start, count, steps
        start += count * steps


def _scan_windows(
    body: Callable[..., Any], carry: Any, inputs: PyTree, start: int, count: int, steps: int
) -> tuple[Any, PyTree]:
    """Windows of one length, in a loop."""

    def body_at(carry: Any, start: jax.Array) -> Any:
        return body(carry, _cut(inputs, start, steps))

    carry, out = brainstate.transform.scan(body_at, carry, start + steps * jnp.arange(count))
    return carry, _unfolded(out)


def _unfolded(outputs: PyTree) -> PyTree:
    """The outputs of all steps, from those by window and step."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)


def _length(inputs: PyTree) -> int:
    return jnp.shape(jax.tree.leaves(inputs)[0])[0]


def _cut(tree: PyTree, start: Any, steps: int) -> PyTree:
    """Some steps of sequences; the sequences themselves if those are all."""
    if isinstance(start, int):
        return jax.tree.map(lambda a: lax.slice_in_dim(a, start, start + steps), tree)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, steps), tree)
