"""What the graph of a model gives for one step, and checks of it against plain JAX.

All start from the present values of the model's states, and leave them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace_fast as btf
from tests.compiler.checks import assert_trees_close
from tests.oracles.step import random_projection, state_values, step_function


class Evaluated(NamedTuple):
    """One step of a compiled model, and the gradients of a loss on its output and hidden states."""

    graph: btf.ETraceGraph
    inputs: dict[Any, jax.Array]
    out: Any
    hidden: dict[Any, Any]
    temps: dict[Any, jax.Array]
    by_state: dict[int, Any]
    c: list[jax.Array]
    L: dict[Any, jax.Array]
    R: dict[Any, jax.Array]
    jacobians: list[tuple[list, dict]]
    """Per group, ``D`` and, by the output of an op, ``f``."""


def loss_of(graph: btf.ETraceGraph) -> Callable[[Any, dict], jax.Array]:
    paths = [path for group in graph.hidden_groups for path in group.hidden_paths]
    return lambda out, hidden: random_projection((out, [hidden[path] for path in paths]))


def evaluate(graph: btf.ETraceGraph, x: Any) -> Evaluated:
    """Run the step that has zeros where the signals are read off, and read them off."""
    info, perturbation, loss = graph.module_info, graph.exit_perturb, loss_of(graph)
    values = [state.value for state in info.compiled_model_states]
    moving = [i for i, value in enumerate(values) if _is_floating(value)]

    def of_moving(moved: Sequence[Any], *zeros: Any) -> tuple[jax.Array, tuple]:
        filled = list(values)
        for place, value in zip(moving, moved, strict=True):
            filled[place] = value
        out, hidden, _, temps = graph.call_exit_perturb((x,), *zeros, filled)
        return loss(out, hidden), (out, list(hidden.items()), list(temps.items()))

    (by_state, c, L, R), (out, hidden, temps) = jax.grad(
        of_moving, argnums=(0, 1, 2, 3), has_aux=True
    )([values[i] for i in moving], *perturbation.zeros())
    values_of = dict(temps)
    return Evaluated(
        graph=graph,
        inputs=dict(zip(info.jaxpr.invars, info.flat_inputs((x,)), strict=True)),
        out=out,
        hidden=dict(hidden),
        temps=values_of,
        by_state=dict(zip(moving, by_state, strict=True)),
        c=c,
        L=dict(zip(perturbation.hidden_outvars, L, strict=True)),
        R=dict(zip(perturbation.bypass_invars, R, strict=True)),
        jacobians=[transition.jacobians(values_of) for transition in graph.transitions],
    )


def _is_floating(value: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(value))


def factors(step: Evaluated) -> dict[str, Any]:
    """All that a learner reads off a step, in the order of groups and relations."""
    relations = step.graph.hidden_param_op_relations
    olds = [old for group in step.graph.hidden_groups for old in group.hidden_invars]
    return {
        'out': step.out,
        'hidden': [step.hidden[p] for g in step.graph.hidden_groups for p in g.hidden_paths],
        'D': [D for D, _ in step.jacobians],
        'x': [None if r.x_var is None else step.temps[r.x_var] for r in relations],
        'f': [[step.jacobians[g.index][1][r.y_var] for g in r.hidden_groups] for r in relations],
        'c': step.c,
        'L': list(step.L.values()),
        'R': [step.R.get(old, jnp.zeros(old.aval.shape, old.aval.dtype)) for old in olds],
    }


def signal_of_the_past(step: Evaluated) -> list[jax.Array]:
    """Per group, ``L D + R``: the gradient of the step by the old planes, last axis."""
    signals = []
    for group, (D, _) in zip(step.graph.hidden_groups, step.jacobians, strict=True):
        L = group.concat_hidden([step.L[new] for new in group.hidden_outvars])
        olds = {old: jnp.zeros(old.aval.shape, old.aval.dtype) for old in group.hidden_invars}
        signal = group.concat_hidden([step.R.get(old, zero) for old, zero in olds.items()])
        for s, row in enumerate(D):
            for q, plane in enumerate(row):
                if plane is not None:
                    signal = signal.at[..., q].add(L[..., s] * plane)
        signals.append(signal)
    return signals


def assert_same_factors(step: Evaluated, twin: Evaluated) -> None:
    """Two steps that say the same, so far as a learner can see."""

    def names(graph: btf.ETraceGraph) -> list[Any]:
        relations = [(r.path, r.f_patterns) for r in graph.hidden_param_op_relations]
        return [[group.hidden_paths for group in graph.hidden_groups], relations]

    assert names(step.graph) == names(twin.graph)
    assert_trees_close(factors(step), factors(twin))


def step_gradient(step: Evaluated) -> dict[Any, list[jax.Array]]:
    """By parameter, ``c (x) x`` of its traced occurrences and the ordinary gradient of the rest."""
    graph, info = step.graph, step.graph.module_info
    total = {
        info.state_id_to_path[id(state)]: jax.tree.leaves(step.by_state[place])
        for place, state in enumerate(info.compiled_model_states)
        if isinstance(state, brainstate.ParamState)
    }
    for relation, cotangent in zip(graph.hidden_param_op_relations, step.c, strict=True):
        if not relation.is_static:
            continue
        for key, grad in _weight_gradients(step, relation, cotangent).items():
            way = relation.weight_ways[key]
            pulled = way.pull_back([step.inputs[v] for v in way.param_vars], grad)
            for path, leaf, g in zip(way.paths, way.leaf_indices, pulled, strict=True):
                total[path][leaf] = total[path][leaf] + g
    return total


def _weight_gradients(
    step: Evaluated, relation: btf.HiddenParamOpRelation, cotangent: jax.Array
) -> dict[str, jax.Array]:
    """In the coordinates of the op, for those of its weights that come from parameters."""
    op, params, ways = relation.primitive, relation.eqn_params, relation.weight_ways
    weights = {key: way([step.inputs[v] for v in way.param_vars]) for key, way in ways.items()}
    fixed = [key for key in op.trainable_invars(params) if key not in ways]
    for key in fixed:
        weights[key] = jnp.zeros(cotangent.shape[-1:])
    x = None if relation.x_var is None else step.temps[relation.x_var]
    grads = op.weight_vjp(x, cotangent, weights, **params)
    return {key: grads[key] for key in ways}


def assert_step_gradient_is_exact(
    model: brainstate.nn.Module, step: Evaluated, x: Any, *, forward_mode: bool = False
) -> None:
    """From a zero trace, what the graph gives is ``jax.grad`` of the step, for every parameter."""
    run, loss = step_function(model), loss_of(step.graph)
    params, hidden, others = state_values(model)

    def true_loss(params: Any) -> jax.Array:
        out, new, _ = run(params, hidden, others, x)
        return loss(out, new)

    true = (jax.jacfwd if forward_mode else jax.grad)(true_loss)(params)
    found = step_gradient(step)
    for path, leaves in found.items():
        assert_trees_close(leaves, jax.tree.leaves(true[path]))
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(true))
    for path in set(true) - set(found):
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(true[path]))
