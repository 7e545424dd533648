"""The options of ``etrace_grad`` and ``etrace_evolve``: what they mean, and what is refused."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._typing import PyTree
from ..kernels.promotion import product, promoted
from ..runtime.input_data import MultiStepData, SingleStepData

if TYPE_CHECKING:
    from .vjp import ETraceVjpAlgorithm as Learner

__all__ = ['LossWeights', 'loss_weights']


class LossWeights(NamedTuple):
    """How much the loss of each step counts.

    Attributes
    ----------
    mask : jax.Array
        The user's weights, or ones.
    is_masked : bool
        Whether the user gave some.
    share : jax.Array
        The weights of the losses that are differentiated.
    scale : jax.Array
        What the sum of losses is divided by.
    divides_later : bool
        Whether the gradients are divided instead of the losses: other signals than those of the
        loss do not know by how much it was.
    """

    mask: jax.Array
    is_masked: bool
    share: jax.Array
    scale: jax.Array
    divides_later: bool

    def divided(self, gradients: list[PyTree]) -> list[PyTree]:
        """Gradients of the reduced loss."""
        if not self.divides_later:
            return gradients
        return jax.tree.map(lambda g: g / self.scale.astype(g.dtype), gradients)

    def reported(self, losses: jax.Array, loss_output: str) -> jax.Array:
        """The losses as the user wants them."""
        if loss_output == 'per_step':
            return losses
        masked = product(losses, self.mask)
        if loss_output == 'masked':
            return masked
        total, scale = promoted(masked.sum(), self.scale)
        return total / scale


def loss_weights(mask: Any, length: int, reduction: str, replaces_signals: bool) -> LossWeights:
    """The weights of all steps, from what a user gives."""
    is_masked = mask is not None
    mask = jnp.asarray(mask) if is_masked else jnp.ones(length)
    if mask.shape != (length,):
        raise ValueError(
            f'The mask has shape {mask.shape}, expected ({length},): one weight per step.'
        )
    if reduction == 'sum':
        return LossWeights(mask, is_masked, mask, jnp.ones(()), False)
    scale = jnp.maximum(mask.sum(), 1)
    # Where losses can be divided, there need be no pass over the gradients.
    share = mask if replaces_signals else mask.astype(float) / scale.astype(float)
    return LossWeights(mask, is_masked, share, scale, replaces_signals)


def check_chunk(chunk_size: int | None, length: int, vjp_method: str | None = None) -> int | None:
    """The steps of a chunk; None for single steps. ``vjp_method`` is given for a gradient."""
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f'chunk_size is {chunk_size!r}; it must be None or a Python int.')
    if chunk_size < 1:
        raise ValueError(f'chunk_size is {chunk_size}; it must be at least 1.')
    if chunk_size == 1:
        return None
    if vjp_method not in (None, 'multi-step'):
        raise ValueError(
            f"chunk_size={chunk_size} needs a learner with vjp_method='multi-step'; this one "
            f'has {vjp_method!r}.'
        )
    if length % chunk_size:
        raise ValueError(
            f'The sequences have {length} steps, which chunk_size={chunk_size} does not divide.'
        )
    return chunk_size


def check_trace_every(trace_every: int | None) -> int | None:
    """The most steps of a window, if the user gives them."""
    if trace_every is not None:
        if isinstance(trace_every, bool) or not isinstance(trace_every, int):
            raise TypeError(f'trace_every is {trace_every!r}; it must be None or a Python int.')
        if trace_every < 1:
            raise ValueError(f'trace_every is {trace_every}; it must be at least 1.')
    return trace_every


def progress_bar(pbar: Any, length: int) -> Callable[..., None] | None:
    """A progress bar over so many steps, as brainstate's loops take it."""
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


def check_weights(weights: Any) -> dict[Any, brainstate.State]:
    """The states to differentiate by, by the user's keys."""
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


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f'{name} is {value!r}; choose one of {choices}.')


def check_finite_values(losses: jax.Array, grads: PyTree, learner: 'Learner') -> None:
    """Refuse losses, gradients, states and traces that are not finite."""
    if isinstance(losses, jax.core.Tracer):
        raise ValueError(
            'check_finite=True needs values, which are not known inside jit or another '
            'transformation. Leave it out there, and check what the transformed function returns.'
        )
    forgotten = not learner.trace_is_live.value  # then it counts as zeros, whatever it holds
    carried = [s for s in learner.carried_states if not (forgotten and s is learner.trace)]
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


def common_length(sequences: tuple[PyTree, ...]) -> int:
    """The number of steps of the sequences."""
    marked = (SingleStepData, MultiStepData)
    for x in jax.tree.leaves(sequences, is_leaf=lambda x: isinstance(x, marked)):
        if isinstance(x, marked):
            raise TypeError(
                f'A sequence is wrapped in {type(x).__name__}; pass the plain arrays, and wrap '
                'inside step_fn.'
            )
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(sequences)]
    if not shapes:
        raise ValueError(
            'No sequence is given, or an empty pytree; give at least one array, with a common '
            'leading length of at least one step.'
        )
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        raise ValueError(
            f'The sequences have shapes {shapes}; they must have a common leading length, of at '
            'least one step.'
        )
    return shapes[0][0]


def in_chunks(tree: PyTree, chunk: int | None) -> PyTree:
    """Sequences of chunks, out of sequences of steps."""
    if chunk is None:
        return tree
    return jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), tree)
