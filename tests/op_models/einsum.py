import jax.numpy as jnp

import braintrace_fast as btf
from tests.op_models.model import OpModel


def case(name: str, equation: str, x: tuple, y: tuple, weight: tuple) -> OpModel:
    """An equation, with the shapes of an example."""
    return OpModel(
        f'einsum_{name}',
        lambda x, w: btf.einsum(equation, x, w['weight'], weight_fn=jnp.sin),
        lambda x, w: jnp.einsum(equation, x, jnp.sin(w['weight'])),
        x=x,
        y=y,
        weights={'weight': weight},
    )


MODELS = [
    case('matmul', 'bk,kn->bn', (3,), (4,), (3, 4)),
    case('shared', 'btk,kn->btn', (2, 3), (2, 4), (3, 4)),
    case('every_class', 'btgks,nkgm->bmtgn', (2, 2, 3, 2), (3, 2, 2, 2), (2, 3, 2, 3)),
    case('no_output', 'bkn,kn->bn', (3, 4), (4,), (3, 4)),
]
