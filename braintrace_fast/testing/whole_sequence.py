"""Oracles of the loss of a whole sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .pure_step import Gradients, PureStep, StepFn, derivative, float64, length_of

__all__ = ['bptt', 'finite_differences']


def bptt(
    model: brainstate.nn.Module, *sequences: Any, step_fn: StepFn, forward_mode: bool = False
) -> Gradients:
    """The gradient of the loss of a sequence, by reverse mode through the model itself.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model with initialised states whose ``update`` is one time step.
    *sequences
        Trees of arrays with a common leading length; their slices are passed to ``step_fn``.
    step_fn : callable
        Calls the model (not a learner) once and returns the loss of the step, a scalar.
    forward_mode : bool
        Whether to differentiate in forward mode, the only one of a ``while`` loop.

    Returns
    -------
    dict
        Gradients by path, in float64.

    Raises
    ------
    VacuousComparison
        If all gradients are zero, or a layer with a ``get_spike`` is silent.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> from braintrace_fast import testing
    >>> cell = braintrace.nn.GRUCell(2, 3)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> grads = testing.bptt(cell, jnp.ones((4, 2)), step_fn=lambda x: cell(x).sum())
    >>> grads['Wz', 'weight']['weight'].dtype
    dtype('float64')
    """
    length_of(sequences)
    with brainstate.environ.context(precision=64):
        pure = PureStep(model, step_fn)
        values, sequences = pure.values, float64(sequences)

        def loss(params: list[Any]) -> Any:
            total, _, spikes = pure.over(values._replace(params=params), sequences)
            return total, spikes

        gradients, spikes = jax.jit(derivative(forward_mode)(loss, has_aux=True))(values.params)
        return pure.result(gradients, spikes)


def finite_differences(
    model: brainstate.nn.Module, *sequences: Any, step_fn: StepFn, step: float = 1e-5
) -> Gradients:
    """The gradient of the loss of a sequence by central differences, element by element.

    Only for smooth models: with spikes the loss is piecewise constant, and a surrogate gradient is
    not its derivative.

    Parameters
    ----------
    model, *sequences, step_fn
        As for :func:`bptt`.
    step : float
        The length of a difference, relative to the size of the parameter's elements.

    Returns
    -------
    dict
        Gradients by path, in float64; their relative error is about ``1e-7``.

    Raises
    ------
    ValueError
        If differences of another length give another gradient: the model is not smooth.
    VacuousComparison
        If all gradients are zero, or a layer with a ``get_spike`` is silent.

    Examples
    --------
    >>> import brainstate, jax, jax.numpy as jnp
    >>> from braintrace_fast import nn, testing
    >>> xs = jax.random.normal(jax.random.key(0), (4, 2))
    >>> cell = nn.GRUCell(2, 3)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> task = dict(step_fn=lambda x: jnp.sum(cell(x) ** 2))
    >>> differences = testing.finite_differences(cell, xs, **task)
    >>> testing.compare(differences, testing.bptt(cell, xs, **task)).check(rtol=1e-6)
    """
    length_of(sequences)
    with brainstate.environ.context(precision=64):
        pure = PureStep(model, step_fn)
        values, sequences = pure.values, float64(sequences)
        leaves, tree = jax.tree.flatten(values.params)

        @jax.jit
        def loss(leaves: list[jax.Array]) -> Any:
            params = jax.tree.unflatten(tree, leaves)
            total, _, spikes = pure.over(values._replace(params=params), sequences)
            return total, spikes

        slopes = jax.jit(lambda step: _slopes(lambda moved: loss(moved)[0], leaves, step))
        gradients = [np.asarray(g) for g in slopes(step)]
        _refuse_unequal(gradients, [np.asarray(g) for g in slopes(2 * step)])
        return pure.result(jax.tree.unflatten(tree, gradients), loss(leaves)[1])


def _slopes(
    loss: Callable[[list[jax.Array]], jax.Array], leaves: list[jax.Array], step: jax.Array
) -> list[jax.Array]:
    """Central differences of a loss by each element of each leaf."""

    def slopes_of(place: int) -> jax.Array:
        leaf = leaves[place]
        size = step * jnp.maximum(jnp.abs(leaf).max(), 1e-3)

        def slope(index: jax.Array) -> jax.Array:
            shift = jnp.where(jnp.arange(leaf.size) == index, size, 0.0).reshape(leaf.shape)
            above, below = (
                loss([*leaves[:place], leaf + sign * shift, *leaves[place + 1 :]])
                for sign in (1, -1)
            )
            return (above - below) / (2 * size)

        return lax.map(slope, jnp.arange(leaf.size)).reshape(leaf.shape)

    return [slopes_of(place) for place in range(len(leaves))]


def _refuse_unequal(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> None:
    """Raise an error if differences of two lengths give different gradients."""
    scale = max(np.abs(g).max() for g in others)
    if any(np.abs(a - b).max() > 1e-4 * scale for a, b in zip(some, others, strict=True)):
        raise ValueError(
            'Differences of two lengths do not agree, so the model is not smooth here. '
            'Compare spiking models with bptt or recurrence instead.'
        )
