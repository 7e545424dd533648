"""What a convolution reads where: strides, padding, dilations, groups and layouts, canonical.

Here an input has its batch axes in front, any number of them, and an output keeps them. What stands
behind them are an array's *own* axes, in the order that the layout says.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ['Geometry', 'batch_first', 'geometry_of', 'layout_of']

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """All but the arrays of a convolution.

    Attributes
    ----------
    kernel : tuple of int
        The shape of the kernel, in its own layout.
    strides, lhs_dilation, rhs_dilation : tuple of int
        One number per spatial axis.
    padding : tuple of tuple of int
        Before and behind each spatial axis.
    groups : int
        The number of feature groups.
    layout : lax.ConvDimensionNumbers
        The axes of input, kernel and output; of input and output, the first is that of the batch.
    """

    kernel: Ints
    strides: Ints
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Ints
    rhs_dilation: Ints
    groups: int
    layout: lax.ConvDimensionNumbers

    @property
    def own_ndim(self) -> int:
        """The number of own axes of an input, and of an output."""
        return len(self.strides) + 1

    @property
    def kernel_output_axis(self) -> int:
        """The axis of the kernel that runs over output channels."""
        return self.layout.rhs_spec[0]

    @property
    def channel_axis(self) -> int:
        """The axis of output channels, counted from behind."""
        return self.layout.out_spec[1] - 1 - self.own_ndim

    def convolve(self, x: jax.Array, kernel: jax.Array, precision: Any) -> jax.Array:
        """The convolution, with all batch axes folded into one."""
        dtype = jnp.result_type(x, kernel)
        y = lax.conv_general_dilated(
            self.one_batch(x).astype(dtype),
            kernel.astype(dtype),
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.layout,
            self.groups,
            precision=precision,
        )
        return y.reshape(*x.shape[: -self.own_ndim], *y.shape[1:])

    def one_batch(self, a: jax.Array) -> jax.Array:
        """An input or output with all batch axes folded into one."""
        own = a.shape[a.ndim - self.own_ndim :]
        return a.reshape(math.prod(a.shape[: -self.own_ndim]), *own)

    def patches(self, x: jax.Array) -> jax.Array:
        """What each output position reads: ``(*batch, *positions, groups, taps and channels)``.

        Positions are in the order of the spatial axes, whatever the layout.
        """
        x = self.channels_last(x, self.layout.lhs_spec)
        batch = x.shape[: -self.own_ndim]
        edges = [
            (low, high, step - 1)
            for (low, high), step in zip(self.padding, self.lhs_dilation, strict=True)
        ]
        padding = [*((0, 0, 0) for _ in batch), *edges, (0, 0, 0)]
        padded = lax.pad(x, jnp.zeros((), x.dtype), padding)
        read = [self._seen_by(padded, tap) for tap in itertools.product(*map(range, self.taps))]
        return jnp.concatenate([self._in_groups(seen) for seen in read], -1)

    def rows(self, plane: jax.Array) -> jax.Array:
        """An array like the output, as ``(*batch, *positions, groups, channels of a group)``."""
        return self._in_groups(self.channels_last(plane, self.layout.out_spec))

    def matrices(self, kernel: jax.Array) -> jax.Array:
        """The kernel of each group, as a matrix from what a position reads to its outputs."""
        ordered = self.outputs_last(kernel)
        by_group = self._in_groups(ordered.reshape(-1, ordered.shape[-1]))
        return jnp.moveaxis(by_group, 1, 0)

    @property
    def taps(self) -> list[int]:
        """How many taps the kernel has, per spatial axis."""
        return [self.kernel[axis] for axis in self.layout.rhs_spec[2:]]

    def _in_groups(self, a: jax.Array) -> jax.Array:
        """An array whose last axis, of channels, is cut into groups."""
        return a.reshape(*a.shape[:-1], self.groups, a.shape[-1] // self.groups)

    def _seen_by(self, padded: jax.Array, tap: Ints) -> jax.Array:
        """What one tap of the kernel reads at all positions."""
        first = padded.ndim - self.own_ndim
        start, limit, strides = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
        for place, (index, count) in enumerate(zip(tap, self.taps, strict=True)):
            dilation = self.rhs_dilation[place]
            start[first + place] = index * dilation
            limit[first + place] -= (count - 1 - index) * dilation
            strides[first + place] = self.strides[place]
        return lax.slice(padded, start, limit, strides)

    def channels_last(self, a: jax.Array, spec: Sequence[int]) -> jax.Array:
        """An array with its own axes in the order of spatial axes, then channels."""
        return _ordered(a, [axis - 1 for axis in (*spec[2:], spec[1])])

    def from_channels_last(self, a: jax.Array) -> jax.Array:
        """An output whose own axes are spatial ones, then channels, in the layout of outputs."""
        _, channel, *spatial = self.layout.out_spec
        return _ordered(a, np.argsort([axis - 1 for axis in (*spatial, channel)]).tolist())

    def outputs_last(self, kernel: jax.Array) -> jax.Array:
        """A kernel with its axes in the order of spatial axes, inputs and outputs."""
        outputs, inputs, *spatial = self.layout.rhs_spec
        return _ordered(kernel, [*spatial, inputs, outputs])

    def in_channels_last(self) -> 'Geometry':
        """The same for arrays of that order."""
        size = len(self.strides)
        spec = (0, size + 1, *range(1, size + 1))
        layout = lax.ConvDimensionNumbers(spec, (size + 1, size, *range(size)), spec)
        outputs, inputs, *spatial = self.layout.rhs_spec
        kernel = tuple(self.kernel[axis] for axis in (*spatial, inputs, outputs))
        return replace(self, kernel=kernel, layout=layout)

    def transposed(self, x: Ints) -> 'Geometry':
        """The convolution of a cotangent, with :meth:`transposed_kernel`, to one like ``x``."""
        own = x[len(x) - self.own_ndim :]
        sizes = [own[axis - 1] for axis in self.layout.lhs_spec[2:]]
        reach = [(n - 1) * d for n, d in zip(self.taps, self.rhs_dilation, strict=True)]
        padding = []
        for place, (low, high) in enumerate(self.padding):
            length = (sizes[place] - 1) * self.lhs_dilation[place] + 1
            stride = self.strides[place]
            unread = (length + low + high - reach[place] - 1) % stride
            padding.append((reach[place] - low, reach[place] - high + unread))
        lhs, rhs, out = self.layout
        layout = lax.ConvDimensionNumbers(out, (rhs[1], rhs[0], *rhs[2:]), lhs)
        return replace(
            self,
            kernel=self._transposed_shape(),
            strides=self.lhs_dilation,
            padding=tuple(padding),
            lhs_dilation=self.strides,
            layout=layout,
        )

    def transposed_kernel(self, kernel: jax.Array) -> jax.Array:
        """The kernel from outputs to inputs: flipped, and with channels exchanged in each group."""
        outputs, inputs, *spatial = self.layout.rhs_spec
        flipped = jnp.flip(kernel, spatial)
        if self.groups == 1:
            return flipped
        ordered = jnp.moveaxis(flipped, (inputs, outputs), (-2, -1))
        by_group = jnp.moveaxis(self._in_groups(ordered), -2, -3)  # (groups, inputs, outputs)
        joined = by_group.reshape(*by_group.shape[:-3], -1, by_group.shape[-1])
        return jnp.moveaxis(joined, (-2, -1), (inputs, outputs))

    def _transposed_shape(self) -> Ints:
        outputs, inputs, *_ = self.layout.rhs_spec
        shape = list(self.kernel)
        shape[inputs] *= self.groups
        shape[outputs] //= self.groups
        return tuple(shape)


def _ordered(a: jax.Array, own: Sequence[int]) -> jax.Array:
    """An array with its last axes in another order; the same object if that is theirs."""
    if list(own) == list(range(len(own))):
        return a
    first = a.ndim - len(own)
    return a.transpose(*range(first), *(first + axis for axis in own))


def layout_of(x: Ints, kernel: Ints, dimension_numbers: Any) -> lax.ConvDimensionNumbers:
    """The layout that a user means, for arrays of these shapes."""
    if not 3 <= len(kernel) <= 5:
        raise TypeError(
            f'conv: found a kernel of shape {kernel}, expected 1 to 3 spatial axes and those of '
            'input and output channels.'
        )
    if len(x) < len(kernel) - 1:
        raise TypeError(
            f'conv: found x of shape {x} and a kernel of shape {kernel}, expected {len(kernel)} '
            'axes: batch (which may be missing), channels and spatial ones.'
        )
    like_x = kernel if len(x) < len(kernel) else x[-len(kernel) :]
    layout = lax.conv_dimension_numbers(like_x, kernel, dimension_numbers)
    if any(sorted(spec) != list(range(len(kernel))) for spec in layout):
        raise TypeError(
            f'conv: found dimension_numbers {dimension_numbers} for a kernel of shape {kernel}, '
            f'expected all of its {len(kernel)} axes once in each.'
        )
    if len(x) < len(kernel):
        lhs, rhs, out = layout
        return lax.ConvDimensionNumbers(_behind_batch(lhs), rhs, _behind_batch(out))
    return layout


def batch_first(x: jax.Array, spec: Sequence[int], groups: int) -> jax.Array:
    """An input with its batch axis in front of its own axes, and batch groups among its channels.

    What batch groups compute for output channels of their own, feature groups do.
    """
    first = x.ndim - len(spec)
    if first >= 0:
        x = jnp.moveaxis(x, first + spec[0], first)
    if groups == 1:
        return x
    size = x.shape[first] if first >= 0 else 1
    if groups < 1 or size % groups:
        raise ValueError(
            f'conv: found batch_group_count={groups} for a batch of {size}, expected a positive '
            'number that divides it.'
        )
    channel = _behind_batch(spec)[1] - 1
    own = list(x.shape[first + 1 :])
    x = x.reshape(*x.shape[:first], groups, size // groups, *own)
    own[channel] *= groups
    return jnp.moveaxis(x, first, first + 1 + channel).reshape(*x.shape[:first], -1, *own)


def geometry_of(
    x: Ints,
    kernel: Ints,
    *,
    strides: Sequence[int],
    padding: str | Sequence[Sequence[int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    groups: int,
    layout: lax.ConvDimensionNumbers,
) -> Geometry:
    """The geometry of a convolution, checked; ``x`` is the shape with all batch axes in front."""
    strides = _numbers('strides', strides, kernel)
    before, behind = (
        _numbers(name, (1,) * len(strides) if value is None else value, kernel)
        for name, value in (('lhs_dilation', lhs_dilation), ('rhs_dilation', rhs_dilation))
    )
    spec = _behind_batch(layout.lhs_spec)
    own = x[len(x) - len(kernel) + 1 :]
    _check_channels(own[spec[1] - 1], kernel, layout.rhs_spec, groups)
    sizes = [own[axis - 1] for axis in spec[2:]]
    taps = [
        max((kernel[a] - 1) * d + 1, 0) for a, d in zip(layout.rhs_spec[2:], behind, strict=True)
    ]
    return Geometry(
        kernel,
        strides,
        _pairs(padding, sizes, taps, strides, before),
        before,
        behind,
        groups,
        lax.ConvDimensionNumbers(spec, tuple(layout.rhs_spec), _behind_batch(layout.out_spec)),
    )


def _behind_batch(spec: Sequence[int]) -> Ints:
    """The axes of a layout when that of the batch is moved to the front."""
    return (0, *(axis + (axis < spec[0]) for axis in spec[1:]))


def _numbers(name: str, values: Sequence[int], kernel: Ints) -> Ints:
    if not isinstance(values, Sequence):
        raise TypeError(
            f'conv: found {name}={values!r}, expected one number per spatial axis, such as (1, 1).'
        )
    if len(values) != len(kernel) - 2 or any(value < 1 for value in values):
        raise ValueError(
            f'conv: found {name}={tuple(values)} for a kernel of shape {kernel}, expected '
            f'{len(kernel) - 2} positive numbers, one per spatial axis.'
        )
    return tuple(map(int, values))


def _check_channels(inputs: int, kernel: Ints, spec: Sequence[int], groups: int) -> None:
    outputs, expected = kernel[spec[0]], kernel[spec[1]] * groups
    if groups < 1 or outputs % groups or inputs != expected:
        raise ValueError(
            f'conv: found {inputs} input channels and a kernel of shape {kernel} with {outputs} '
            f'output channels in {groups} group(s), expected {expected} input channels and a '
            'positive number of groups that divides both. Check the sizes and dimension_numbers.'
        )


def _pairs(
    padding: Any, sizes: Sequence[int], taps: Sequence[int], strides: Ints, dilation: Ints
) -> tuple[tuple[int, int], ...]:
    """Padding as pairs of numbers, one per spatial axis."""
    if isinstance(padding, str):
        if any(step != 1 for step in dilation):
            raise ValueError(
                f'conv: found padding={padding!r} with lhs_dilation={dilation}, expected pairs of '
                'numbers: there is more than one way to pad a dilated input.'
            )
        padding = lax.padtype_to_pads(sizes, taps, strides, padding)
    elif not isinstance(padding, Sequence):
        raise ValueError(
            f"conv: found padding={padding!r}, expected 'SAME', 'VALID', 'SAME_LOWER' or a pair "
            '(before, behind) per spatial axis.'
        )
    if len(padding) != len(sizes) or any(np.shape(pair) != (2,) for pair in padding):
        raise TypeError(
            f'conv: found padding={padding!r}, expected {len(sizes)} pair(s) (before, behind), one '
            'per spatial axis.'
        )
    return tuple((int(low), int(high)) for low, high in padding)
