"""Learners whose learning signal comes from reverse mode: all rules are configurations of one."""

import copy
import os
from collections.abc import Collection, Mapping
from typing import Any, Self

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._typing import Path
from ..compiler import CompilationReport, ControlFlowPolicy, ETraceGraph, Scope
from ..compiler.untraced import warn_of_untraced
from ..driver import (
    ChunkInside,
    Driver,
    EnvironmentChanged,
    Recorded,
    StepCall,
    StepInputs,
    kernel_choices,
    needs_multi_step,
    restart,
    run_chunk,
)
from ..driver.step_call import USE_RESET
from ..errors import NotSupportedError
from ..kernels.dispatch import Choice
from ..reference_api.executor import ETraceVjpGraphExecutor
from ..runtime.engine import Engine
from ..runtime.factors import Entry, Values
from ..runtime.input_data import chunk_length, has_multi_step_data, single_step
from ..runtime.planner import Plan, default_budget, outlook, parse_bytes, tree_bytes
from . import checkpoint
from .axes import ETraceConfig
from .base import EligibilityTrace, host_scalar
from .configured import ConfiguredAlgorithm, leak_of, scope_of
from .trace_views import ops_of, shown

__all__ = ['ETraceVjpAlgorithm']


class ETraceVjpAlgorithm(ConfiguredAlgorithm):
    """A learning rule whose learning signal comes from reverse mode.

    Called with the inputs of a step, the learner runs the model, advances the trace and returns the
    model's result. Under ``brainstate.transform.grad``, the gradient of the weights is the online
    gradient; nothing flows back to the states of the step before, because the trace carries the
    past.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    name : str, optional
        The name of the learner.
    vjp_method : {'single-step', 'multi-step'}
        Whether the learning signal reaches back one step, or through a chunk of inputs given as
        :class:`MultiStepData`.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    config : ETraceConfig, optional
        What makes the learning rule; by default that which the class stands for.
    random_feedback_key : jax.Array, optional
        The random key of fixed matrices, if the learning signal goes through some.
    snap_max_jacobian_elements : int
        The most elements of a block of ``D``, for rules that have such.
    backend : {'auto', 'jax', 'pallas', 'interpret'}
        The implementation asked for.
    memory_budget : int or str, optional
        The bytes that the windows of :meth:`etrace_grad` and :meth:`etrace_evolve` may take, such
        as ``'256MB'``; by default a quarter of what is free on the device when the learner is made.
    couple_layers : bool
        Whether hidden states of modules in a list that drive each other position by position form
        one group, so that their coupling is traced. By default, modules in a list are layers, and
        a coupling between layers counts within a step only.
    scope : Scope, optional
        Which influence between states is traced, where that is to differ from :class:`Scope`.
    """

    step_call: StepCall | None
    watches_calls = True

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = 'single-step',
        control_flow: ControlFlowPolicy | None = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        snap_max_jacobian_elements: int = 2**24,
        *,
        backend: str = 'auto',
        memory_budget: int | str | None = None,
        couple_layers: bool = False,
        scope: Scope | None = None,
    ) -> None:
        config = self.default_config if config is None else config
        self.check_config(config, vjp_method, random_feedback_key)
        scope = scope_of(config, couple_layers) if scope is None else scope
        options: Any = dict(backend=backend, couple_layers=couple_layers, scope=scope)
        executor = ETraceVjpGraphExecutor(
            model, vjp_method, control_flow=control_flow, leak=leak_of(config), **options
        )
        super().__init__(model, executor, name, config, random_feedback_key)
        self.snap_max_jacobian_elements = snap_max_jacobian_elements
        self.memory_budget = None if memory_budget is None else parse_bytes(memory_budget)
        self.resolved_budget = self.memory_budget or default_budget()
        self.plan: Plan | None = None
        self.choices: list[Choice] = []
        self.vjp_method = vjp_method

    @property
    def differentiates_calls(self) -> bool:
        """Whether every call is differentiated in full, and the trace read at its start."""
        return self.vjp_method == 'multi-step'

    def make_engine(self, graph: ETraceGraph) -> Engine:
        """The engine of this learning rule."""
        raise NotImplementedError('A learning rule must say which engine carries its trace.')

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for inputs like these, and make a zero trace.

        Parameters
        ----------
        *args
            Inputs of one step, or windows.

        Raises
        ------
        CompilationError
            If there is no weight that could be traced.

        Warns
        -----
        UntracedWarning
            If weights are left out or counted only in part where the model could be changed.
        """
        self.graph_executor.compile_graph(*args)
        self._prepare()
        if self.vjp_method == 'multi-step' and any(t.forward_only for t in self.graph.transitions):
            raise NotSupportedError(
                "A hidden state passes through a while loop, which vjp_method='multi-step' would "
                "have to differentiate in reverse. Use 'single-step', or lax.scan or lax.fori_loop "
                'with a fixed number of steps.'
            )
        self.example = single_step(args)
        self._start_values = {
            path: state.value
            for path, state in self.graph.module_info.retrieved_model_states.items()
            if isinstance(state, brainstate.ShortTermState)
        }
        self.init_etrace_state(*args)
        self.choices = self._kernel_choices()
        self.is_compiled = True
        self.modulator = self.modulator  # its shape can be checked now
        warn_of_untraced(self.graph)

    def _prepare(self) -> None:
        """Make all that depends on the graph."""
        config = self.config
        mixes = config.include_recurrent_mixing and config.trace_factorization == 'per_param'
        other = config.learning_signal in ('random_feedback', 'modulatory')
        if (mixes or other) and any(r.substeps for r in self.graph.hidden_param_op_relations):
            raise NotSupportedError(
                'The step has an op inside a descended scan (a long one), through which '
                f'{config.recurrence_scope if mixes else config.learning_signal!r} is not '
                'followed. Have the scan unrolled: compile(..., control_flow='
                'ControlFlowPolicy(scan_unroll_limit=...)), with its length or more.'
            )
        self.prepare_signals(self.graph)
        self.engine = self.make_engine(self.graph)

    def with_backend(self, name: str, strict: bool | Collection[str] = False) -> Self:
        """Another learner of the same model, compiled for another backend.

        It shares the model and its states, and goes on from a copy of this learner's trace.

        Parameters
        ----------
        name : {'auto', 'jax', 'pallas', 'interpret'}
            The backend.
        strict : bool or collection of str
            Platforms on which it is an error if there is no kernel, as in
            :func:`braintrace_fast.use_backend`.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> import braintrace_fast as braintrace
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.ones(3))
        >>> learner.with_backend('pallas').resolved_backend.name
        'pallas'
        """
        self._check_compiled()
        other = copy.copy(self)
        other.graph_executor = copy.copy(self.graph_executor)
        other.graph_executor.choose_backend(name, strict)
        other._prepare()
        other.trace = EligibilityTrace(other.engine.fit(self.trace.value))
        other.trace_is_live = brainstate.ShortTermState(self.trace_is_live.value)
        other.running_index = brainstate.LongTermState(self.running_index.value)
        other.plan, other.choices = None, other._kernel_choices()
        return other

    @property
    def driver(self) -> Driver:
        """What runs the compiled model with the engine."""
        return Driver(self.graph_executor, self.engine, self)

    @property
    def carried(self) -> tuple[Entry, jax.Array]:
        """The trace, and the number of steps since it was zero."""
        return Entry(self.trace.value, self.trace_is_live.value), self.running_index.value

    @property
    def step_weight(self) -> jax.Array | None:
        """The weight of the step that ``etrace_grad`` runs with a mask."""
        return None if self.step_call is None else self.step_call.weight

    def _kernel_choices(self) -> list[Choice]:
        return kernel_choices(self.driver, self.example, *self.carried, self._runs_in_windows())

    def init_etrace_state(self, *args: Any) -> None:
        """Make a zero trace, for inputs like those that the model was compiled for."""
        self.trace = EligibilityTrace(jax.tree.map(_zeros, self.engine.trace_shape()))
        self.trace_is_live = brainstate.ShortTermState(host_scalar(np.bool_))

    @property
    def report(self) -> CompilationReport:
        """What was compiled, and why, and how the last sequences were cut into windows."""
        graph = self.graph
        if self.plan is None:
            trace = tree_bytes(self.engine.trace_shape())
            lines = outlook(self.driver.outlook, trace, self.resolved_budget)
        else:
            lines = self.plan.lines()
        refusal = self.engine.refuses_carry()
        if refusal is not None:
            lines = [*lines, refusal]
        backend = f'{self.resolved_backend.name} (asked for: {self.backend})'
        sections = {'Backend': [backend, *map(str, self.choices)]}
        if self._runs_in_windows():
            sections['Windows'] = lines
        return CompilationReport(graph, sections)

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the report, or return it as text."""
        report = self.report
        if verbose:
            report.show()
        return report.to_str() if return_msg else None

    @property
    def own_states(self) -> list[brainstate.State]:
        """The states that belong to the learner and not to the model."""
        return [self.trace, self.trace_is_live, self.running_index, *super().own_states]

    @property
    def carried_states(self) -> list[brainstate.State]:
        """All states that go from step to step, the model's included."""
        return [*self.graph_executor.states.values(), *self.own_states]

    def _runs_in_windows(self) -> bool:
        """Whether sequences are learned in windows, with the trace touched once in each."""
        return not self.differentiates_calls and self.engine.refuses_windows() is None

    def forget(self) -> None:
        """Take the trace for zero from here on; what a large one holds is not touched."""
        self.running_index.value = host_scalar(np.int32)
        self.trace_is_live.value = host_scalar(np.bool_)
        if self.engine.is_small:
            self._clear()

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the trace and the step counter to zero."""
        self._check_compiled()
        if self.step_call is not None:
            raise NotSupportedError(f"step_fn resets the learner's trace. {USE_RESET}")
        self.forget()
        self._clear()

    def _clear(self) -> None:
        self.trace.value = jax.tree.map(jnp.zeros_like, self.trace.value)

    @property
    def resolved_options(self) -> dict[str, Any]:
        """Options that a saved state depends on, besides attributes named like arguments."""
        return {'config': self.config}

    def save(self, path: str | os.PathLike, others: Mapping[str, Any] | None = None) -> None:
        """Write the whole state of the learner and its model to a file.

        That is all states of the model (parameters, hidden states, random keys that the step uses,
        and others), the traces and the counters. The file holds arrays and plain metadata, no code.
        It is replaced as a whole: whenever the process ends, the old or the new one is there. What
        a killed process left beside it is removed by the next save to the same path.

        Parameters
        ----------
        path : path
            The file, with any suffix; ``.npz`` describes it.
        others : dict, optional
            More to keep with it, by name: states, dicts of states, modules, or optimisers. An
            optimiser and ``brainstate.random.DEFAULT`` belong here if training is to go on bit by
            bit.

        Examples
        --------
        >>> import os, tempfile
        >>> import brainstate, jax.numpy as jnp
        >>> import braintrace_fast as braintrace
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.ones(3))
        >>> _ = learner(jnp.ones(3))
        >>> path = os.path.join(tempfile.mkdtemp(), 'learner.npz')
        >>> learner.save(path)
        >>> expected = learner(jnp.ones(3))
        >>> learner.load(path)
        >>> bool((learner(jnp.ones(3)) == expected).all())
        True
        """
        self._check_compiled()
        checkpoint.save(self, path, others or {})

    def load(self, path: str | os.PathLike, others: Mapping[str, Any] | None = None) -> None:
        """Take over the state that :meth:`save` wrote.

        Parameters
        ----------
        path : path
            The file.
        others : dict, optional
            What was given to :meth:`save` under this name.

        Raises
        ------
        CheckpointError
            If the file is truncated, or of another model, algorithm or newer format; the message
            says what differs. Nothing is changed then.
        """
        self._check_compiled()
        checkpoint.load(self, path, others or {})

    def get_etrace_of(self, weight: brainstate.ParamState | Path) -> Any:
        """The present trace of a weight.

        Parameters
        ----------
        weight : ParamState or Path
            The weight, or its path in the model.

        Returns
        -------
        dict
            By op (the ``id`` of its ``y_var``) and group, the trace in braintrace's layout: arrays
            shaped like the weights that the op takes, with examples in front and states last. A
            state that no step reads again is not carried, and is shown as NaN. Filtered states
            follow those of the trace. For ``pp_prop`` it is a pair of dictionaries: the input
            sides by the ``id`` of ``x_var``, and the output sides.

        Raises
        ------
        ValueError
            If the weight is not traced.
        """
        self._check_compiled()
        return shown(self, ops_of(self, weight))

    def update(self, *args: Any, modulator: Any = None, reset: Any = None) -> Any:
        """Run one step, or a chunk, of the model and of the trace.

        Parameters
        ----------
        *args
            The inputs of the step, or chunks in :class:`MultiStepData`.
        modulator : number or array, optional
            The learning signal of this step, for rules that take one from the user.
        reset : bool or array, optional
            Where to start anew before this step, as at the end of an episode: one flag for all, or
            one per example. Hidden and other short-term states get the values that they had when
            the learner was compiled, and nothing of the past counts from here on. A state that is
            shared by the batch goes on where only some examples start anew.

        Returns
        -------
        PyTree
            The model's results; for a chunk with a leading time axis.
        """
        self._check_compiled()
        call = self.step_call
        if call is not None:
            call.enter()
        self._follow_environment()
        modulator = self.modulator_of(modulator)
        keep = None if reset is None else self._restart(reset)
        args = self.graph_executor.with_environment(args)
        if call is not None and call.records:
            out = self._recorded_step(call, args, modulator, keep)
        else:
            out = self._traced_step(args, modulator, keep)
        if call is not None:
            call.leave()
        return out

    def _traced_step(self, args: tuple[Any, ...], modulator: Any, keep: jax.Array | None) -> Any:
        """Run a step, or a chunk, of the model and of the trace."""
        is_chunk, length = has_multi_step_data(args), 1
        if is_chunk:
            length = chunk_length(args)
        else:
            args = single_step(args)
        values = self.graph_executor.values()
        inputs = StepInputs(args, *values, *self.carried, keep, modulator)
        if is_chunk or self.differentiates_calls:
            (out, hidden, others), trace = run_chunk(self.driver, inputs, self.vjp_method)
        else:
            (out, hidden, others), trace = self.driver.step(inputs)
        self._write_states(hidden, others)
        self.trace.value = trace
        self.trace_is_live.value = jnp.ones((), bool)
        self.running_index.value = self.running_index.value + length
        return out

    def _recorded_step(
        self, call: StepCall, args: tuple[Any, ...], modulator: Any, keep: jax.Array | None
    ) -> Any:
        """Run a step of the model, and leave the trace to the end of the window."""
        if call.is_nested:
            raise NotSupportedError(
                'step_fn calls the learner inside a transformation (jit, vmap, cond, checkpoint, '
                '...). Call it directly: the loop over all steps is compiled as a whole.'
            )
        if has_multi_step_data(args):
            if call.zeros is None:
                raise ChunkInside
            raise NotImplementedError(needs_multi_step(self.vjp_method))
        args, values = single_step(args), self.graph_executor.values()
        runner = self.graph_executor.runner
        if call.zeros is None:
            out, hidden, others, factors = runner.run(args, *values)
        else:
            (out, hidden, others), factors = runner.run_perturbed(args, *values, call.zeros)
        call.recorded = Recorded(factors.after_restart(keep), modulator)
        self._write_states(hidden, others)
        return out

    def _follow_environment(self) -> None:
        """Go on with the graph for the present environment, compiled now if need be."""
        if not self.graph_executor.follow_environment():
            return
        self._prepare()
        shapes, held = self.engine.trace_shape(), self.trace.value
        if jax.tree.map(_shape_of, shapes) != jax.tree.map(_shape_of, held):
            raise NotSupportedError(
                'In this environment the model has other traces than in the one that it was '
                f'compiled in: {jax.tree.map(_shape_of, shapes)}, expected '
                f'{jax.tree.map(_shape_of, held)}. Compile another learner for it, inside '
                'brainstate.environ.context(...).'
            )
        self.plan, self.choices = None, self._kernel_choices()
        if self.step_call is not None and self.step_call.records:
            raise EnvironmentChanged

    def _restart(self, reset: Any) -> jax.Array:
        """Set states to what they started with; returns what is kept of the past, as a flag."""
        reason = self.engine.refuses_restarts()
        if reason is not None:
            raise NotSupportedError(
                f'{type(self).__name__} cannot start anew in single steps: {reason}'
            )
        relations = self.graph.hidden_param_op_relations
        return restart(self.graph_executor.states, self._start_values, relations, reset)

    def _write_states(self, hidden: Values, others: Values) -> None:
        states = self.graph_executor.states
        for path, value in (*hidden.items(), *others.items()):
            states[path].value = value

    def _check_compiled(self) -> None:
        super()._check_compiled()
        if self.model is not self.graph_executor.model:  # copied as a part of something else
            raise self._copy_error()
        states: Any = self.model.states()
        used = self.graph_executor.states.items()
        replaced = [p for p, state in used if states.get(p, state) is not state]
        if replaced:
            raise ValueError(
                f'The states {replaced} were made anew after the model was compiled, so that the '
                'learner holds the old ones. Use brainstate.nn.reset_all_states(learner, ...), '
                'which sets their values, or compile again.'
            )


def _shape_of(a: Any) -> str:
    return f'{a.dtype}{list(a.shape)}'


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros; where JAX computes on the host, no program is compiled to make them."""
    on_host = jax.default_backend() == 'cpu'
    return jax.device_put(np.zeros(shape.shape, shape.dtype)) if on_host else jnp.zeros_like(shape)
