"""One driver for every way to run a compiled model with its engine."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import brainstate
import jax
from jax import lax

from .._typing import Path, PyTree
from ..compiler import ETraceGraph
from ..runtime.asked import Cut, define_vjp
from ..runtime.engine import Engine, Steps, Trace
from ..runtime.executor import ETraceGraphExecutor
from ..runtime.factors import Entry, Factors, GroupPlanes, Signals, Values, Zeros
from ..runtime.gradient import GradientSum
from ..runtime.planner import Traits, tree_bytes
from .windows import Driven, Sequences, run_windows, window_traits

__all__ = ['Driver', 'Recorded', 'Results', 'Rule', 'StepInputs']

Results = tuple[PyTree, Values, Values]
"""What a step returns, its new hidden states, and its other new states."""


class Rule(Protocol):
    """What a learning rule makes of the signals of the loss."""

    def learning_signals(self, factors: Factors, signals: Signals, modulator: Any) -> Signals:
        """The signals of a step that the rule learns from."""

    def entry_signals(self, planes: GroupPlanes) -> GroupPlanes:
        """The same at the start of a chunk that is differentiated in full."""

    def exit_signals(self, planes: GroupPlanes, modulator: Any) -> GroupPlanes | None:
        """What the future says of the states at the end of such a chunk; None for nothing."""


class StepInputs(NamedTuple):
    """All that a step, or a chunk of steps, depends on.

    Attributes
    ----------
    args : PyTree
        The inputs of the model.
    params, hidden, others : dict
        The values of the model's states, by path.
    entry : Entry
        The trace before the step.
    elapsed : jax.Array
        The number of steps since the trace was zero.
    keep : jax.Array, optional
        Per example, or for all, 0 where the states started anew before the step.
    modulator : optional
        What the learning rule is given besides the signals.
    """

    args: Any
    params: Values
    hidden: Values
    others: Values
    entry: Entry
    elapsed: jax.Array
    keep: jax.Array | None = None
    modulator: Any = None


class Recorded(NamedTuple):
    """What a step leaves for the trace."""

    factors: Factors
    modulator: Any


class Residuals(NamedTuple):
    """What the backward pass of a step needs of the forward pass."""

    inputs: StepInputs
    vjp: Any
    factors: Factors
    trace: Trace


_none: Any = (None,) * len(StepInputs._fields)
NO_COTANGENTS = StepInputs(*_none)


@dataclasses.dataclass(frozen=True)
class Driver:
    """Runs steps of a model, and hands what they say of the past to an engine.

    It is used in three ways, which share their parts. A step yields factors. With zeros added where
    signals are read, the cotangents of the zeros are the signals, of which the rule may make
    others. Out of both, the engine makes a gradient and the next trace:

    - :meth:`step`, inside a user's own ``grad``: one step, whose backward pass is the gradient;
    - :meth:`gradient`, over sequences: many steps, then one gradient for a window of them;
    - :meth:`evolve`: the same without zeros and signals, for the trace alone.

    Parameters
    ----------
    executor : ETraceGraphExecutor
        The compiled model.
    engine : Engine
        What carries the trace.
    rule : Rule
        What decides on signals.
    """

    executor: ETraceGraphExecutor
    engine: Engine
    rule: Rule

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        return self.executor.graph

    @property
    def outlook(self) -> Traits:
        """What the planner will have to know of sequences, as far as the step alone shows it."""
        jaxpr = self.graph.module_info.jaxpr
        computed = [v.aval for eqn in jaxpr.eqns for v in eqn.outvars]
        _, hidden, others = self.executor.values()
        effects = any(eqn.effects for eqn in jaxpr.eqns)
        return window_traits(self, tree_bytes(computed), tree_bytes((hidden, others)), effects)

    def step(self, inputs: StepInputs) -> tuple[Results, Trace]:
        """Run one step; its backward pass gives the online gradient."""
        step = jax.custom_vjp(self.advance)
        define_vjp(step, self._forward, self._backward, lambda operand: operand.args)
        return step(inputs)

    def advance(self, inputs: StepInputs) -> tuple[Results, Trace]:
        """Run one step, of which no gradient is asked."""
        values = inputs.params, inputs.hidden, inputs.others
        out, hidden, others, factors = self.executor.runner.run(inputs.args, *values)
        return (out, hidden, others), self._next_trace(inputs, factors.after_restart(inputs.keep))

    def gradient(
        self,
        step: Callable[..., tuple[jax.Array, PyTree, Recorded]],
        weights: Sequence[brainstate.State],
        paths: Sequence[Path | None],
        sequences: Sequences,
    ) -> Driven:
        """The gradient over sequences, with the trace read and written once per window.

        Parameters
        ----------
        step : callable
            From zeros and slices of the sequences to what is differentiated, outputs to stack,
            and what the model's step leaves for the trace.
        weights : sequence of State
            What to differentiate by.
        paths : sequence of Path or None
            The path of each, if it is a parameter of the model.
        sequences : Sequences
            The sequences, and where to start.
        """
        runner = self.executor.runner

        def learning(*slices: Any) -> Any:
            def loss(zeros: Zeros) -> Any:
                value, outputs, recorded = step(zeros, *slices)
                return value, (outputs, recorded)

            gradient = brainstate.transform.grad(loss, weights, argnums=0, has_aux=True)
            (grads, cotangents), (outputs, (factors, modulator)) = gradient(runner.zeros())
            signals = self.learned_signals(runner.as_signals(cotangents), factors, modulator)
            return (outputs, (factors, signals)), grads

        return run_windows(self, learning, weights, paths, sequences)

    def evolve(self, step: Callable[..., tuple[PyTree, Recorded]], sequences: Sequences) -> Driven:
        """Run over sequences, without a gradient; the parameters are those of :meth:`gradient`."""

        def running(*slices: Any) -> Any:
            outputs, recorded = step(None, *slices)
            return (outputs, (recorded.factors, None)), []

        return run_windows(self, running, [], [], sequences)

    def learned_signals(self, exact: Signals, factors: Factors, modulator: Any) -> Signals:
        """The signals that the rule learns from, given those of the loss."""
        signals = self.rule.learning_signals(factors, exact, modulator)
        return signals.after_restart(factors.keep)

    def _next_trace(self, inputs: StepInputs, factors: Factors) -> Trace:
        params = lax.stop_gradient(inputs.params)
        point = inputs.args, inputs.hidden, inputs.others
        steps = Steps(inputs.entry, factors, inputs.elapsed, None, params, point)
        return self.engine.advance(steps)

    def _forward(self, cut: Cut, inputs: StepInputs) -> tuple[tuple[Results, Trace], Residuals]:
        values = inputs.params, inputs.hidden, inputs.others
        results, vjp, factors = self.executor.runner.run_with_vjp(inputs.args, *values, cut)
        factors = factors.after_restart(inputs.keep)
        trace = self._next_trace(inputs, factors)
        read = inputs._replace(args=None, hidden={}, others={}, keep=None)
        return (results, trace), Residuals(read, vjp, factors, trace)

    def _backward(self, residuals: Residuals, cotangents: tuple[Results, Trace]) -> StepInputs:
        inputs, vjp, factors, trace = residuals
        ct_args, ct_params, exact = self.executor.runner.signals(vjp, cotangents[0])
        signals = self.learned_signals(exact, factors, inputs.modulator)
        total = GradientSum(self.graph, inputs.params, ct_params)
        total.exchange(factors, exact.c, signals.c)
        step = Steps(inputs.entry, factors, inputs.elapsed, signals, inputs.params)
        self.engine.gradients(total, step, trace)
        return NO_COTANGENTS._replace(args=ct_args, params=total.result())
