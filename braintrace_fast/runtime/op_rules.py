"""The trace rules of a relation's op, with the parameters of its equation bound."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compiler import HiddenParamOpRelation
from ..kernels.promotion import product
from ..op import TraceRules
from .factors import Values
from .gradient import leaves_of

__all__ = [
    'bound_rules',
    'lacking_rules',
    'operand',
    'plane_views',
    'varying_weights',
    'weight_shapes',
    'weights_of',
]


def bound_rules(
    relation: HiddenParamOpRelation,
    slopes: Mapping[str, jax.Array] = MappingProxyType({}),
    values: Values | None = None,
) -> TraceRules:
    """The trace rules of a relation's op, with the parameters of its equation.

    With ``slopes``, new traces are in the coordinates of the parameter, not of the op's weight.
    ``values`` are those of the model's parameters, which new traces of some ops depend on; without
    them, a new trace has the right shape and no meaning.
    """
    rules, params = relation.primitive.trace_rules, relation.rule_params
    with_weights = {'weights': weights_of(relation, values)} if rules.takes_weights else {}
    if slopes and rules.weight_view is not None:
        slopes = rules.weight_view(dict(slopes), **params)

    def outer(x: Any, plane: jax.Array) -> Any:
        trace = rules.outer(x, plane, **params, **with_weights)
        return {k: _scaled(leaf, slopes[k]) if k in slopes else leaf for k, leaf in trace.items()}

    def bound(rule: Any, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        return None if rule is None else partial(rule, **params, **more)

    return dataclasses.replace(
        rules,
        outer=outer,
        outer_sum=bound(rules.outer_sum, with_weights),
        decay=bound(rules.decay),
        contract=bound(rules.contract),
        is_outer=rules.is_outer and not slopes,
        entries=None if slopes else bound(rules.entries),
        operand=bound(rules.operand),
        plane_view=bound(rules.plane_view),
        weight_view=bound(rules.weight_view),
    )


def weight_shapes(relation: HiddenParamOpRelation) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of an op's trainable inputs, by name."""
    ways = relation.weight_ways | relation.fixed_ways
    return {key: jax.ShapeDtypeStruct(way.shape, way.dtype) for key, way in ways.items()}


def weights_of(relation: HiddenParamOpRelation, values: Values | None) -> dict[str, jax.Array]:
    """An op's trainable inputs by name; zeros if the parameters' values are not given."""
    if values is None:
        return jax.tree.map(jnp.zeros_like, weight_shapes(relation))
    ways = relation.weight_ways | relation.fixed_ways
    return {key: way(leaves_of(values, way)) for key, way in ways.items()}


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


def lacking_rules(relations: Sequence[HiddenParamOpRelation]) -> str | None:
    """Which op has no trace rules, if one has none, and how to register them."""
    for relation in relations:
        op = relation.primitive
        if op.trace_rules is None:
            ways = ['register_primitive(trace_rules=...)']
            if op.example_rules is not None:
                ways = [f'{op}.{method}(...)' for method in op.example_rules.missing()]
            return (
                f'{relation.source}: {op} has no trace rules, so its trace cannot be carried from '
                f'step to step. Register them with {" and ".join(ways)}, or use '
                "etrace_grad(..., trace='fresh')."
            )
    return None
