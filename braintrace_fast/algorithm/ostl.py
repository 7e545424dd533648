"""Online spatio-temporal learning, by other rules."""

from typing import Any, ClassVar

import brainstate

from .presets import pp_prop

__all__ = ['OSTLFeedforward']


class OSTLFeedforward(pp_prop):
    r"""OSTL (Bohnstingl et al., 2023) of feed-forward networks: the gradients of the steps alone.

    .. math::

        g = \sum_t c_t \otimes x_t

    up to the decay. It is :class:`pp_prop` with one that leaves nothing of the past.

    Parameters
    ----------
    model, name, **kwargs
        As for :class:`pp_prop`.
    decay_or_rank : float or int
        The decay, or the rank, of both sides of the trace; with 0.0 or rank 1, nothing is kept.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, 'ostl_feedforward', jnp.ones(2), decay_or_rank=0.0)
    >>> learner.regime, learner.config.temporal_recursion
    ('without-H', ('none', 'none'))
    """

    regime: ClassVar[str] = 'without-H'

    def __init__(
        self,
        model: brainstate.nn.Module,
        decay_or_rank: Any = 1e-6,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, decay_or_rank, name, **kwargs)
