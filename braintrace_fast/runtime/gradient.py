"""Gradients by parameter, from gradients in the coordinates of the ops."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..compiler import ETraceGraph, HiddenParamOpRelation
from ..kernels.planes import Plane
from .factors import Factors, Values, sum_leading

__all__ = ['GradientSum', 'slopes_of']


class GradientSum:
    """Adds up gradients of a graph's parameters.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    params : dict
        The values of the parameters, by path.
    start : dict
        Gradients to start from, by path, shaped like the parameters.
    """

    def __init__(self, graph: ETraceGraph, params: Values, start: Values) -> None:
        self._relations = list(graph.hidden_param_op_relations)
        self.params = params
        self._trees = {path: jax.tree.structure(value) for path, value in params.items()}
        self._leaves = {path: jax.tree.leaves(value) for path, value in start.items()}

    def add_present(self, index: int, factors: Factors, c: jax.Array, in_trace: Plane) -> None:
        """Add ``(c - in_trace) (x) x``: what a step adds besides what is read off its trace."""
        counted = None if in_trace is None else sum_leading(in_trace, c.ndim)
        x = factors.x[index]
        if self._relations[index].is_static:
            self.add_product(index, x, c if counted is None else c - counted)
        elif counted is not None:  # reverse mode has counted c
            self.add_product(index, x, -counted, factors.varying[index])

    def add_product(
        self,
        index: int,
        x: jax.Array | None,
        cotangent: Plane,
        varying: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
        leading_axes: int = 0,
        only: Callable[[str], bool] = lambda key: True,
    ) -> None:
        """Add the weight gradients of an op from its input and its output's cotangent.

        Both may have ``leading_axes`` (time) that are summed over. No cotangent adds nothing.

        If the weights vary in time, ``varying`` has what their ways read in this step, and only the
        traced parameters are added to. ``only`` chooses among the op's trainable inputs by name.
        """
        if cotangent is None:
            return
        grads = self.product(index, x, cotangent, varying, leading_axes)
        for key, way in self._relations[index].weight_ways.items():
            if not only(key):
                continue
            pulled = way.pull_back(leaves_of(self.params, way), grads[key], varying.get(key, ()))
            for place in way.traced:
                self.add_leaf(way.paths[place], way.leaf_indices[place], pulled[place])

    def product(
        self,
        index: int,
        x: jax.Array | None,
        cotangent: jax.Array,
        varying: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
        leading_axes: int = 0,
    ) -> dict[str, jax.Array]:
        """The weight gradients of an op, in its coordinates; by default those of a step."""
        relation = self._relations[index]
        weights = {
            key: way(leaves_of(self.params, way), varying.get(key, ()))
            for key, way in (relation.weight_ways | relation.fixed_ways).items()
        }
        return relation.primitive.weight_vjp(
            x, cotangent, weights, leading_axes=leading_axes, **relation.rule_params
        )

    def exchange(
        self, factors: Factors, exact: Sequence[jax.Array], replaced: Sequence[jax.Array]
    ) -> None:
        """Where reverse mode has counted exact cotangents of ops' outputs, count others instead."""
        for index, relation in enumerate(self._relations):
            if not relation.is_static and replaced[index] is not exact[index]:
                change = replaced[index] - exact[index]
                self.add_product(index, factors.x[index], change, factors.varying[index])

    def add_past(self, index: int, grads: Mapping[str, jax.Array] | None) -> None:
        """Add contracted traces: op coordinates if the weights are static, else parameters'."""
        relation = self._relations[index]
        if grads is None:
            return
        if relation.primitive.trace_rules.weight_view is not None:
            grads = self._from_view(relation, grads)
        for key, way in relation.weight_ways.items():
            if way.is_static:
                pulled = way.pull_back(leaves_of(self.params, way), grads[key])
            else:
                pulled = tuple(grads[key] for _ in way.traced)
            for place, gradient in zip(way.traced, pulled, strict=True):
                self.add_leaf(way.paths[place], way.leaf_indices[place], gradient)

    def _from_view(
        self, relation: HiddenParamOpRelation, grads: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Gradients in the coordinates of an op's trace, pulled back to those of its weights."""
        view, params = relation.primitive.trace_rules.weight_view, relation.rule_params
        weights = {
            # A view of weights that may vary is linear, and the same at all of them.
            key: way(leaves_of(self.params, way)) if way.is_static else jnp.zeros(way.shape)
            for key, way in (relation.weight_ways | relation.fixed_ways).items()
        }
        viewed, pull_back = jax.vjp(lambda weights: view(weights, **params), weights)
        cotangents = {key: grads[key].astype(a.dtype) for key, a in viewed.items()}
        return pull_back(cotangents)[0]

    def result(self) -> Values:
        """The gradients by path, with the structure (units included) of the parameters."""
        return {
            path: jax.tree.unflatten(self._trees[path], leaves)
            for path, leaves in self._leaves.items()
        }

    def replace(self, gradients: Values) -> None:
        """Take these gradients, by path, instead of all that were added."""
        if gradients.keys() != self._leaves.keys():
            raise ValueError(
                f'There are gradients of {list(gradients)}, expected {list(self._leaves)}.'
            )
        self._leaves = {path: jax.tree.leaves(value) for path, value in gradients.items()}

    def by_whether_traced(self) -> tuple[Values, Values]:
        """The result, of parameters that a trace belongs to, and of others."""
        traced = {path for path, _ in self._traced_leaves()}
        result = self.result()
        return (
            {path: value for path, value in result.items() if path in traced},
            {path: value for path, value in result.items() if path not in traced},
        )

    def _traced_leaves(self) -> set[tuple[Any, int]]:
        return {
            (way.paths[place], way.leaf_indices[place])
            for relation in self._relations
            for way in relation.weight_ways.values()
            for place in way.traced
        }

    def add_plain(self, gradients: Values) -> None:
        """Add gradients, by path, to the leaves of parameters that no trace belongs to."""
        traced = self._traced_leaves()
        for path, value in gradients.items():
            for index, leaf in enumerate(jax.tree.leaves(value)):
                if (path, index) not in traced and leaf.dtype != jax.dtypes.float0:
                    self.add_leaf(path, index, leaf)

    def add_leaf(self, path: Any, index: int, gradient: jax.Array) -> None:
        """Add to the gradient of one leaf of a parameter."""
        leaf = self._leaves[path][index]
        self._leaves[path][index] = leaf + gradient.astype(leaf.dtype)


def leaves_of(params: Values, way: Any) -> list[jax.Array]:
    """The parameter leaves that a weight's way starts from."""
    places = zip(way.paths, way.leaf_indices, strict=True)
    return [jax.tree.leaves(params[path])[index] for path, index in places]


def slopes_of(
    relation: HiddenParamOpRelation, params: Values, varying: Mapping[str, tuple[Any, ...]]
) -> dict[str, jax.Array]:
    """For weights that vary in time, ``d weight / d parameter`` element by element."""
    slopes = {}
    for key, way in relation.weight_ways.items():
        if not way.is_static:
            leaves = leaves_of(params, way)
            ones = jnp.ones_like(way(leaves, varying[key]))
            slopes[key] = way.pull_back(leaves, ones, varying[key])[way.traced[0]]
    return slopes
