"""Equations made by hand."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._compat import Atom, JaxprEqn, Var, open_jaxpr, struct

__all__ = ['copy_equation', 'single_equation']


def copy_equation(atom: Atom, result: Var) -> JaxprEqn:
    """The equation that copies a value into a variable."""
    (eqn,) = open_jaxpr(jax.make_jaxpr(lambda x: jnp.array(x, copy=True))(struct(atom)))[0].eqns
    return eqn.replace(invars=[atom], outvars=[result])


def single_equation(fun: Any, operands: Sequence[Var], result: Var) -> JaxprEqn:
    """The equation of a one-primitive function, such as ``lax.add``, on variables."""
    return _template(fun, len(operands)).replace(invars=list(operands), outvars=[result])


@functools.lru_cache(maxsize=16)
def _template(fun: Any, num_operands: int) -> JaxprEqn:
    (eqn,) = open_jaxpr(jax.make_jaxpr(fun)(*[0.0] * num_operands))[0].eqns
    return eqn
