"""The checked entry point of ``hidden_jacobian``."""

from collections.abc import Sequence
from typing import Any

import jax

from .. import dispatch
from ..dispatch import PLAIN, Backend
from ..planes import Plane
from .operands import JacobianOperands

__all__ = ['hidden_jacobian']


def hidden_jacobian(
    transition: Any,
    constants: Sequence[Sequence[jax.Array]],
    inputs: Sequence[jax.Array],
    *,
    backend: Backend = PLAIN,
) -> list[list[Plane]]:
    """The derivatives of new states by old states and by the outputs of ops, per position.

    Parameters
    ----------
    transition : object
        The compiled transition of a group, with ``widths`` (how many planes each state holds along
        its last axis; 0 for a state that is one plane), ``reached`` (per new state, which inputs it
        depends on), ``pattern`` (per new plane, which planes of the inputs), ``shared`` (per op,
        whether its output has fewer axes than the states), ``forward_only`` (whether there is no
        reverse mode), ``evaluate(row, constants, inputs)`` (one new state) and
        ``push_forward(row, constants, inputs, tangents)`` (its tangent).
    constants : sequence of sequence of array
        Per new state, what its row reads besides the inputs.
    inputs : sequence of array
        The old states, then the outputs of the ops.
    backend : Backend
        What to run it with.

    Returns
    -------
    list of list of array or None
        Per new plane, its derivative by every plane of the inputs; None where it is structurally
        zero.
    """
    if len(constants) != len(transition.widths):
        raise ValueError(
            f'hidden_jacobian: there are constants for {len(constants)} states, expected '
            f'{len(transition.widths)}.'
        )
    operands = JacobianOperands(transition, constants, inputs)
    return dispatch.run('hidden_jacobian', backend, operands)
