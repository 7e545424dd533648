"""Convolutions of many kinds, with what JAX makes of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Geometry(NamedTuple):
    """The shapes of a convolution, and the options of ``conv``."""

    name: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    bias: dict[str, tuple[int, ...]]
    y: tuple[int, ...]
    options: dict[str, Any]


def plain(x: jax.Array, kernel: jax.Array, bias: Any = None, **options: Any) -> jax.Array:
    """The same in plain JAX, also for ``x`` without a batch; a bias of rank 1 is per channel."""
    if x.ndim < kernel.ndim:
        return plain(x[None], kernel, bias, **options)[0]
    strides = options.pop('strides', (1,))
    padding = options.pop('padding', 'SAME')
    y = lax.conv_general_dilated(x, kernel, strides, padding, **options)
    if bias is None:
        return y
    if bias.ndim == 1:
        layout = lax.conv_dimension_numbers(x.shape, kernel.shape, options.get('dimension_numbers'))
        bias = bias.reshape([-1 if axis == layout.out_spec[1] else 1 for axis in range(y.ndim)])
    return y + jnp.broadcast_to(bias, y.shape)


NHWC = ('NHWC', 'HWIO', 'NHWC')

BATCH_FIRST = [
    Geometry('line', (2, 3, 7), (4, 3, 3), {'bias': (4,)}, (2, 4, 7), {}),
    Geometry(
        'image',
        (2, 5, 4, 2),
        (3, 2, 2, 3),
        {'bias': (3,)},
        (2, 3, 2, 3),
        {'strides': (2, 2), 'dimension_numbers': NHWC},
    ),
    Geometry(
        'volume',
        (2, 2, 3, 4, 3),
        (3, 2, 2, 2, 1),
        {},
        (2, 3, 2, 3, 4),
        {'strides': (1, 1, 1), 'padding': ((0, 0), (0, 0), (1, 0))},
    ),
    Geometry(
        'groups',
        (2, 6, 4),
        (4, 3, 2),
        {'bias': (4,)},
        (2, 4, 3),
        {'padding': 'VALID', 'feature_group_count': 2},
    ),
    Geometry(
        'depthwise',
        (2, 4, 3, 3),
        (2, 2, 1, 6),
        {'bias': (6,)},
        (2, 4, 3, 6),
        {'strides': (1, 1), 'dimension_numbers': NHWC, 'feature_group_count': 3},
    ),
    Geometry(
        'dilated',
        (2, 2, 5, 4),
        (2, 3, 2, 2),
        {},
        (2, 2, 3, 4),
        {
            'strides': (2, 1),
            'padding': ((1, 0), (-1, 2)),
            'lhs_dilation': (2, 1),
            'rhs_dilation': (1, 2),
            'dimension_numbers': ('NCHW', 'OHWI', 'NCWH'),
        },
    ),
]

FEW = [g for g in BATCH_FIRST if g.name == 'depthwise']

OTHERS = [
    Geometry(
        'batch_groups',
        (4, 3, 5),
        (6, 3, 2),
        {'bias': (6,)},
        (2, 6, 5),
        {
            'batch_group_count': 2,
        },
    ),
    Geometry(
        'batch_groups_of_images',
        (6, 3, 4, 2),
        (2, 2, 2, 3),
        {},
        (2, 3, 4, 3),
        {
            'strides': (1, 1),
            'batch_group_count': 3,
            'dimension_numbers': NHWC,
        },
    ),
    Geometry(
        'batch_behind',
        (5, 4, 2, 3),
        (2, 2, 3, 6),
        {'bias': (6,)},
        (2, 6, 5, 4),
        {'strides': (1, 1), 'dimension_numbers': ('HWNC', 'HWIO', 'NCHW')},
    ),
]
"""Those whose input is another one for the op."""

OUTPUT_BEHIND = [
    Geometry(
        'output_behind',
        (5, 4, 2, 3),
        (2, 2, 3, 6),
        {'bias': (6,)},
        (6, 2, 5, 4),
        {'strides': (1, 1), 'dimension_numbers': ('HWNC', 'HWIO', 'CNHW')},
    ),
    Geometry(
        'batch_groups_behind',
        (3, 5, 4),
        (2, 3, 3),
        {},
        (5, 2, 2),
        {'batch_group_count': 2, 'dimension_numbers': ('CHN', 'OIH', 'HNC')},
    ),
]
"""Those whose output is another one than the op's, so that it cannot be traced."""
