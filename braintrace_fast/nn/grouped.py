"""A dense layer per group, on the ``grouped_matmul`` op."""

from typing import Any

import brainstate
from brainstate.nn.init import param

from ..op import grouped_matmul
from .initializers import GROUPED_KAIMING_NORMAL, ZERO

__all__ = ['GroupedLinear']


class GroupedLinear(brainstate.nn.Module):
    """``y[g] = x[g] @ weight[g] + bias[g]`` for every group, with traced weight and bias.

    Parameters
    ----------
    num_groups : int
        The number of groups.
    in_features, out_features : int
        The sizes of the input and the output of each group.
    w_init : Callable or ArrayLike
        Makes the weight. Default Kaiming normal, with variance
        ``2 / (in_features * out_features)``.
    b_init : Callable, ArrayLike or None
        Makes the bias; None for no bias. Default zeros.
    name : str, optional
        The name of the module.
    param_type : type
        The class of the state that holds the parameters. Default ``brainstate.ParamState``.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dictionary with ``weight`` of shape ``(num_groups, in_features, out_features)`` and, if
        there is one, ``bias`` of shape ``(num_groups, out_features)``.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> layer = braintrace.nn.GroupedLinear(2, 3, 4)
    >>> layer(jnp.ones((5, 2, 3))).shape
    (5, 2, 4)
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        w_init: Any = GROUPED_KAIMING_NORMAL,
        b_init: Any = ZERO,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        super().__init__(name=name)  # type: ignore[call-arg]
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.in_size = (num_groups, in_features)
        self.out_size = (num_groups, out_features)
        params = {'weight': param(w_init, (num_groups, in_features, out_features))}
        if b_init is not None:
            params['bias'] = param(b_init, (num_groups, out_features))
        self.weight = param_type(params)

    def update(self, x: Any) -> Any:
        """Apply the layer to ``x`` of shape ``(..., num_groups, in_features)``."""
        params = self.weight.value
        return grouped_matmul(x, params['weight'], params.get('bias'))
