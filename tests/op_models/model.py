"""A model around one op: states that the op's output drives, position by position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

States = tuple[Any, ...]
Transition = Callable[[States, Any], States]


def one_state(states: States, y: Any) -> States:
    (h,) = states
    return (jnp.tanh(0.8 * h + y),)


def two_states(states: States, y: Any) -> States:
    """A current with one time constant, whose new value a potential reads."""
    a, h = states
    a = 0.7 * a + 0.5 * y
    return a, jnp.tanh(0.6 * h + a - 0.3 * a * h)


TRANSITIONS: dict[str, tuple[Transition, int]] = {'one': (one_state, 1), 'two': (two_states, 2)}
"""By name: how the states follow each other, and how many there are."""


def same(x: Any) -> Any:
    return x


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape)


@dataclasses.dataclass(frozen=True)
class OpModel:
    """An op, and what it computes in plain JAX.

    ``op(x, weights)`` and ``plain(X, weights)`` take a batch in front. ``X = dense(x)`` is what the
    output is linear in. ``x`` and ``y`` are the shapes of one example, ``weights`` those of the
    parameters.
    """

    name: str
    op: Callable[[Any, dict[str, Any]], Any]
    plain: Callable[[Any, dict[str, Any]], Any]
    x: tuple[int, ...]
    y: tuple[int, ...]
    weights: dict[str, tuple[int, ...]]
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] = normal
    dense: Callable[[Any], Any] = same

    def inputs(self, steps: int, batch: int) -> jax.Array:
        return jnp.asarray(self.draw(np.random.default_rng(1), (steps, batch, *self.x)))

    def parameters(self) -> dict[str, jax.Array]:
        rng = np.random.default_rng(2)
        return {
            key: jnp.asarray(0.7 * rng.normal(size=shape)) for key, shape in self.weights.items()
        }


class Driven(brainstate.nn.Module):
    """States driven by an op; a parameter per weight, of the weight's name."""

    def __init__(self, model: OpModel, transition: str) -> None:
        super().__init__()
        self.model = model
        self.transition, self.size = TRANSITIONS[transition]
        for key, value in model.parameters().items():
            setattr(self, key, brainstate.ParamState(value))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        lead = () if batch_size is None else (batch_size,)
        zeros = jnp.zeros((*lead, *self.model.y), brainstate.environ.dftype())
        for s in range(self.size):
            setattr(self, f'h{s}', brainstate.HiddenState(zeros))

    def update(self, x: Any) -> States:
        weights = {key: getattr(self, key).value for key in self.model.weights}
        y = self.model.op(x, weights)
        names = [f'h{s}' for s in range(self.size)]
        new = self.transition(tuple(getattr(self, name).value for name in names), y)
        for name, value in zip(names, new, strict=True):
            getattr(self, name).value = value
        return new
