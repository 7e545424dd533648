"""Dense layers on the ``matmul`` op, and one with a sparse matrix."""

from typing import Any

import brainstate
import saiunit as u

from ..op import matmul, sparse_matmul

__all__ = ['Linear', 'SignedWLinear', 'SparseLinear']


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
            weight = weight * self.w_mask
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
            weight = weight * self.w_sign
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
