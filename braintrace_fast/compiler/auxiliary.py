"""The values of an op's auxiliary operands, which are the same in every step."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from .._compat import Atom, JaxprEqn, Literal, build_jaxpr, open_jaxpr, source_line
from ..errors import NotSupportedError
from .liveness import needed_equations, read_variables
from .module_info import ModuleInfo

__all__ = ['aux_values']


def aux_values(minfo: ModuleInfo, eqn: JaxprEqn) -> dict[str, jax.Array]:
    """The values of an op's auxiliary operands, by name.

    Raises
    ------
    NotSupportedError
        If one of them is no constant of the step, nor computed from constants alone.
    """
    places = eqn.primitive.aux_invars(eqn.params)
    return {name: _static_value(minfo, eqn, name, eqn.invars[i]) for name, i in places.items()}


def _static_value(minfo: ModuleInfo, op: JaxprEqn, name: str, operand: Atom) -> jax.Array:
    if isinstance(operand, Literal):
        return jnp.asarray(operand.val)
    jaxpr, consts = open_jaxpr(minfo.closed_jaxpr)
    eqns = needed_equations(jaxpr.eqns, [operand])
    read = {operand, *read_variables(eqns)}
    if not read.isdisjoint(jaxpr.invars) or any(eqn.effects for eqn in eqns):
        raise NotSupportedError(
            f'{source_line(op)}: the {name!r} of {op.primitive} may change from step to step: '
            'it is computed from an input, a state or a parameter. An auxiliary operand must be a '
            'constant: make it a plain array that the step does not write.'
        )
    constants = {v: value for v, value in zip(jaxpr.constvars, consts, strict=True) if v in read}
    static = build_jaxpr(list(constants), [], [operand], eqns)
    with _evaluated_now(constants.values()):
        (value,) = jax.core.eval_jaxpr(static, list(constants.values()))
        return jnp.asarray(value)


def _evaluated_now(values: Iterable[Any]) -> AbstractContextManager[None]:
    """Compute with concrete values at once, even while a function around is traced."""
    if any(isinstance(value, jax.core.Tracer) for value in values):
        return nullcontext()
    return jax.ensure_compile_time_eval()
