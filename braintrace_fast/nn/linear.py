"""Dense layers on the ``matmul`` op."""

from typing import Any

import brainstate
import saiunit as u

from ..op import matmul
from .factors import as_factor

__all__ = ['Linear', 'SignedWLinear']


class Linear(brainstate.nn.Linear):
    """``y = x @ (weight * w_mask) + bias``, with traced weight and bias.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        The sizes of the input and the output.
    w_init : Callable or ArrayLike
        Makes the weight. Default Kaiming normal.
    b_init : Callable, ArrayLike or None
        Makes the bias; None for no bias. Default zeros.
    w_mask : Callable, ArrayLike or None
        Multiplies the weight.
    name : str, optional
        The name of the module.
    param_type : type
        The class of the state that holds the parameters. Default ``brainstate.ParamState``.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dictionary with ``weight`` and, if there is one, ``bias``.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> layer = braintrace.nn.Linear(3, 2)
    >>> layer(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def update(self, x: Any) -> Any:
        """Apply the layer to ``x`` of shape ``(..., in_size)``."""
        params = self.weight.value
        weight = params['weight']
        if self.w_mask is not None:
            weight = weight * as_factor(self.w_mask, weight)
        return matmul(x, weight, params.get('bias'))


class SignedWLinear(brainstate.nn.SignedWLinear):
    """``y = x @ (abs(weight) * w_sign)``, with a traced weight: the signs stay as they are given.

    Parameters
    ----------
    in_size, out_size, w_init, name, param_type
        As for :class:`Linear`.
    w_sign : ArrayLike or None
        The signs, broadcast against the weight; None makes every weight positive.

    Attributes
    ----------
    weight : brainstate.ParamState
        The weight, of either sign.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> layer = braintrace.nn.SignedWLinear(3, 2, w_init=-jnp.ones((3, 2)))
    >>> layer(jnp.ones(3)).tolist()
    [3.0, 3.0]
    """

    def update(self, x: Any) -> Any:
        """Apply the layer to ``x`` of shape ``(..., in_size)``."""
        weight = u.math.abs(self.weight.value)
        if self.w_sign is not None:
            weight = weight * as_factor(self.w_sign, weight)
        return matmul(x, weight)
