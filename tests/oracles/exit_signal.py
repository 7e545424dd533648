"""The learning signal of a group's exits by brute force.

Adding ``p`` to a new state when the model writes it lets everybody see it, also the other states
of the group. So ``L_p = dloss/dp`` counts same-step paths inside the group, and with ``P`` the
same-step influence of the group's planes on each other, ``L_p = P^T L``. Both are taken from the
model itself, whose writes are intercepted; nothing here knows the compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from tests.oracles.dense import Planes, own_positions, plain_ops
from tests.oracles.step import Path, Values, random_projection, states_by_kind, step_function


def exit_signal_oracle(
    model: brainstate.nn.Module, groups: Sequence[Sequence[Path]], *, forward_mode: bool = False
) -> Callable[[Values, Any, Sequence[Path]], list[Planes]]:
    """The function that gives ``L[group][s]`` for a random projection of output and states."""
    states = states_by_kind(model)[1]
    step = step_function(model)

    def planes_of(path: Path, value: jax.Array) -> Planes:
        wide = isinstance(states[path], brainstate.HiddenGroupState)
        return [value[..., i] for i in range(value.shape[-1])] if wide else [value]

    def signals(values: Values, x: Any, projected: Sequence[Path]) -> list[Planes]:
        zeros = {path: jnp.zeros_like(u.get_mantissa(values.hidden[path])) for path in states}
        writes = _count_writes(states, lambda: jax.eval_shape(lambda: step(*values, x)))

        def perturbed(added: dict[Path, jax.Array]) -> tuple[Any, dict[Path, Any]]:
            with _added_at_last_write(states, writes, added):
                output, hidden, _ = step(*values, x)
            return output, hidden

        def loss(added: dict[Path, jax.Array]) -> jax.Array:
            output, hidden = perturbed(added)
            return random_projection((output, {path: hidden[path] for path in projected}))

        def new_planes(added: dict[Path, jax.Array]) -> list[Planes]:
            with plain_ops():
                _, hidden = perturbed(added)
            mantissas = {path: u.get_mantissa(value) for path, value in hidden.items()}
            return [[p for path in g for p in planes_of(path, mantissas[path])] for g in groups]

        L_p = (jax.jacfwd if forward_mode else jax.grad)(loss)(zeros)
        influence = (jax.jacfwd if forward_mode else jax.jacrev)(new_planes)(zeros)
        return [
            _solve(
                [p for path in group for p in planes_of(path, L_p[path])],
                [
                    [p for path in group for p in planes_of(path, row[path])]
                    for row in influence[index]
                ],
            )
            for index, group in enumerate(groups)
        ]

    return signals


def _solve(L_p: Planes, influence: list[Planes]) -> Planes:
    shape = L_p[0].shape
    P = jnp.stack(
        [jnp.stack([own_positions(p, shape, shape) for p in row], -1) for row in influence], -2
    )
    L = jnp.linalg.solve(jnp.swapaxes(P, -1, -2), jnp.stack(L_p, -1)[..., None])[..., 0]
    return [L[..., s] for s in range(len(L_p))]


@contextlib.contextmanager
def _intercepted_writes(on_write: Callable[[brainstate.State, Any], Any]) -> Iterator[None]:
    original = brainstate.State.value
    brainstate.State.value = property(
        original.fget, lambda self, v: original.fset(self, on_write(self, v))
    )
    try:
        yield
    finally:
        brainstate.State.value = original


def _count_writes(states: dict[Path, brainstate.State], call: Callable[[], Any]) -> dict[Path, int]:
    path_of = {id(state): path for path, state in states.items()}
    writes = dict.fromkeys(states, 0)

    def count(state: brainstate.State, value: Any) -> Any:
        if id(state) in path_of:
            writes[path_of[id(state)]] += 1
        return value

    with _intercepted_writes(count):
        call()
    return writes


@contextlib.contextmanager
def _added_at_last_write(
    states: dict[Path, brainstate.State], writes: dict[Path, int], added: dict[Path, jax.Array]
) -> Iterator[None]:
    path_of = {id(state): path for path, state in states.items()}
    left = dict(writes)

    def add(state: brainstate.State, value: Any) -> Any:
        path = path_of.get(id(state))
        if path is None:
            return value
        left[path] -= 1
        unit = u.get_unit(value)
        return value if left[path] else value + u.maybe_decimal(added[path] * unit)

    with _intercepted_writes(add):
        yield
