"""SnAp: a trace of what a weight does to its own neuron, and to those that this one reaches."""

from typing import Any

import brainstate

from .axes import ETraceConfig
from .presets import ParamDimVjpAlgorithm

__all__ = ['SnAp']


class SnAp(ParamDimVjpAlgorithm):
    r"""SnAp-n (Menick et al., 2021): RTRL with the influence within ``n`` steps of each weight.

    A weight acts on one position in its own step. The trace keeps what it does to the positions
    that this one reaches in fewer than ``n`` steps, whatever passes through them; ``n = 1`` is
    :class:`OSTLRecurrent`. As soon as every position reaches every other one, as with ``n = 2`` and
    a dense recurrent weight, the gradient is that of RTRL within a group, which is BPTT if there is
    one group.

    A trace that is carried has a plane per neighbour, example and state for every weight. A fresh
    sequence (``etrace_grad(..., trace='fresh')``) needs none: prefer it where sequences are whole.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    n : int
        How far the influence is kept; at least 1.
    name, vjp_method, fast_solve
        As for :class:`ParamDimVjpAlgorithm`.
    snap_max_jacobian_elements : int
        The most elements that the Jacobians of a step may have, over the batch: per position, the
        square of neighbours times states.
    **kwargs
        More arguments of :class:`ParamDimVjpAlgorithm`.

    Raises
    ------
    ValueError
        If ``n`` is less than 1.
    TypeError
        If ``n`` is not an integer.
    NotSupportedError
        When the model is compiled, if the Jacobians have too many elements.

    Notes
    -----
    Who reaches whom is read off the recurrent ops: all from all for a dense one, by its entries for
    a sparse one. Where that cannot be told, all reach all, and a diagnostic
    (``SNAP_PATTERN_CONSERVATIVE``) says so.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, braintrace.SnAp, jnp.ones(2), n=2)
    >>> xs = jnp.ones((10, 2))
    >>> grads = learner.etrace_grad(
    ...     xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), trace='fresh'
    ... )
    >>> grads['W', 'weight']['weight'].shape
    (6, 4)
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        n: int = 2,
        name: str | None = None,
        vjp_method: str = 'single-step',
        fast_solve: bool = True,
        snap_max_jacobian_elements: int = 2**24,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            config=ETraceConfig(recurrence_scope='sparse_n', sparse_n=n),
            snap_max_jacobian_elements=snap_max_jacobian_elements,
            **kwargs,
        )
        self.n = n
