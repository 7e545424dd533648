"""The gradient of a sequence by the recurrence over dense Jacobians, for models of the table.

The loss of a step reads the output and every hidden state, so that all signals are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from braintrace_fast import testing
from tests.models import MODELS, ModelCase
from tests.oracles.step import random_projection

STEPS = 6
BATCH = 2
DECAY = (0.8, 0.9)


def step_loss(model: brainstate.nn.Module) -> Callable[[Any, Any], jax.Array]:
    """The loss of a step, which calls the model or a learner of it."""
    hidden = list(model.states(brainstate.HiddenState).values())

    def loss(run: Any, x: Any) -> jax.Array:
        output = run(x)
        return random_projection((output, [state.value for state in hidden]))

    return loss


def output_loss(run: Any, x: Any) -> jax.Array:
    return random_projection(run(x))


def oracle_of(
    case: ModelCase, outputs_only: bool = False, steps: int = STEPS
) -> testing.Recurrence:
    """The dense recurrence of a model of the table, with either loss."""
    return _oracle_of(case.name, outputs_only, brainstate.environ.get_precision(), steps)


@functools.cache
def _oracle_of(name: str, outputs_only: bool, precision: int, steps: int) -> testing.Recurrence:
    case = MODELS[name]
    model, inputs = case.build(BATCH)
    loss = functools.partial(output_loss if outputs_only else step_loss(model), model)
    return testing.Recurrence(model, inputs(0, steps), step_fn=loss, forward_mode=case.forward_mode)


def recurrence_of(
    case: ModelCase,
    algorithm: str,
    chunk_size: int | None = None,
    outputs_only: bool = False,
    steps: int = STEPS,
) -> testing.Gradients:
    """The truth over the sequence from the start, in float64."""
    oracle = oracle_of(case, outputs_only, steps)
    return oracle.gradient(None if algorithm == 'd_rtrl' else DECAY, chunk_size)
