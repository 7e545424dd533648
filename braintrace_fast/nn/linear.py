"""Dense layers on the ``matmul`` op, and one with a sparse matrix."""

from typing import Any

import brainstate
import saiunit as u

from ..op import matmul, sparse_matmul
from .factors import as_factor

__all__ = ['Linear', 'ScaledWSLinear', 'SignedWLinear', 'SparseLinear']


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


class ScaledWSLinear(brainstate.nn.ScaledWSLinear):
    """A dense layer whose weight is standardised, with traced weight, gain and bias.

    ``y = x @ (std(weight) * w_mask * gain) + bias``, where ``std`` takes the mean of each output's
    weights from them and divides them by ``sqrt(max(inputs * variance, eps))``.

    Parameters
    ----------
    in_size, out_size, w_init, b_init, w_mask, name, param_type
        As for :class:`Linear`; the mask multiplies the standardised weight.
    ws_gain : bool
        Whether there is a gain, which starts at one. Default True.
    eps : float
        The least ``inputs * variance`` to divide by. Default 1e-4.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dictionary with ``weight`` and, if there are such, ``bias`` and ``gain`` ``(1, outputs)``.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> layer = braintrace.nn.ScaledWSLinear(3, 2)
    >>> layer(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def update(self, x: Any) -> Any:
        """Apply the layer to ``x`` of shape ``(..., in_size)``."""
        params = self.weight.value

        def standardised(weight: Any) -> Any:
            weight = brainstate.nn.weight_standardization(weight, self.eps, params.get('gain'))
            return weight if self.w_mask is None else weight * as_factor(self.w_mask, weight)

        return matmul(x, params['weight'], params.get('bias'), weight_fn=standardised)


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


class SparseLinear(brainstate.nn.SparseLinear):
    """``y = x @ W + bias`` for a sparse matrix ``W``, with traced entries and bias.

    Parameters
    ----------
    spar_mat : sparse matrix
        Of brainevent or ``saiunit.sparse``: where the entries are, and their initial values. A
        matrix with a single value keeps one weight that all entries share.
    b_init : Callable, ArrayLike or None
        Makes the bias; None, the default, for no bias.
    in_size : int or tuple of int, optional
        The size of the input.
    name, param_type
        As for :class:`Linear`.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dictionary with ``weight``, the values of the entries, and, if there is one, ``bias``.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp, saiunit as u
    >>> matrix = u.sparse.CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> braintrace.nn.SparseLinear(matrix)(jnp.array([1.0, 10.0])).tolist()
    [30.0, 2.0]
    """

    def update(self, x: Any) -> Any:
        """Apply the layer to ``x`` of shape ``(..., in_size)``, or to an event array."""
        params = self.weight.value
        return sparse_matmul(x, params['weight'], sparse_mat=self.spar_mat, bias=params.get('bias'))
