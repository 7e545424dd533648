"""What the driver asks of an engine: how a trace advances, and what gradient is read off it."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from .._typing import PyTree
from ..kernels.planes import Plane
from .factors import Entry, Factors, GroupPlanes, Signals, Values
from .gradient import GradientSum

__all__ = ['BackwardEngine', 'Engine', 'FactorTransform', 'Steps', 'Trace']

Trace = PyTree
"""What an engine carries from step to step; only the engine looks inside."""


class Steps(NamedTuple):
    """A step, or a window of them, as an engine sees it.

    Attributes
    ----------
    entry : Entry or None
        The trace before the first step. None if it is zero, and the one after the last step is not
        wanted.
    factors : Factors
        The factors; those of a window have a leading axis of steps.
    elapsed : jax.Array
        The number of steps since the trace was zero.
    signals : Signals or None
        What the losses say of the states; None if no gradient is wanted.
    params : dict
        The values of the parameters, by path.
    inputs : tuple, optional
        Of one step: its arguments, and the values of hidden and other states before it, by path.
    """

    entry: Entry | None
    factors: Factors
    elapsed: jax.Array
    signals: Signals | None
    params: Values
    inputs: tuple[Any, Values, Values] | None = None


class Engine(Protocol):
    """How a learning rule carries its trace, and what gradient it reads off.

    Attributes
    ----------
    is_small : bool
        Whether the trace is no larger than what a step computes. One that is to be forgotten is
        then set to zero, and not only marked, and windows are shorter.
    """

    is_small: bool

    def refuses_windows(self) -> str | None:
        """Why several steps cannot be learned at once; None if they can.

        Sequences are then learned step by step, and :meth:`window` is not called.
        """

    def refuses_carry(self) -> str | None:
        """Why no trace can be carried from step to step; None if one can.

        Then only fresh sequences can be learned, which need none.
        """

    def refuses_restarts(self) -> str | None:
        """Why some examples cannot start anew while others go on; None if they can."""

    def trace_shape(self) -> Trace:
        """The shapes and types of the trace."""

    def stored_shapes(self) -> list[Trace]:
        """Those of all traces that :meth:`fit` takes."""

    def fit(self, trace: Trace) -> Trace:
        """A trace of another backend in the form of this one."""

    def advance(self, step: Steps) -> Trace:
        """The trace after a step."""

    def gradients(self, total: GradientSum, step: Steps, trace: Trace) -> None:
        """Add the gradient of a step; ``trace`` is the one after it."""

    def entry_gradients(
        self, total: GradientSum, entry: Entry, signals: GroupPlanes, elapsed: jax.Array
    ) -> None:
        """Add ``signals[g][q] . e[q]``: cotangents of the states to which the trace belongs."""

    def window(
        self, total: GradientSum | None, steps: Steps, overwrite: bool = True
    ) -> Trace | None:
        """Add the gradient of K steps at once, and carry the trace, if there is one, past them.

        ``overwrite`` says whether nobody else wants the trace at the entry.
        """

    def trace_of(self, entry: Entry, params: Values, ops: Collection[int]) -> PyTree:
        """The part of a trace that belongs to some ops, for people to look at."""


@runtime_checkable
class BackwardEngine(Engine, Protocol):
    """An engine that needs no trace if the windows of a sequence run from the last to the first."""

    def window_before(
        self, total: GradientSum, steps: Steps, later: GroupPlanes | None
    ) -> GroupPlanes:
        """Add the gradient of K steps, and of what they do to steps that follow.

        ``later`` are cotangents of the states at the end of the window, None if nothing follows;
        what is returned are those at its start. There is no trace at the entry of the steps.
        """


class FactorTransform(Protocol):
    """Turns the factors of a model into those of another recurrence, with more planes."""

    @property
    def copies(self) -> int:
        """How many times as many planes there are."""

    def factors(self, factors: Factors, leading: tuple[int, ...] = ()) -> Factors:
        """Factors of the other recurrence; ``leading`` are axes of steps for new planes."""

    def planes(self, signals: Sequence[Sequence[Plane]]) -> GroupPlanes:
        """Signals per group and plane, as those of the other recurrence."""
