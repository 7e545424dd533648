"""UORO: one random product of two vectors per hidden group, whose mean is the exact trace."""

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._typing import Path
from ..compiler import ControlFlowPolicy, ETraceGraph
from ..errors import NotSupportedError
from ..runtime.engine import Engine
from ..runtime.projected import ProjectedEngine
from .axes import ETraceConfig
from .vjp import ETraceVjpAlgorithm

__all__ = ['UORO', 'RandomProjectionVjpAlgorithm']


class RandomProjectionVjpAlgorithm(ETraceVjpAlgorithm):
    r"""Learning from a trace that is a random product of two vectors, right in the mean.

    Per hidden group there is one vector of the size of its states and one of the size of the
    parameters that reach it. In each step, with random signs :math:`\nu`,

    .. math::

        \tilde s_t = \rho_0 D_t \tilde s_{t-1} + \rho_1 \nu_t, \qquad
        \tilde\theta_t = \tilde\theta_{t-1} / \rho_0 + \nu_t J_t / \rho_1

    where :math:`D_t` is the whole Jacobian of the group's states by those of the step before,
    recurrent connections included, and :math:`J_t` that by the parameters. The scales :math:`\rho`
    keep both vectors of like size. The mean of :math:`\tilde s_t \tilde\theta_t` over the signs is
    the exact trace of the group, so that the gradient of a model with one group is that of
    backpropagation through time, in the mean. One draw can be far from it.

    What a call does, a step or a chunk, is differentiated in full; only what came before it counts
    by the trace. With another learning signal and ``vjp_method='single-step'``, the step itself
    counts by the trace after it. Whatever the length of a sequence, the memory is that of the
    parameters and states.

    Parameters
    ----------
    model, name, control_flow, **options
        As for :class:`ETraceVjpAlgorithm`.
    vjp_method : {'multi-step', 'single-step'}
        Whether calls may be chunks of steps, given as :class:`MultiStepData`.
    fast_solve, snap_max_jacobian_elements
        Accepted for braintrace's sake; they change nothing.
    config : ETraceConfig, optional
        The learning rule; one with ``trace_factorization='random_projection'``.
    random_feedback_key : jax.Array, optional
        As for :class:`ETraceVjpAlgorithm`.
    projection_key : int or jax.Array
        The seed of the signs, or a random key, typed or raw. The stream of signs goes on from
        sequence to sequence; :meth:`reset_state` starts it anew.
    projection_eps : float
        Added to each norm in the scales.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, 'uoro', jnp.ones(2), projection_key=0)
    >>> def losses(x):
    ...     return jnp.sum(learner(braintrace.MultiStepData(x)) ** 2, axis=1)
    >>> grads = learner.etrace_grad(jnp.ones((10, 2)), step_fn=losses, chunk_size=5)
    >>> grads['W', 'weight']['weight'].shape
    (6, 4)
    """

    trace_factorization = 'random_projection'
    default_config = ETraceConfig(
        trace_factorization='random_projection', recurrence_scope='coupled'
    )

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = 'multi-step',
        fast_solve: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        config: ETraceConfig | None = None,
        projection_key: Any = 42,
        projection_eps: float = 1e-12,
        random_feedback_key: Any = None,
        snap_max_jacobian_elements: int = 2**24,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            name,
            vjp_method,
            control_flow,
            config,
            random_feedback_key,
            snap_max_jacobian_elements,
            **options,
        )
        if not 0 < np.float32(projection_eps) < np.inf:
            raise ValueError(
                'projection_eps must be positive and finite, and remain positive in float32, '
                f'because the first norms are zero; it is {projection_eps!r}.'
            )
        self.fast_solve = fast_solve
        self.projection_key = projection_key
        self.projection_eps = projection_eps
        self._key = _typed_key(projection_key)

    @property
    def differentiates_calls(self) -> bool:
        """Whether a call is differentiated in full: unless its own steps have another signal."""
        return self.vjp_method == 'multi-step' or not self.replaces_signals()

    def make_engine(self, graph: ETraceGraph) -> Engine:
        """The engine that carries a product of vectors per group."""
        own = self.replaces_signals() and self.config.learning_signal == 'symmetric'
        if own and self.differentiates_calls:
            raise NotSupportedError(
                f'{type(self).__name__} overrides learning_signals, which is not called: a call is '
                "differentiated in full. Use vjp_method='single-step', or override entry_signals, "
                'for what came before.'
            )
        return ProjectedEngine(graph, self._draw, self.projection_eps)

    def _draw(self, step: jax.Array, group: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(self._key, step), group)
        return self._draw_projection(key, step, group, shape, dtype)

    def _draw_projection(
        self, key: jax.Array, step: jax.Array, group_index: int, shape: tuple[int, ...], dtype: Any
    ) -> jax.Array:
        """The signs of a step for one group; subclasses may draw others.

        They must be as likely as their opposites, and uncorrelated, with variance 1. This is traced
        once for all steps.

        Parameters
        ----------
        key : jax.Array
            A random key for this step and group.
        step : jax.Array
            How many times signs were drawn since :meth:`reset_state`.
        group_index : int
            The group.
        shape : tuple of int
            ``(*varshape, num_state)``.
        dtype : dtype
            The type of the group's states.
        """
        return jax.random.rademacher(key, shape, dtype)

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the trace and the step counter to zero, and start the stream of signs anew."""
        super().reset_state(batch_size, **kwargs)
        self.trace.value = jax.tree.map(jnp.zeros_like, self.trace.value)

    def _clear(self) -> None:
        held: Any = self.trace.value
        zeros = jax.tree.map(jnp.zeros_like, held)
        self.trace.value = zeros._replace(step=held.step)  # else all sequences had the same signs

    def get_etrace_of(self, weight: brainstate.ParamState | Path) -> Any:
        """The present side of a weight in the products of the groups that it reaches.

        Parameters
        ----------
        weight : ParamState or Path
            The weight, or its path in the model.

        Returns
        -------
        dict
            By group and path, arrays like the weight's leaves.

        Raises
        ------
        ValueError
            If the weight is not traced.
        """
        found = super().get_etrace_of(weight)
        path = weight
        if isinstance(weight, brainstate.State):
            path = self.state_id_to_path[id(weight)]
        return {key: leaves for key, leaves in found.items() if key[1] == path}


class UORO(RandomProjectionVjpAlgorithm):
    """Unbiased Online Recurrent Optimization (Tallec and Ollivier, 2018).

    The parameters are those of :class:`RandomProjectionVjpAlgorithm`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(cell, braintrace.UORO, jnp.ones(2))
    >>> learner(jnp.ones(2)).shape
    (4,)
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = 'multi-step',
        fast_solve: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        projection_key: Any = 42,
        projection_eps: float = 1e-12,
        random_feedback_key: Any = None,
        snap_max_jacobian_elements: int = 2**24,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            control_flow,
            None,
            projection_key,
            projection_eps,
            random_feedback_key,
            snap_max_jacobian_elements,
            **options,
        )


def _typed_key(key: Any) -> jax.Array:
    """A random key of JAX's newer form, from a seed or a key of either form."""
    if isinstance(key, bool) or not isinstance(key, int | np.integer | np.ndarray | jax.Array):
        raise TypeError(f'projection_key is {key!r}; give an int, or a random key of JAX.')
    array = jnp.asarray(key)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    return jax.random.wrap_key_data(array) if array.ndim else jax.random.key(array)
