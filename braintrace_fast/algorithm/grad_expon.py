"""A leaky sum of gradients."""

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from .._typing import PyTree
from ..errors import ArgumentError

__all__ = ['GradExpon']


class GradExpon(brainstate.nn.Module):
    r"""A sum of gradients of which a part is kept: :math:`g \leftarrow a g + \nabla`.

    Parameters
    ----------
    grad_shape : PyTree
        Arrays, or shapes and types, like the gradients.
    tau_or_decay : Quantity or float
        The decay ``a`` in ``(0, 1)``; or a time constant, which with the environment's ``dt`` means
        :math:`a = e^{-dt / \tau}`.

    Attributes
    ----------
    gradients : brainstate.LongTermState
        The sum.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> smoothed = braintrace.GradExpon({'w': jnp.zeros(2)}, 0.5)
    >>> for _ in range(2):
    ...     smoothed.update({'w': jnp.ones(2)})
    >>> smoothed.gradients.value['w'].tolist()
    [1.5, 1.5]
    """

    def __init__(self, grad_shape: PyTree, tau_or_decay: Any) -> None:
        super().__init__()
        self.decay = _decay(tau_or_decay)
        zeros = jax.tree.map(lambda a: jnp.zeros(jnp.shape(a), jnp.result_type(a)), grad_shape)
        self.gradients = brainstate.LongTermState(zeros)

    def update(self, grads: PyTree) -> None:
        """Add gradients, after a part of the sum has leaked."""
        old = self.gradients.value
        self.gradients.value = jax.tree.map(lambda g, new: self.decay * g + new, old, grads)


def _decay(given: Any) -> float:
    if isinstance(given, u.Quantity):
        steps = given / brainstate.environ.get_dt()
        if not u.get_unit(steps).is_unitless:
            raise ValueError(f'tau_or_decay is {given}; expected a time, as 10.0 * saiunit.ms is.')
        if not u.get_mantissa(steps) > 0:
            raise ValueError(f'tau_or_decay is {given}; a time constant must be positive.')
        return float(jnp.exp(-1 / u.get_mantissa(steps)))
    if not isinstance(given, float):
        raise TypeError(
            f'tau_or_decay is {given!r}; expected a time constant with its unit, or a float.'
        )
    if not 0 < given < 1:
        raise ArgumentError(f'tau_or_decay is {given}; a decay must be in (0, 1).')
    return given
