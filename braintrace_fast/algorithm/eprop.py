"""e-prop: D-RTRL with a filtered trace, and with random feedback if wanted."""

from typing import Any

import brainstate

from .axes import ETraceConfig
from .presets import ParamDimVjpAlgorithm
from .signals import check_kappa

__all__ = ['EProp']

SIGNALS = {'symmetric': 'symmetric', 'random': 'random_feedback'}


class EProp(ParamDimVjpAlgorithm):
    r"""e-prop (Bellec et al., 2020): a local trace, smoothed, times a learning signal.

    .. math::

        e_t = D_t e_{t-1} + f_t \otimes x_t, \qquad
        \bar e_t = \kappa \bar e_{t-1} + e_t, \qquad
        g_t = L_t \bar e_t

    and what reaches the loss of the step past the hidden states. The filter stands for a readout
    that leaks by ``kappa``. With random feedback, the direction of the signal goes through a fixed
    random matrix per hidden group, :math:`B^T L_t / |L_t|`, and counts alone.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    feedback : {'symmetric', 'random'}
        Whether the signal is the loss's own, or goes through random matrices.
    kappa_filter_decay : float
        How much of the filtered trace is kept from step to step, in ``[0, 1)``; 0 means no filter,
        which is :class:`D_RTRL`. The filter advances in every step, also in ``etrace_evolve``, and
        takes as much memory as the trace.
    random_feedback_key : jax.Array, optional
        The random key of the matrices, which ``feedback='random'`` needs.
    name : str, optional
        The name of the learner.
    vjp_method : {'single-step', 'multi-step'}
        How far the learning signal reaches back. In the latter mode a chunk is differentiated in
        full, and what is said here is about what comes before it.
    fast_solve : bool
        Accepted for braintrace's sake; see :class:`ParamDimVjpAlgorithm`.
    **kwargs
        More arguments of :class:`ParamDimVjpAlgorithm`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, 'eprop', jnp.ones(2), kappa_filter_decay=0.9)
    >>> xs = jnp.ones((10, 2))
    >>> grads = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
    >>> grads['W', 'weight']['weight'].shape
    (6, 4)
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        feedback: str = 'symmetric',
        kappa_filter_decay: float = 0.0,
        random_feedback_key: Any = None,
        name: str | None = None,
        vjp_method: str = 'single-step',
        fast_solve: bool = True,
        **kwargs: Any,
    ) -> None:
        if feedback not in SIGNALS:
            raise ValueError(f"feedback is {feedback!r}; choose 'symmetric' or 'random'.")
        kappa = check_kappa('kappa_filter_decay', kappa_filter_decay)
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            config=ETraceConfig(
                learning_signal=SIGNALS[feedback], trace_filter='kappa', kappa=kappa
            ),
            random_feedback_key=random_feedback_key,
            **kwargs,
        )
        self.feedback = feedback
        self.kappa_filter_decay = kappa
