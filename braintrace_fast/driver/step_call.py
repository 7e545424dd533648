"""A call of the user's ``step_fn``: what it must not write, and what it leaves."""

from collections.abc import Mapping
from typing import Any

import brainstate
import jax
from jax.extend.core import get_opaque_trace_state

from ..errors import NotSupportedError
from ..runtime.factors import Zeros
from .driver import Recorded

__all__ = ['USE_RESET', 'ChunkInside', 'EnvironmentChanged', 'StepCall']

USE_RESET = (
    'The trace would not know of it. To start anew, as at the end of an episode, call the learner '
    "with flags, learner(x, reset=done); any other change belongs in the model's update, which "
    'can take what it needs as an input.'
)
USE_OWN_LOOP = (
    'Weights are fixed within a call of etrace_grad or etrace_evolve. Update them after it, or in '
    'every step of a loop of your own around brainstate.transform.grad (see "Updating weights in '
    'every step" in the README).'
)


class ChunkInside(Exception):
    """A step that is recorded calls the learner with a chunk of steps."""


class EnvironmentChanged(Exception):
    """A step that is recorded runs in another environment, for which the learner is now ready."""


class StepCall:
    """A call of ``step_fn``, in which the learner is to be called once.

    States on which traces and windows rely must not be written meanwhile.

    Parameters
    ----------
    hidden, weights : dict
        The states that must not be written: hidden states and weights, by path or name.
    weight : jax.Array, optional
        The weight that a mask gives to the step.
    records : bool
        Whether the learner leaves the trace alone, and records what the step leaves for it.
    zeros : Zeros, optional
        What to add to the step where signals are read.
    """

    def __init__(
        self,
        hidden: Mapping[Any, brainstate.State],
        weights: Mapping[Any, brainstate.State],
        weight: jax.Array | None = None,
        records: bool = False,
        zeros: Zeros | None = None,
    ) -> None:
        self.weight = weight
        self.records = records
        self.zeros = zeros
        self.recorded: Recorded | None = None
        self.calls = 0
        self._states = [
            *((state, f'the hidden state at {path}', USE_RESET) for path, state in hidden.items()),
            *((state, f'the weight {path}', USE_OWN_LOOP) for path, state in weights.items()),
        ]
        self._renew()

    @property
    def is_nested(self) -> bool:
        """Whether a transformation inside ``step_fn`` is being traced."""
        return bool(self._trace != get_opaque_trace_state(convention='flax'))

    def enter(self) -> None:
        """The learner is called."""
        self._check_states()
        self.calls += 1

    def leave(self) -> None:
        """The learner returns; what it has written may stay."""
        self._renew()

    def finish(self) -> None:
        """``step_fn`` returns."""
        self._check_states()
        if self.calls != 1:
            raise ValueError(
                f'step_fn called the learner {self.calls} times, expected once: the trace '
                'advances with every call.'
            )

    def _renew(self) -> None:
        """Take the present values as those that must stay."""
        self._trace = get_opaque_trace_state(convention='flax')
        self._values = [state.value for state, *_ in self._states]

    def _check_states(self) -> None:
        """Raise an error if a state was written, unless that cannot be told."""
        if self.is_nested:
            return
        for (state, name, advice), value in zip(self._states, self._values, strict=True):
            before, now = jax.tree.leaves(value), jax.tree.leaves(state.value)
            if len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True)):
                raise NotSupportedError(f'step_fn writes {name}. {advice}')
