"""Sums over all steps, of which products are taken inside the product.

A sum over steps commutes with linear maps and with additions, and the sum of products is one
product that also contracts the steps. So each term becomes a small tree of the four kinds below.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ..._compat import Atom, JaxprEqn, Literal, Var, equation_function
from ...compiler.primitives import LINEAR
from ...op.outer import outer_total

__all__ = ['Sum', 'invariant_value', 'sum_of']

Arrays = Mapping[Var, jax.Array]


class Sum(Protocol):
    """The sum of one variable over all steps."""

    @property
    def leaves(self) -> list[Var]:
        """The variables whose values in all steps it is computed from."""

    def evaluate(self, stacked: Arrays, invariant: Arrays, length: int) -> jax.Array:
        """The sum, from stacked leaves, from what is the same in all steps and their number."""


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A linear map of sums."""

    eqn: JaxprEqn
    operands: tuple[Sum, ...]

    @property
    def leaves(self) -> list[Var]:
        return [leaf for operand in self.operands for leaf in operand.leaves]

    def evaluate(self, stacked: Arrays, invariant: Arrays, length: int) -> jax.Array:
        sums = [operand.evaluate(stacked, invariant, length) for operand in self.operands]
        return equation_function(self.eqn)(*sums)[0]


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product that contracts the steps as well."""

    eqn: JaxprEqn

    @property
    def leaves(self) -> list[Var]:
        return list(self.eqn.invars)

    def evaluate(self, stacked: Arrays, invariant: Arrays, length: int) -> jax.Array:
        a, b = (stacked[v] for v in self.eqn.invars)
        (ca, cb), (ba, bb) = self.eqn.params['dimension_numbers']
        ca, cb = ((0, *(axis + 1 for axis in axes)) for axes in (ca, cb))
        ba, bb = (tuple(axis + 1 for axis in axes) for axes in (ba, bb))
        params = {k: v for k, v in self.eqn.params.items() if k != 'dimension_numbers'}
        if ca == tuple(range(a.ndim - 1)) and cb == tuple(range(b.ndim - 1)):
            return outer_total(a, b, **params)
        return lax.dot_general(a, b, ((ca, cb), (ba, bb)), **params)


@dataclasses.dataclass(frozen=True)
class _Stacked:
    """A plain sum of what was computed in all steps."""

    v: Var

    @property
    def leaves(self) -> list[Var]:
        return [self.v]

    def evaluate(self, stacked: Arrays, invariant: Arrays, length: int) -> jax.Array:
        return stacked[self.v].sum(0)


@dataclasses.dataclass(frozen=True)
class _Repeated:
    """The same value in all steps."""

    v: Atom

    @property
    def leaves(self) -> list[Var]:
        return []

    def evaluate(self, stacked: Arrays, invariant: Arrays, length: int) -> jax.Array:
        total = invariant_value(self.v, invariant) * length
        return jnp.broadcast_to(total, self.v.aval.shape)


def sum_of(v: Atom, producer: Mapping[Var, JaxprEqn], is_invariant: Callable[[Atom], bool]) -> Sum:
    """How to sum one variable, given the equations that compute variables."""
    if is_invariant(v):
        return _Repeated(v)
    eqn = producer.get(v)
    if eqn is None:
        return _Stacked(v)
    operands = eqn.invars
    match eqn.primitive.name:
        case 'add' | 'add_any' if all(a.aval.shape == v.aval.shape for a in operands):
            return _Linear(eqn, tuple(sum_of(a, producer, is_invariant) for a in operands))
        case 'dot_general' if not any(map(is_invariant, operands)):
            return _Product(eqn)
        case name if name in LINEAR or (name == 'convert_element_type' and _inexact(operands[0])):
            return _Linear(eqn, (sum_of(operands[0], producer, is_invariant),))
    return _Stacked(v)


def invariant_value(v: Atom, invariant: Arrays) -> jax.Array:
    """The value of a literal, or of a variable that is the same in all steps."""
    return jnp.asarray(v.val) if isinstance(v, Literal) else invariant[v]


def _inexact(v: Atom) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)
