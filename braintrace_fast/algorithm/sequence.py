"""Driving a learner over sequences: gradients, or the forward pass alone."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._typing import PyTree
from ..runtime.input_data import MultiStepData, SingleStepData

__all__ = ['SequenceDriverMixin']


class SequenceDriverMixin:
    """Gives a learner :meth:`etrace_grad` and :meth:`etrace_evolve`."""

    calls: int
    vjp_method: str
    param_states: Any

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
    ) -> Any:
        """Accumulate the online gradient over sequences.

        Parameters
        ----------
        *sequences
            Trees of arrays with a common leading length; their slices are passed to ``step_fn``.
        step_fn : callable
            Calls the learner once, and returns the loss of the step (with a window, one loss per
            step).
        mask : array, optional
            A weight for the loss of every step. The model and the trace advance in any case.
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
            A progress bar, as brainstate's loops take it.

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
        length = _common_length(sequences)
        chunk = self._check_chunk(chunk_size, length, for_grad=True)
        mask = jnp.ones(length) if mask is None else jnp.asarray(mask)
        if mask.shape != (length,):
            raise ValueError(
                f'The mask has shape {mask.shape}, expected ({length},): one weight per step.'
            )
        states = _check_weights(self.param_states if weights is None else weights)
        expected = () if chunk is None else (chunk,)

        def step_gradient(slices: Any, weight: jax.Array) -> Any:
            def objective() -> Any:
                result = self._call_once(step_fn, slices)
                loss, aux = result if has_aux else (result, None)
                if jnp.shape(loss) != expected:
                    raise ValueError(
                        f'step_fn returned a loss of shape {jnp.shape(loss)}, expected {expected}: '
                        + ('one loss per step of the window.' if chunk else 'a scalar.')
                    )
                return jnp.sum(loss * weight), (loss, aux)

            # A list: keys of a dict of states may be of types that do not sort together.
            return brainstate.transform.grad(objective, list(states.values()), has_aux=True)()

        def body(total: Any, inputs: Any) -> Any:
            grads, (loss, aux) = step_gradient(*inputs)
            return jax.tree.map(jnp.add, total, grads), (loss, aux)

        zeros = jax.tree.map(jnp.zeros_like, [state.value for state in states.values()])
        inputs = _in_chunks((sequences, mask), chunk)
        with _unchanged_on_error(self):
            totals, (losses, aux) = brainstate.transform.scan(body, zeros, inputs, pbar=pbar)
            losses = losses.reshape(length)
            if check_finite:
                _check_finite(losses, totals, _carried(self))
        scale = jnp.maximum(mask.sum(), 1) if reduction == 'mean' else jnp.ones(())
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
            A progress bar, as brainstate's loops take it.
        """
        self._check_compiled()  # type: ignore[attr-defined]
        length = _common_length(sequences)
        chunk = self._check_chunk(chunk_size, length, for_grad=False)

        def body(slices: Any) -> Any:
            if step_fn is not None:
                out = self._call_once(step_fn, slices)
            elif chunk is None:
                out = self(*slices)  # type: ignore[operator]
            else:
                out = self(*map(MultiStepData, slices))  # type: ignore[operator]
            return out if return_outputs else None

        inputs = _in_chunks(sequences, chunk)
        with _unchanged_on_error(self):
            outputs = brainstate.transform.for_loop(body, inputs, pbar=pbar)
        return outputs if return_outputs else None

    def _call_once(self, step_fn: Callable[..., Any], slices: Any) -> Any:
        before = self.calls
        result = step_fn(*slices)
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


def _carried(learner: Any) -> list[brainstate.State]:
    """All states that a learner carries from step to step, its model's included."""
    return [*learner.graph_executor.states.values(), learner.trace, learner.running_index]


def _check_finite(losses: jax.Array, grads: PyTree, carried: list[brainstate.State]) -> None:
    if isinstance(losses, jax.core.Tracer):
        raise ValueError(
            'check_finite=True needs values, which are not known inside jit or another '
            'transformation. Leave it out there, and check what the transformed function returns.'
        )
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


def _in_chunks(tree: PyTree, chunk: int | None) -> PyTree:
    if chunk is None:
        return tree
    return jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), tree)
