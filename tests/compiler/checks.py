"""What tests of the compiler share: models of the same values at every call, and comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u


def build(
    make: Callable[[], brainstate.nn.Module], batch: int | None = None
) -> brainstate.nn.Module:
    """A model with the same weights and the same lively hidden states at every call."""
    brainstate.random.seed(11)
    model = make()
    brainstate.nn.init_all_states(model, batch_size=batch)
    rng = np.random.default_rng(3)
    for state in model.states(brainstate.HiddenState).values():
        mantissa, unit = u.split_mantissa_unit(state.value)
        value = jnp.asarray(rng.normal(size=mantissa.shape), mantissa.dtype)
        state.value = u.maybe_decimal(value * unit)
    return model


def draw(*shape: int, seed: int = 5) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), brainstate.environ.dftype())


def param(*shape: int) -> brainstate.ParamState:
    """A parameter of the same values at every call, drawn without a compilation by shape."""
    return brainstate.ParamState(0.5 * draw(*shape))


def numbers(leaf: jax.Array) -> np.ndarray:
    """A copy of an array, also of random keys."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if is_key else leaf)


def leaves_of(model: brainstate.nn.Module) -> dict[Any, list[np.ndarray]]:
    """Copies of all values of a model, to compare with later."""
    states = model.states().items()
    return {path: list(map(numbers, jax.tree.leaves(state.value))) for path, state in states}


def assert_close(found: Any, true: Any, rtol: float = 1e-10) -> None:
    found, true = np.asarray(found), np.asarray(true)
    assert found.shape == true.shape
    np.testing.assert_allclose(found, true, rtol=rtol, atol=rtol * max(1.0, np.abs(true).max()))


def assert_trees_close(found: Any, true: Any, rtol: float = 1e-10) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(true)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        assert_close(a, b, rtol)
