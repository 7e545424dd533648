"""``y = conv(x, kernel) + bias``, in 1 to 3 spatial dimensions, with any number of batch axes.

At position ``p`` and output channel ``k``, with ``i`` for the places that a kernel reads (taps and
the input channels of the group of ``k``),

    y[p, k] = sum_i patch[p, i] kernel[i, k] + bias[k]

a product with a matrix that all positions share. So the trace of the kernel is ``patch[p, i]``
times a plane, ``(batch, positions, groups, inputs, outputs)``, that of the bias the plane itself,
and both are added up over positions only when they are read. A plane that is uniform is kept as a
filtered input, without the patches. Without a trace, the gradient is one convolution of the input
with the cotangent, into whose batch the steps of a window are folded.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from jax import lax

from .conv_geometry import Geometry, batch_first, geometry_of, layout_of
from .convolution import convolve, kernel_gradient
from .element_wise import element_wise
from .operands import as_floats, check_floats, in_unit, matmul_precision, numbers_of
from .outer import outer_rules
from .primitive import Weights, register_primitive, weight_and_bias

__all__ = ['conv', 'conv_p']


def _forward(
    x: jax.Array,
    kernel: jax.Array,
    *bias: jax.Array,
    geometry: Geometry,
    has_bias: bool,
    precision: str | None,
) -> jax.Array:
    y = convolve(x, kernel, geometry, precision)
    if not has_bias:
        return y
    return y + lax.broadcast_in_dim(bias[0], y.shape, (y.ndim + geometry.channel_axis,))


def _weight_vjp(
    x: jax.Array,
    cotangent: jax.Array,
    weights: Weights,
    *,
    geometry: Geometry,
    has_bias: bool,
    precision: str | None,
) -> Weights:
    gradients = {}
    if 'weight' in weights:
        total = kernel_gradient(x, cotangent, geometry, precision)
        gradients['weight'] = total.astype(weights['weight'].dtype)
    if 'bias' in weights:
        gradients['bias'] = _channel_sum(cotangent, geometry).astype(weights['bias'].dtype)
    return gradients


def _channel_sum(plane: jax.Array, geometry: Geometry) -> jax.Array:
    channels = plane.ndim + geometry.channel_axis
    return plane.sum(tuple(axis for axis in range(plane.ndim) if axis != channels))


def _patches(x: jax.Array, *, geometry: Geometry, **_: Any) -> jax.Array:
    return geometry.patches(x)


def _rows(plane: jax.Array, *, geometry: Geometry, **_: Any) -> jax.Array:
    return geometry.rows(plane)


def _matrices(weights: Weights, *, geometry: Geometry, **_: Any) -> Weights:
    views = {'weight': geometry.matrices, 'bias': lambda bias: bias.reshape(geometry.groups, -1)}
    return {key: views[key](weight) for key, weight in weights.items()}


def _diagonal(
    weights: Weights, sources: np.ndarray, *, geometry: Geometry, **_: Any
) -> jax.Array | None:
    """The tap that reads the output's own position, from each channel to itself."""
    out, inputs, *spatial = geometry.layout.rhs_spec
    channels, per_group = geometry.kernel[out], geometry.kernel[inputs]
    is_kept = {*geometry.strides, *geometry.lhs_dilation} == {1}
    if not is_kept or per_group * geometry.groups != channels:
        return None
    if not np.array_equal(sources, np.arange(len(sources))):
        return None
    if geometry.channel_axis not in (-1, -geometry.own_ndim):
        return None
    kernel = jnp.moveaxis(weights['weight'], (out, inputs, *spatial), range(2 + len(spatial)))
    low = [before for before, _ in geometry.padding]
    taps = [divmod(edge, step) for edge, step in zip(low, geometry.rhs_dilation, strict=True)]
    exists = all(
        rest == 0 and 0 <= tap < size
        for (tap, rest), size in zip(taps, kernel.shape[2:], strict=True)
    )
    own = jnp.zeros(channels, kernel.dtype)
    if exists:
        own = kernel[np.arange(channels), np.arange(channels) % per_group, *(t for t, _ in taps)]
    num = len(sources) // channels
    return jnp.tile(own, num) if geometry.channel_axis == -1 else jnp.repeat(own, num)


conv_p = register_primitive(
    'etp_conv',
    _forward,
    batched=True,
    trainable_invars_fn=weight_and_bias,
    weight_vjp=_weight_vjp,
    linear_in_x=('weight',),
    diagonal=_diagonal,
    trace_rules=outer_rules(
        groups=1, keeps_input=True, operand=_patches, plane_view=_rows, weight_view=_matrices
    ),
)


def conv(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    strides: Sequence[int] = (1,),
    padding: str | Sequence[Sequence[int]] = 'SAME',
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: Any = None,
    kernel_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Convolve with a kernel whose influence on hidden states is to be traced.

    Computes ``conv(x, kernel_fn(kernel)) + bias_fn(bias)``, in 1 to 3 spatial dimensions.

    Parameters
    ----------
    x : ArrayLike
        In the layout that ``dimension_numbers`` says; without its batch axis, or with further ones
        in front, if you like. Integers and booleans (spikes) are taken as the kernel's dtype.
    kernel : ArrayLike
        In the layout that ``dimension_numbers`` says.
    bias : ArrayLike, optional
        In a unit that converts to that of ``x * kernel``. One of rank 1 has a number per output
        channel, or one for all; another is added to the output as it broadcasts, and may vary over
        positions.
    strides : sequence of int
        One per spatial axis: their number says how many there are. Default ``(1,)``.
    padding, lhs_dilation, rhs_dilation, feature_group_count, batch_group_count : optional
        As for ``jax.lax.conv_general_dilated``. Default ``'SAME'``, and one for all others.
    dimension_numbers : optional
        None for ``('NCH', 'OIH', 'NCH')`` and its like with more axes, three such strings, or a
        ``jax.lax.ConvDimensionNumbers``.
    kernel_fn, bias_fn : Callable, optional
        Applied to the kernel and to the bias before the op: to their numbers, without the unit,
        which is put back after. Gradients are those of the raw kernel and bias.

    Returns
    -------
    ArrayLike
        In the unit of ``x * kernel``.

    Raises
    ------
    TypeError
        If ranks and layouts do not fit, or the kernel or the bias does not consist of
        floating-point numbers.
    ValueError
        If sizes, strides, dilations or groups do not fit.
    saiunit.UnitMismatchError
        If the bias has another physical dimension than ``x * kernel``.

    Notes
    -----
    A carried trace has a copy of the kernel per example and output position. Where that is too
    large, learn with ``etrace_grad(..., trace='fresh')``, which carries none, or with ``pp_prop``.
    To be traced, the output must have its batch axis first.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> x, kernel = jnp.ones((8, 3, 16)), jnp.ones((4, 3, 5))
    >>> braintrace.conv(x, kernel, strides=(2,)).shape
    (8, 4, 8)
    >>> layout = ('NHWC', 'HWIO', 'NHWC')
    >>> image, kernel = jnp.ones((8, 28, 28, 1)), jnp.ones((3, 3, 1, 8))
    >>> braintrace.conv(image, kernel, strides=(1, 1), dimension_numbers=layout).shape
    (8, 28, 28, 8)
    """
    x, x_unit = u.split_mantissa_unit(x)
    kernel, kernel_unit = numbers_of(kernel, kernel_fn)
    unit = x_unit * kernel_unit
    check_floats('conv', kernel=kernel)
    x = as_floats(x, kernel.dtype)
    layout = layout_of(x.shape, kernel.shape, dimension_numbers)
    x = batch_first(x, layout.lhs_spec, batch_group_count)
    geometry = geometry_of(
        x.shape,
        kernel.shape,
        strides=strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        groups=_one_count(feature_group_count, batch_group_count),
        layout=layout,
    )
    if bias is not None:
        bias = in_unit('conv', bias, unit)
        bias = jnp.asarray(bias if bias_fn is None else bias_fn(bias))
        check_floats('conv', bias=bias)
    y = _with_bias(x, kernel, bias, geometry, layout.out_spec[0])
    if x.ndim >= kernel.ndim:
        y = jnp.moveaxis(y, -kernel.ndim, layout.out_spec[0] - kernel.ndim)
    return u.maybe_decimal(y * unit)


def _one_count(feature_groups: int, batch_groups: int) -> int:
    """The number of groups, of which batch groups have become feature groups."""
    if feature_groups > 1 and batch_groups > 1:
        raise ValueError(
            f'conv: found feature_group_count={feature_groups} and batch_group_count='
            f'{batch_groups}, expected one of them to be 1. Give one kind of groups.'
        )
    return feature_groups if batch_groups == 1 else batch_groups


def _with_bias(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, geometry: Geometry, batch_axis: int
) -> jax.Array:
    """The op, and another one for a bias that varies over positions.

    ``batch_axis`` is that of the output for which the bias was made.
    """
    bind = functools.partial(
        conv_p.bind, x, kernel, geometry=geometry, precision=matmul_precision()
    )
    if bias is None:
        return bind(has_bias=False)
    outputs = kernel.shape[geometry.kernel_output_axis]
    if bias.shape in ((1,), (outputs,)):
        return bind(jnp.broadcast_to(bias, (outputs,)), has_bias=True)
    if bias.ndim == 1 or bias.ndim > kernel.ndim:
        raise ValueError(
            f'conv: found a bias of shape {bias.shape}, expected ({outputs},) for a kernel with '
            f'{outputs} output channels, or what broadcasts to the output.'
        )
    aligned = bias.reshape(*(1,) * (kernel.ndim - bias.ndim), *bias.shape)
    aligned = jnp.moveaxis(aligned, batch_axis, 0)
    if aligned.size == aligned.shape[geometry.channel_axis] in (1, outputs):
        return bind(jnp.broadcast_to(aligned.reshape(-1), (outputs,)), has_bias=True)
    y = bind(has_bias=False)
    return y + _at_positions(aligned, bias.shape, y.shape)


def _at_positions(aligned: jax.Array, found: Sequence[int], y: Sequence[int]) -> jax.Array:
    """A bias that varies over positions, shaped like the output: an op of its own."""
    if len(aligned) == 1:  # for all examples
        aligned = aligned[0]
    fits = zip(aligned.shape[::-1], y[::-1], strict=False)
    if aligned.ndim > len(y) or any(size not in (1, expected) for size, expected in fits):
        raise ValueError(
            f'conv: found a bias of shape {tuple(found)}, which does not broadcast to the output: '
            f'that has the shape {tuple(y)}, with the batch in front. Give one number per output '
            'channel, or per position and channel.'
        )
    own = y[len(y) - aligned.ndim :]
    return jnp.broadcast_to(element_wise(jnp.broadcast_to(aligned, own)), y)
