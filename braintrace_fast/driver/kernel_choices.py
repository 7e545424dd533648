"""Which kernels a learner's steps and windows run with, found out without running them."""

from typing import Any

import jax
import jax.numpy as jnp

from ..kernels import dispatch
from ..kernels.dispatch import Choice
from ..runtime.engine import Steps
from ..runtime.factors import Entry, Factors, Signals
from ..runtime.gradient import GradientSum
from .driver import Driver

__all__ = ['kernel_choices']


def kernel_choices(
    driver: Driver,
    example: tuple[Any, ...],
    entry: Entry,
    elapsed: jax.Array,
    learns_in_windows: bool,
    length: int = 64,
) -> list[Choice]:
    """The choices of a step, and of a window of so many steps.

    Parameters
    ----------
    driver : Driver
        The driver.
    example : tuple
        Inputs of a step.
    entry : Entry
        The trace before it.
    elapsed : jax.Array
        Its number of steps.
    learns_in_windows : bool
        Whether windows are for the gradient, or for the trace alone.
    length : int
        The steps of a window.
    """
    if driver.executor.resolved_backend.name == 'jax':
        return []
    runner, engine = driver.executor.runner, driver.engine
    values = driver.executor.values()
    carries = engine.refuses_carry() is None
    before = entry if carries else None  # without it, one learns in fresh windows

    def step() -> Any:
        *_, factors = runner.run(example, *values)
        exact = runner.as_signals(runner.zeros())
        signals = driver.rule.learning_signals(factors, exact, modulator=jnp.zeros(()))
        if before is not None:
            params, hidden, others = values
            point = example, hidden, others
            engine.advance(Steps(before, factors, elapsed, None, params, point))
        return factors, signals

    def window(factors: Factors, signals: Signals) -> Any:
        if not learns_in_windows:
            return engine.window(None, Steps(before, factors, elapsed, None, values[0]))
        total = GradientSum(driver.graph, values[0], jax.tree.map(jnp.zeros_like, values[0]))
        steps = Steps(before, factors, elapsed, signals, values[0])
        return engine.window(total, steps), total.result()

    with dispatch.recording() as choices:
        one = jax.eval_shape(step)
        if engine.refuses_windows() is None:
            many = jax.tree.map(lambda a: jax.ShapeDtypeStruct((length, *a.shape), a.dtype), one)
            jax.eval_shape(window, *many)
    return choices
