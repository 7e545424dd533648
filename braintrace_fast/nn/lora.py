"""A correction of low rank, on the ``lora_matmul`` op."""

from typing import Any

import brainstate

from ..op import lora_matmul

__all__ = ['LoRA']


class LoRA(brainstate.nn.LoRA):
    """``y = x @ lora_a @ lora_b / lora_rank + base_module(x)``, with traced ``lora_a, lora_b``.

    Parameters
    ----------
    in_features, lora_rank, out_features : int
        The sizes of the input, of what lies between the two matrices, and of the output.
    base_module : Callable, optional
        What is corrected.
    kernel_init : Callable or ArrayLike
        Makes both matrices. Default LeCun normal.
    param_type : type
        The class of the state that holds the parameters. Default ``brainstate.ParamState``.
    in_size : int or tuple of int, optional
        The shape of an input whose last axis has the features.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dictionary with ``lora_a`` of shape ``(in_features, lora_rank)`` and ``lora_b`` of shape
        ``(lora_rank, out_features)``.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> layer = braintrace.nn.LoRA(3, 2, 4, base_module=braintrace.nn.Linear(3, 4))
    >>> layer(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __call__(self, x: Any) -> Any:
        """Apply the layer, by :meth:`update`."""
        return self.update(x)

    def update(self, x: Any) -> Any:
        """Apply the layer to ``x`` of shape ``(..., in_features)``."""
        base = self.base_module
        if base is not None and not callable(base):
            raise ValueError(
                f'LoRA: found base_module={base!r}, expected a module or a function. '
                'Give what the layer corrects, or None.'
            )
        a, b = self.weight.value['lora_a'], self.weight.value['lora_b']
        y = lora_matmul(x, a, b, alpha=1 / a.shape[-1])
        return y if base is None else y + base(x)
