"""Reverse mode for ``while`` loops, where they act position by position.

JAX differentiates a ``while`` in forward mode only. Where its results follow an operand position by
position, one JVP with tangents of one gives the slope at every position, by which a cotangent is
multiplied.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._compat import JaxprEqn, Literal, equation_function, open_jaxpr, struct
from .alignment import align_results
from .positions import identity_alignment
from .primitives import is_inexact

__all__ = ['follows', 'with_reverse_mode']


def follows(eqn: JaxprEqn, place: int) -> bool | None:
    """Whether the results follow an operand position by position; None if no derivative flows."""
    operand = eqn.invars[place]
    if isinstance(operand, Literal) or not is_inexact(operand.aval):
        return None
    identity = identity_alignment(operand.aval.shape)
    outcomes = align_results(
        eqn, [identity if i == place else None for i in range(len(eqn.invars))]
    )
    reached = [(o, v) for o, v in zip(outcomes, eqn.outvars, strict=True) if o is not None]
    if not reached:
        return None
    return all(o == identity and v.aval.shape == operand.aval.shape for o, v in reached)


def with_reverse_mode(eqn: JaxprEqn) -> JaxprEqn:
    """An equation with a ``while`` inside, as one that can be differentiated either way.

    The derivative is zero for operands that the results do not follow position by position.
    """
    function = equation_function(eqn)
    floats = [place for place, v in enumerate(eqn.outvars) if is_inexact(v.aval)]
    moving = [place for place in range(len(eqn.invars)) if follows(eqn, place)]

    @jax.custom_vjp
    def run(*operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    def forward(*operands: jax.Array) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        return run(*operands), [slopes(operands, place) for place in moving]

    def slopes(operands: Sequence[jax.Array], place: int) -> list[jax.Array]:
        def of_one(moved: jax.Array) -> list[jax.Array]:
            results = function(*operands[:place], moved, *operands[place + 1 :])
            return [results[i] for i in floats]

        point = operands[place]
        return jax.jvp(of_one, [point], [jnp.ones_like(point)])[1]

    def backward(
        kept: list[list[jax.Array]], cotangents: Sequence[jax.Array]
    ) -> tuple[jax.Array | None, ...]:
        pulled: list[Any] = [None] * len(eqn.invars)
        for place, slopes_of_one in zip(moving, kept, strict=True):
            shape, dtype = eqn.invars[place].aval.shape, eqn.invars[place].aval.dtype
            terms = (
                slope * cotangents[i]
                for i, slope in zip(floats, slopes_of_one, strict=True)
                if slope.shape == shape
            )
            pulled[place] = sum(terms, start=jnp.zeros(shape, dtype)).astype(dtype)
        return tuple(pulled)

    run.defvjp(forward, backward)
    (call,) = open_jaxpr(jax.make_jaxpr(run)(*map(struct, eqn.invars)))[0].eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
