"""Prints the order of groups and the bits of gradients, which no hash seed may change."""

import hashlib

import jax
import numpy as np

import braintrace_fast as btf
from tests.models import MODELS
from tests.oracles.step import random_projection


def main():
    for name, rule, options in (
        ('three_layers', btf.D_RTRL, {}),
        ('two_layers', btf.pp_prop, {'decay_or_rank': 0.9}),
    ):
        model, inputs = MODELS[name].build(2)
        xs = inputs(0, 3)
        learner = rule(model, **options)
        learner.compile_graph(xs[0])
        grads = learner.etrace_grad(xs, step_fn=lambda x, run=learner: random_projection(run(x)))
        print([group.hidden_paths for group in learner.graph.hidden_groups], list(grads))
        for gradient in jax.tree.leaves(list(grads.values())):
            bits = hashlib.sha256(np.asarray(gradient).tobytes()).hexdigest()
            print(bits, np.abs(gradient).max())


if __name__ == '__main__':
    main()
