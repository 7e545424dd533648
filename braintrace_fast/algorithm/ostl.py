"""Online spatio-temporal learning (OSTL), by other rules."""

from typing import Any, ClassVar

import brainstate

from .axes import ETraceConfig
from .presets import ParamDimVjpAlgorithm, pp_prop

__all__ = ['OSTLFeedforward', 'OSTLRecurrent']


class OSTLRecurrent(ParamDimVjpAlgorithm):
    r"""OSTL with recurrence (Bohnstingl et al., 2023): D-RTRL with the whole block diagonal.

    ``D`` of :class:`D_RTRL` leaves out what passes through a recurrent op. Here it keeps what each
    position does to itself by any path, with :math:`z` the ops' outputs:

    .. math::

        D_t = \frac{\partial h_t}{\partial h_{t-1}}\Big|_{z} +
              \frac{\partial h_t}{\partial z_t} \operatorname{diag}
              \frac{\partial z_t}{\partial h_{t-1}}

    Only the diagonal of a weight is read for it, and no Jacobian is made. Where states reach each
    other in other ways, such as by two products in a row in a GRU, it is probed by as many backward
    passes as a group has positions and states.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    *args, **kwargs
        More arguments of :class:`ParamDimVjpAlgorithm`.

    Attributes
    ----------
    regime : str
        ``'with-H'``: recurrence within a layer counts.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, 'ostl_recurrent', jnp.ones(2))
    >>> xs = jnp.ones((10, 2))
    >>> grads = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
    >>> grads['W', 'weight']['weight'].shape
    (6, 4)
    """

    regime: ClassVar[str] = 'with-H'
    default_config = ETraceConfig(recurrence_scope='coupled')


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
