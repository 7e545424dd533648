"""What all learners show of a compiled model."""

from typing import Any, ClassVar, Self

import brainstate
import jax
import numpy as np

from .._typing import Path
from ..compiler import CompilationReport, ETraceGraph
from ..errors import NotCompiledError
from ..kernels.dispatch import Backend
from ..runtime.executor import ETraceGraphExecutor
from .reference_hooks import refuse_reference_hooks
from .sequence import SequenceDriverMixin

__all__ = ['ETraceAlgorithm', 'EligibilityTrace']


class EligibilityTrace(brainstate.ShortTermState):
    """The state that holds a learner's traces."""


class ETraceAlgorithm(SequenceDriverMixin, brainstate.nn.Module):
    """A model with an online learning rule.

    A rule that shares nothing with those of this library subclasses this: it overrides
    :meth:`init_etrace_state` and ``update``, which runs a step and returns the model's result, and
    says by ``jax.custom_vjp`` what its gradient is. Whatever else it overrides, a rule of reverse
    mode is better made of :class:`ETraceVjpAlgorithm`.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    graph_executor : ETraceGraphExecutor
        Its executor.
    name : str, optional
        The name of the learner.

    Raises
    ------
    ValueError
        If the model or the executor is something else.
    """

    vjp_method: str = 'single-step'
    watches_calls: ClassVar[bool] = False
    """Whether ``update`` reports to the ``step_call`` of a sequence."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_reference_hooks(cls)

    def __init__(
        self,
        model: brainstate.nn.Module,
        graph_executor: ETraceGraphExecutor,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)  # type: ignore[call-arg]
        if not isinstance(model, brainstate.nn.Module):
            raise ValueError(f'The model is of {type(model)}, expected a brainstate.nn.Module.')
        if not isinstance(graph_executor, ETraceGraphExecutor):
            raise ValueError(
                f'graph_executor is of {type(graph_executor)}, expected an ETraceGraphExecutor.'
            )
        self.model = model
        self.graph_executor = graph_executor
        self.is_compiled = False
        self.running_index = brainstate.LongTermState(host_scalar(np.int32))
        self.step_call: Any = None

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for inputs like these, once, and make the states of the rule."""
        if not self.is_compiled:
            self.graph_executor.compile_graph(*args)
            self.init_etrace_state(*args)
            self.is_compiled = True

    def init_etrace_state(self, *args: Any, **kwargs: Any) -> None:
        """Make the states of the rule, for a model compiled for inputs like these."""
        raise NotImplementedError(f'{type(self).__name__} does not say which states its rule has.')

    def get_etrace_of(self, weight: brainstate.ParamState | Path) -> Any:
        """The present trace of a weight, given as a state or by its path."""
        raise NotImplementedError(f'{type(self).__name__} does not say what its traces are.')

    @property
    def model4compile(self) -> brainstate.nn.Module:
        """The model, by braintrace's name for it."""
        return self.model

    @property
    def executor(self) -> ETraceGraphExecutor:
        """The executor."""
        return self.graph_executor

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        return self.graph_executor.graph

    @property
    def report(self) -> CompilationReport:
        """What was compiled, and why."""
        return CompilationReport(self.graph)

    @property
    def param_states(self) -> brainstate.util.FlattedDict:
        """The trainable weights that the step uses, by path."""
        return self.graph_executor.states_of(brainstate.ParamState)

    @property
    def hidden_states(self) -> brainstate.util.FlattedDict:
        """The hidden states, by path."""
        return self.graph_executor.states_of(brainstate.HiddenState)

    @property
    def other_states(self) -> brainstate.util.FlattedDict:
        """All other states that the step uses, by path."""
        return self.graph_executor.states_of(brainstate.State)

    @property
    def path_to_states(self) -> brainstate.util.FlattedDict:
        """All states that the step uses, by path."""
        return self.graph_executor.path_to_states

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        """The path of each state, by ``id``."""
        return self.graph_executor.state_id_to_path

    @property
    def backend(self) -> str:
        """The implementation asked for."""
        return self.graph_executor.backend

    @property
    def resolved_backend(self) -> Backend:
        """The implementation that was decided on when the model was compiled."""
        return self.graph_executor.resolved_backend

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the compilation report, or return it as text."""
        return self.graph_executor.show_graph(verbose, return_msg)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: Any = None) -> Any:
        raise self._copy_error()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._copy_error()

    def _copy_error(self) -> TypeError:
        """The error for deep copies and pickles, whose steps would belong to others' states."""
        return TypeError(
            f'{type(self).__name__} can be neither deep-copied nor pickled: what is compiled '
            "belongs to its own model's states. Compile a second learner of another model, and "
            'carry the state over: learner.save(path), other.load(path). Another learner of the '
            'same model is learner.with_backend(learner.backend).'
        )

    @property
    def carried_states(self) -> list[brainstate.State]:
        """All states that go from step to step, the model's included."""
        states: Any = self.states()
        return list(states.values())

    def replaces_signals(self) -> bool:
        """Whether the rule learns from other signals than those of the loss."""
        return False

    def forget(self) -> None:
        """Take the past for zero from here on."""
        self.reset_state()
        self.running_index.value = host_scalar(np.int32)

    def _runs_in_windows(self) -> bool:
        """Whether sequences are learned in windows; a rule that is unknown runs step by step."""
        return False

    def _check_compiled(self) -> None:
        if not self.is_compiled:
            raise NotCompiledError(
                'The learner has not been compiled yet. Make it with braintrace_fast.compile('
                'model, algorithm, *inputs), or call compile_graph(*inputs) first.'
            )


def host_scalar(dtype: Any) -> jax.Array:
    """A zero that no program is compiled to make."""
    return jax.device_put(np.zeros((), dtype))
