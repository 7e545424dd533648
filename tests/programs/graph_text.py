"""Prints all that the graphs of the given models consist of."""

import re
import sys

import brainstate
import jax
import saiunit as u

import braintrace_fast as btf
from tests.models import MODELS


def canonical_text(name: str) -> str:
    """All that a graph consists of, without the addresses of objects."""
    with brainstate.environ.context(dt=0.1 * u.ms):
        model, inputs = MODELS[name].build(2)
        x = jax.tree.map(lambda xs: xs[0], inputs(0, 1))
        graph = btf.compile_etrace_graph(model, x)
    info = graph.module_info
    parts = [name, info.jaxpr, list(info.state_id_to_path.values())]
    for group, transition in zip(graph.hidden_groups, graph.transitions, strict=True):
        parts += [group.hidden_paths, group.pattern, group.transition_jaxpr]
        parts += [transition.pattern, *(row.jaxpr for row in transition.rows)]
    for relation in graph.hidden_param_op_relations:
        ways = [
            (key, way.paths, way.leaf_indices, way.chain, way.main)
            for key, way in relation.weight_ways.items()
        ]
        parts += [relation.path, relation.connected_hidden_paths, relation.f_patterns, ways]
        parts += [relation.eqn_params, *relation.y_to_hidden_group_jaxprs]
    parts += [graph.hidden_perturb.perturb_jaxpr, graph.hidden_perturb.perturb_hidden_paths]
    parts += [graph.exit_perturb.closed_jaxpr, len(graph.exit_perturb.bypass_invars)]
    parts += [(r.kind, r.message, r.weight_path, r.hidden_paths) for r in graph.diagnostics]
    parts += [btf.CompilationReport(graph).to_str(2)]
    return re.sub(r'0x[0-9a-f]+', '0x', '\n'.join(map(str, parts)))


if __name__ == '__main__':
    print('\n'.join(map(canonical_text, sys.argv[1:])))
