"""Links: each occurrence of an op that reaches a hidden group, in one flat list."""

import dataclasses
from collections.abc import Sequence

import jax

from ..compiler import ETraceGraph, HiddenGroup, HiddenParamOpRelation

__all__ = ['Link', 'group_plane', 'links_of', 'links_to', 'shared_axes', 'x_shape']


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """An op that reaches a hidden group.

    Attributes
    ----------
    index : int
        Its place among all links, in the order of which factors and traces are kept.
    op : int
        The index of the op's relation.
    is_first : bool
        Whether it is the first link of its op.
    relation : HiddenParamOpRelation
        The op.
    group : HiddenGroup
        The group.
    f_pattern : sequence of bool
        ``[s]`` is False where ``d h_s / d y`` is zero by structure.
    """

    index: int
    op: int
    is_first: bool
    relation: HiddenParamOpRelation
    group: HiddenGroup
    f_pattern: Sequence[bool]


def links_of(graph: ETraceGraph) -> tuple[Link, ...]:
    """All links of a graph, by op and then by the groups that it reaches."""
    reached = [
        (op, place, relation, group)
        for op, relation in enumerate(graph.hidden_param_op_relations)
        for place, group in enumerate(relation.hidden_groups)
    ]
    return tuple(
        Link(index, op, place == 0, relation, group, relation.f_patterns[place])
        for index, (op, place, relation, group) in enumerate(reached)
    )


def links_to(links: Sequence[Link], group: HiddenGroup) -> list[Link]:
    """The links that reach a group."""
    return [link for link in links if link.group.index == group.index]


def x_shape(relation: HiddenParamOpRelation) -> jax.ShapeDtypeStruct | None:
    """The shape and type of an op's input, in one substep; None for an op of weights alone."""
    if relation.x_var is None:
        return None
    aval = relation.x_var.aval
    return jax.ShapeDtypeStruct(aval.shape[bool(relation.substeps) :], aval.dtype)


def group_plane(group: HiddenGroup) -> jax.ShapeDtypeStruct:
    """The shape and type of one plane of a group."""
    return jax.ShapeDtypeStruct(group.varshape, group.hidden_invars[0].aval.dtype)


def shared_axes(x: Sequence[int], y: Sequence[int]) -> int:
    """How many axes in front two shapes have in common: the examples of an op's input and output.

    Examples
    --------
    >>> from braintrace_fast.runtime.links import shared_axes
    >>> shared_axes((8, 3, 16), (8, 4, 16))
    1
    """
    differ = [place for place, (a, b) in enumerate(zip(x, y, strict=False)) if a != b]
    return min([len(x), len(y), *differ])
