"""The step of a model as a pure function, and a loss that reads all that it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

Path = tuple[str | int, ...]
StateValues = dict[Path, Any]
RANDOM: Path = ('brainstate.random.DEFAULT',)


class Values(NamedTuple):
    """Values of a model's states by path; ``others`` are neither parameters nor hidden."""

    params: StateValues
    hidden: StateValues
    others: StateValues


Step = Callable[[StateValues, StateValues, StateValues, Any], tuple[Any, StateValues, StateValues]]


def states_by_kind(model: brainstate.nn.Module) -> tuple[dict[Path, brainstate.State], ...]:
    params, hidden, others = {}, {}, {RANDOM: brainstate.random.DEFAULT}
    for path, state in model.states().items():
        if isinstance(state, brainstate.ParamState):
            params[path] = state
        elif isinstance(state, brainstate.HiddenState):
            hidden[path] = state
        else:
            others[path] = state
    return params, hidden, others


def state_values(model: brainstate.nn.Module) -> Values:
    """The present values of the model's states, and of brainstate's own generator."""
    return Values(*({path: s.value for path, s in kind.items()} for kind in states_by_kind(model)))


def step_function(model: brainstate.nn.Module) -> Step:
    """The model's step: ``(params, hidden, others, x) -> (output, new hidden, new others)``.

    It is pure, so ``jax.grad`` of it is the truth for a step, and leaves the model's states alone.
    """
    kinds = states_by_kind(model)

    def step(params: StateValues, hidden: StateValues, others: StateValues, x: Any) -> Any:
        before = [(state, state.value) for kind in kinds for state in kind.values()]
        with brainstate.StateTraceStack():
            try:
                for kind, values in zip(kinds, (params, hidden, others), strict=True):
                    for path, state in kind.items():
                        state.restore_value(values[path])
                output = model(x)
                new = [{path: state.value for path, state in kind.items()} for kind in kinds[1:]]
            finally:
                for state, value in before:
                    state.restore_value(value)
        return output, *new

    return step


def run(step: Step, values: Values, xs: Any) -> tuple[list[Any], list[Values]]:
    """The outputs of the steps over a sequence, and all values from the first to the last."""
    outputs, trajectory = [], [values]
    for x in xs:
        output, hidden, others = step(*trajectory[-1], x)
        outputs.append(output)
        trajectory.append(Values(values.params, hidden, others))
    return outputs, trajectory


def random_projection(tree: Any, seed: int = 0) -> jax.Array:
    """A scalar that depends on each mantissa of floating type in the tree."""
    rng = np.random.default_rng(seed)
    return sum(
        jnp.sum(leaf * rng.normal(size=leaf.shape))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )
