"""Marks on inputs: one time step, or a chunk of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_pytree_node_class

__all__ = [
    'MultiStepData',
    'SingleStepData',
    'chunk_length',
    'has_multi_step_data',
    'single_step',
    'split_chunk',
]


class _InputData:
    def __init__(self, data: Any) -> None:
        self.data = data

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.data,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> '_InputData':
        return cls(*children)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.data!r})'


@register_pytree_node_class
class SingleStepData(_InputData):
    """Input of one time step; in a chunk, every step sees it.

    Parameters
    ----------
    data : PyTree
        The input.
    """


@register_pytree_node_class
class MultiStepData(_InputData):
    """Input of a chunk of time steps, along the leading axis of every leaf.

    Parameters
    ----------
    data : PyTree
        The input.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> braintrace.MultiStepData(jnp.zeros((10, 3))).data.shape
    (10, 3)
    """


def _is_marked(x: Any) -> bool:
    return isinstance(x, _InputData)


def _map_marked(fun: Callable[[Any], Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(fun, args, is_leaf=_is_marked)


def has_multi_step_data(args: tuple[Any, ...]) -> bool:
    """Whether any of the arguments is a chunk."""
    leaves = jax.tree.leaves(args, is_leaf=_is_marked)
    return any(isinstance(x, MultiStepData) for x in leaves)


def single_step(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the first step, without marks."""

    def first(x: Any) -> Any:
        if isinstance(x, MultiStepData):
            return jax.tree.map(lambda leaf: leaf[0], x.data)
        return x.data if isinstance(x, SingleStepData) else x

    return _map_marked(first, args)


def split_chunk(
    args: tuple[Any, ...],
) -> tuple[list[Any], Callable[[list[Any]], tuple[Any, ...]]]:
    """The sequences among the arguments, and a function from their slices to a step's arguments.

    Raises
    ------
    ValueError
        If the sequences have different lengths, or no step at all.
    """
    leaves, tree = jax.tree.flatten(args, is_leaf=_is_marked)
    sequences = [x.data for x in leaves if isinstance(x, MultiStepData)]
    lengths = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(sequences)]
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise ValueError(
            f'The sequences of a chunk have lengths {lengths}; they must be equal and at least 1.'
        )

    def at_step(slices: list[Any]) -> tuple[Any, ...]:
        remaining = iter(slices)
        filled = [next(remaining) if isinstance(x, MultiStepData) else x for x in leaves]
        return single_step(jax.tree.unflatten(tree, filled))

    return sequences, at_step


def chunk_length(args: tuple[Any, ...]) -> int:
    """The number of steps of the sequences among the arguments."""
    sequences, _ = split_chunk(args)
    return int(jnp.shape(jax.tree.leaves(sequences)[0])[0])
