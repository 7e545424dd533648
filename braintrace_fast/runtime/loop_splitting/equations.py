"""What lists of equations read, make and depend on."""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..._compat import Atom, JaxprEqn, Literal, Var, build_jaxpr, jaxprs_in_params
from ...compiler.primitives import LINEAR

__all__ = [
    'all_results',
    'always_zero',
    'divide',
    'evaluate',
    'is_one_of',
    'num_bytes',
    'results',
]


def is_one_of(atom: Atom, variables: Container[Var]) -> bool:
    """Whether an atom is a variable, and one of these."""
    return not isinstance(atom, Literal) and atom in variables


def num_bytes(v: Var) -> int:
    """The bytes of a variable."""
    return v.aval.size * v.aval.dtype.itemsize


def results(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """What equations compute."""
    return [v for eqn in eqns for v in eqn.outvars]


def all_results(eqns: Iterable[JaxprEqn]) -> Iterator[Var]:
    """What equations compute, the equations inside them included."""
    for eqn in eqns:
        yield from eqn.outvars
        for inner in jaxprs_in_params(eqn.params):
            yield from all_results(inner.eqns)


def divide(
    eqns: Sequence[JaxprEqn], known: Iterable[Var], late_results: Container[Var] = ()
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations that depend on known variables alone, and the others.

    Those that compute one of the late results, or have effects, are among the others.
    """
    known = set(known)
    early: list[JaxprEqn] = []
    late: list[JaxprEqn] = []
    for eqn in eqns:
        reads_known = all(isinstance(v, Literal) or v in known for v in eqn.invars)
        if reads_known and not eqn.effects and not any(v in late_results for v in eqn.outvars):
            early.append(eqn)
            known.update(eqn.outvars)
        else:
            late.append(eqn)
    return early, late


def evaluate(
    eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outs: Sequence[Atom], values: Sequence[Any]
) -> list[jax.Array]:
    """Run equations on the values of their inputs."""
    return jax.core.eval_jaxpr(build_jaxpr((), inputs, outs, eqns), (), *values)


def always_zero(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The variables that are zero whatever the values of others."""
    zeros: set[Var] = set()
    for eqn in eqns:
        if eqn.primitive.name in LINEAR and all(
            not np.any(v.val) if isinstance(v, Literal) else v in zeros for v in eqn.invars
        ):
            zeros.update(eqn.outvars)
    return zeros
