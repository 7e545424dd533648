"""The order of groups, states and sums does not depend on Python's hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import hashlib
import jax, numpy as np
from tests.models import MODELS
from tests.oracles import random_projection
import braintrace_fast as btf

for name, rule, options in (
    ('three_layers', btf.D_RTRL, {}),
    ('two_layers', btf.pp_prop, {'decay_or_rank': 0.9}),
):
    model, inputs = MODELS[name].build(2)
    xs = inputs(0, 3)
    learner = rule(model, **options)
    learner.compile_graph(xs[0])
    grads = learner.etrace_grad(xs, step_fn=lambda x: random_projection(learner(x)))
    print([group.hidden_paths for group in learner.graph.hidden_groups], list(grads))
    for gradient in jax.tree.leaves(list(grads.values())):
        print(hashlib.sha256(np.asarray(gradient).tobytes()).hexdigest(), np.abs(gradient).max())
"""


@pytest.mark.slow
def test_two_processes_with_different_hash_seeds_give_the_same_bits():
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', PROGRAM],
            cwd=ROOT,
            env={**os.environ, 'PYTHONHASHSEED': seed, 'JAX_PLATFORMS': 'cpu'},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ('1', '2')
    ]
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results[0][1] + results[1][1]
    assert results[0][0] == results[1][0]
    assert len(results[0][0].splitlines()) > 10
