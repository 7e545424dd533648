import jax
import jax.numpy as jnp

import braintrace_fast as btf
from tests.op_models.model import OpModel

ROWS = 5


def indices(rng, shape):
    return rng.integers(-ROWS, ROWS, size=shape)


def one_hot(x):
    return jax.nn.one_hot(x % ROWS, ROWS, dtype=jnp.float64)


MODELS = [
    OpModel(
        'embedding',
        lambda x, w: btf.embedding(x, w['weight'], weight_fn=jnp.sin),
        lambda x, w: x @ jnp.sin(w['weight']),
        x=(),
        y=(4,),
        weights={'weight': (ROWS, 4)},
        draw=indices,
        dense=one_hot,
    ),
    OpModel(
        'embedding_of_two_axes',
        lambda x, w: btf.embedding(x, w['weight']),
        lambda x, w: jnp.einsum('bkv,vfg->bkfg', x, w['weight']),
        x=(2,),
        y=(2, 3, 2),
        weights={'weight': (ROWS, 3, 2)},
        draw=indices,
        dense=one_hot,
    ),
]
