"""Ops with rules of braintrace's form: one that is not linear in its weight, one of indices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import braintrace_fast as btf
from tests.op_models.model import OpModel

ROWS = 5


def squared(x, weight, bias, *, gain):
    return gain * jnp.einsum('...i,io->...o', x, weight**2) + jnp.broadcast_to(
        bias, (*x.shape[:-1], bias.shape[-1])
    )


def squared_to_dw(x, plane, weights, *, gain):
    """By hand, for one example only."""
    return {
        'weight': 2 * gain * weights['weight'] * x[:, None] * plane[None, :],
        'bias': plane,
    }


def scaled_trace(plane, trace, *, gain):
    return {'weight': trace['weight'] * plane[None, :], 'bias': trace['bias'] * plane}


def zeros(x_var, y_var, weight_vars, num_state):
    raise AssertionError('not called: the shape is known')


def table(x, weight):
    return jax.nn.one_hot(x, ROWS, dtype=weight.dtype) @ weight if x.ndim else weight[x]


def table_to_dw(x, plane, weights):
    """Of an index, or of what pp-prop makes of several."""
    code = x if jnp.issubdtype(x.dtype, jnp.inexact) else jax.nn.one_hot(x, ROWS, dtype=plane.dtype)
    return {'weight': code[:, None] * plane[None, :]}


def one_hot(x, weights):
    return jax.nn.one_hot(x, weights['weight'].shape[0], dtype=weights['weight'].dtype)


@functools.cache
def squared_op(batched):
    op = btf.register_primitive(
        f'tests_squared_{batched}',
        squared,
        batched=batched,
        trainable_invars_fn=lambda params: {'weight': 1, 'bias': 2},
    )
    op.register_xy_to_dw(squared_to_dw)
    op.register_dt_to_t(scaled_trace)
    op.register_init_drtrl(zeros)
    op.register_init_pp(zeros)
    return op


@functools.cache
def table_op(batched):
    op = btf.register_primitive(f'tests_table_{batched}', table, batched=batched)
    op.register_etp_rules(
        xy_to_dw=table_to_dw,
        dt_to_t=lambda plane, trace: {'weight': trace['weight'] * plane[None, :]},
        init_drtrl=zeros,
        init_pp=zeros,
        pp_x_repr=one_hot,
    )
    return op


MODELS = (
    OpModel(
        'registered',
        lambda x, w: squared_op(x.ndim == 2).bind(x, w['weight'], w['bias'], gain=0.5),
        lambda X, w: squared(X, w['weight'], w['bias'], gain=0.5),
        x=(3,),
        y=(4,),
        weights={'weight': (3, 4), 'bias': (4,)},
    ),
    OpModel(
        'registered_table',
        lambda x, w: table_op(x.ndim == 1).bind(x, w['weight']),
        lambda X, w: X @ w['weight'],
        x=(),
        y=(4,),
        weights={'weight': (ROWS, 4)},
        draw=lambda rng, shape: rng.integers(0, ROWS, size=shape).astype(np.int32),
        dense=lambda x: jax.nn.one_hot(x, ROWS, dtype=float),
    ),
)
