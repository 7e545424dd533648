import jax.numpy as jnp

import braintrace_fast as btf
from tests.op_models.model import OpModel

MODELS = [
    OpModel(
        'grouped_matmul',
        lambda x, w: btf.grouped_matmul(x, w['weight'], w['bias'], weight_fn=jnp.sin),
        lambda x, w: jnp.einsum('bgi,gio->bgo', x, jnp.sin(w['weight'])) + w['bias'][None],
        x=(2, 3),
        y=(2, 4),
        weights={'weight': (2, 3, 4), 'bias': (2, 4)},
    ),
    OpModel(
        'grouped_matmul_one_group',
        lambda x, w: btf.grouped_matmul(x, w['weight']),
        lambda x, w: x @ w['weight'][0],
        x=(1, 3),
        y=(1, 2),
        weights={'weight': (1, 3, 2)},
    ),
]
