import jax.numpy as jnp
import numpy as np

import braintrace_fast as btf
from tests.op_models.model import OpModel

FIXED = np.random.default_rng(5).normal(size=(3, 2))

MODELS = [
    OpModel(
        'lora',
        lambda x, w: btf.lora_matmul(x, w['B'], w['A'], alpha=0.6, bias=w['bias'], b_fn=jnp.sin),
        lambda x, w: 0.6 * x @ jnp.sin(w['B']) @ w['A'] + w['bias'][None],
        x=(3,),
        y=(4,),
        weights={'B': (3, 2), 'A': (2, 4), 'bias': (4,)},
    ),
    OpModel(
        'lora_of_a_fixed_side',
        lambda x, w: btf.lora_matmul(x, jnp.asarray(FIXED), w['A'], a_fn=jnp.sin),
        lambda x, w: x @ FIXED @ jnp.sin(w['A']),
        x=(3,),
        y=(4,),
        weights={'A': (2, 4)},
    ),
    OpModel(
        'lora_of_a_square',
        lambda x, w: btf.lora_matmul(x, w['B'], w['B'].T),
        lambda x, w: x @ w['B'] @ w['B'].T,
        x=(3,),
        y=(3,),
        weights={'B': (3, 2)},
    ),
]
