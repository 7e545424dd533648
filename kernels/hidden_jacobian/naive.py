"""``hidden_jacobian`` as it is defined: of the dense Jacobian, the diagonal."""

from typing import Any

import jax
import numpy as np

from .operands import JacobianOperands

__all__ = ['hidden_jacobian']


def hidden_jacobian(operands: JacobianOperands) -> list[list[np.ndarray]]:
    """See :func:`braintrace_fast.kernels.hidden_jacobian.hidden_jacobian`.

    A derivative that is structurally zero is an array of zeros. It takes the square of the
    positions in memory, and reverse mode if there is one.
    """
    transition, inputs = operands.transition, operands.inputs
    widths = (*transition.widths, *(0 for _ in transition.shared))
    differentiate = jax.jacfwd if transition.forward_only else jax.jacrev
    rows = []
    for row, width in enumerate(transition.widths):

        def new_state(inputs: Any, row: int = row) -> jax.Array:
            return transition.evaluate(row, operands.constants[row], inputs)

        jacobians = [np.asarray(a, np.float64) for a in differentiate(new_state)(list(inputs))]
        shape = jax.eval_shape(new_state, list(inputs)).shape
        varshape = shape[:-1] if width else shape
        for plane in _places(width):
            columns = zip(jacobians, widths, strict=True)
            rows.append(
                [
                    _diagonal(jacobian, varshape, plane, column)
                    for jacobian, other in columns
                    for column in _places(other)
                ]
            )
    return rows


def _places(width: int) -> list[tuple[int, ...]]:
    """The places of planes along an axis of their own, if there is one."""
    return [(plane,) for plane in range(width)] if width else [()]


def _diagonal(
    jacobian: np.ndarray, varshape: tuple[int, ...], plane: tuple[int, ...], column: tuple[int, ...]
) -> np.ndarray:
    """``d new[position, plane] / d input[position, column]`` at all positions.

    An input may lack leading axes, or have one number along some: all positions there share it.
    """
    derivative = np.zeros(varshape)
    shared = jacobian.ndim - len(varshape) - len(plane) - len(column)
    sizes = jacobian.shape[len(varshape) + len(plane) :][:shared]
    for position in np.ndindex(*varshape):
        own = position[len(position) - shared :]
        place = tuple(p if size > 1 else 0 for p, size in zip(own, sizes, strict=True))
        derivative[position] = jacobian[(*position, *plane, *place, *column)]
    return derivative
