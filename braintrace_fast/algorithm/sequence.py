"""Sequences: the gradient of a learner over them, or the forward pass alone."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from .._typing import PyTree
from ..driver import (
    ChunkInside,
    Driven,
    EnvironmentChanged,
    Recorded,
    Sequences,
    StepCall,
    WindowRequest,
)
from ..kernels.promotion import product
from ..runtime.factors import Zeros
from ..runtime.input_data import MultiStepData
from ..runtime.planner import parse_bytes
from .sequence_options import (
    check_choice,
    check_chunk,
    check_finite_values,
    check_trace_every,
    check_weights,
    common_length,
    in_chunks,
    loss_weights,
    progress_bar,
)

if TYPE_CHECKING:
    from .vjp import ETraceVjpAlgorithm as Learner
else:
    Learner = object

__all__ = ['SequenceDriverMixin']


class SequenceDriverMixin:
    """Gives a learner :meth:`etrace_grad` and :meth:`etrace_evolve`."""

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
            Calls the learner once, and returns the loss of the step (with a chunk, one loss per
            step). It may write states of its own, but no hidden state and no weight; an episode
            starts with ``learner(x, reset=True)``.
        mask : array, optional
            A weight for the loss of every step. The model and the trace advance in any case. Where
            another signal takes the place of the loss's (a modulator, random feedback), it is
            weighed alike: a step with weight 0 teaches nothing.
        chunk_size : int, optional
            From 2 on, chunks of so many steps are passed, for ``vjp_method='multi-step'``;
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
            ends with a trace of zeros, and builds none: a long sequence runs in windows from the
            last to the first, after a forward pass that finds the states at their entries. (A trace
            is carried from window to window if that is cheaper, or if a step has side effects,
            such as printing.)
        trace_every : int, optional
            How many steps a window has at most; the trace is read and written once in each, and the
            gradient is the same for any number. By default it is as many as fit into the memory
            budget and make a step noticeably faster.
        memory_budget : int or str, optional
            The bytes that a window may take, such as ``'256MB'``, besides the sequences, states and
            traces themselves; by default the learner's.

        Returns
        -------
        grads, or a tuple of grads, losses, aux
            As ``brainstate.transform.grad``.
        """
        learner = _compiled(self)
        if step_fn is None:
            raise TypeError(
                'etrace_grad needs step_fn=..., which calls the learner and returns the loss.'
            )
        check_choice('reduction', reduction, ('mean', 'sum'))
        check_choice('loss_output', loss_output, ('per_step', 'masked', 'scalar'))
        check_choice('trace', trace, ('carry', 'fresh'))
        length = common_length(sequences)
        chunk = check_chunk(chunk_size, length, learner.vjp_method)
        states = check_weights(learner.param_states if weights is None else weights)
        shares = loss_weights(mask, length, reduction, learner.replaces_signals())
        objective = _Objective(learner, step_fn, states, has_aux, chunk, shares.is_masked)

        def gradient() -> tuple[list[PyTree], Any]:
            inputs = sequences, shares.share
            if learner._runs_in_windows():
                request = _request(learner, trace, trace_every, memory_budget, pbar, length)
                driven = _in_windows(learner, request, objective.drive, inputs)
                return driven.gradients, driven.outputs
            with _trace_of(learner, trace):
                return _accumulate(objective, list(states.values()), in_chunks(inputs, chunk), pbar)

        with _unchanged_on_error(learner):
            totals, (losses, aux) = _in_its_environment(gradient)
            losses = losses.reshape(length)
            if check_finite:
                check_finite_values(losses, totals, learner)
        grads = dict(zip(states, shares.divided(totals), strict=True))
        value = [shares.reported(losses, loss_output)] if return_value else []
        returned = (grads, *value, *([aux] if has_aux else []))
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
            The steps of a chunk, as in :meth:`etrace_grad`.
        return_outputs : bool
            Whether to return what the calls returned, stacked.
        pbar : optional
            A progress bar, as in :meth:`etrace_grad`.
        trace_every : int, optional
            How many steps to run, at most, between two updates of the trace.
        memory_budget : int or str, optional
            The bytes that a window may take, as in :meth:`etrace_grad`.
        """
        learner = _compiled(self)
        length = common_length(sequences)
        chunk = check_chunk(chunk_size, length)
        call = step_fn or _plain_call(learner, chunk)

        def step(zeros: Zeros | None, *slices: Any, records: bool = True) -> Any:
            out, recorded = _called(learner, call, slices, {}, records=records)
            return out if return_outputs else None, recorded

        def evolve() -> PyTree:
            if learner._runs_in_windows() and chunk is None:
                request = _request(learner, 'carry', trace_every, memory_budget, pbar, length)
                with contextlib.suppress(ChunkInside):
                    drive = partial(learner.driver.evolve, step)
                    return _in_windows(learner, request, drive, sequences).outputs
            inputs = in_chunks(sequences, chunk)
            return brainstate.transform.for_loop(
                lambda slices: step(None, *slices, records=False)[0], inputs, pbar=pbar
            )

        with _unchanged_on_error(learner):
            outputs = _in_its_environment(evolve)
        return outputs if return_outputs else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Objective:
    """What ``etrace_grad`` differentiates: the weighed loss of a step.

    Parameters
    ----------
    learner : ETraceVjpAlgorithm
        The learner.
    step_fn : callable
        The user's function.
    states : dict
        What to differentiate by, by the user's keys.
    has_aux : bool
        Whether ``step_fn`` returns more than the loss.
    chunk : int or None
        The steps of a call.
    is_masked : bool
        Whether the user weighs the steps.
    """

    learner: Learner
    step_fn: Callable[..., Any]
    states: Mapping[Any, brainstate.State]
    has_aux: bool
    chunk: int | None
    is_masked: bool

    def __call__(
        self, slices: PyTree, weight: jax.Array, zeros: Zeros | None = None, records: bool = False
    ) -> tuple[jax.Array, PyTree, Recorded | None]:
        """The weighed loss; the loss and what comes with it; and what is left for the trace."""
        mask = weight if self.is_masked else None
        result, recorded = _called(
            self.learner, self.step_fn, slices, self.states, mask, records, zeros
        )
        loss, aux = result if self.has_aux else (result, None)
        expected = () if self.chunk is None else (self.chunk,)
        if jnp.shape(loss) != expected:
            raise ValueError(
                f'step_fn returned a loss of shape {jnp.shape(loss)}, expected {expected}: '
                + ('one loss per step of the chunk.' if self.chunk else 'a scalar.')
            )
        return jnp.sum(product(jnp.asarray(loss), weight)), (loss, aux), recorded

    def drive(self, sequences: Sequences) -> Driven:
        """Its gradient in windows."""
        own = {id(state): path for path, state in self.learner.param_states.items()}
        weights = list(self.states.values())  # keys may be of types that do not sort together
        paths = [own.get(id(state)) for state in weights]

        def step(zeros: Zeros, slices: PyTree, weight: jax.Array) -> Any:
            return self(slices, weight, zeros, records=True)

        return self.learner.driver.gradient(step, weights, paths, sequences)


def _compiled(learner: Any) -> Learner:
    learner._check_compiled()
    return learner


def _plain_call(learner: Learner, chunk: int | None) -> Callable[..., Any]:
    """A call of the learner with the slices of the sequences."""
    if chunk is None:
        return learner
    return lambda *slices: learner(*map(MultiStepData, slices))


def _called(
    learner: Learner,
    step_fn: Callable[..., Any],
    slices: PyTree,
    weights: Mapping[Any, brainstate.State],
    mask: jax.Array | None = None,
    records: bool = False,
    zeros: Zeros | None = None,
) -> tuple[Any, Recorded | None]:
    """Call ``step_fn``, in which the learner is called once; returns what it records too."""
    if not learner.watches_calls:
        return step_fn(*slices), None
    watched = {**learner.param_states, **weights}
    call = StepCall(learner.hidden_states, watched, mask, records, zeros)
    before, learner.step_call = learner.step_call, call
    try:
        result = step_fn(*slices)
    finally:
        learner.step_call = before
    call.finish()
    return result, call.recorded


def _request(
    learner: Learner,
    trace: str,
    trace_every: int | None,
    memory_budget: int | str | None,
    pbar: Any,
    length: int,
) -> WindowRequest:
    """What is asked of windows, checked."""
    budget = learner.resolved_budget if memory_budget is None else parse_bytes(memory_budget)
    bar = progress_bar(pbar, length)
    return WindowRequest(check_trace_every(trace_every), trace == 'fresh', budget, bar)


def _in_windows(
    learner: Learner,
    request: WindowRequest,
    drive: Callable[[Sequences], Driven],
    inputs: tuple[PyTree, ...],
) -> Driven:
    """Drive a learner over sequences, from its trace to the next."""
    if request.fresh:
        learner.forget()
    driven = drive(Sequences(inputs, request, *learner.carried))
    learner.plan = driven.plan
    if request.fresh or driven.entry is None:
        learner.forget()
    else:
        learner.trace.value, learner.trace_is_live.value = driven.entry
        learner.running_index.value = driven.elapsed
    return driven


@contextlib.contextmanager
def _trace_of(learner: Learner, trace: str) -> Iterator[None]:
    """Start and end with a trace of zeros, if it is to be fresh."""
    if trace == 'fresh':
        learner.forget()
    yield
    if trace == 'fresh':
        learner.forget()


@contextlib.contextmanager
def _unchanged_on_error(learner: Learner) -> Iterator[None]:
    """Give all states of the learner and its model their values back if the block fails."""
    states = learner.carried_states
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
    objective: Callable[..., Any], states: list[brainstate.State], inputs: PyTree, pbar: Any
) -> tuple[list[PyTree], PyTree]:
    """Sum the gradient of every step, with the trace advanced in each."""

    def body(total: Any, inputs: Any) -> Any:
        gradient = brainstate.transform.grad(lambda: objective(*inputs)[:2], states, has_aux=True)
        grads, outputs = gradient()
        return jax.tree.map(jnp.add, total, grads), outputs

    zeros = jax.tree.map(jnp.zeros_like, [state.value for state in states])
    return brainstate.transform.scan(body, zeros, inputs, pbar=pbar)
