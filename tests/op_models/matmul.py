import jax.numpy as jnp

import braintrace_fast as btf
from tests.op_models.model import OpModel

MODELS = [
    OpModel(
        'matmul',
        lambda x, w: btf.matmul(x, w['weight'], w['bias'], weight_fn=jnp.sin),
        lambda x, w: x @ jnp.sin(w['weight']) + w['bias'][None],
        x=(3,),
        y=(4,),
        weights={'weight': (3, 4), 'bias': (4,)},
    ),
]
