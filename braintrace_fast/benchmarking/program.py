"""Gradients of a sequence as compiled programs that always start from the same states."""

import contextlib
import functools
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import brainstate
import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.serialize_executable import serialize

from . import peak
from .hlo import Work, count_work

__all__ = ['Program', 'bptt', 'online', 'updating']

StepFn = Callable[..., Any]


class Program:
    """A function of states, compiled as a pure program.

    Running it leaves the states alone: every run starts from their values at the time of compiling.

    Parameters
    ----------
    function : callable
        What to run; it may read and write states.
    *args
        Its arguments.
    steps : int
        How many time steps it takes, for times per step.

    Attributes
    ----------
    seconds : float
        How long tracing and compiling took.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> from braintrace_fast import benchmarking
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.ones(3))
    >>> loss = lambda run, x: jnp.mean(run(x) ** 2)
    >>> program = benchmarking.online(learner, jnp.ones((5, 3)), step_fn=loss)
    >>> program()['Wz', 'weight']['weight'].shape, program.steps
    ((7, 4), 5)
    """

    def __init__(self, function: Callable[..., Any], *args: Any, steps: int) -> None:
        start = time.perf_counter()
        stateful = brainstate.transform.StatefulFunction(function, return_only_write=True)
        stateful.make_jaxpr(*args)
        self.states = stateful.get_states(*args)
        self.steps = steps
        leaves, tree = jax.tree.flatten(([state.value for state in self.states], args))
        self.leaves = jax.tree.map(jax.numpy.asarray, leaves)

        def pure(*leaves: Any) -> Any:
            values, args = jax.tree.unflatten(tree, leaves)
            new, result = stateful.jaxpr_call(values, *args)
            flat, self.result_tree = jax.tree.flatten(result)
            return flat, jax.tree.leaves(new)

        self.pure = jax.jit(pure)
        with _compiled_anew():
            self.compiled = self.pure.lower(*self.leaves).compile()
        self.seconds = time.perf_counter() - start

    def __call__(self) -> Any:
        """Run once, to the end, and return what the function returned."""
        result, _ = jax.block_until_ready(self.compiled(*self.leaves))
        return jax.tree.unflatten(self.result_tree, result)

    @functools.cached_property
    def work(self) -> Work:
        """The counted work of the compiled program."""
        return count_work(self.compiled.as_text() or '')

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of arguments, results and temporaries, as the compiler plans them."""
        plan: Any = self.compiled.memory_analysis()
        return {
            'argument_bytes': plan.argument_size_in_bytes,
            'output_bytes': plan.output_size_in_bytes,
            'temp_bytes': plan.temp_size_in_bytes,
        }

    @property
    def state_bytes(self) -> int:
        """Bytes that are carried from call to call besides the parameters: states and traces."""
        carried = [s.value for s in self.states if not isinstance(s, brainstate.ParamState)]
        return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(carried))

    def peak_bytes(self) -> int:
        """Bytes by which a fresh process grows when it runs the program once."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, 'program')
            arguments = [np.asarray(leaf) for leaf in self.leaves]
            path.write_bytes(pickle.dumps((serialize(self.compiled), arguments)))
            command = [sys.executable, str(peak.__file__), str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f'The process that measures the peak failed:\n{done.stderr}')
        return int(done.stdout)


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Compile without the persistent cache: what it gives back cannot be serialized again."""
    name = 'jax_enable_compilation_cache'
    enabled = getattr(jax.config, name)
    jax.config.update(name, False)
    reset_cache()  # JAX asks once whether the cache is used
    try:
        yield
    finally:
        jax.config.update(name, enabled)
        reset_cache()


def online(learner: Any, *sequences: Any, step_fn: StepFn, **options: Any) -> Program:
    """The gradient of a sequence by a learner.

    Parameters
    ----------
    learner : ETraceVjpAlgorithm
        A compiled learner, or one of another library that has ``etrace_grad``.
    *sequences
        Arrays with a leading axis of steps.
    step_fn : callable
        ``(run, *slices)``, which calls ``run`` once and returns the loss of the step. The same
        function serves learners and plain models.
    **options
        Arguments of ``etrace_grad``.
    """
    step = functools.partial(step_fn, learner)
    return Program(
        lambda *given: learner.etrace_grad(*given, step_fn=step, **options),
        *sequences,
        steps=_length(sequences),
    )


def bptt(
    model: brainstate.nn.Module, *sequences: Any, step_fn: StepFn, reduction: str = 'mean'
) -> Program:
    """The gradient of a sequence by reverse mode through the model, with arguments as `online`."""
    weights: Any = model.states(brainstate.ParamState)

    def total(*given: Any) -> Any:
        losses = brainstate.transform.for_loop(functools.partial(step_fn, model), *given)
        return losses.mean() if reduction == 'mean' else losses.sum()

    return Program(
        lambda *given: brainstate.transform.grad(total, weights)(*given),
        *sequences,
        steps=_length(sequences),
    )


def updating(learner: Any, *sequences: Any, step_fn: StepFn, rate: float = 1e-3) -> Program:
    """A run over a sequence that changes the weights in every step, inside one loop.

    Parameters
    ----------
    learner, *sequences, step_fn
        As for :func:`online`.
    rate : float
        How far to go down the gradient of each step.

    Returns
    -------
    Program
        It returns the losses, and the weights at the end by path.
    """
    weights: Any = learner.param_states

    def step(*slices: Any) -> Any:
        gradient = brainstate.transform.grad(
            lambda: step_fn(learner, *slices), weights, return_value=True
        )
        grads, loss = gradient()
        for path, state in weights.items():
            state.value = jax.tree.map(lambda w, g: w - rate * g, state.value, grads[path])
        return loss

    def run(*given: Any) -> Any:
        losses = brainstate.transform.for_loop(step, *given)
        return losses, {path: state.value for path, state in weights.items()}

    return Program(run, *sequences, steps=_length(sequences))


def _length(sequences: Sequence[Any]) -> int:
    return int(jax.tree.leaves(sequences)[0].shape[0])
