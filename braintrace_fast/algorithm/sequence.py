"""Driving a learner over sequences: gradients, or the forward pass alone."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state

from .._typing import PyTree
from ..errors import NotSupportedError
from ..runtime.factors import Entry, Factors, Signals, Zeros, as_window, stacked, without_zeros
from ..runtime.gradient import GradientSum
from ..runtime.input_data import MultiStepData, SingleStepData
from ..runtime.loop_splitting import StatefulLoop
from ..runtime.planner import Plan, parse_bytes, plan_windows, tree_bytes

__all__ = ['Recorder', 'SequenceDriverMixin', 'Windows']


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


class Recorder:
    """Collects the factors of one step while a window is recorded.

    With ``zeros``, the step is perturbed by them, so that their cotangents are its signals.
    """

    def __init__(self, zeros: Zeros | None = None) -> None:
        self.zeros = zeros
        self.factors: Factors | None = None
        self.modulator: Any = None
        self.keep: jax.Array | None = None


class WindowInside(Exception):
    """A step that is recorded calls the learner with a window of its own."""


class EnvironmentChanged(Exception):
    """A step that is recorded runs in another environment, for which the learner is now ready."""


class Watched:
    """States that ``step_fn`` must not write, because traces or windows rely on them.

    Parameters
    ----------
    hidden, weights : dict
        Hidden states and weights, by path or name.
    """

    def __init__(
        self, hidden: Mapping[Any, brainstate.State], weights: Mapping[Any, brainstate.State]
    ) -> None:
        self.states = [
            *((state, f'the hidden state at {path}', USE_RESET) for path, state in hidden.items()),
            *((state, f'the weight {path}', USE_OWN_LOOP) for path, state in weights.items()),
        ]
        self.renew()

    def renew(self) -> None:
        """Take the present values as those that must stay."""
        self.trace = get_opaque_trace_state(convention='flax')
        self.values = [state.value for state, *_ in self.states]

    @property
    def is_nested(self) -> bool:
        """Whether a transformation inside ``step_fn`` is being traced."""
        return bool(self.trace != get_opaque_trace_state(convention='flax'))

    def check(self) -> None:
        """Raise an error if a state was written, unless that cannot be told."""
        if self.is_nested:
            return
        for (state, name, advice), value in zip(self.states, self.values, strict=True):
            before, now = jax.tree.leaves(value), jax.tree.leaves(state.value)
            if len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True)):
                raise NotSupportedError(f'step_fn writes {name}. {advice}')


class Windows(NamedTuple):
    """What was asked of the windows into which sequences are cut.

    Attributes
    ----------
    every : int or None
        The most steps of a window; None to choose from memory.
    fresh : bool
        Whether to start and end with a trace of zeros.
    budget : int
        The bytes that a window may take.
    bar : callable or None
        A progress bar over the steps.
    """

    every: int | None
    fresh: bool
    budget: int
    bar: Callable[..., None] | None


class SequenceDriverMixin:
    """Gives a learner :meth:`etrace_grad` and :meth:`etrace_evolve`."""

    calls: int
    vjp_method: str
    param_states: Any
    graph: Any
    graph_executor: Any
    engine: Any
    trace: Any
    trace_is_live: Any
    running_index: Any
    recorder: Recorder | None
    watched: Watched | None
    hidden_states: Any
    step_weight: jax.Array | None
    plan: Plan | None
    memory_budget: int | None
    resolved_budget: int
    forget: Callable[[], None]
    learning_signals: Callable[..., Signals]
    replaces_signals: Callable[[], bool]
    _runs_in_windows: Callable[[], bool]

    def etrace_grad(
        self,
        *sequences: PyTree,
        step_fn: Callable[..., Any] | None = None,
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
        reduction: str = 'mean',
        loss_output: str = 'per_step',
        has_aux: bool = False,
        return_value: bool = False,
        check_finite: bool = False,
        pbar: Any = None,
        trace: str = 'carry',
        trace_every: int | None = None,
        memory_budget: int | str | None = None,
    ) -> Any:
        """Accumulate the online gradient over sequences.

        Parameters
        ----------
        *sequences
            Trees of arrays with a common leading length; their slices are passed to ``step_fn``.
        step_fn : callable
            Calls the learner once, and returns the loss of the step (with a window, one loss per
            step). It may write states of its own, but no hidden state and no weight; an episode
            starts with ``learner(x, reset=True)``.
        mask : array, optional
            A weight for the loss of every step. The model and the trace advance in any case. Where
            another signal takes the place of the loss's (a modulator, random feedback), it is
            weighed alike: a step with weight 0 teaches nothing.
        chunk_size : int, optional
            From 2 on, windows of so many steps are passed, for ``vjp_method='multi-step'``;
            ``step_fn`` then wraps the model's inputs in :class:`MultiStepData`.
        weights : dict, optional
            The ``ParamState``s to differentiate by, by any keys; by default the learner's, by path.
            A readout outside the model belongs here.
        reduction : {'mean', 'sum'}
            ``'mean'`` divides by the sum of the mask, or by 1 if that is less.
        loss_output : {'per_step', 'masked', 'scalar'}
            What is returned as the value: losses, masked losses, or the reduced loss.
        has_aux : bool
            Whether ``step_fn`` returns ``(loss, aux)``.
        return_value : bool
            Whether to return the losses.
        check_finite : bool
            Whether to refuse losses, gradients, states and traces that are not finite. Not for use
            inside a transformation, where values are not known.
        pbar : optional
            A progress bar, as brainstate's loops take it: a ``ProgressBar``, or the number of
            steps between two updates.
        trace : {'carry', 'fresh'}
            ``'carry'`` goes on from the learner's trace and leaves the one after the last step.
            ``'fresh'`` is for sequences that have nothing to do with those before: it starts and
            ends with a trace of zeros, and builds none if there is one window.
        trace_every : int, optional
            How many steps to run, at most, between two updates of the trace; the gradient is the
            same for any number. By default it is as many as fit into the memory budget; with a
            trace to carry, as many as make a step noticeably faster.
        memory_budget : int or str, optional
            The bytes that a window may take, such as ``'256MB'``, besides the sequences, states and
            traces themselves; by default the learner's.

        Returns
        -------
        grads, or a tuple of grads, losses, aux
            As ``brainstate.transform.grad``.
        """
        self._check_compiled()  # type: ignore[attr-defined]
        if step_fn is None:
            raise TypeError(
                'etrace_grad needs step_fn=..., which calls the learner and returns the loss.'
            )
        _check_choice('reduction', reduction, ('mean', 'sum'))
        _check_choice('loss_output', loss_output, ('per_step', 'masked', 'scalar'))
        _check_choice('trace', trace, ('carry', 'fresh'))
        length = _common_length(sequences)
        chunk = self._check_chunk(chunk_size, length, for_grad=True)
        is_weighed = mask is not None
        mask = jnp.asarray(mask) if is_weighed else jnp.ones(length)
        if mask.shape != (length,):
            raise ValueError(
                f'The mask has shape {mask.shape}, expected ({length},): one weight per step.'
            )
        states = _check_weights(self.param_states if weights is None else weights)
        scale = jnp.maximum(mask.sum(), 1) if reduction == 'mean' else jnp.ones(())
        share, divides_later = mask, reduction == 'mean' and self.replaces_signals()
        if reduction == 'mean' and not divides_later:  # which takes no pass over the gradients
            share = mask / scale.astype(float)
        expected = () if chunk is None else (chunk,)

        def objective(slices: Any, weight: jax.Array) -> Any:
            with self._weighing(weight if is_weighed else None):
                result = self._call_once(step_fn, slices, states)
            loss, aux = result if has_aux else (result, None)
            if jnp.shape(loss) != expected:
                raise ValueError(
                    f'step_fn returned a loss of shape {jnp.shape(loss)}, expected {expected}: '
                    + ('one loss per step of the window.' if chunk else 'a scalar.')
                )
            return jnp.sum(loss * weight), (loss, aux)

        def gradient() -> Any:
            if self._runs_in_windows():
                bar = _progress_bar(pbar, length)
                windows = self._windows(trace, trace_every, memory_budget, bar)
                return self._windows_gradient(objective, states, (sequences, share), windows)
            if trace == 'fresh':
                self.forget()
            inputs = _in_chunks((sequences, share), chunk)
            found = _accumulate(objective, list(states.values()), inputs, pbar)
            if trace == 'fresh':
                self.forget()
            return found

        with _unchanged_on_error(self):
            totals, (losses, aux) = _in_its_environment(gradient)
            losses = losses.reshape(length)
            if check_finite:
                _check_finite(losses, totals, self)
        if divides_later:
            totals = jax.tree.map(lambda g: g / scale.astype(g.dtype), totals)
        grads = dict(zip(states, totals, strict=True))
        value = {
            'per_step': lambda: losses,
            'masked': lambda: losses * mask,
            'scalar': lambda: (losses * mask).sum() / scale,
        }[loss_output]()
        returned = (grads, *([value] if return_value else []), *([aux] if has_aux else []))
        return returned if len(returned) > 1 else grads

    def etrace_evolve(
        self,
        *sequences: PyTree,
        step_fn: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        return_outputs: bool = False,
        pbar: Any = None,
        trace_every: int | None = None,
        memory_budget: int | str | None = None,
    ) -> Any:
        """Advance the model and the trace over sequences, without a gradient.

        Parameters
        ----------
        *sequences
            Trees of arrays with a common leading length.
        step_fn : callable, optional
            Calls the learner; by default it is called with the slices.
        chunk_size : int, optional
            The length of windows, as in :meth:`etrace_grad`.
        return_outputs : bool
            Whether to return what the calls returned, stacked.
        pbar : optional
            A progress bar, as in :meth:`etrace_grad`.
        trace_every : int, optional
            How many steps to run, at most, between two updates of the trace.
        memory_budget : int or str, optional
            The bytes that a window may take, as in :meth:`etrace_grad`.
        """
        self._check_compiled()  # type: ignore[attr-defined]
        length = _common_length(sequences)
        chunk = self._check_chunk(chunk_size, length, for_grad=False)

        def call(*slices: Any) -> Any:
            if step_fn is not None:
                out = self._call_once(step_fn, slices, self.param_states)
            elif chunk is None:
                out = self(*slices)  # type: ignore[operator]
            else:
                out = self(*map(MultiStepData, slices))  # type: ignore[operator]
            return out if return_outputs else None

        def evolve() -> Any:
            if self._runs_in_windows() and chunk is None:
                bar = _progress_bar(pbar, length)
                windows = self._windows('carry', trace_every, memory_budget, bar)
                with contextlib.suppress(WindowInside):
                    return self._evolve_windows(call, sequences, windows)
            inputs = _in_chunks(sequences, chunk)
            return brainstate.transform.for_loop(lambda s: call(*s), inputs, pbar=pbar)

        with _unchanged_on_error(self):
            outputs = _in_its_environment(evolve)
        return outputs if return_outputs else None

    def _windows_gradient(
        self,
        objective: Callable[..., Any],
        states: Any,
        inputs: tuple[PyTree, jax.Array],
        windows: Windows,
    ) -> tuple[Any, Any]:
        """Gradients over sequences, with the trace read and written once per window."""
        runner = self.graph_executor.runner
        own = {id(state): path for path, state in self.param_states.items()}
        weights = list(states.values())  # keys may be of types that do not sort together
        places = [(i, own[id(state)]) for i, state in enumerate(weights) if id(state) in own]

        def step(slices: Any, weight: jax.Array) -> Any:
            def recorded(zeros: Zeros) -> Any:
                with self._recording(Recorder(zeros)) as recorder:
                    value, outputs = objective(slices, weight)
                return value, (outputs, recorder.factors, recorder.modulator)

            gradient = brainstate.transform.grad(recorded, weights, argnums=0, has_aux=True)
            (grads, cotangents), (outputs, factors, modulator) = gradient(runner.zeros())
            exact = runner.as_signals(cotangents)
            signals = self.learning_signals(factors, exact, modulator)
            return (outputs, (factors, signals.after_restart(factors.keep))), grads

        loop = StatefulLoop(step, inputs, windows.bar is not None)
        like_outputs, (like_factors, like_signals) = loop.ys
        are_zero = loop.are_zero[1][1]
        like_signals = without_zeros(like_signals, are_zero)

        def window(
            inputs: Any,
            total: Any,
            entry: Entry | None,
            index: Any,
            show: Any = None,
            alone: bool = False,
        ) -> Any:
            (outputs, (factors, signals)), grads = loop(inputs, show)
            signals = without_zeros(signals, are_zero)
            steps, relations = _length(inputs), self.graph.hidden_param_op_relations
            outputs, signals = stacked((outputs, signals), steps, (like_outputs, like_signals))
            factors = as_window(factors, relations, steps, like_factors)
            params, _, _ = self.graph_executor.values()
            traced = GradientSum(self.graph, params, jax.tree.map(jnp.zeros_like, params))
            trace = self.engine.window(traced, entry, factors, signals, index, not alone)
            total = jax.tree.map(jnp.add, total, grads)
            gradients = traced.result()
            for place, path in places:  # a state may be named twice
                total[place] = jax.tree.map(jnp.add, total[place], gradients[path])
            return total, trace, outputs

        zeros = jax.tree.map(jnp.zeros_like, [state.value for state in weights])
        parts = {**like_factors._asdict(), **like_signals._asdict()}
        return self._run_windows(window, zeros, inputs, windows, parts, loop.bytes_per_step)

    def _evolve_windows(
        self, call: Callable[..., Any], sequences: tuple[PyTree, ...], windows: Windows
    ) -> Any:
        def step(*slices: Any) -> Any:
            with self._recording(Recorder()) as recorder:
                out = call(*slices)
            return (out, recorder.factors), ()

        loop = StatefulLoop(step, sequences, windows.bar is not None)
        like_outputs, like_factors = loop.ys

        def window(
            inputs: Any,
            total: Any,
            entry: Entry | None,
            index: Any,
            show: Any = None,
            alone: bool = False,
        ) -> Any:
            (outputs, factors), _ = loop(inputs, show)
            steps, relations = _length(inputs), self.graph.hidden_param_op_relations
            outputs = stacked(outputs, steps, like_outputs)
            factors = as_window(factors, relations, steps, like_factors)
            trace = self.engine.window(None, entry, factors, None, index, not alone)
            return total, trace, outputs

        parts = like_factors._asdict()
        return self._run_windows(window, (), sequences, windows, parts, loop.bytes_per_step)[1]

    def _run_windows(
        self,
        window: Callable[..., Any],
        total: Any,
        inputs: PyTree,
        windows: Windows,
        parts: Mapping[str, PyTree],
        loop_bytes: int,
    ) -> tuple[Any, Any]:
        """Run windows one after the other."""
        inputs = jax.tree.map(jnp.asarray, inputs)
        if windows.fresh:
            self.forget()
        index = self.running_index.value
        entry: Entry | None = Entry(self.trace.value, self.trace_is_live.value)
        choices = windows.every, windows.fresh, windows.budget, loop_bytes + tree_bytes(parts)
        args = total, entry, index
        plan = plan_windows(window, inputs, args, *choices, small=self.engine.is_small)
        self.plan = plan.describe(parts, self.trace.value)
        alone = plan.windows == ((1, plan.steps),)
        if windows.fresh and alone:
            entry = None

        first, bar = index, windows.bar

        def body(carry: Any, inputs: Any) -> Any:
            total, entry, index = carry
            done, show = index - first, None
            if bar is not None:
                show = lambda i, ys: bar(done + i, carry=None, y=ys[0])  # noqa: E731
            total, trace, outputs = window(inputs, total, entry, index, show, alone)
            after = index + _length(inputs)
            # Always set: with the index it takes one launch, and as a constant a copy of its own.
            entry = None if entry is None else Entry(trace, after != index)
            return (total, entry, after), outputs

        carry: Any = (total, entry, index)
        outputs, start = [], 0
        for count, steps in plan.windows:

            def body_at(carry: Any, start: jax.Array, steps: int = steps) -> Any:
                return body(carry, _cut(inputs, start, steps))

            if count == 1:
                carry, out = body(carry, _cut(inputs, start, steps))
            else:
                starts = start + steps * jnp.arange(count)
                carry, out = brainstate.transform.scan(body_at, carry, starts)
                out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)
            outputs.append(out)
            start += count * steps
        total, entry, index = carry
        if windows.fresh or entry is None:
            self.forget()
        else:
            self.trace.value, self.trace_is_live.value = entry
            self.running_index.value = index
        if len(outputs) == 1:
            return total, outputs[0]
        return total, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)

    @contextlib.contextmanager
    def _recording(self, recorder: Recorder) -> Iterator[Recorder]:
        self.recorder = recorder
        try:
            yield recorder
        finally:
            self.recorder = None

    @contextlib.contextmanager
    def _weighing(self, weight: jax.Array | None) -> Iterator[None]:
        self.step_weight = weight
        try:
            yield
        finally:
            self.step_weight = None

    def _windows(
        self,
        trace: str,
        trace_every: int | None,
        memory_budget: int | str | None,
        bar: Callable[..., None] | None,
    ) -> Windows:
        if trace_every is not None:
            if isinstance(trace_every, bool) or not isinstance(trace_every, int):
                raise TypeError(f'trace_every is {trace_every!r}; it must be None or a Python int.')
            if trace_every < 1:
                raise ValueError(f'trace_every is {trace_every}; it must be at least 1.')
        budget = self.resolved_budget if memory_budget is None else parse_bytes(memory_budget)
        return Windows(trace_every, trace == 'fresh', budget, bar)

    def _call_once(
        self, step_fn: Callable[..., Any], slices: Any, weights: Mapping[Any, brainstate.State]
    ) -> Any:
        before = self.calls
        self.watched = Watched(self.hidden_states, {**self.param_states, **weights})
        try:
            result = step_fn(*slices)
            self.watched.check()
        finally:
            self.watched = None
        if self.calls - before != 1:
            raise ValueError(
                f'step_fn called the learner {self.calls - before} times, expected once: the trace '
                'advances with every call.'
            )
        return result

    def _check_chunk(self, chunk_size: int | None, length: int, for_grad: bool) -> int | None:
        if chunk_size is None:
            return None
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
            raise TypeError(f'chunk_size is {chunk_size!r}; it must be None or a Python int.')
        if chunk_size < 1:
            raise ValueError(f'chunk_size is {chunk_size}; it must be at least 1.')
        if chunk_size == 1:
            return None
        if for_grad and self.vjp_method != 'multi-step':
            raise ValueError(
                f"chunk_size={chunk_size} needs a learner with vjp_method='multi-step'; this one "
                f'has {self.vjp_method!r}.'
            )
        if length % chunk_size:
            raise ValueError(
                f'The sequences have {length} steps, which chunk_size={chunk_size} does not divide.'
            )
        return chunk_size


@contextlib.contextmanager
def _unchanged_on_error(learner: Any) -> Iterator[None]:
    """Give all states of the learner and its model their values back if the block fails."""
    states = _carried(learner)
    values = [state.value for state in states]
    try:
        yield
    except BaseException:
        for state, value in zip(states, values, strict=True):
            state.restore_value(value)
        raise


def _in_its_environment(run: Callable[[], Any]) -> Any:
    """Run until the learner is ready for the environment that the steps set."""
    while True:
        with contextlib.suppress(EnvironmentChanged):
            return run()


def _accumulate(
    objective: Callable[..., Any], states: Any, inputs: PyTree, pbar: Any
) -> tuple[Any, Any]:
    """Sum the gradient of every step, with the trace advanced in each."""

    def body(total: Any, inputs: Any) -> Any:
        gradient = brainstate.transform.grad(lambda: objective(*inputs), states, has_aux=True)
        grads, outputs = gradient()
        return jax.tree.map(jnp.add, total, grads), outputs

    zeros = jax.tree.map(jnp.zeros_like, [state.value for state in states])
    return brainstate.transform.scan(body, zeros, inputs, pbar=pbar)


def _progress_bar(pbar: Any, length: int) -> Callable[..., None] | None:
    if pbar is None:
        return None
    if isinstance(pbar, int) and not isinstance(pbar, bool):
        pbar = brainstate.transform.ProgressBar(freq=pbar)
    if not isinstance(pbar, brainstate.transform.ProgressBar):
        raise TypeError(
            f'pbar is {pbar!r}; expected a brainstate.transform.ProgressBar, or how many steps to '
            'run between two updates.'
        )
    return pbar.init(length)


def _length(inputs: PyTree) -> int:
    return jnp.shape(jax.tree.leaves(inputs)[0])[0]


def _carried(learner: Any) -> list[brainstate.State]:
    """All states that a learner carries from step to step, its model's included."""
    return [*learner.graph_executor.states.values(), *learner.own_states]


def _check_finite(losses: jax.Array, grads: PyTree, learner: Any) -> None:
    if isinstance(losses, jax.core.Tracer):
        raise ValueError(
            'check_finite=True needs values, which are not known inside jit or another '
            'transformation. Leave it out there, and check what the transformed function returns.'
        )
    forgotten = not learner.trace_is_live.value  # then it counts as zeros, whatever it holds
    carried = [s for s in _carried(learner) if not (forgotten and s is learner.trace)]
    values = [state.value for state in carried]
    parts = {'losses': losses, 'gradients': grads, 'states or traces': values}
    for name, tree in parts.items():
        leaves = [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.inexact)]
        if not all(bool(jnp.isfinite(a).all()) for a in leaves):
            where = f'the {name}'
            if name == 'losses':
                where += f' of steps {jnp.flatnonzero(~jnp.isfinite(losses))[:10].tolist()}'
            raise FloatingPointError(
                f'Not finite: {where}. States and traces are as they were before the call. Look '
                'for a division by zero, an overflow or too large a learning rate.'
            )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f'{name} is {value!r}; choose one of {choices}.')


def _check_weights(weights: Any) -> dict[Any, brainstate.State]:
    if not isinstance(weights, Mapping):
        raise TypeError(
            f'weights is a {type(weights).__name__}, expected a dict of ParamStates, such as '
            '{**learner.param_states, "readout": readout.weight}.'
        )
    wrong = {
        key: type(w).__name__ for key, w in weights.items() if not isinstance(w, brainstate.State)
    }
    if wrong:
        raise TypeError(f'weights has {wrong}, expected a ParamState for every key, not its value.')
    for key, state in weights.items():
        types = map(jnp.result_type, jax.tree.leaves(state.value))
        fixed = [str(dtype) for dtype in types if not jnp.issubdtype(dtype, jnp.inexact)]
        if fixed:
            raise TypeError(
                f'The ParamState at {key} holds {", ".join(fixed)}, by which nothing can be '
                'differentiated. Keep such values in a plain attribute of the module, or leave '
                'the state out: weights={path: state, ...}.'
            )
    return dict(weights)


def _common_length(sequences: tuple[PyTree, ...]) -> int:
    marked = (SingleStepData, MultiStepData)
    for x in jax.tree.leaves(sequences, is_leaf=lambda x: isinstance(x, marked)):
        if isinstance(x, marked):
            raise TypeError(
                f'A sequence is wrapped in {type(x).__name__}; pass the plain arrays, and wrap '
                'inside step_fn.'
            )
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(sequences)]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        raise ValueError(
            f'The sequences have shapes {shapes}; give at least one, with a common leading length '
            'of at least one step.'
        )
    return shapes[0][0]


def _cut(tree: PyTree, start: Any, steps: int) -> PyTree:
    """Some steps of sequences; the sequences themselves if those are all."""
    if isinstance(start, int):
        return jax.tree.map(lambda a: lax.slice_in_dim(a, start, start + steps), tree)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, steps), tree)


def _in_chunks(tree: PyTree, chunk: int | None) -> PyTree:
    if chunk is None:
        return tree
    return jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), tree)
