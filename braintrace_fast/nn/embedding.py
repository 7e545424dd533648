"""A table of rows, on the ``embedding`` op."""

from typing import Any

import brainstate

from ..op import embedding
from .initializers import LECUN_UNIFORM

__all__ = ['Embedding']


class Embedding(brainstate.nn.Embedding):
    """``y = weight[indices]``, with a traced table.

    Parameters
    ----------
    num_embeddings : int
        The number of rows.
    embedding_size : int or tuple of int
        The shape of a row.
    embedding_init : Callable or ArrayLike
        Makes the table. Default LeCun uniform.
    padding_idx, max_norm, norm_type, scale_grad_by_freq, freeze
        For the signature only: they alter rows or gradients in ways that cannot be traced, so
        values other than the defaults of all but ``norm_type`` are refused.
    name : str, optional
        The name of the module.
    param_type : type
        The class of the state that holds the table. Default ``brainstate.ParamState``.

    Attributes
    ----------
    weight : brainstate.ParamState
        The table, of shape ``(num_embeddings, *embedding_size)``.

    Raises
    ------
    NotImplementedError
        If an argument that cannot be traced is given.
    ValueError
        If a size is negative, or ``padding_idx`` is no row.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> layer = braintrace.nn.Embedding(10, 3)
    >>> layer(jnp.array([1, 7])).shape
    (2, 3)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: Any,
        embedding_init: Any = LECUN_UNIFORM,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        freeze: bool = False,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_size,
            embedding_init,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            freeze=freeze,
            name=name,
            param_type=param_type,
        )
        self._refuse_untraced()

    def update(self, indices: Any) -> Any:
        """The rows of indices of any shape."""
        self._refuse_untraced()
        return embedding(indices, self.weight.value)

    def _refuse_untraced(self) -> None:
        defaults = dict(max_norm=None, freeze=False, scale_grad_by_freq=False, padding_idx=None)
        found = {name: getattr(self, name) for name in defaults}
        wrong = [f'{name}={found[name]!r}' for name in found if found[name] != defaults[name]]
        if wrong:
            raise NotImplementedError(
                f'Embedding does not support: {", ".join(wrong)}. What that does to rows or '
                'gradients cannot be traced: leave it out, or use brainstate.nn.Embedding, whose '
                'table is not traced.'
            )
