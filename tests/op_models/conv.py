import jax.numpy as jnp
from jax import lax

import braintrace_fast as btf
from tests.op_models.model import OpModel

NHWC = ('NHWC', 'HWIO', 'NHWC')
IMAGE = {'padding': ((1, 1), (1, 0)), 'dimension_numbers': NHWC}


def image(x, kernel):
    return lax.conv_general_dilated(x, kernel, (2, 1), **IMAGE)


def line(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1,), ((1, 0),), feature_group_count=2)


MODELS = [
    OpModel(
        'conv',
        lambda x, w: btf.conv(
            x, w['weight'], w['bias'], strides=(2, 1), kernel_fn=jnp.sin, bias_fn=jnp.cos, **IMAGE
        ),
        lambda x, w: image(x, jnp.sin(w['weight'])) + jnp.cos(w['bias'])[None, None, None],
        x=(3, 3, 2),
        y=(2, 3, 4),
        weights={'weight': (3, 2, 2, 4), 'bias': (4,)},
    ),
    OpModel(
        'conv_grouped',
        lambda x, w: btf.conv(x, w['weight'], w['bias'], padding=[(1, 0)], feature_group_count=2),
        lambda x, w: line(x, w['weight']) + w['bias'][None, :, None],
        x=(4, 3),
        y=(6, 3),
        weights={'weight': (6, 2, 2), 'bias': (6,)},
    ),
    OpModel(
        'conv_bias_per_position',
        lambda x, w: btf.conv(x, w['weight'], w['bias'], strides=(2, 1), **IMAGE),
        lambda x, w: image(x, w['weight']) + w['bias'][None],
        x=(3, 2, 1),
        y=(2, 2, 2),
        weights={'weight': (3, 2, 1, 2), 'bias': (2, 1, 2)},
    ),
]
