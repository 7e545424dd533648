"""The executor: a model with its compiled graph, which follows the environment and the backend."""

from collections.abc import Collection
from typing import Any

import brainstate
import jax

from .._typing import Path
from ..compiler import (
    CompilationReport,
    ControlFlowPolicy,
    ETraceGraph,
    Scope,
    compile_etrace_graph,
)
from ..compiler.environment import CHANGING
from ..config import check_backend, resolve_backend
from ..errors import NotCompiledError, NotSupportedError
from ..kernels.dispatch import Backend
from .factors import StepRunner, Values
from .input_data import single_step
from .recursion import with_leak

__all__ = ['ETraceGraphExecutor']

MOST_VARIANTS = 16
"""How many values of the same keys of the environment a step is compiled for."""


class ETraceGraphExecutor:
    """A model and its compiled graph.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    backend : {'auto', 'jax', 'pallas', 'interpret'}
        The implementation asked for; see :func:`braintrace_fast.use_backend`.
    couple_layers : bool
        Whether to trace what states of modules in a list do to each other.
    scope : Scope, optional
        Which influence is traced.
    leak : float, optional
        What carries all traces from step to step, instead of what the states do.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        control_flow: ControlFlowPolicy | None = None,
        backend: str = 'auto',
        couple_layers: bool = False,
        scope: Scope | None = None,
        leak: float | None = None,
    ) -> None:
        if not isinstance(model, brainstate.nn.Module):
            raise TypeError(
                f'The model is a {type(model).__name__}, expected a brainstate.nn.Module.'
            )
        self.model = model
        self.control_flow = control_flow
        self.couple_layers = couple_layers
        self.scope = scope
        self.leak = leak
        self.backend = check_backend(backend)
        self.resolved_backend = Backend()
        self._graph: ETraceGraph | None = None
        self._graphs: tuple[ETraceGraph, ...] = ()
        self._example: tuple[Any, ...] = ()
        self._environ_inputs = set(CHANGING)
        self._runner: StepRunner | None = None
        self._kinds: tuple[Any, dict[type, brainstate.util.FlattedDict]] = (None, {})

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        if self._graph is None:
            raise NotCompiledError(
                'The graph is not compiled yet; call compile_graph(*inputs) first.'
            )
        return self._graph

    @property
    def runner(self) -> StepRunner:
        """The compiled step as pure functions."""
        if self._runner is None:
            self._runner = StepRunner(self.graph, self.resolved_backend)
        return self._runner

    @property
    def states(self) -> brainstate.util.FlattedDict:
        """The states of the model that the step uses, by path."""
        return _used_states(self.graph)

    def states_of(self, kind: type) -> brainstate.util.FlattedDict:
        """Those of a kind: ParamState, HiddenState, or State for all others."""
        if self._kinds[0] is not self.graph:
            kinds = (brainstate.ParamState, brainstate.HiddenState, brainstate.State)
            found: dict[type, dict[Path, Any]] = {kind: {} for kind in kinds}
            for path, state in self.states.items():
                found[next(kind for kind in kinds if isinstance(state, kind))][path] = state
            split = {kind: brainstate.util.FlattedDict(states) for kind, states in found.items()}
            self._kinds = (self.graph, split)
        return self._kinds[1][kind]

    @property
    def first_states(self) -> brainstate.util.FlattedDict:
        """Those that it used in the environment in which it was first compiled."""
        return _used_states(self._graphs[0])

    @property
    def path_to_states(self) -> brainstate.util.FlattedDict:
        """The same as :attr:`states`."""
        return self.states

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        """The path of each state, by ``id``."""
        return self.graph.module_info.state_id_to_path

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for inputs like these; of a chunk, for its first step."""
        self._example = jax.tree.map(_shape_if_traced, single_step(args))
        self._graph = self._compile()
        self._graphs = (self._graph,)
        self.choose_backend(self.backend)

    def _compile(self) -> ETraceGraph:
        graph = compile_etrace_graph(
            self.model,
            *self._example,
            control_flow=self.control_flow,
            environ_inputs=self._environ_inputs,
            couple_layers=self.couple_layers,
            scope=self.scope,
        )
        return graph if self.leak is None else with_leak(graph, self.leak)

    def follow_environment(self) -> bool:
        """Take the graph for brainstate's present environment, compiling it if there is none yet.

        Numbers that change become inputs of the step. For other values, such as flags, there is one
        graph each.

        Returns
        -------
        bool
            Whether it is a different graph from before.

        Raises
        ------
        NotSupportedError
            If there are too many values to keep a graph for each.
        """
        environment = self.graph.module_info.environment
        if environment.fits():
            return False
        self._runner = None
        for graph in self._graphs:
            if graph.module_info.environment.fits():
                self._graph = graph
                return True
        if len(self._graphs) == MOST_VARIANTS:
            raise NotSupportedError(
                f'The step was compiled for {MOST_VARIANTS} values of the environment, and they '
                f'changed again: {", ".join(environment.changes())}. The model uses them to decide '
                'what to compute (a branch of Python, a shape), so that each value is another '
                'program. Pass what changes often as an input of the model, and use jax.lax.cond '
                'or jax.numpy.where to decide.'
            )
        self._environ_inputs = self._environ_inputs | environment.moved()
        with jax.ensure_compile_time_eval():  # nothing of a surrounding transformation is kept
            self._graph = self._compile()
        self._graphs += (self._graph,)
        return True

    def with_environment(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a step, preceded by what it reads of the environment, if anything."""
        return self.graph.module_info.with_environment(args)

    def choose_backend(self, backend: str, strict: bool | Collection[str] = False) -> None:
        """Decide now which implementation of the kernels this graph runs."""
        self.backend = check_backend(backend)
        self.resolved_backend, self._runner = resolve_backend(backend, strict), None

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the compilation report, or return it as text."""
        report = CompilationReport(self.graph)
        if verbose:
            report.show()
        return report.to_str() if return_msg else None

    def values(self) -> tuple[Values, Values, Values]:
        """The present values of parameters, hidden states and other states, by path."""

        def values(kind: type) -> Values:
            return {path: state.value for path, state in self.states_of(kind).items()}

        hidden = values(brainstate.HiddenState)
        return values(brainstate.ParamState), hidden, values(brainstate.State)


def _shape_if_traced(a: Any) -> Any:
    return jax.ShapeDtypeStruct(a.shape, a.dtype) if isinstance(a, jax.core.Tracer) else a


def _used_states(graph: ETraceGraph) -> brainstate.util.FlattedDict:
    info = graph.module_info
    used = {id(state) for state in info.compiled_model_states}
    states = info.retrieved_model_states
    return brainstate.util.FlattedDict({p: s for p, s in states.items() if id(s) in used})
