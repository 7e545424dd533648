import brainevent
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace_fast as btf
from tests.op_models.model import OpModel

INPUTS, OUTPUTS = 5, 4
ROWS = np.array([0, 0, 1, 2, 2, 2, 3, 4])
COLS = np.array([1, 3, 0, 2, 3, 3, 1, 0])
"""One place twice, and no entry where there could be one."""
BY_ROW = brainevent.CSR(
    np.ones(8, np.float32), COLS, np.searchsorted(ROWS, np.arange(6)), shape=(INPUTS, OUTPUTS)
)
TARGETS = np.array([[0, 1], [3, 2], [1, 2], [0, 0], [2, 3]])
BY_SOURCE = brainevent.FixedNumPerPre(np.ones((5, 2), np.float32), TARGETS, shape=(INPUTS, OUTPUTS))
BY_PLACE = u.sparse.COO((np.ones(8, np.float32), ROWS[::-1], COLS[::-1]), shape=(INPUTS, OUTPUTS))
FULL = u.sparse.CSR.fromdense(np.ones((3, 2), np.float32))


def dense(weight, rows=ROWS, cols=COLS):
    """The matrix of a weight, with zeros where it has no entry."""
    return jnp.zeros((INPUTS, OUTPUTS), weight.dtype).at[rows, cols].add(weight)


def spikes(rng, shape):
    return rng.random(shape) < 0.6


MODELS = [
    OpModel(
        'sparse_matmul',
        lambda x, w: btf.sparse_matmul(
            x, w['weight'], sparse_mat=BY_ROW, bias=w['bias'], weight_fn=jnp.sin
        ),
        lambda x, w: x @ dense(jnp.sin(w['weight'])) + w['bias'][None],
        x=(INPUTS,),
        y=(OUTPUTS,),
        weights={'weight': (8,), 'bias': (OUTPUTS,)},
    ),
    OpModel(
        'sparse_matmul_fixed_number',
        lambda x, w: btf.sparse_matmul(
            brainevent.BinaryArray(x), w['weight'], sparse_mat=BY_SOURCE
        ),
        lambda x, w: x @ dense(w['weight'], np.arange(INPUTS)[:, None], TARGETS),
        x=(INPUTS,),
        y=(OUTPUTS,),
        weights={'weight': (INPUTS, 2)},
        draw=spikes,
        dense=lambda x: x.astype(jnp.float64),
    ),
    OpModel(
        'sparse_matmul_shared',
        lambda x, w: btf.sparse_matmul(x, w['weight'], sparse_mat=BY_PLACE),
        lambda x, w: x @ dense(jnp.broadcast_to(w['weight'], (8,))),
        x=(INPUTS,),
        y=(OUTPUTS,),
        weights={'weight': (1,)},
    ),
    OpModel(
        'sparse_matmul_full',
        lambda x, w: btf.sparse_matmul(x, w['weight'].reshape(-1), sparse_mat=FULL),
        lambda x, w: x @ w['weight'],
        x=(3,),
        y=(2,),
        weights={'weight': (3, 2)},
    ),
]
