"""DNI: D-RTRL in chunks, with a learned guess of what the steps after each chunk will say."""

from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compiler import ControlFlowPolicy
from ..driver import StepInputs, run_forward
from ..kernels.promotion import promoted
from ..runtime.factors import GroupPlanes, split_planes
from ..runtime.input_data import MultiStepData
from .axes import ETraceConfig
from .presets import ParamDimVjpAlgorithm

__all__ = ['DNI', 'SyntheticGradient', 'train_synthetic_gradient']

GroupValues = dict[int, jax.Array]
"""By hidden group, its states in one array of shape ``(*varshape, num_state)``."""


class SyntheticGradient(brainstate.nn.Module):
    """Guesses the cotangents of hidden states from their values, by an affine map per group.

    It maps all states of an example in a group, the last axis of ``varshape`` and the states at
    each place, to as many cotangents. It is not a part of the model, and no trace belongs to it.

    Parameters
    ----------
    group_shapes : dict of int to tuple of int
        By group, ``(*varshape, num_state)``, as :meth:`DNI.group_signal_shapes` gives them.
    hidden_width : int, optional
        Accepted for braintrace's sake; it changes nothing.
    scale : float
        The standard deviation of the initial weights. At 0, all guesses are zero before training.
    seed : int
        The seed of the initial weights.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> synthesizer = braintrace.SyntheticGradient({0: (2, 4, 1)})
    >>> synthesizer.apply(synthesizer.param_values(), {0: jnp.ones((2, 4, 1))})[0].shape
    (2, 4, 1)
    """

    def __init__(
        self,
        group_shapes: Mapping[int, tuple[int, ...]],
        hidden_width: int | None = None,
        scale: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.group_shapes = {group: tuple(shape) for group, shape in group_shapes.items()}
        self.hidden_width = hidden_width
        rng = np.random.default_rng(seed)
        self.w, self.b = {}, {}
        for group, shape in self.group_shapes.items():
            size = int(np.prod(shape[-2:]))
            drawn = scale * rng.normal(size=(size, size))
            self.w[group] = brainstate.ParamState(jnp.asarray(drawn, jnp.float32))
            self.b[group] = brainstate.ParamState(jnp.zeros(size, jnp.float32))

    def states_dict(self) -> dict[tuple[str, int], brainstate.ParamState]:
        """The parameters, by keys for an optimiser."""
        weights = {('synth_w', group): state for group, state in self.w.items()}
        return weights | {('synth_b', group): state for group, state in self.b.items()}

    def param_values(self) -> dict[str, GroupValues]:
        """The values of the parameters, for :meth:`apply`."""
        return {
            'w': {group: state.value for group, state in self.w.items()},
            'b': {group: state.value for group, state in self.b.items()},
        }

    def apply(
        self, param_values: Mapping[str, GroupValues], group_hiddens: GroupValues
    ) -> GroupValues:
        """The guesses.

        Parameters
        ----------
        param_values : dict
            As :meth:`param_values` returns them.
        group_hiddens : dict of int to jax.Array
            The states of each group.

        Returns
        -------
        dict of int to jax.Array
            Arrays like the states.
        """
        guesses = {}
        for group, value in group_hiddens.items():
            w, b = param_values['w'][group], param_values['b'][group]
            x, w, b = promoted(value.reshape(*value.shape[:-2], -1), w, b)
            y = x @ w
            guess = y + jnp.broadcast_to(b, y.shape)
            guesses[group] = guess.reshape(value.shape).astype(value.dtype)
        return guesses


class DNI(ParamDimVjpAlgorithm):
    r"""Decoupled neural interfaces (Jaderberg et al., 2017): D-RTRL with a guess of the future.

    A chunk of steps is differentiated in full, and its past counts by the trace. For weights that
    no trace belongs to, what they do to later chunks is lost; here a synthesiser guesses it from
    the states at the end of the chunk,

    .. math::

        \hat g(h_b) \approx \partial \sum_{t > b} \ell_t / \partial h_b

    and the guess flows back through the chunk, to parameters that are not traced and to inputs
    alone: the future of traced weights is in the trace already, whose gradients stay as those of
    :class:`D_RTRL`. With the true cotangents in the place of guesses, the gradient of a weight that
    is not traced is that of the whole sequence.

    Parameters
    ----------
    model, name, fast_solve, trace_dtype, chunked_trace, control_flow, **options
        As for :class:`ParamDimVjpAlgorithm`.
    synthesizer : SyntheticGradient, optional
        What guesses. It can be attached later; without one, there is no call. Train it by
        :func:`train_synthetic_gradient`. Another object will do that has its ``param_values()`` and
        ``apply(values, hiddens)``. ``save`` leaves it to ``others=``.
    vjp_method : {'multi-step', 'single-step'}
        Whether calls may be chunks of steps, given as :class:`MultiStepData`. If not, each step is
        a chunk of its own.
    snap_max_jacobian_elements : int
        As for :class:`ParamDimVjpAlgorithm`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(cell, 'dni', jnp.ones(2))
    >>> shapes = learner.group_signal_shapes()
    >>> learner.attach_synthesizer(braintrace.SyntheticGradient(shapes))
    >>> xs = jnp.ones((10, 2))
    >>> errors = braintrace.train_synthetic_gradient(learner, xs, chunk_size=5)
    >>> def losses(x):
    ...     return jnp.sum(learner(braintrace.MultiStepData(x)) ** 2, axis=1)
    >>> grads = learner.etrace_grad(xs, step_fn=losses, chunk_size=5, reduction='sum')
    """

    default_config = ETraceConfig(learning_signal='bootstrapped')

    def __init__(
        self,
        model: brainstate.nn.Module,
        synthesizer: SyntheticGradient | None = None,
        name: str | None = None,
        vjp_method: str = 'multi-step',
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        snap_max_jacobian_elements: int = 2**24,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            trace_dtype,
            chunked_trace,
            control_flow,
            snap_max_jacobian_elements=snap_max_jacobian_elements,
            **options,
        )
        self.synthesizer = synthesizer

    @property
    def differentiates_calls(self) -> bool:
        """Always: a call has an end, at which the future is guessed."""
        return True

    def replaces_signals(self) -> bool:
        """The guesses are those of losses as they are, not yet divided by their number."""
        return True

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for inputs like these, and make a zero trace."""
        super().compile_graph(*args)
        if self.synthesizer is not None:
            self.attach_synthesizer(self.synthesizer)  # its shapes can be checked now

    def group_signal_shapes(self) -> dict[int, tuple[int, ...]]:
        """By hidden group, the shape of its cotangents, ``(*varshape, num_state)``."""
        self._check_compiled()
        return {g.index: (*g.varshape, g.num_state) for g in self.graph.hidden_groups}

    def attach_synthesizer(self, synthesizer: SyntheticGradient) -> None:
        """Take another synthesiser, for :meth:`group_signal_shapes`.

        Parameters
        ----------
        synthesizer : SyntheticGradient
            The synthesiser.
        """
        shapes = getattr(synthesizer, 'group_shapes', None)
        if self.is_compiled and shapes is not None and shapes != self.group_signal_shapes():
            raise ValueError(
                f'The synthesiser is for groups of shapes {shapes}, and the model has '
                f'{self.group_signal_shapes()}. Make it by '
                'SyntheticGradient(learner.group_signal_shapes()).'
            )
        self.synthesizer = synthesizer

    def modulator_of(self, given: Any) -> Any:
        """The parameters of the synthesiser; no user's modulator."""
        super().modulator_of(given)
        return self._attached().param_values()

    def _attached(self) -> SyntheticGradient:
        if self.synthesizer is None:
            raise RuntimeError(
                'There is no synthesiser, which guesses the future for DNI. Attach one: '
                'learner.attach_synthesizer(SyntheticGradient(learner.group_signal_shapes())).'
            )
        return self.synthesizer

    def exit_signals(self, planes: GroupPlanes, modulator: Any) -> GroupPlanes:
        """What the synthesiser guesses from the states at the end of a chunk."""
        states = _by_group(planes)
        guesses = lax.stop_gradient(self._attached().apply(modulator, states))
        for group, state in states.items():
            if jnp.shape(guesses[group]) != state.shape:
                raise ValueError(
                    f'The synthesiser guesses cotangents of shape {jnp.shape(guesses[group])} for '
                    f'group {group}, whose states have the shape {state.shape}.'
                )
        return tuple(
            tuple(split_planes(guesses[group], len(own))) for group, own in enumerate(planes)
        )


def train_synthetic_gradient(
    learner: DNI,
    inputs: Any,
    *,
    chunk_size: int = 1,
    loss_fn: Callable[[Any], jax.Array] | None = None,
    optimizer: Any = None,
    lr: float = 1e-2,
    epochs: int = 1,
    reset: bool = True,
    batch_size: int | None = None,
) -> list[float]:
    """Train the synthesiser of a learner on what the losses of a sequence really say.

    The states at the start of each chunk are to tell the cotangents that its losses give them,
    those by way of the next chunk included, which are guessed; those after the last step are zero.
    Parameters of the model stay as they are.

    Parameters
    ----------
    learner : DNI
        The learner, with a synthesiser.
    inputs : PyTree of arrays
        The sequence, with a leading axis of steps.
    chunk_size : int
        The steps of a chunk: as many as the learner will be called with.
    loss_fn : callable, optional
        From the outputs of a chunk (of a step, if ``chunk_size`` is 1) to a number: the loss that
        the learner will be trained on; by default the sum of squares.
    optimizer : optional
        An optimiser of ``learner.synthesizer.states_dict()``; by default, plain steps along the
        gradient.
    lr : float
        The size of those steps.
    epochs : int
        How many times to go over the sequence.
    reset : bool
        Whether the learner and the model's states start anew before each time. Short-term states
        get the values that they had when the learner was compiled.
    batch_size : int, optional
        If given, ``brainstate.nn.reset_all_states`` resets them instead, with this batch size.

    Returns
    -------
    list of float
        Per epoch, the mean squared error of the guesses.

    Raises
    ------
    RuntimeError
        If no synthesiser is attached.
    ValueError
        If ``chunk_size`` is less than 1, or does not divide the length of the sequence.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(2, 4), 'dni', jnp.ones(2))
    >>> shapes = learner.group_signal_shapes()
    >>> learner.attach_synthesizer(braintrace.SyntheticGradient(shapes))
    >>> errors = braintrace.train_synthetic_gradient(learner, jnp.ones((10, 2)), epochs=9)
    >>> errors[-1] < errors[0]
    True
    """
    learner._attached()
    length = jnp.shape(jax.tree.leaves(inputs)[0])[0]
    if chunk_size < 1 or length % chunk_size:
        raise ValueError(
            f'chunk_size is {chunk_size}; it must be at least 1, and divide the {length} steps of '
            'the sequence.'
        )
    regression = _Regression(learner, loss_fn or _sum_of_squares, optimizer, lr)
    chunks = inputs
    if chunk_size > 1:
        chunks = jax.tree.map(lambda a: a.reshape(-1, chunk_size, *a.shape[1:]), inputs)

    @brainstate.transform.jit
    def epoch() -> jax.Array:
        errors = brainstate.transform.for_loop(
            lambda chunk: regression.step(MultiStepData(chunk) if chunk_size > 1 else chunk), chunks
        )
        return jnp.mean(jnp.append(errors, regression.last()))

    errors = []
    for _ in range(epochs):
        if reset:
            _start_anew(learner, batch_size)
        errors.append(float(epoch()))
    return errors


class _Regression:
    """Steps of a synthesiser's training."""

    def __init__(
        self, learner: DNI, loss_fn: Callable[[Any], jax.Array], optimizer: Any, lr: float
    ) -> None:
        self.learner, self.loss_fn = learner, loss_fn
        self.synthesizer = learner._attached()
        self.optimizer, self.lr = optimizer, lr

    def step(self, chunk: Any) -> jax.Array:
        """Learn from a chunk, and run it; returns the error of the guess at its start."""
        states = self._states()
        error = self._fit(states, self._cotangents(chunk))
        self.learner(chunk)
        return error

    def last(self) -> jax.Array:
        """Learn that nothing follows the last step."""
        states = self._states()
        return self._fit(states, jax.tree.map(jnp.zeros_like, states))

    def _states(self) -> GroupValues:
        _, hidden, _ = self.learner.graph_executor.values()
        return _by_group(self.learner.graph_executor.runner.entry_planes(hidden))

    def _cotangents(self, chunk: Any) -> GroupValues:
        """What the losses of a chunk and the guess at its end say of the states at its start."""
        learner, executor = self.learner, self.learner.graph_executor
        args = executor.with_environment((chunk,))
        params, hidden, others = executor.values()
        inputs = StepInputs(args, params, hidden, others, *learner.carried)

        def run(hidden: Any) -> Any:
            return run_forward(learner.driver, inputs._replace(hidden=hidden))[0]

        results, pull_back = jax.vjp(run, hidden)
        out, loss_pull_back = jax.vjp(self.loss_fn, results[0])
        planes = executor.runner.entry_planes(results[1])
        guess = learner.exit_signals(planes, self.synthesizer.param_values())
        exits = executor.runner.exit_cotangents(results, guess)
        (cotangents,) = pull_back((*loss_pull_back(jnp.ones_like(out)), *exits[1:]))
        return _by_group(executor.runner.entry_planes(cotangents))

    def _fit(self, states: GroupValues, targets: GroupValues) -> jax.Array:
        """Move the guesses for some states towards targets; returns the mean squared error."""
        weights = self.synthesizer.states_dict()

        def error() -> jax.Array:
            guesses = self.synthesizer.apply(self.synthesizer.param_values(), states)
            squares = [jnp.square(guesses[g] - targets[g]).ravel() for g in targets]
            return jnp.mean(jnp.concatenate(promoted(*squares)))

        gradient = brainstate.transform.grad(error, weights, return_value=True)
        grads, value = gradient()
        if self.optimizer is not None:
            self.optimizer.update(grads)
        else:
            for key, state in weights.items():
                held: Any = state.value
                state.value = held - jnp.asarray(self.lr, held.dtype) * grads[key]
        return value


def _by_group(planes: GroupPlanes) -> GroupValues:
    """The states of each group in one array."""
    every: Any = planes  # none is missing
    return {group: jnp.stack(promoted(*own), -1) for group, own in enumerate(every)}


def _sum_of_squares(outputs: Any) -> jax.Array:
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(outputs)]
    return jnp.sum(jnp.stack(promoted(*squares)))


def _start_anew(learner: DNI, batch_size: int | None) -> None:
    """Reset the states of a model, in place, and its learner."""
    if batch_size is not None:
        brainstate.nn.reset_all_states(learner, batch_size=batch_size)
    else:
        learner.reset_state()
        for path, value in learner._start_values.items():
            learner.graph_executor.states[path].value = value
