"""Convolutional layers on the ``conv`` op."""

from typing import Any

import brainstate

from ..op import conv
from .factors import as_factor

__all__ = ['Conv1d', 'Conv2d', 'Conv3d']


class _TracedConv:
    """What makes a convolutional layer of brainstate one whose weights are traced."""

    def update(self: Any, x: Any) -> Any:
        """Apply the layer to ``x`` of shape ``in_size``, or with a batch axis in front."""
        self._check_input_dim(x)
        params = self.weight.value
        return self._conv_op(x, params, params.get('bias'))

    def _conv_op(self: Any, x: Any, params: dict[str, Any], bias: Any = None) -> Any:
        """The layer; without a bias, whose unit may not fit, for the constructor to find shapes."""
        kernel = params['weight']
        if self.w_mask is not None:
            kernel = kernel * as_factor(self.w_mask, kernel)
        return conv(
            x,
            kernel,
            bias,
            strides=self.stride,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            feature_group_count=self.groups,
            dimension_numbers=self.dimension_numbers,
        )


class Conv1d(_TracedConv, brainstate.nn.Conv1d):
    """A convolution over one spatial axis, with traced weight and bias.

    Parameters
    ----------
    in_size : tuple of int
        The shape of an input without batch: spatial sizes, then channels.
    out_channels : int
        The number of output channels.
    kernel_size, stride, lhs_dilation, rhs_dilation : int or tuple of int
        One number per spatial axis, or one for all. All but the first are 1 by default.
    padding : str, int or sequence
        ``'SAME'`` (the default) or ``'VALID'``; or numbers, or pairs of them, per spatial axis.
    groups : int
        The number of groups of channels that know nothing of each other. Default 1.
    w_init : Callable or ArrayLike
        Makes the weight. Default Xavier normal.
    b_init : Callable, ArrayLike or None
        Makes the bias; None, the default, for no bias.
    w_mask : Callable, ArrayLike or None
        Multiplies the weight.
    channel_first : bool
        Whether channels come before spatial sizes, in ``in_size`` too. Default False.
    name : str, optional
        The name of the module.
    param_type : type
        The class of the state that holds the parameters. Default ``brainstate.ParamState``.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dictionary with ``weight``, of shape ``(*kernel_size, channels / groups, out_channels)``,
        and, if there is one, ``bias``, shaped to be added to an output.
    out_size : tuple of int
        The shape of an output without batch.

    Raises
    ------
    ValueError
        If ``in_size`` has another number of axes, ``groups`` divides the channels not, or an input
        has another shape than ``in_size``.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> layer = braintrace.nn.Conv1d((28, 3), 16, kernel_size=5)
    >>> layer(jnp.ones((2, 28, 3))).shape, layer(jnp.ones((28, 3))).shape
    ((2, 28, 16), (28, 16))
    """


class Conv2d(_TracedConv, brainstate.nn.Conv2d):
    """A convolution over two spatial axes, with traced weight and bias.

    Parameters and attributes are those of :class:`Conv1d`.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> layer = braintrace.nn.Conv2d((28, 28, 1), 8, kernel_size=3, stride=2)
    >>> layer(jnp.ones((16, 28, 28, 1))).shape
    (16, 14, 14, 8)
    """


class Conv3d(_TracedConv, brainstate.nn.Conv3d):
    """A convolution over three spatial axes, with traced weight and bias.

    Parameters and attributes are those of :class:`Conv1d`.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> layer = braintrace.nn.Conv3d((8, 8, 8, 1), 4, kernel_size=(3, 3, 2), padding='VALID')
    >>> layer.out_size
    (6, 6, 7, 4)
    """
