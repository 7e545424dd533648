"""Products that are worth computing ahead of the loop."""

import functools
import itertools
from collections.abc import Container, Sequence

import jax
from jax import lax

from ..._compat import Atom, JaxprEqn, Literal, Var, open_jaxpr, rewire, struct
from .equations import divide, is_one_of, num_bytes, results

__all__ = ['pays_ahead', 'split_products']


def pays_ahead(eqn: JaxprEqn, invariant: Container[Var]) -> bool:
    """Whether an equation is a product that is worth computing ahead."""
    weights = sum(num_bytes(v) for v in eqn.invars if is_one_of(v, invariant))
    return eqn.primitive.name == 'dot_general' and _outweigh(weights, eqn.outvars[0])


def split_products(
    eqns: Sequence[JaxprEqn], given: Sequence[Var], xs: Sequence[Var]
) -> list[JaxprEqn]:
    """Take apart products whose left side joins what is known ahead with what is not."""
    invariant = {*given, *results(divide(eqns, given)[0])}
    known = {*given, *xs, *results(divide(eqns, [*given, *xs])[0])}
    joined = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive.name == 'concatenate'}
    split = ((_pieces(eqn, joined, invariant, known) or [eqn]) for eqn in eqns)
    return list(itertools.chain.from_iterable(split))


def _outweigh(weight_bytes: float, result: Var) -> bool:
    """Whether reading weights moves more bytes than writing a result and reading it again."""
    return weight_bytes > 2 * num_bytes(result)


def _pieces(
    eqn: JaxprEqn, joined: dict[Var, JaxprEqn], invariant: set[Var], known: set[Var]
) -> list[JaxprEqn] | None:
    """The equations of a product taken apart, if the part that is known ahead is worth it.

    A product with results of less than 32 bits stays whole: in two parts it would round twice.
    """
    if eqn.primitive.name != 'dot_general' or not is_one_of(eqn.invars[0], joined):
        return None
    left, weights = joined[eqn.invars[0]], eqn.invars[1]
    axis, axes = left.params['dimension'], eqn.params['dimension_numbers'][0]
    is_wide = eqn.outvars[0].aval.dtype.itemsize >= 4
    if axis not in axes[0] or not is_one_of(weights, invariant) or not is_wide:
        return None
    rows = axes[1][axes[0].index(axis)]
    early = [is_one_of(v, known) for v in left.invars]
    num_early = sum(v.aval.shape[axis] for v in itertools.compress(left.invars, early))
    share = num_early / weights.aval.shape[rows]
    if all(early) or not _outweigh(num_bytes(weights) * share, eqn.outvars[0]):
        return None

    def product(weights: jax.Array, *parts: jax.Array) -> jax.Array:
        products, end = [], 0
        for _, run in itertools.groupby(zip(early, parts, strict=True), lambda pair: pair[0]):
            part = lax.concatenate([array for _, array in run], axis)
            start, end = end, end + part.shape[axis]
            own = lax.slice_in_dim(weights, start, end, axis=rows)
            products.append(lax.dot_general(part, own, **eqn.params))
        return functools.reduce(lax.add, products)

    operands = [weights, *left.invars]
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(product)(*map(struct, operands)))
    env = dict(zip((*jaxpr.invars, *jaxpr.outvars), (*operands, *eqn.outvars), strict=True))

    def renamed(atoms: Sequence[Atom]) -> list[Atom]:
        return [v if isinstance(v, Literal) else env.get(v, v) for v in atoms]

    return [rewire(e, renamed(e.invars), renamed(e.outvars)) for e in jaxpr.eqns]
