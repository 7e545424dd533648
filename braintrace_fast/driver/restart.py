"""Examples that start anew before a step, as at the end of an episode."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._typing import Path
from ..compiler import HiddenParamOpRelation
from ..runtime.factors import Values, per_example
from ..runtime.links import shared_axes, x_shape

__all__ = ['restart']


def restart(
    states: Mapping[Path, brainstate.State],
    starts: Values,
    relations: Sequence[HiddenParamOpRelation],
    reset: Any,
) -> jax.Array:
    """Set short-term states to what they started with, where the flags say so.

    Parameters
    ----------
    states : mapping
        The states of the model, by path.
    starts : mapping
        What the short-term states among them started with.
    relations : sequence of HiddenParamOpRelation
        The ops that are traced, which say what an example is.
    reset : bool or array
        One flag for all, or one per example.

    Returns
    -------
    jax.Array
        Flags of what is kept of the past.
    """
    flags = jnp.asarray(reset).astype(bool)
    for relation in relations:
        if flags.ndim > _axes_of_examples(relation):
            raise ValueError(
                f'reset has shape {flags.shape}, and there are no examples of that shape: the op '
                f'at {relation.source} gives an output of shape {relation.y_var.aval.shape}. Give '
                'one flag for all, or one per example.'
            )
    for path, state in states.items():
        if not isinstance(state, brainstate.ShortTermState):
            continue
        shapes = {jnp.shape(leaf)[: flags.ndim] for leaf in jax.tree.leaves(state.value)}
        if shapes == {flags.shape}:
            state.value = jax.tree.map(
                lambda start, a: jnp.where(per_example(flags, a), start, a),
                starts[path],
                state.value,
            )
        elif isinstance(state, brainstate.HiddenState):
            raise ValueError(
                f'reset has shape {flags.shape}, which is not how the shape of the hidden '
                f'state at {path} starts: {jnp.shape(state.value)}. Give one flag for all, or '
                'one per example.'
            )
    return ~flags


def _axes_of_examples(relation: HiddenParamOpRelation) -> float:
    """How many axes in front of an op's output number examples; any, if all examples share it."""
    y = relation.y_var.aval.shape[bool(relation.substeps) :]
    own = any(group.varshape == y for group in relation.hidden_groups)
    x = x_shape(relation)
    return shared_axes(x.shape, y[:-1]) if own and x is not None else math.inf
