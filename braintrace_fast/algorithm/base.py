"""What every learning rule shares: a compiled model, a trace, and a step with a backward pass."""

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, Self

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import source_line
from .._typing import Path
from ..compiler import CompilationReport, ControlFlowPolicy, ETraceGraph, warn_of_untraced
from ..compiler.control_flow import has_while
from ..compiler.transition import Plane
from ..errors import NotSupportedError
from ..kernels import dispatch
from ..kernels.dispatch import Backend, Choice
from ..reference_api.executor import ETraceVjpGraphExecutor
from ..runtime.asked import Cut, define_vjp
from ..runtime.executor import ETraceGraphExecutor
from ..runtime.factors import Entry, Factors, Signals, Values, kept, per_example
from ..runtime.gradient import GradientSum
from ..runtime.input_data import has_multi_step_data, single_step, split_window
from ..runtime.planner import Plan, default_budget, parse_bytes, show_bytes
from . import checkpoint
from .reference_hooks import refuse_reference_hooks
from .sequence import (
    USE_RESET,
    EnvironmentChanged,
    Recorder,
    SequenceDriverMixin,
    Watched,
    WindowInside,
)

__all__ = ['ETraceAlgorithm', 'ETraceVjpAlgorithm', 'EligibilityTrace', 'Engine']


class EligibilityTrace(brainstate.ShortTermState):
    """The state that holds a learner's traces."""


class Engine(Protocol):
    """How a learning rule carries its trace, and what gradient it reads off.

    Attributes
    ----------
    is_small : bool
        Whether the trace is no larger than what a step computes. One that is to be forgotten is
        then set to zero, and not only marked, and windows are shorter.
    restarts : bool
        Whether some examples may start anew while others go on.
    """

    is_small: bool
    restarts: bool

    def trace_shape(self) -> Any:
        """The shapes and types of the trace."""

    def stored_shapes(self) -> list[Any]:
        """Those of all traces that :meth:`fit` takes."""

    def fit(self, trace: Any) -> Any:
        """A trace of another backend in the form of this one."""

    def advance(self, entry: Entry, factors: Any, params: Values, step: jax.Array) -> Any:
        """The trace after a step."""

    def gradients(
        self,
        total: GradientSum,
        entry: Entry,
        trace: Any,
        factors: Any,
        signals: Any,
        step: jax.Array,
    ) -> None:
        """Add the gradient of a step, given the traces before and after it."""

    def entry_gradients(
        self, total: GradientSum, entry: Entry, signals: Any, step: jax.Array
    ) -> None:
        """Add the gradient of a window by the states that it started from."""

    def window(
        self,
        total: GradientSum | None,
        entry: Entry | None,
        factors: Any,
        signals: Any,
        step: jax.Array,
    ) -> Any:
        """Add the gradient of K steps at once, and carry the trace, if there is one, past them."""

    def trace_of(self, trace: Any, relations: list[int]) -> Any:
        """The part of a trace that belongs to some relations, for people to look at."""


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
        self.running_index = brainstate.LongTermState(_scalar(np.int32))

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

    def _states_of(self, kind: type) -> dict[Path, Any]:
        states = self.graph_executor.states
        return {path: s for path, s in states.items() if isinstance(s, kind)}


class ETraceVjpAlgorithm(ETraceAlgorithm):
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
        Whether the learning signal reaches back one step, or through a window of inputs given as
        :class:`MultiStepData`.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    backend : {'auto', 'jax', 'pallas', 'interpret'}
        The implementation asked for.
    memory_budget : int or str, optional
        The bytes that the windows of :meth:`etrace_grad` and :meth:`etrace_evolve` may take, such
        as ``'256MB'``; by default a quarter of what is free on the device when the learner is made.
    couple_layers : bool
        Whether hidden states of modules in a list that drive each other position by position form
        one group, so that their coupling is traced. By default, modules in a list are layers, and
        a coupling between layers counts within a step only.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = 'single-step',
        control_flow: ControlFlowPolicy | None = None,
        backend: str = 'auto',
        memory_budget: int | str | None = None,
        couple_layers: bool = False,
    ) -> None:
        executor = ETraceVjpGraphExecutor(model, vjp_method, control_flow, backend, couple_layers)
        super().__init__(model, executor, name)
        self.memory_budget = None if memory_budget is None else parse_bytes(memory_budget)
        self.resolved_budget = self.memory_budget or default_budget()
        self.plan: Plan | None = None
        self.choices: list[Choice] = []
        self.vjp_method = vjp_method
        self.calls = 0
        self.watched: Watched | None = None
        self.recorder: Recorder | None = None
        self.step_weight: jax.Array | None = None

    def make_engine(self, graph: ETraceGraph) -> Engine:
        """The engine of this learning rule."""
        raise NotImplementedError('A learning rule must say which engine carries its trace.')

    def learning_signals(self, factors: Factors, signals: Signals, modulator: Any) -> Signals:
        """The signals of a step that the rule learns from; those of the loss by default.

        ``modulator`` is what :meth:`modulator_of` returned. While ``etrace_grad`` runs a step with
        a mask, ``step_weight`` is its weight there; it is in the loss's signals already.
        """
        return signals

    def replaces_signals(self) -> bool:
        """Whether the rule learns from other signals than those of the loss."""
        return type(self).learning_signals is not ETraceVjpAlgorithm.learning_signals

    def entry_signals(self, planes: Sequence[Sequence[Plane]]) -> Sequence[Sequence[Plane]]:
        """The same at the start of a window that is differentiated in full."""
        return planes

    def modulator_of(self, given: Any) -> Any:
        """The modulator of a call; only rules that learn from one take it."""
        if given is not None:
            raise TypeError(f'{type(self).__name__} takes no modulator; use ThreeFactor.')
        return None

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for inputs like these, and make a zero trace.

        Parameters
        ----------
        *args
            Inputs of one step, or windows.

        Warns
        -----
        UntracedWarning
            If weights are left out or counted only in part where the model could be changed.
        """
        self.graph_executor.compile_graph(*args)
        if self.vjp_method == 'multi-step' and any(t.forward_only for t in self.graph.transitions):
            raise NotSupportedError(
                "A hidden state passes through a while loop, which vjp_method='multi-step' would "
                "have to differentiate in reverse. Use 'single-step', or lax.scan or lax.fori_loop "
                'with a fixed number of steps.'
            )
        self.engine = self.make_engine(self.graph)
        self.example = single_step(args)
        self._start_values = {
            path: state.value
            for path, state in self.graph.module_info.retrieved_model_states.items()
            if isinstance(state, brainstate.ShortTermState)
        }
        self.init_etrace_state(*args)
        self.choices = self._choose_kernels()
        self.is_compiled = True
        warn_of_untraced(self.graph)

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
        other.engine = other.make_engine(self.graph)
        other.trace = EligibilityTrace(other.engine.fit(self.trace.value))
        other.trace_is_live = brainstate.ShortTermState(self.trace_is_live.value)
        other.running_index = brainstate.LongTermState(self.running_index.value)
        other.plan, other.choices = None, other._choose_kernels()
        return other

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

    def _choose_kernels(self, steps: int = 64) -> list[Choice]:
        """Which implementations a step takes, and the gradient of a window of so many steps."""
        if self.resolved_backend.name == 'jax':
            return []
        runner, engine = self.graph_executor.runner, self.engine
        values, index = self.graph_executor.values(), self.running_index.value
        relations = self.graph.hidden_param_op_relations
        entry: Entry | None = Entry(self.trace.value, self.trace_is_live.value)
        if any(relation.primitive.trace_rules is None for relation in relations):
            entry = None  # nothing is carried: it learns in fresh windows

        def step() -> Any:
            *_, factors = runner.run(self.example, *values)
            exact = runner.as_signals(runner.zeros())
            signals = self.learning_signals(factors, exact, modulator=jnp.zeros(()))
            if entry is not None:
                engine.advance(entry, factors, values[0], index)
            return factors, signals

        def window(factors: Factors, signals: Signals) -> Any:
            if not self._runs_in_windows():
                return engine.window(None, entry, factors, None, index)
            total = GradientSum(self.graph, values[0], jax.tree.map(jnp.zeros_like, values[0]))
            return engine.window(total, entry, factors, signals, index), total.result()

        with dispatch.recording() as choices:
            one = jax.eval_shape(step)
            if self._is_static():
                many = jax.tree.map(lambda a: jax.ShapeDtypeStruct((steps, *a.shape), a.dtype), one)
                jax.eval_shape(window, *many)
        return choices

    def init_etrace_state(self, *args: Any) -> None:
        """Make a zero trace, for inputs like those that the model was compiled for."""
        self.trace = EligibilityTrace(jax.tree.map(_zeros, self.engine.trace_shape()))
        self.trace_is_live = brainstate.ShortTermState(_scalar(np.bool_))

    @property
    def report(self) -> CompilationReport:
        """What was compiled, and why, and how the last sequences were cut into windows."""
        if self.plan is None:
            lines = [f'none yet; a window may take {show_bytes(self.resolved_budget)}']
        else:
            lines = self.plan.lines()
        backend = f'{self.resolved_backend.name} (asked for: {self.backend})'
        sections = {'Backend': [backend, *map(str, self.choices)]}
        if self._runs_in_windows():
            sections['Windows'] = lines
        return CompilationReport(self.graph, sections)

    @property
    def own_states(self) -> list[brainstate.State]:
        """The states that belong to the learner and not to the model."""
        return [self.trace, self.trace_is_live, self.running_index]

    def _runs_in_windows(self) -> bool:
        """Whether sequences are learned in windows, with the trace touched once in each."""
        return self.vjp_method == 'single-step' and self._is_static()

    def _is_static(self) -> bool:
        """Whether no traced weight varies in time."""
        return all(relation.is_static for relation in self.graph.hidden_param_op_relations)

    def forget(self) -> None:
        """Take the trace for zero from here on; what a large one holds is not touched."""
        self.running_index.value = _scalar(np.int32)
        self.trace_is_live.value = _scalar(np.bool_)
        if self.engine.is_small:
            self._clear()

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the trace and the step counter to zero."""
        self._check_compiled()
        if self.watched is not None:
            raise NotSupportedError(f"step_fn resets the learner's trace. {USE_RESET}")
        self.forget()
        self._clear()

    def _clear(self) -> None:
        self.trace.value = jax.tree.map(jnp.zeros_like, self.trace.value)

    @property
    def resolved_options(self) -> dict[str, Any]:
        """Options that a saved state depends on, besides attributes named like arguments."""
        return {}

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
            By relation and group, the trace per state plane (None for planes that are not kept);
            the filtered planes of a filter follow;
            for ``pp_prop`` a pair of dictionaries: the input sides by relation, and the output
            sides.

        Raises
        ------
        ValueError
            If the weight is not traced.
        """
        self._check_compiled()
        path = weight
        if isinstance(weight, brainstate.State):
            path = self.state_id_to_path.get(id(weight), ())
        relations = self.graph.hidden_param_op_relations
        found = [
            r
            for r, relation in enumerate(relations)
            if any(path in way.paths for way in relation.weight_ways.values())
        ]
        if not found:
            traced = [p for p, _ in self.report.etrace_weights]
            raise ValueError(f'There is no trace of {path}; the traced weights are {traced}.')
        live = self.trace_is_live.value
        trace = jax.tree.map(lambda a: jnp.where(live, a, jnp.zeros_like(a)), self.trace.value)
        return self.engine.trace_of(trace, found)

    def update(self, *args: Any, modulator: Any = None, reset: Any = None) -> Any:
        """Run one step, or a window, of the model and of the trace.

        Parameters
        ----------
        *args
            The inputs of the step, or windows in :class:`MultiStepData`.
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
            The model's results; for a window with a leading time axis.
        """
        self._check_compiled()
        if self.watched is not None:
            self.watched.check()
        self._follow_environment()
        self.calls += 1
        modulator = self.modulator_of(modulator)
        keep = None if reset is None else self._restart(reset)
        args = self.graph_executor.with_environment(args)
        if self.recorder is not None:
            self.recorder.modulator, self.recorder.keep = modulator, keep
            out = self._recorded_step(self.recorder, args)
        else:
            out = self._traced_step(args, modulator, keep)
        if self.watched is not None:
            self.watched.renew()
        return out

    def _traced_step(self, args: tuple[Any, ...], modulator: Any, keep: jax.Array | None) -> Any:
        """Run a step, or a window, of the model and of the trace."""
        params, hidden, others = self.graph_executor.values()
        run: Callable[..., Any] = partial(self._single_step, modulator)
        num_steps = 1
        if has_multi_step_data(args):
            num_steps = _window_length(args)
        else:
            args = single_step(args)
        if has_multi_step_data(args) or self.vjp_method == 'multi-step':
            run = self._window
        entry = Entry(self.trace.value, self.trace_is_live.value)
        out, hidden, others, trace = run(
            keep, args, params, hidden, others, entry, self.running_index.value
        )
        self._write_states(hidden, others)
        self.trace.value = trace
        self.trace_is_live.value = jnp.ones((), bool)
        self.running_index.value = self.running_index.value + num_steps
        return out

    def _follow_environment(self) -> None:
        """Go on with the graph for the present environment, compiled now if need be."""
        if not self.graph_executor.follow_environment():
            return
        self.engine = self.make_engine(self.graph)
        shapes, held = self.engine.trace_shape(), self.trace.value
        if jax.tree.map(_shape_of, shapes) != jax.tree.map(_shape_of, held):
            raise NotSupportedError(
                'In this environment the model has other traces than in the one that it was '
                f'compiled in: {jax.tree.map(_shape_of, shapes)}, expected '
                f'{jax.tree.map(_shape_of, held)}. Compile another learner for it, inside '
                'brainstate.environ.context(...).'
            )
        self.plan, self.choices = None, self._choose_kernels()
        if self.recorder is not None:
            raise EnvironmentChanged

    def _restart(self, reset: Any) -> jax.Array:
        """Set states to what they started with; returns what is kept of the past, as a flag."""
        if not self.engine.restarts:
            raise NotSupportedError(
                f'{type(self).__name__} cannot start anew in single steps: its bias correction '
                'counts the steps of all examples together. Reset the states inside the model, '
                'which takes the flag as an input, or use D_RTRL, EProp or ThreeFactor. Between '
                "sequences, trace='fresh' or reset_state() starts anew."
            )
        flags = jnp.asarray(reset).astype(bool)
        for path, state in self.graph_executor.states.items():
            if not isinstance(state, brainstate.ShortTermState):
                continue
            shapes = {jnp.shape(leaf)[: flags.ndim] for leaf in jax.tree.leaves(state.value)}
            if shapes == {flags.shape}:
                state.value = jax.tree.map(
                    lambda start, a: jnp.where(per_example(flags, a), start, a),
                    self._start_values[path],
                    state.value,
                )
            elif isinstance(state, brainstate.HiddenState):
                raise ValueError(
                    f'reset has shape {flags.shape}, which is not how the shape of the hidden '
                    f'state at {path} starts: {jnp.shape(state.value)}. Give one flag for all, or '
                    'one per example.'
                )
        return ~flags

    def _recorded_step(self, recorder: Recorder, args: Any) -> Any:
        """Run a step of the model, and leave the trace to the end of the window."""
        if self.watched is not None and self.watched.is_nested:
            raise NotSupportedError(
                'step_fn calls the learner inside a transformation (jit, vmap, cond, checkpoint, '
                '...). Call it directly: the loop over all steps is compiled as a whole.'
            )
        if has_multi_step_data(args):
            if recorder.zeros is None:
                raise WindowInside
            raise NotImplementedError(self._needs_multi_step())
        args = single_step(args)
        values = self.graph_executor.values()
        runner = self.graph_executor.runner
        if recorder.zeros is None:
            out, hidden, others, recorder.factors = runner.run(args, *values)
        else:
            results, recorder.factors = runner.run_perturbed(args, *values, recorder.zeros)
            out, hidden, others = results
        recorder.factors = recorder.factors.after_restart(recorder.keep)
        self._write_states(hidden, others)
        return out

    def _needs_multi_step(self) -> str:
        return (
            "The gradient of a window (MultiStepData) needs vjp_method='multi-step'; this learner "
            f'has {self.vjp_method!r}. Give one step at a time, or compile it so.'
        )

    def _write_states(self, hidden: Values, others: Values) -> None:
        states = self.graph_executor.states
        for path, value in (*hidden.items(), *others.items()):
            states[path].value = value

    def _check_compiled(self) -> None:
        if not self.is_compiled:
            raise ValueError(
                'The learner is not compiled yet. Make it with braintrace_fast.compile(model, '
                'algorithm, *inputs), or call compile_graph(*inputs) first.'
            )
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

    def _single_step(self, *inputs: Any) -> Any:
        runner, engine, graph = self.graph_executor.runner, self.engine, self.graph

        @jax.custom_vjp
        def step(
            modulator: Any,
            keep: Any,
            args: Any,
            params: Values,
            hidden: Values,
            others: Values,
            entry: Entry,
            t: Any,
        ) -> Any:
            out, hidden, others, factors = runner.run(args, params, hidden, others)
            factors = factors.after_restart(keep)
            return out, hidden, others, engine.advance(entry, factors, params, t)

        def forward(
            cut: Cut,
            modulator: Any,
            keep: Any,
            args: Any,
            params: Values,
            hidden: Values,
            others: Values,
            entry: Entry,
            t: Any,
        ) -> Any:
            results, vjp, factors = runner.run_with_vjp(args, params, hidden, others, cut)
            factors = factors.after_restart(keep)
            new_trace = engine.advance(entry, factors, params, t)
            return (*results, new_trace), (
                modulator,
                vjp,
                factors,
                params,
                entry,
                new_trace,
                t,
            )

        def backward(residuals: Any, cotangents: Any) -> Any:
            modulator, vjp, factors, params, entry, trace, t = residuals
            ct_args, ct_params, exact = runner.signals(vjp, cotangents[:3])
            signals = self.learning_signals(factors, exact, modulator)
            signals = signals.after_restart(factors.keep)
            total = GradientSum(graph, params, ct_params)
            total.exchange(factors, exact.c, signals.c)
            engine.gradients(total, entry, trace, factors, signals, t)
            return None, None, ct_args, total.result(), None, None, None, None

        define_vjp(step, forward, backward, place=2)
        return step(*inputs)

    def _window(self, *inputs: Any) -> Any:
        runner, engine, graph = self.graph_executor.runner, self.engine, self.graph

        def run_step(
            keep: Any, args: Any, params: Values, hidden: Values, others: Values, entry: Any, t: Any
        ) -> Any:
            out, hidden, others, factors = runner.run(args, params, hidden, others)
            factors = factors.after_restart(keep)
            trace = engine.advance(entry, factors, lax.stop_gradient(params), t)
            return out, hidden, others, trace

        def run_steps(
            keep: Any, args: Any, params: Values, hidden: Values, others: Values, entry: Any, t: Any
        ) -> Any:
            sequences, at_step = split_window(args)

            def body(carry: Any, slices: Any) -> Any:
                hidden, others = carry
                out, hidden, others, factors = runner.run(at_step(slices), params, hidden, others)
                return (hidden, others), (out, factors)

            (hidden, others), (out, factors) = lax.scan(body, (hidden, others), sequences)
            if keep is not None:
                later = jnp.ones((_window_length(args) - 1, *keep.shape), bool)
                factors = factors.after_restart(jnp.concatenate([keep[None], later]))
            if self._is_static():
                return out, hidden, others, engine.window(None, entry, factors, None, t)

            def advance(carry: Any, factors: Any) -> Any:
                entry, t = carry
                trace = engine.advance(entry, factors, lax.stop_gradient(params), t)
                return (Entry(trace, jnp.ones_like(entry.live)), t + 1), None

            (entry, _), _ = lax.scan(advance, (entry, t), factors)
            return out, hidden, others, entry.trace

        run = run_steps if has_multi_step_data(inputs[1]) else run_step
        window = jax.custom_vjp(run)

        def forward(
            cut: Cut,
            keep: Any,
            args: Any,
            params: Values,
            hidden: Values,
            others: Values,
            entry: Entry,
            t: Any,
        ) -> Any:
            if self.vjp_method != 'multi-step':
                raise NotImplementedError(self._needs_multi_step())

            def main(args: Any, params: Values, hidden: Values) -> Any:
                *results, new_trace = run(keep, cut(args), params, hidden, others, entry, t)
                return tuple(results), new_trace

            results, vjp, new_trace = jax.vjp(main, args, params, hidden, has_aux=True)
            return (*results, new_trace), (keep, vjp, params, entry, t)

        def backward(residuals: Any, cotangents: Any) -> Any:
            keep, vjp, params, entry, t = residuals
            with _named_loops(graph):
                ct_args, ct_params, ct_hidden = vjp(cotangents[:3])
            total = GradientSum(graph, params, ct_params)
            planes = self.entry_signals(runner.entry_planes(ct_hidden))
            if keep is not None:
                planes = kept(planes, keep)
            engine.entry_gradients(total, entry, planes, t - 1)
            return None, ct_args, total.result(), None, None, None, None

        define_vjp(window, forward, backward, place=1)
        return window(*inputs)


@contextmanager
def _named_loops(graph: ETraceGraph) -> Iterator[None]:
    """Say where the while loop is that JAX cannot differentiate in reverse."""
    try:
        yield
    except ValueError as error:
        loops = [source_line(eqn) for eqn in graph.module_info.jaxpr.eqns if has_while(eqn)]
        if not loops or 'Reverse-mode differentiation' not in str(error):
            raise
        raise NotSupportedError(
            f'{", ".join(loops)}: the loss reads a while loop, which the gradient of a window '
            "would have to differentiate in reverse. Use vjp_method='single-step', or lax.scan or "
            'lax.fori_loop with a fixed number of steps.'
        ) from error


def _shape_of(a: Any) -> str:
    return f'{a.dtype}{list(a.shape)}'


def _window_length(args: tuple[Any, ...]) -> int:
    sequences, _ = split_window(args)
    return int(jnp.shape(jax.tree.leaves(sequences)[0])[0])


def _scalar(dtype: Any) -> jax.Array:
    """A zero that no program is compiled to make."""
    return jax.device_put(np.zeros((), dtype))


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros; where JAX computes on the host, no program is compiled to make them."""
    on_host = jax.default_backend() == 'cpu'
    return jax.device_put(np.zeros(shape.shape, shape.dtype)) if on_host else jnp.zeros_like(shape)
