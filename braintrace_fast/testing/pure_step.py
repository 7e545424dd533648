"""A step and its loss as pure functions of the model's states."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._typing import Path
from .comparison import VacuousComparison, refuse_zero

__all__ = ['Gradients', 'PureStep', 'StepFn', 'Values', 'derivative', 'float64', 'length_of']

Gradients = dict[Path, Any]
StepFn = Callable[..., Any]


class Values(NamedTuple):
    """Values of a model's states, in the order of their paths."""

    params: list[Any]
    hidden: list[Any]
    others: list[Any]


class PureStep:
    """The step of a model, with its loss, as a pure function of the model's states."""

    def __init__(self, model: brainstate.nn.Module, step_fn: StepFn) -> None:
        states: Any = model.states()
        nodes: Any = model.nodes()
        param, hid = brainstate.ParamState, brainstate.HiddenState
        self.step_fn = step_fn
        self.params = {p: s for p, s in states.items() if isinstance(s, param)}
        self.hidden = {p: s for p, s in states.items() if isinstance(s, hid)}
        self.others = [s for s in states.values() if not isinstance(s, param | hid)]
        self.others.append(brainstate.random.DEFAULT)
        self.spiking = {p: n for p, n in nodes.items() if hasattr(n, 'get_spike')}

    @property
    def values(self) -> Values:
        """The present values of the states, in float64."""
        kinds = (self.params.values(), self.hidden.values(), self.others)
        return Values(*([float64(state.value) for state in kind] for kind in kinds))

    def step(self, values: Values, slices: Any) -> tuple[jax.Array, Values, list[jax.Array]]:
        """The loss, the new values and the spikes of each layer; no state is changed."""
        states = [*self.params.values(), *self.hidden.values(), *self.others]
        before = [state.value for state in states]
        with brainstate.StateTraceStack():
            try:
                for state, value in zip(states, itertools.chain(*values), strict=True):
                    state.restore_value(value)
                loss = self.step_fn(*slices)
                new = [state.value for state in states]
                spikes = [jnp.sum(jnp.abs(n.get_spike())) for n in self.spiking.values()]
            finally:
                for state, value in zip(states, before, strict=True):
                    state.restore_value(value)
        if jnp.shape(loss) != ():
            raise ValueError(f'step_fn returned a loss of shape {jnp.shape(loss)}, not a scalar.')
        ends = list(itertools.accumulate(map(len, values)))
        hidden, others = new[ends[0] : ends[1]], new[ends[1] :]
        return loss, Values(values.params, hidden, others), spikes

    def over(self, values: Values, sequences: Any) -> tuple[Any, Values, Any]:
        """The sum of the losses, the last values and all spikes."""

        def body(carry: Any, slices: Any) -> Any:
            hidden, others = carry
            loss, new, spikes = self.step(Values(values.params, hidden, others), slices)
            return (new.hidden, new.others), (loss, spikes)

        carry, (losses, spikes) = lax.scan(body, (values.hidden, values.others), sequences)
        return losses.sum(), Values(values.params, *carry), [s.sum() for s in spikes]

    def result(self, gradients: Any, spikes: Any) -> Gradients:
        """Gradients by path; an error if they prove nothing."""
        for path, count in zip(self.spiking, spikes, strict=True):
            if not count > 0:
                raise VacuousComparison(
                    f'The layer {path} has not spiked once, so its recurrence had no effect. Use '
                    'stronger inputs, more steps, or initial voltages around the threshold.'
                )
        by_path = jax.tree.map(np.asarray, dict(zip(self.params, gradients, strict=True)))
        refuse_zero(by_path)
        return by_path


def float64(tree: Any) -> Any:
    """A tree with its real numbers in float64."""

    def convert(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(convert, tree)


def length_of(sequences: Any) -> int:
    """The common length of sequences."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(sequences)]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(f'The sequences have shapes {shapes}; give some of a common length.')
    return shapes[0][0]


def derivative(forward_mode: bool) -> Callable[..., Any]:
    """The transformation that gives Jacobians, in forward or in reverse mode."""
    return jax.jacfwd if forward_mode else jax.jacrev
