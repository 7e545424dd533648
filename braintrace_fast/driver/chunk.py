"""A chunk of steps that is differentiated in full, and by the trace at its entry."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import source_line
from ..compiler import ETraceGraph
from ..compiler.control_flow import has_while
from ..errors import NotSupportedError
from ..runtime.asked import Cut, define_vjp
from ..runtime.engine import Steps, Trace
from ..runtime.factors import Entry, Values, kept
from ..runtime.gradient import GradientSum
from ..runtime.input_data import chunk_length, has_multi_step_data, split_chunk
from .driver import NO_COTANGENTS, Driver, Results, StepInputs

__all__ = ['needs_multi_step', 'run_chunk', 'run_forward']


def run_chunk(driver: Driver, inputs: StepInputs, vjp_method: str) -> tuple[Results, Trace]:
    """Run a chunk of steps, given as :class:`MultiStepData`, or one step as a chunk of its own.

    Its backward pass differentiates the steps in full, of which ``vjp_method='single-step'`` allows
    one. What came before counts by the trace, and what comes after by what the rule says of the
    states at the end (``exit_signals``): that reaches inputs, and parameters where they are not
    traced, whose future is not in a trace.
    """

    def forward(cut: Cut, inputs: StepInputs) -> Any:
        if vjp_method != 'multi-step' and has_multi_step_data(inputs.args):
            raise NotImplementedError(needs_multi_step(vjp_method))

        def main(args: Any, params: Values, hidden: Values) -> Any:
            stopped = inputs._replace(args=cut(args), params=params, hidden=hidden)
            return run_forward(driver, stopped)

        results, vjp, trace = jax.vjp(main, inputs.args, inputs.params, inputs.hidden, has_aux=True)
        planes = driver.executor.runner.entry_planes(lax.stop_gradient(results[1]))
        future = driver.rule.exit_signals(planes, inputs.modulator)
        read = inputs._replace(args=None, hidden={}, others={}, modulator=None)
        return (results, trace), (read, vjp, future)

    def backward(residuals: Any, cotangents: Any) -> StepInputs:
        inputs, vjp, future = residuals
        with _named_loops(driver.graph):
            ct_args, ct_params, ct_hidden = vjp(cotangents[0])
        total = GradientSum(driver.graph, inputs.params, ct_params)
        if future is not None:
            exits = driver.executor.runner.exit_cotangents(cotangents[0], future)
            later_args, later_params, _ = vjp(exits)
            ct_args = jax.tree.map(_added, ct_args, later_args)
            total.add_plain(later_params)
        planes = driver.rule.entry_signals(driver.executor.runner.entry_planes(ct_hidden))
        if inputs.keep is not None:
            planes = kept(planes, inputs.keep)
        driver.engine.entry_gradients(total, inputs.entry, planes, inputs.elapsed - 1)
        return NO_COTANGENTS._replace(args=ct_args, params=total.result())

    chunk = jax.custom_vjp(partial(run_forward, driver))
    define_vjp(chunk, forward, backward, lambda operand: operand.args)
    return chunk(inputs)


def run_forward(driver: Driver, inputs: StepInputs) -> tuple[Results, Trace]:
    """The same as plain JAX, which differentiates it as any function."""
    if not has_multi_step_data(inputs.args):
        return driver.advance(inputs)
    in_windows = driver.engine.refuses_windows() is None
    return (_run_window if in_windows else _run_steps)(driver, inputs)


def _run_window(driver: Driver, inputs: StepInputs) -> tuple[Results, Trace]:
    """Run the steps of a chunk, then advance the trace past all of them at once."""
    sequences, at_step = split_chunk(inputs.args)
    runner, params = driver.executor.runner, inputs.params

    def body(carry: Any, slices: Any) -> Any:
        hidden, others = carry
        out, hidden, others, factors = runner.run(at_step(slices), params, hidden, others)
        return (hidden, others), (out, factors)

    carry = inputs.hidden, inputs.others
    (hidden, others), (out, factors) = lax.scan(body, carry, sequences)
    factors = factors.after_restart(_keep_of_steps(inputs))
    params = lax.stop_gradient(inputs.params)
    steps = Steps(inputs.entry, factors, inputs.elapsed, None, params)
    return (out, hidden, others), driver.engine.window(None, steps)


def _run_steps(driver: Driver, inputs: StepInputs) -> tuple[Results, Trace]:
    """Run a chunk with the trace advanced in every step, for engines that know no windows."""
    sequences, at_step = split_chunk(inputs.args)

    def body(before: StepInputs, at: Any) -> Any:
        slices, keep = at
        step = before._replace(args=at_step(slices), params=inputs.params, keep=keep)
        (out, hidden, others), trace = driver.advance(step)
        entry = Entry(trace, jnp.ones_like(before.entry.live))
        after = before._replace(
            hidden=hidden, others=others, entry=entry, elapsed=before.elapsed + 1
        )
        return after, out

    carried = inputs._replace(args=None, params={}, keep=None)
    last, out = lax.scan(body, carried, (sequences, _keep_of_steps(inputs)))
    return (out, last.hidden, last.others), last.entry.trace


def _keep_of_steps(inputs: StepInputs) -> jax.Array | None:
    """What each step of a chunk keeps of the past: states can start anew before the first."""
    if inputs.keep is None:
        return None
    later = jnp.ones((chunk_length(inputs.args) - 1, *inputs.keep.shape), bool)
    return jnp.concatenate([inputs.keep[None], later])


def _added(one: Any, other: Any) -> Any:
    """The sum of two cotangents; those of integers are empty."""
    return one if one.dtype == jax.dtypes.float0 else one + other


def needs_multi_step(vjp_method: str) -> str:
    """Why a chunk has no gradient."""
    return (
        "The gradient of a chunk (MultiStepData) needs vjp_method='multi-step'; this learner "
        f'has {vjp_method!r}. Give a single time step in each call, or compile it so.'
    )


@contextmanager
def _named_loops(graph: ETraceGraph) -> Iterator[None]:
    """Say where the while loop is that JAX cannot differentiate in reverse."""
    try:
        yield
    except ValueError as error:
        loops = [source_line(eqn) for eqn in graph.module_info.jaxpr.eqns if has_while(eqn)]
        if not loops or 'Reverse-mode differentiation' not in str(error):
            raise
        raise NotSupportedError(
            f'{", ".join(loops)}: the loss reads a while loop, which the gradient of a chunk '
            "would have to differentiate in reverse. Use vjp_method='single-step', or lax.scan or "
            'lax.fori_loop with a fixed number of steps.'
        ) from error
