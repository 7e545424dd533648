"""The same model gives the same graph in every process, whatever the hash seed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import brainstate
import jax
import saiunit as u

import braintrace_fast as btf
from tests.models import MODELS

ROOT = Path(__file__).parents[2]
NAMES = ['coba_ei', 'stop_gradient', 'drop_connect', 'pooled', 'switch']


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


def run_with_hash_seed(seed: int) -> subprocess.Popen:
    program = (
        'from tests.compiler.test_determinism import *\n'
        "print('\\n'.join(map(canonical_text, NAMES)))"
    )
    settings = {
        'PYTHONHASHSEED': str(seed),
        'PYTHONPATH': str(ROOT),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # only initialisers are run
    }
    return subprocess.Popen(
        [sys.executable, '-c', program],
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_graphs_do_not_depend_on_the_hash_seed():
    processes = [run_with_hash_seed(seed) for seed in (1, 2)]
    (one, _), (other, _) = (process.communicate() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(one) > 10_000
    assert one == other


def test_compiling_twice_gives_the_same_graph():
    assert canonical_text('switch') == canonical_text('switch')
