"""OSTL: D-RTRL whose trace also keeps what each neuron does to itself through recurrent weights."""

from typing import Any

import brainstate

from ..compiler import Coupled
from .presets import ParamDimVjpAlgorithm

__all__ = ['OSTLRecurrent']


class OSTLRecurrent(ParamDimVjpAlgorithm):
    r"""OSTL with recurrence (Bohnstingl et al., 2022): D-RTRL with the whole block diagonal.

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
        More arguments of :class:`ParamDimVjpAlgorithm`; the default ``scope`` is :class:`Coupled`.

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

    regime = 'with-H'

    def __init__(self, model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> None:
        if kwargs.get('scope') is None:
            kwargs['scope'] = Coupled(kwargs.get('couple_layers', False))
        super().__init__(model, *args, **kwargs)
