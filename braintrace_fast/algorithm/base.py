"""What all learners show of a compiled model."""

from typing import Any, Self

import brainstate
import jax
import numpy as np

from .._typing import Path
from ..compiler import CompilationReport, ETraceGraph
from ..kernels.dispatch import Backend
from ..runtime.executor import ETraceGraphExecutor
from .reference_hooks import refuse_reference_hooks
from .sequence import SequenceDriverMixin

__all__ = ['ETraceAlgorithm', 'EligibilityTrace']


class EligibilityTrace(brainstate.ShortTermState):
    """The state that holds a learner's traces."""


class ETraceAlgorithm(SequenceDriverMixin, brainstate.nn.Module):
    """A model with an online learning rule.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    graph_executor : ETraceGraphExecutor
        Its executor.
    name : str, optional
        The name of the learner.
    """

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
        self.model = model
        self.graph_executor = graph_executor
        self.is_compiled = False
        self.running_index = brainstate.LongTermState(host_scalar(np.int32))

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
    def param_states(self) -> dict[Path, brainstate.ParamState]:
        """The trainable weights that the step uses, by path."""
        return self._states_of(brainstate.ParamState)

    @property
    def hidden_states(self) -> dict[Path, brainstate.HiddenState]:
        """The hidden states, by path."""
        return self._states_of(brainstate.HiddenState)

    @property
    def other_states(self) -> dict[Path, brainstate.State]:
        """All other states that the step uses, by path."""
        kinds = (brainstate.ParamState, brainstate.HiddenState)
        states = self.graph_executor.states
        return {path: s for path, s in states.items() if not isinstance(s, kinds)}

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

    def _states_of(self, kind: type) -> dict[Path, Any]:
        states = self.graph_executor.states
        return {path: s for path, s in states.items() if isinstance(s, kind)}


def host_scalar(dtype: Any) -> jax.Array:
    """A zero that no program is compiled to make."""
    return jax.device_put(np.zeros((), dtype))
