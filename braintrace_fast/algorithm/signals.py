"""What may take the place of the learning signal, and filters for users' own signals."""

from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from ..compiler import ETraceGraph, HiddenGroup
from ..kernels.planes import Plane, add, times
from ..runtime.factors import Factors, GroupPlanes, Signals, sum_leading
from ..runtime.links import links_of

__all__ = [
    'FixedRandomFeedback',
    'KappaFilter',
    'RandomFeedback',
    'check_kappa',
    'check_modulator',
    'modulated',
]


class KappaFilter(brainstate.ShortTermState):
    r"""A state that follows a signal, smoothed.

    Each :meth:`update` sets :math:`v \leftarrow \kappa v + (1 - \kappa) x`. Learners do not use it:
    the filter of :class:`EProp` is part of its trace. It is for signals of your own.

    Parameters
    ----------
    init_value : array
        The value to start with; it gives the shape and type.
    kappa : float
        How much of the old value is kept, in ``[0, 1)``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> reward = braintrace.KappaFilter(jnp.zeros(2), kappa=0.75)
    >>> reward.update(jnp.array([4.0, 8.0])).tolist(), reward.value.tolist()
    ([1.0, 2.0], [1.0, 2.0])
    """

    def __init__(self, init_value: Any, kappa: float) -> None:
        self.kappa = check_kappa('kappa', kappa)
        self._start = jax.tree.map(jnp.asarray, init_value)
        super().__init__(self._start)

    def update(self, x: Any) -> Any:
        """Take in a value, and return the smoothed one."""
        self.value = self.kappa * self.value + (1 - self.kappa) * x
        return self.value

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the value to zero; with ``batch_size``, that is the length of its first axis."""

        def zeros(start: jax.Array) -> jax.Array:
            shape = start.shape if batch_size is None else (batch_size, *start.shape[1:])
            return jnp.zeros(shape, start.dtype)

        self.value = jax.tree.map(zeros, self._start)


class FixedRandomFeedback:
    """A random matrix that stays as it was drawn.

    Parameters
    ----------
    n_target : int
        The length of what is projected: rows of the matrix.
    n_layer : int
        The length of the result: its columns.
    key : jax.Array
        The random key to draw from, as ``brainstate.random.split_key()`` gives one.
    init_scale : float
        The standard deviation of the entries.

    Attributes
    ----------
    B : jax.Array
        The matrix, of shape ``(n_target, n_layer)``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> feedback = braintrace.FixedRandomFeedback(2, 3, jax.random.PRNGKey(0))
    >>> feedback.B.shape, feedback.project(jnp.ones((5, 2))).shape
    ((2, 3), (5, 3))
    """

    def __init__(self, n_target: int, n_layer: int, key: Any, init_scale: float = 0.1) -> None:
        for name, size in (('n_target', n_target), ('n_layer', n_layer)):
            if isinstance(size, bool) or not hasattr(size, '__index__'):
                raise TypeError(f'{name} is {size!r}; it must be an integer.')
            if size < 1:
                raise ValueError(f'{name} is {size}; it must be at least 1.')
        self.n_target, self.n_layer = int(n_target), int(n_layer)
        drawn = brainstate.random.normal(size=(self.n_target, self.n_layer), key=key)
        self.B: jax.Array = jax.lax.stop_gradient(init_scale * drawn)

    def project(self, y_target: Any) -> Any:
        """``y_target @ B``, over the last axis."""
        return y_target @ self.B


class RandomFeedback:
    """Sends the direction of each signal through a fixed random matrix per group.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    key : jax.Array
        The random key, from which the matrices of all groups are drawn.
    """

    def __init__(self, graph: ETraceGraph, key: Any) -> None:
        self.graph = graph
        relations = graph.hidden_param_op_relations
        groups = {group.index: group for r in relations for group in r.hidden_groups}
        for group in groups.values():
            if not group.varshape:
                raise ValueError(
                    f'The states {group.hidden_paths} are single numbers, without an axis of '
                    'neurons to project. Give them one, of length 1.'
                )
        try:
            with brainstate.random.seed_context(key):
                keys = [brainstate.random.split_key() for _ in groups]
        except (TypeError, ValueError) as error:
            raise TypeError(
                f'random_feedback_key is {key!r}; expected a random key, such as '
                'brainstate.random.split_key() gives.'
            ) from error
        self.feedback = {
            index: FixedRandomFeedback(group.varshape[-1], group.varshape[-1], own)
            for (index, group), own in zip(groups.items(), keys, strict=True)
        }

    def __call__(
        self, factors: Factors, signals: Signals, weight: jax.Array | None = None
    ) -> Signals:
        """The signals of a step, of its new and of its old states, projected.

        ``weight`` is a factor of the signals, of which their direction keeps the sign.
        """
        L, R = self.project(signals.L), self.project(signals.R)
        if weight is not None:
            L, R = jax.tree.map(lambda plane: plane * jnp.abs(weight).astype(plane.dtype), (L, R))
        return _replaced(self.graph, factors, signals, L, R)

    def project(self, planes: Sequence[Sequence[Plane]]) -> GroupPlanes:
        """Planes per group, each divided by its norm over the neurons and projected."""
        return tuple(
            tuple(
                plane
                if plane is None or group not in self.feedback
                else _direction(plane) @ self.feedback[group].B.astype(plane.dtype)
                for plane in own
            )
            for group, own in enumerate(planes)
        )


def modulated(
    graph: ETraceGraph, factors: Factors, signals: Signals, modulator: jax.Array
) -> Signals:
    """The signals of a step with a modulator in the place of what the loss says."""
    L = tuple(_expanded(modulator, group) for group in graph.hidden_groups)
    R = tuple((None,) * len(planes) for planes in L)
    return _replaced(graph, factors, signals, L, R)


def _replaced(
    graph: ETraceGraph, factors: Factors, signals: Signals, L: GroupPlanes, R: GroupPlanes
) -> Signals:
    """Other signals, with which an op is reached by way of hidden states alone."""
    by_op: list[list[Plane]] = [[] for _ in signals.c]
    for link in links_of(graph):
        own = L[link.group.index]
        if link.relation.substeps:
            own = tuple(None if plane is None else plane[None] for plane in own)
        by_op[link.op] += map(times, factors.f[link.index], own)
    c = []
    for old, new in zip(signals.c, map(add, by_op), strict=True):
        c.append(jnp.zeros_like(old) if new is None else sum_leading(new, old.ndim))
    return Signals(tuple(c), L, R)


def _direction(plane: jax.Array) -> jax.Array:
    return plane / (jnp.linalg.norm(plane, axis=-1, keepdims=True) + 1e-8)


def _expanded(modulator: jax.Array, group: HiddenGroup) -> tuple[jax.Array, ...]:
    """A modulator as planes of a group."""
    modulator = jnp.asarray(modulator)
    shape = (*group.varshape, group.num_state)
    if modulator.ndim and modulator.shape == shape[:-1]:
        modulator = modulator[..., None]
    dtype = group.hidden_invars[0].aval.dtype
    full = jnp.broadcast_to(modulator.astype(dtype), shape)
    return tuple(full[..., s] for s in range(group.num_state))


def check_modulator(modulator: Any, groups: Sequence[HiddenGroup]) -> jax.Array:
    """A modulator as an array that expands to all groups, or an error that says why not."""
    if isinstance(modulator, list | tuple | dict):
        raise TypeError(
            f'The modulator is a {type(modulator).__name__}; expected one number or array for all '
            'hidden groups. Make an array of it.'
        )
    try:
        array = jnp.asarray(u.get_mantissa(modulator))
    except (TypeError, ValueError) as error:
        raise TypeError(f'The modulator is {modulator!r}; expected a number or array.') from error
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f'The modulator is {array.dtype}; expected real numbers.')
    for group in groups:
        try:
            jax.eval_shape(lambda m, group=group: _expanded(m, group), array)
        except ValueError as error:
            shape = (*group.varshape, group.num_state)
            raise ValueError(
                f'The modulator has shape {array.shape}, which does not fit hidden group '
                f'{group.index} ({group.hidden_paths}). Expected a number, an array of shape '
                f'{shape[:-1]}, or one that broadcasts to {shape}: one value per example is '
                'modulator[:, None, None] there.'
            ) from error
    return array


def check_kappa(name: str, value: Any) -> float:
    """A decay in ``[0, 1)``, or an error."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool | str):
        raise TypeError(f'{name} is {value!r}; it must be a number in [0, 1).')
    if not 0 <= number < 1:
        raise ValueError(f'{name} is {value}; it must be in [0, 1). 0 means no filter.')
    return number
