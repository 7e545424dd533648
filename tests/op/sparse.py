"""A toy op with auxiliary operands: a weight of which only some entries are there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace_fast as btf

INPUTS, OUTPUTS = 5, 4
ROWS = np.array([0, 0, 1, 2, 2, 3, 4], np.int32)
COLS = np.array([1, 3, 0, 2, 3, 1, 0], np.int32)
MATRIX = u.sparse.COO((np.ones(7, np.float32), ROWS, COLS), shape=(INPUTS, OUTPUTS))


def plain(x: Any, weight: Any, rows: Any, cols: Any, *, size: int = OUTPUTS) -> jax.Array:
    """``y[..., o] = sum of x[..., row p] weight[p]`` over the entries ``p`` in column ``o``."""
    terms = jnp.einsum('...p,p->p...', x[..., rows], weight)
    return jnp.moveaxis(jax.ops.segment_sum(terms, cols, num_segments=size), 0, -1)


def dense(weight: Any) -> jax.Array:
    return jnp.zeros((INPUTS, OUTPUTS), weight.dtype).at[ROWS, COLS].add(weight)


def weight_vjp(x, cotangent, weights, *, rows, cols, size):
    products = x[..., rows] * cotangent[..., cols]
    return {'weight': products.sum(tuple(range(products.ndim - 1)))}


RULES = btf.TraceRules(
    outer=lambda x, plane, *, rows, cols, size: {'weight': x[..., rows] * plane[..., cols]},
    outer_sum=lambda x, plane, *, rows, cols, size: {
        'weight': (x[..., rows] * plane[..., cols]).sum(0)
    },
    decay=lambda plane, trace, *, rows, cols, size: {'weight': plane[..., cols] * trace['weight']},
    contract=lambda plane, trace, *, rows, cols, size: {
        'weight': (plane[..., cols] * trace['weight']).sum(tuple(range(plane.ndim - 1)))
    },
)


def _register(name: str, **rules: Any) -> btf.ETPPrimitive:
    return btf.register_primitive(
        name, plain, batched=True, aux_invars_fn=lambda params: {'rows': 2, 'cols': 3}, **rules
    )


with_rules = _register('test_sparse', weight_vjp=weight_vjp, trace_rules=RULES)
without_rules = _register('test_sparse_without_rules')
