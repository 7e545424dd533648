"""Truncated RTRL by brute force: dense Jacobians of a step, and a mask of what is kept.

    E_t = mask * (J_t E_{t-1} + I_t),    g_t = dl/dw at fixed h_{t-1} + dl/dh_t (mask * J_t E_{t-1})

with ``J = dh_t/dh_{t-1}`` and ``I = dh_t/dw`` of the whole step. The mask has, for a weight whose
instant influence is on the positions of a set, the positions that these reach in fewer than ``n``
steps. It is right if every weight has one position, the same in all examples, all weights are
traced, and the loss reads the new states alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from tests.oracles.step import state_values, step_function

Loss = Callable[[dict], jax.Array]


def influence_gradient(
    model: brainstate.nn.Module, xs: jax.Array, loss: Loss, n: int, axes: int = 0
) -> Any:
    """The gradient by parameters, summed over all steps of a sequence.

    ``axes`` is the number of axes of a state, in front, that number examples. States are of one
    shape, and all in one group.
    """
    step, values = step_function(model), state_values(model)
    weights, as_params = ravel_pytree(values.params)
    states, as_hidden = ravel_pytree(values.hidden)
    shape = jax.tree.leaves(values.hidden)[0].shape
    num = int(np.prod(shape[axes:]))

    def move(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
        _, hidden, _ = step(as_params(w), as_hidden(h), values.others, x)
        return ravel_pytree(hidden)[0]

    jacobians = jax.jit(jax.jacrev(move, argnums=(0, 1)))
    signal = jax.jit(jax.grad(lambda h: loss(as_hidden(h))))
    position = np.arange(len(states)) % num
    E = total = 0.0
    links = reached = mask = None
    h = states
    for x in xs:
        instant, J = map(np.asarray, jacobians(weights, h, x))
        if mask is None:
            links, reached = np.eye(num, dtype=bool), np.eye(num, dtype=bool)
            np.logical_or.at(links, np.ix_(position, position), J != 0)
            for _ in range(n - 1):
                reached = reached @ links.T  # [from, to]
            own = np.zeros((num, len(weights)), bool)
            np.logical_or.at(own, position, instant != 0)
            mask = (reached.T @ own)[position]
        h = jnp.asarray(move(weights, h, x))
        L = np.asarray(signal(h))
        past = mask * (J @ E) if np.ndim(E) else 0.0 * instant
        total = total + L @ instant + L @ past
        E = past + instant
    return as_params(jnp.asarray(total))
