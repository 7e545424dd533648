"""Backward passes that differentiate by those inputs alone by which someone asks to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from .._typing import PyTree

__all__ = ['Cut', 'define_vjp', 'whole']

Cut = Callable[[PyTree], PyTree]
"""Stops the gradient of those inputs by which nobody asks to differentiate."""


def whole(inputs: PyTree) -> PyTree:
    """Cuts nothing."""
    return inputs


def define_vjp(
    function: Any,
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[[Any, Any], Any],
    inputs_of: Callable[[Any], PyTree],
) -> None:
    """Define the derivatives of a ``jax.custom_vjp`` of one operand, a tree.

    An input that nobody differentiates by may pass through what has no derivative, such as a
    callback to the host.

    Parameters
    ----------
    function : jax.custom_vjp
        The function.
    forward, backward : callable
        As for ``defvjp``, but that ``forward`` gets a :data:`Cut` before the operand, to be called
        on the inputs inside what it differentiates, and that ``backward`` returns one cotangent.
    inputs_of : callable
        Which part of the operand the inputs are.
    """

    def forward_asked(operand: Any) -> tuple[Any, Any]:
        asked = jax.tree.map(lambda leaf: leaf.perturbed, inputs_of(operand))

        def cut(inputs: PyTree) -> PyTree:
            return jax.tree.map(lambda a, ask: a if ask else lax.stop_gradient(a), inputs, asked)

        return forward(cut, custom_vjp_primal_tree_values(operand))

    def backward_whole(residuals: Any, cotangents: Any) -> tuple[Any]:
        return (backward(residuals, jax.tree.map(_instantiated, cotangents)),)

    function.defvjp(forward_asked, backward_whole, symbolic_zeros=True)


def _instantiated(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    numpy_only = cotangent.dtype == jax.dtypes.float0
    return (np if numpy_only else jnp).zeros(cotangent.shape, cotangent.dtype)
