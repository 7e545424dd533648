"""Traces in braintrace's layout: shaped like the parameter, examples in front, states last.

Engines keep a plane per state, in the coordinates that suit their kernels. This is for people to
look at, and for programs that were written for the other layout.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import NotSupportedError
from .links import Link

__all__ = ['f_key', 'on_states', 'stored', 'trace_key', 'unseen', 'without_view', 'x_key']

Weights = Mapping[str, jax.Array]


def trace_key(link: Link) -> tuple[int, int]:
    """The key of a link's trace."""
    return id(link.relation.y_var), link.group.index


def f_key(link: Link) -> tuple[int, str]:
    """The key of the output side of a link's trace."""
    return id(link.relation.y_var), f'hidden_group_{link.group.index}'


def x_key(link: Link) -> int | None:
    """The key of the input side of a link's trace; None if its op has no input."""
    x = link.relation.x_var
    return None if x is None else id(x)


def on_states(planes: Sequence[Any]) -> Any:
    """Planes, which may be trees of arrays, as one with the states in the last axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, -1), *planes)


def unseen(shapes: Any, is_alive: bool, live: jax.Array) -> Any:
    """A plane that is not carried: zero as long as it must be, and then not a number."""
    fill = jnp.where(live, jnp.nan, 0.0) if is_alive else jnp.zeros(())
    return jax.tree.map(lambda a: jnp.full(a.shape, fill, a.dtype), shapes)


def without_view(view: Callable[..., Any], weights: Weights, trace: Weights) -> Weights:
    """A trace in the coordinates of a view of the weights, pulled back to those of the weights."""
    viewed, pull_back = jax.vjp(view, dict(weights))
    given = {key: trace[key].astype(a.dtype) for key, a in viewed.items()}
    (leading,) = {given[key].ndim - a.ndim for key, a in viewed.items()}

    def pulled(cotangents: Any) -> Any:
        (gradients,) = pull_back(cotangents)
        return {key: gradients[key] for key in cotangents.keys() & gradients.keys()}

    for _ in range(leading):
        pulled = jax.vmap(pulled)
    return pulled(given)


def stored(shapes: Any, values: Any) -> Any:
    """What a plane of these shapes holds for values that are shown; a smaller form only zeros."""
    leaves = jax.tree.leaves(values)
    if jax.tree.map(jnp.shape, values) == jax.tree.map(jnp.shape, shapes):
        return jax.tree.map(lambda a, like: a.astype(like.dtype), values, shapes)
    if any(isinstance(a, jax.core.Tracer) or jnp.any(a != 0) for a in leaves):
        raise NotSupportedError(
            'This trace is kept in a smaller form, and can be set to zeros only, outside jit. '
            'Start anew by reset_state(), or by reset=... in a call of the learner.'
        )
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
