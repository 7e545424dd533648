"""The trace rules of a relation's op, with the parameters of its equation bound."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from jax import lax

from ..compiler import HiddenParamOpRelation
from ..kernels.promotion import product
from ..op import TraceRules

__all__ = ['bound_rules', 'operand', 'plane_views', 'varying_weights']


def bound_rules(
    relation: HiddenParamOpRelation, slopes: Mapping[str, jax.Array] = MappingProxyType({})
) -> TraceRules:
    """The trace rules of a relation's op, with the parameters of its equation.

    With ``slopes``, new traces are in the coordinates of the parameter, not of the op's weight.
    """
    rules, params = relation.primitive.trace_rules, relation.rule_params
    if slopes and rules.weight_view is not None:
        slopes = rules.weight_view(dict(slopes), **params)

    def outer(x: Any, plane: jax.Array) -> Any:
        trace = rules.outer(x, plane, **params)
        return {k: _scaled(leaf, slopes[k]) if k in slopes else leaf for k, leaf in trace.items()}

    def bound(rule: Any) -> Any:
        return None if rule is None else partial(rule, **params)

    return dataclasses.replace(
        rules,
        outer=outer,
        outer_sum=bound(rules.outer_sum),
        decay=bound(rules.decay),
        contract=bound(rules.contract),
        is_outer=rules.is_outer and not slopes,
        entries=None if slopes else bound(rules.entries),
        operand=bound(rules.operand),
        plane_view=bound(rules.plane_view),
        weight_view=bound(rules.weight_view),
    )


def _scaled(trace: jax.Array, slope: jax.Array) -> jax.Array:
    """The trace of a weight times ``d weight / d parameter``, which the batch shares."""
    return product(trace, lax.expand_dims(slope, range(trace.ndim - slope.ndim)))


def operand(rules: TraceRules, x: Any) -> Any:
    """An op's input as its trace rules take it."""
    return x if rules.operand is None else rules.operand(x)


def plane_views(rules: TraceRules, planes: Any) -> Any:
    """A tree of planes as the trace rules of an op take them."""
    return planes if rules.plane_view is None else jax.tree.map(rules.plane_view, planes)


def varying_weights(relations: Sequence[HiddenParamOpRelation]) -> str | None:
    """Which weight varies in time, if one does, and where it is used."""
    for relation in relations:
        if not relation.is_static:
            return f'{relation.source}: the weight {relation.path} varies in time'
    return None
