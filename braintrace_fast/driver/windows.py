"""Sequences in windows: a loop over the steps of each, then one look at the trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Path, PyTree
from ..runtime.engine import Steps, Trace
from ..runtime.factors import Entry, as_window, stacked, without_zeros
from ..runtime.gradient import GradientSum
from ..runtime.loop_splitting import StatefulLoop
from ..runtime.planner import Plan, plan_windows, tree_bytes

if TYPE_CHECKING:
    from .driver import Driver

__all__ = ['Driven', 'Sequences', 'WindowRequest', 'run_windows']


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
        window.bytes_per_step,
        small=driver.engine.is_small,
    ).describe(window.parts, entry.trace)
    alone = plan.windows == ((1, plan.steps),)
    first, bar = elapsed, request.bar

    def body(carry: Any, inputs: Any) -> Any:
        total, entry, elapsed = carry
        done, show = elapsed - first, None
        if bar is not None:
            show = lambda i, ys: bar(done + i, carry=None, y=ys[0])  # noqa: E731
        total, trace, outputs = window(inputs, total, entry, elapsed, show, alone)
        after = elapsed + _length(inputs)
        # Always set: with the count it takes one launch, and as a constant a copy of its own.
        entry = None if entry is None else Entry(trace, after != elapsed)
        return (total, entry, after), outputs

    carry: Any = (total, None if request.fresh and alone else entry, elapsed)
    outputs = []
    for start, count, steps in _pieces(plan):
        if count == 1:
            carry, out = body(carry, _cut(inputs, start, steps))
        else:
            carry, out = _scan_windows(body, carry, inputs, start, count, steps)
        outputs.append(out)
    gradients, last, elapsed = carry
    joined = outputs[0]
    if len(outputs) > 1:
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
    return Driven(gradients, joined, last, elapsed, plan)


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
        (outputs, (factors, signals)), grads = self.loop(inputs, show)
        length, links = _length(inputs), self.driver.executor.runner.links
        outputs = stacked(outputs, length, self.like_outputs)
        factors = as_window(factors, links, length, self.like_factors)
        params, _, _ = self.driver.executor.values()
        traced = None
        if signals is not None:
            signals = without_zeros(signals, self.are_zero)
            signals = stacked(signals, length, self.like_signals)
            zeros = jax.tree.map(jnp.zeros_like, params)
            traced = GradientSum(self.driver.graph, params, zeros)
        steps = Steps(entry, factors, elapsed, signals, params)
        trace = self.driver.engine.window(traced, steps, overwrite=not alone)
        total = jax.tree.map(jnp.add, total, grads)
        by_path = {} if traced is None else traced.result()
        for place, path in enumerate(self.paths):  # a state may be named twice
            if path is not None:
                total[place] = jax.tree.map(jnp.add, total[place], by_path[path])
        return total, trace, outputs


def _pieces(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Where windows of one length start, how many there are, and how long they are."""
    start = 0
    for count, steps in plan.windows:
        yield start, count, steps
        start += count * steps


def _scan_windows(
    body: Callable[..., Any], carry: Any, inputs: PyTree, start: int, count: int, steps: int
) -> tuple[Any, PyTree]:
    """Windows of one length, in a loop."""

    def body_at(carry: Any, start: jax.Array) -> Any:
        return body(carry, _cut(inputs, start, steps))

    carry, out = brainstate.transform.scan(body_at, carry, start + steps * jnp.arange(count))
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)


def _length(inputs: PyTree) -> int:
    return jnp.shape(jax.tree.leaves(inputs)[0])[0]


def _cut(tree: PyTree, start: Any, steps: int) -> PyTree:
    """Some steps of sequences; the sequences themselves if those are all."""
    if isinstance(start, int):
        return jax.tree.map(lambda a: lax.slice_in_dim(a, start, start + steps), tree)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, steps), tree)
