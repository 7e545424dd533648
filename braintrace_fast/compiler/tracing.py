"""One step of a model, traced by brainstate, and the states that it uses."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import numpy as np
from brainstate.random import RandomState

from .._compat import ClosedJaxpr, Var
from .._typing import Path, PyTree
from ..errors import CompilationError, NotSupportedError
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .environment import Environment, EnvironmentValues, bind_environment, trace_reads

__all__ = ['TracedStep', 'trace_step']


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced step, before it is flattened.

    Attributes
    ----------
    stateful : brainstate.transform.StatefulFunction
        The traced model.
    closed_jaxpr : ClosedJaxpr
        From the values of the environment, the arguments and the states to results and states.
    environment : Environment
        What the step reads of brainstate's environment.
    retrieved : brainstate.util.FlattedDict
        All states of the model, and those that the step uses besides, by path.
    states : tuple of brainstate.State
        The states that the step uses, in the order of the jaxpr.
    id_to_path : dict
        The path of each state, by ``id``.
    in_tree : PyTreeDef
        The structure of the arguments and states.
    out_shapes, state_shapes : PyTree
        The shapes of the results, and of the states.
    """

    stateful: brainstate.transform.StatefulFunction
    closed_jaxpr: ClosedJaxpr
    environment: Environment
    retrieved: brainstate.util.FlattedDict
    states: tuple[brainstate.State, ...]
    id_to_path: dict[int, Path]
    in_tree: Any
    out_shapes: PyTree
    state_shapes: PyTree

    @property
    def num_out(self) -> int:
        """How many outputs of the jaxpr are results."""
        return len(jax.tree.leaves(self.out_shapes))

    @property
    def num_state(self) -> int:
        """How many inputs, and outputs, of the jaxpr are states."""
        return len(jax.tree.leaves(self.state_shapes))

    @property
    def hidden_places(self) -> list[int]:
        """Which outputs of the jaxpr are hidden states."""
        are_hidden = [
            isinstance(state, brainstate.HiddenState)
            for state, tree in zip(self.states, self.state_shapes, strict=True)
            for _ in jax.tree.leaves(tree)
        ]
        return [self.num_out + k for k, is_hidden in enumerate(are_hidden) if is_hidden]

    def state_trees(self, variables: Sequence[Any]) -> list[PyTree]:
        """Per state, its part of the jaxpr's last inputs or outputs."""
        own = variables[len(variables) - self.num_state :]
        return list(jax.tree.unflatten(jax.tree.structure(tuple(self.state_shapes)), own))

    def leaves_by_path(self, kind: type, variables: Sequence[Any]) -> dict[Path, list[Var]]:
        """The inputs or outputs that are states of a kind, in the order of the model's states."""
        leaves = {
            self.id_to_path[id(state)]: jax.tree.leaves(tree)
            for state, tree in zip(self.states, self.state_trees(variables), strict=True)
            if isinstance(state, kind)
        }
        return {path: leaves[path] for path in self.retrieved if path in leaves}

    def hidden_by_path(self, variables: Sequence[Any]) -> dict[Path, Var]:
        """The input or output that is each hidden state, in the order of the model's states."""
        leaves = self.leaves_by_path(brainstate.HiddenState, variables)
        return {path: v for path, (v,) in leaves.items()}


def trace_step(
    model: brainstate.nn.Module,
    model_args: tuple[Any, ...],
    model_kwargs: Mapping[str, Any],
    environ_inputs: Collection[str],
) -> TracedStep:
    """Trace one step of a model, whose states are left as they are.

    Raises
    ------
    CompilationError, NotSupportedError
        If the states are not what a learner can work with.
    """
    owner = model.module if isinstance(model, brainstate.nn.Vmap) else model
    own_states: Any = owner.states()

    def trace(given: EnvironmentValues | None) -> Any:
        step = model if given is None else bind_environment(model)
        args = model_args if given is None else (given, *model_args)
        with _kept_flags(own_states.values()), _told_to_initialise(model):
            return *_traced(step, args, dict(model_kwargs)), args

    (stateful, key, args), environment = trace_reads(trace, environ_inputs)
    states = tuple(stateful.get_states_by_cache(key))
    retrieved = _with_external_states(own_states, states)
    id_to_path = {id(state): path for path, state in retrieved.items()}
    _check_states(states, stateful.get_write_states_by_cache(key), id_to_path)
    out_shapes, state_shapes = stateful.get_out_shapes_by_cache(key)
    values = tuple(state.value for state in states)
    return TracedStep(
        stateful=stateful,
        closed_jaxpr=stateful.get_jaxpr_by_cache(key),
        environment=environment,
        retrieved=retrieved,
        states=states,
        id_to_path=id_to_path,
        in_tree=jax.tree.structure((args, dict(model_kwargs), values)),
        out_shapes=out_shapes,
        state_shapes=state_shapes,
    )


def _traced(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[brainstate.transform.StatefulFunction, Any]:
    """A traced step and its key in the cache.

    A random state without a seed holds plain numbers until it is first read, and a key from then
    on. If the step draws from such a state, it is traced once more, for the key.
    """

    def trace() -> tuple[brainstate.transform.StatefulFunction, Any]:
        stateful = brainstate.transform.StatefulFunction(step, return_only_write=False)
        stateful.make_jaxpr(*args, **kwargs)
        return stateful, stateful.get_arg_cache_key(*args, **kwargs)

    stateful, key = trace()
    drawn = [s for s in stateful.get_states_by_cache(key) if isinstance(s, RandomState)]
    unread = [state for state in drawn if isinstance(state._value, np.ndarray)]
    for state in unread:
        state.check_if_deleted()  # as every read does
    return trace() if unread else (stateful, key)


@contextmanager
def _kept_flags(states: Iterable[brainstate.State]) -> Iterator[None]:
    """Undo the marks that tracing leaves on states that the step would write."""
    flags = [(state, state._been_writen) for state in states]
    try:
        yield
    finally:
        for state, written in flags:
            state._been_writen = written


@contextmanager
def _told_to_initialise(model: brainstate.nn.Module) -> Iterator[None]:
    """A state that is not initialised shows as an attribute that a module lacks."""
    try:
        yield
    except AttributeError as error:
        if not isinstance(error.obj, brainstate.nn.Module):
            raise
        present = list(model.states(brainstate.HiddenState)) or 'none'
        raise CompilationError(
            f'The step reads the attribute {error.name!r} of a {type(error.obj).__name__}, which '
            f'has none of that name. Hidden states found in the model: {present}. Initialise the '
            'states before compiling: brainstate.nn.init_all_states(model, batch_size=...).'
        ) from error


def _with_external_states(
    retrieved: Any, states: Sequence[brainstate.State]
) -> brainstate.util.FlattedDict:
    """The model's states, and those that the step uses from outside the model."""
    known = {id(state) for state in retrieved.values()}
    external = [state for state in states if id(state) not in known]
    for state in external:
        carried = not isinstance(state, brainstate.ParamState | brainstate.HiddenState)
        emit(
            DiagnosticKind.STATE_MISMATCH,
            DiagnosticLevel.INFO if carried else DiagnosticLevel.WARNING,
            f'The step uses a {type(state).__name__} that is not part of the model; it is carried. '
            'Make it an attribute of the module to give it a path.',
        )
    # Not by integers, which would make each a layer of its own.
    paths = {('_external', str(index)): state for index, state in enumerate(external)}
    return brainstate.util.FlattedDict({**retrieved, **paths})


def _check_states(
    states: Sequence[brainstate.State],
    written: Sequence[brainstate.State],
    id_to_path: dict[int, Path],
) -> None:
    if not any(isinstance(state, brainstate.HiddenState) for state in states):
        raise CompilationError(
            'The step uses no brainstate.HiddenState, so there is nothing to trace. Make what '
            'carries over from step to step a HiddenState, and initialise it '
            '(brainstate.nn.init_all_states) before compiling.'
        )
    for state in states:
        if not isinstance(state, brainstate.HiddenState):
            continue
        types = [str(leaf.dtype) for leaf in jax.tree.leaves(state.value)]
        if any('complex' in name for name in types):
            raise NotSupportedError(
                f'The hidden state at {id_to_path[id(state)]} is {types[0]}. Traces are of real '
                'states: keep its real and its imaginary part as two hidden states, and join them '
                'inside the step by jax.lax.complex.'
            )
    for state in written:
        if isinstance(state, brainstate.ParamState):
            raise NotSupportedError(
                f'The step writes the ParamState at {id_to_path[id(state)]}. Weights must be fixed '
                'within a step: update them after it, or make the value a ShortTermState.'
            )
