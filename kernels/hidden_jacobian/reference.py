"""The definition of ``hidden_jacobian`` in plain JAX, which is also what runs without a kernel.

Reverse mode takes one VJP per state plane ``s`` and gives row ``s`` of ``D`` and ``f[s]`` of every
op at once. Forward mode takes one JVP per input; it serves transitions that contain a ``while``,
and ops whose output has fewer axes than the states (a time constant that the batch shares), where a
VJP would sum over the axes that are missing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..planes import Plane
from .operands import JacobianOperands

__all__ = ['hidden_jacobian']


def hidden_jacobian(operands: JacobianOperands) -> list[list[Plane]]:
    """See :func:`braintrace_fast.kernels.hidden_jacobian.hidden_jacobian`."""
    transition, constants, inputs = operands.transition, operands.constants, operands.inputs
    widths = (*transition.widths, *(0 for _ in transition.shared))
    columns = [
        list(_flatten(per_input, widths))
        for row in range(len(transition.widths))
        for per_input in _row(transition, row, constants[row], inputs, widths)
    ]
    return [
        [plane if present else None for plane, present in zip(column, row, strict=True)]
        for column, row in zip(columns, transition.pattern, strict=True)
    ]


def _row(
    transition: Any,
    row: int,
    constants: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    widths: Sequence[int],
) -> list[list[list[jax.Array] | None]]:
    """Per plane of one new state, its derivatives by the planes of every input."""
    shared = (*(False for _ in transition.widths), *transition.shared)
    reached, width = transition.reached[row], widths[row]
    by_forward = [
        r and (transition.forward_only or s) for r, s in zip(reached, shared, strict=True)
    ]
    moving = [place for place, r in enumerate(reached) if r and not by_forward[place]]
    derivatives: list[list[list[jax.Array] | None]] = [
        [None] * len(inputs) for _ in range(width or 1)
    ]
    if moving:

        def new_state(*moved: jax.Array) -> jax.Array:
            values = list(inputs)
            for place, value in zip(moving, moved, strict=True):
                values[place] = value
            return transition.evaluate(row, constants, values)

        new, pull_back = jax.vjp(new_state, *(inputs[place] for place in moving))
        for plane in range(width or 1):
            cotangents = pull_back(_one_plane(new, plane, width))
            for place, cotangent in zip(moving, cotangents, strict=True):
                derivatives[plane][place] = _split(cotangent, widths[place])
    for place, forward in enumerate(by_forward):
        if forward:
            tangents = [
                _push(transition, row, constants, inputs, place, plane, widths[place])
                for plane in range(widths[place] or 1)
            ]
            for plane in range(width or 1):
                derivatives[plane][place] = [t[..., plane] if width else t for t in tangents]
    return derivatives


def _push(
    transition: Any,
    row: int,
    constants: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    place: int,
    plane: int,
    width: int,
) -> jax.Array:
    """The tangent of a row for ones in one plane of one input."""
    tangents: list[jax.Array | None] = [None] * len(inputs)
    tangents[place] = _one_plane(inputs[place], plane, width)
    return transition.push_forward(row, constants, inputs, tangents)


def _split(value: jax.Array, width: int) -> list[jax.Array]:
    return [value[..., plane] for plane in range(width)] if width else [value]


def _flatten(per_input: Sequence[list[jax.Array] | None], widths: Sequence[int]) -> Iterator[Plane]:
    for planes, width in zip(per_input, widths, strict=True):
        yield from planes if planes is not None else [None] * (width or 1)


def _one_plane(like: jax.Array, plane: int, width: int) -> jax.Array:
    if not width:
        return jnp.ones_like(like)
    return jnp.zeros_like(like).at[..., plane].set(1)
