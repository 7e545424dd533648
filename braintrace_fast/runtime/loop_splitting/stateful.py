"""The two entry points: a loop of a pure body, and a loop of a function of states."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..._typing import PyTree
from ..factors import stacked
from .body import flat_body
from .equations import all_results, always_zero, is_one_of, num_bytes
from .run import Recorded, Show, record, results, run
from .stages import split_loop

__all__ = ['StatefulLoop', 'loop']

Progress = Callable[[jax.Array, PyTree], None]
"""Called in order with the number of a step and its ``ys``."""


def loop(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree, PyTree]],
    carry: PyTree,
    xs: PyTree,
    progress: Progress | None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Run a body over the leading axis of ``xs``.

    Parameters
    ----------
    body : callable
        ``(carry, x) -> (carry, ys, terms)``.
    carry : PyTree
        The values to start with.
    xs : PyTree
        Arrays with a common leading axis.
    progress : callable, optional
        Called in every step of the scan with its number and its ``ys``, which are then computed in
        order.

    Returns
    -------
    tuple
        The last carry, the stacked ``ys``, and the sums of the ``terms``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.runtime.loop_splitting import loop
    >>> last, ys, total = loop(lambda c, x: (c + x, c * x, 2 * c), 0.0, jnp.arange(4.0))
    >>> float(last), ys.tolist(), float(total)
    (6.0, [0.0, 0.0, 2.0, 9.0], 8.0)
    """
    carry = jax.tree.map(_as_array, carry)
    xs = jax.tree.map(_as_array, xs)
    traced = _TracedLoop(body, carry, _slices(xs), progress is not None)
    last, ys, sums = traced.run(carry, xs, progress)
    return last, stacked(ys, jax.tree.leaves(xs)[0].shape[0], traced.shapes[1]), sums


class StatefulLoop:
    """A function of brainstate states, traced once, to be run over sequences of any length.

    Parameters
    ----------
    step : callable
        ``(*slices) -> (ys, terms)``; it may read and write states.
    xs : sequence of PyTree
        Arguments with a common leading axis, of which only the shapes matter.
    shows : bool
        Whether calls may show progress, so that ``ys`` are computed in order.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> from braintrace_fast.runtime.loop_splitting import StatefulLoop
    >>> count = brainstate.ShortTermState(jnp.zeros(()))
    >>> def step(x):
    ...     count.value = count.value + 1
    ...     return count.value * x, x
    >>> loop = StatefulLoop(step, (jnp.ones(3),))
    >>> ys, total = loop((jnp.ones(4),))
    >>> ys.tolist(), float(total), float(count.value)
    ([1.0, 2.0, 3.0, 4.0], 4.0, 4.0)
    """

    def __init__(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        xs: Sequence[PyTree],
        shows: bool = False,
    ) -> None:
        slices = _slices(tuple(xs))
        function = brainstate.transform.StatefulFunction(
            step, name='window', return_only_write=False
        ).make_jaxpr(*slices)
        self._touched = function.get_state_trace(*slices)

        def body(values: Any, x: Any) -> Any:
            values, (ys, terms) = function.jaxpr_call(values, *x)
            return values, ys, terms

        values = jax.tree.map(_as_array, [state.value for state in self._touched.states])
        self._loop = _TracedLoop(body, values, slices, shows)

    @property
    def ys(self) -> PyTree:
        """The shapes of one step's ``ys``."""
        return self._loop.shapes[1]

    @property
    def bytes_per_step(self) -> int:
        """The bytes of all that a step reads and computes, nothing shared."""
        split = self._loop.split
        eqns = *split.schedule.ahead, *split.schedule.in_order, *split.deferred.eqns
        return sum(map(num_bytes, (*split.body.xs, *all_results(eqns))))

    @property
    def recorded_bytes(self) -> int:
        """The bytes that :meth:`record` leaves of a step."""
        split = self._loop.split
        states = [split.body.old[place] for place in split.deferred.states]
        return sum(map(num_bytes, (*split.deferred.kept, *split.schedule.foreseen, *states)))

    @property
    def are_zero(self) -> PyTree:
        """Which of the ``ys`` are zero in all steps, whatever the values of states and inputs."""
        split = self._loop.split
        zeros = always_zero(split.first)
        flat = [is_one_of(v, zeros) for v in split.body.ys]
        return jax.tree.unflatten(jax.tree.structure(self.ys), flat)

    @property
    def has_effects(self) -> bool:
        """Whether a step does more than to compute: prints, say, or calls the host."""
        return any(eqn.effects for eqn in self._loop.split.body.eqns)

    @property
    def moving(self) -> list[jax.Array]:
        """The present values of all that a step changes: arrays of the states that it writes."""
        leaves = jax.tree.leaves(self._values())
        return [leaves[place] for place in self._loop.split.body.moving]

    def __call__(
        self, xs: Sequence[PyTree], progress: Progress | None = None
    ) -> tuple[PyTree, PyTree]:
        """Run over the leading axis of the arguments; ``progress`` as in :func:`loop`.

        Returns
        -------
        tuple
            The stacked ``ys``, and the sums of the ``terms``. Those ``ys`` that are the same in all
            steps have a leading axis of 1, and of those that are uniform all axes have size 1.
        """
        last, ys, sums = self.run(self.moving, xs, progress)
        self.write(last)
        return ys, sums

    def run(
        self, moving: list[jax.Array], xs: Sequence[PyTree], progress: Progress | None = None
    ) -> tuple[list[jax.Array], PyTree, PyTree]:
        """The same from values of :attr:`moving` to their last ones, which come first."""
        return self._run(self._loop, moving, xs, progress)

    def record(
        self, moving: list[jax.Array], xs: Sequence[PyTree], progress: Progress | None = None
    ) -> tuple[list[jax.Array], Recorded]:
        """The last values of :attr:`moving`, and what :meth:`results` needs of the steps."""
        flat = jax.tree.leaves(jax.tree.map(_as_array, tuple(xs)))
        carry = jax.tree.leaves(self._with(moving))
        last, recorded = record(self._loop.split, carry, flat, self._loop.showing(progress))
        return [last[place] for place in self._loop.split.body.moving], recorded

    def results(self, xs: Sequence[PyTree], recorded: Recorded) -> tuple[PyTree, PyTree]:
        """What a call returns, of steps that were recorded: all, or some in a row."""
        carry, flat = jax.tree.leaves(self._values()), jax.tree.leaves(tuple(xs))
        return self._loop.unflatten(*results(self._loop.split, carry, flat, recorded))

    def advance(self, moving: list[jax.Array], xs: Sequence[PyTree]) -> list[jax.Array]:
        """The last values of :attr:`moving`, and nothing else."""
        return self._run(self._states_alone, moving, xs, None)[0]

    def write(self, moving: list[jax.Array]) -> None:
        """Give the states values of :attr:`moving`."""
        values = self._with(moving)
        for state, value, written in zip(
            self._touched.states, values, self._touched.been_writen, strict=True
        ):
            if written:
                state.value = value

    @functools.cached_property
    def _states_alone(self) -> '_TracedLoop':
        return self._loop.states_alone()

    def _values(self) -> list[PyTree]:
        return jax.tree.map(_as_array, [state.value for state in self._touched.states])

    def _with(self, moving: list[jax.Array]) -> list[PyTree]:
        """The values of all states, with these in the place of those that move."""
        leaves, tree = jax.tree.flatten(self._values())
        for place, value in zip(self._loop.split.body.moving, moving, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(tree, leaves)

    def _run(
        self,
        loop: '_TracedLoop',
        moving: list[jax.Array],
        xs: Sequence[PyTree],
        progress: Progress | None,
    ) -> tuple[list[jax.Array], PyTree, PyTree]:
        xs = jax.tree.map(_as_array, tuple(xs))
        last, ys, sums = loop.run(self._with(moving), xs, progress)
        leaves = jax.tree.leaves(last)
        return [leaves[place] for place in self._loop.split.body.moving], ys, sums


class _TracedLoop:
    """A body that is traced once, to be run over sequences of any length."""

    def __init__(
        self, body: Callable[[PyTree, PyTree], Any], carry: PyTree, x: PyTree, shows: bool
    ) -> None:
        closed, self.shapes = jax.make_jaxpr(body, return_shape=True)(carry, x)
        sizes = [len(jax.tree.leaves(part)) for part in self.shapes]
        self.split = split_loop(flat_body(closed, sizes), shows)

    def states_alone(self) -> '_TracedLoop':
        """The same loop without ``ys`` and terms."""
        other = copy.copy(self)
        other.shapes = (self.shapes[0], (), ())
        other.split = split_loop(dataclasses.replace(self.split.body, ys=[], terms=[]), False)
        return other

    def run(
        self, carry: PyTree, xs: PyTree, progress: Progress | None
    ) -> tuple[PyTree, PyTree, PyTree]:
        flat_carry, carry_tree = jax.tree.flatten(carry)
        show = self.showing(progress)
        last, ys, sums = run(self.split, flat_carry, jax.tree.leaves(xs), show)
        return jax.tree.unflatten(carry_tree, last), *self.unflatten(ys, sums)

    def showing(self, progress: Progress | None) -> Show:
        """The same for flat ``ys``."""
        tree = jax.tree.structure(self.shapes[1])

        def show(step: jax.Array, ys: list[jax.Array]) -> None:
            if progress is not None:
                progress(step, jax.tree.unflatten(tree, ys))

        return show

    def unflatten(self, ys: list[jax.Array], sums: list[jax.Array]) -> tuple[PyTree, PyTree]:
        """The ``ys`` and sums of terms in the form of the body's."""
        _, ys_tree, sums_tree = map(jax.tree.structure, self.shapes)
        return jax.tree.unflatten(ys_tree, ys), jax.tree.unflatten(sums_tree, sums)


def _as_array(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _slices(xs: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), xs)
