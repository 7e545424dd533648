"""What the tests of learners share: a learner per model and its compiled step.

Learners are shared between tests, which set all states before they use one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.driver import windows
from braintrace_fast.runtime import planner
from tests.models import MODELS, ModelCase
from tests.oracles.recurrence import BATCH, DECAY, STEPS, step_loss
from tests.oracles.step import state_values, states_by_kind, step_function

ALGORITHMS: dict[str, tuple[type[btf.ETraceVjpAlgorithm], dict[str, Any]]] = {
    'd_rtrl': (btf.D_RTRL, {}),
    'pp_prop': (btf.pp_prop, {'decay_or_rank': DECAY}),
}


class Learning(NamedTuple):
    model: brainstate.nn.Module
    xs: Any
    start: Any
    learner: btf.ETraceVjpAlgorithm
    step: Callable[[Any], Any]
    """From the inputs of a step to gradients by path, compiled."""


def learning(case: ModelCase, algorithm: str, *, steps: int = STEPS, **options: Any) -> Learning:
    precision = brainstate.environ.get_precision()
    return _learning(case.name, algorithm, precision, steps, tuple(sorted(options.items())))


@functools.cache
def _learning(name: str, algorithm: str, precision: int, steps: int, options: Any) -> Learning:
    model, inputs = MODELS[name].build(BATCH)
    xs = inputs(0, steps)
    rule, defaults = ALGORITHMS[algorithm]
    learner = rule(model, **(defaults | dict(options)))
    learner.compile_graph(at(xs, 0))
    loss = step_loss(model)

    @brainstate.transform.jit
    def step(x: Any) -> Any:
        return brainstate.transform.grad(lambda: loss(learner, x), learner.param_states)()

    return Learning(model, xs, state_values(model), learner, step)


def at(sequences: Any, t: int) -> Any:
    return jax.tree.map(lambda a: a[t], sequences)


def set_states(model: brainstate.nn.Module, values: Any) -> None:
    for kind, by_path in zip(states_by_kind(model), values, strict=True):
        for path, state in kind.items():
            state.value = by_path[path]


def begin(case: Learning, values: Any = None) -> None:
    """Set the states, from the start by default, and zero traces."""
    set_states(case.model, case.start if values is None else values)
    case.learner.reset_state()


@functools.cache
def _live_values(name: str, precision: int) -> Any:
    """States after three steps, moved at random."""
    model, inputs = MODELS[name].build(BATCH)
    xs, rng = inputs(1, 3), np.random.default_rng(2)
    values, step = state_values(model), jax.jit(step_function(model))
    for t in range(3):
        _, hidden, others = step(*values, at(xs, t))
        values = values._replace(hidden=hidden, others=others)

    def move(a: jax.Array) -> jax.Array:
        return a + jnp.asarray(0.1 * rng.normal(size=a.shape), a.dtype)

    return values._replace(hidden=jax.tree.map(move, values.hidden))


def live_values(case: ModelCase) -> Any:
    return _live_values(case.name, brainstate.environ.get_precision())


def check(found: Any, true: Any, rtol: float) -> None:
    testing.compare(found, true).check(rtol)


def add_trees(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def cut_into(monkeypatch: Any, steps: int, block: int | None, backwards: bool = True) -> None:
    """Cut sequences into windows, and these into blocks, whatever they take."""

    def plan_windows(window: Any, inputs: Any, *_: Any) -> planner.Plan:
        pieces = planner.split(len(jax.tree.leaves(inputs)[0]), steps)
        return planner.Plan(pieces, 'told to', 0, backwards=backwards, block=block)

    monkeypatch.setattr(windows, 'plan_windows', plan_windows)
