"""What a step reads from brainstate's environment, and how it follows what the caller sets there.

A value that is read while a step is traced is one of two things:

- an *input* of the step, if it is a number or an array that changes from call to call, as the time
  ``t`` does. It is read again at every call, and may be a tracer;
- a *constant* of the program otherwise: a flag such as ``fit``, or a number that has never changed,
  as ``dt``. A step traced with one value does not fit another; it has to be traced again.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._typing import PyTree

__all__ = ['CHANGING', 'Environment', 'EnvironmentValues', 'bind_environment', 'trace_reads']

CHANGING = (brainstate.environ.T, brainstate.environ.I)
"""The keys that are inputs from the start: the time, and the number of the step."""

SETTINGS = frozenset(
    {
        brainstate.environ.PRECISION,
        brainstate.environ.PLATFORM,
        brainstate.environ.HOST_DEVICE_COUNT,
        brainstate.environ.JIT_ERROR_CHECK,
    }
)
"""The keys whose values are constants of the program, even if they are numbers."""

MISSING = object()

_patching = threading.RLock()


class EnvironmentValues(NamedTuple):
    """The values of a step's inputs that come from the environment, by key."""

    values: dict[str, Any]


class Environment(NamedTuple):
    """What a step was traced with.

    Attributes
    ----------
    inputs : dict
        Per key that is an input of the step, the shapes and types of its value.
    constants : dict
        Per other key that the step reads, its value; ``MISSING`` if there was none.
    """

    inputs: dict[str, PyTree] = {}
    constants: dict[str, Any] = {}

    def fits(self) -> bool:
        """Whether the step can run in the present environment."""
        return all(_fits(_present(key), like) for key, like in self.inputs.items()) and all(
            _same(_present(key), value) for key, value in self.constants.items()
        )

    def moved(self) -> set[str]:
        """The keys of constants that are numbers and have changed."""
        return {
            key
            for key, value in self.constants.items()
            if _can_move(key, value)
            and _can_move(key, _present(key))
            and not _same(_present(key), value)
        }

    def changes(self) -> list[str]:
        """How the constants differ from the present environment, in words."""
        pairs = {key: (value, _present(key)) for key, value in self.constants.items()}
        return [
            f'{key} is {_show(now)} (it was {_show(then)})'
            for key, (then, now) in pairs.items()
            if not _same(now, then)
        ]

    def values(self) -> EnvironmentValues:
        """The present values of the inputs."""
        return EnvironmentValues(
            {
                key: jax.tree.map(lambda a, one: jnp.asarray(a, one.dtype), _present(key), like)
                for key, like in self.inputs.items()
            }
        )


def bind_environment(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that takes values of its environment as its first argument."""

    def bound(environment: EnvironmentValues, *args: Any, **kwargs: Any) -> Any:
        with brainstate.environ.context(**environment.values):
            return step(*args, **kwargs)

    return bound


def trace_reads(
    trace: Callable[[EnvironmentValues | None], Any], changing: Collection[str]
) -> tuple[Any, Environment]:
    """Trace a step, with what it reads from the environment as inputs where that is possible.

    Parameters
    ----------
    trace : callable
        Traces the step with these values as its first argument, or without such an argument.
    changing : collection of str
        Keys whose numbers are inputs. Arrays and tracers are in any case.

    Returns
    -------
    tuple
        What ``trace`` returned, and the environment.
    """
    present = brainstate.environ.all()
    movable = {key: value for key, value in present.items() if _can_move(key, value)}
    wanted = {k: v for k, v in movable.items() if k in changing or not _is_scalar(v)}

    def attempt(inputs: Mapping[str, Any]) -> tuple[Any, Environment]:
        values = {key: jax.tree.map(jnp.asarray, value) for key, value in inputs.items()}
        with _recorded_reads() as reads:
            traced = trace(EnvironmentValues(values) if values else None)
        unread = [key for key in values if key not in reads]
        if unread:
            return attempt({key: v for key, v in inputs.items() if key in reads})
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), values)
        constants = {key: present.get(key, MISSING) for key in reads if key not in values}
        return traced, Environment(shapes, constants)

    try:
        return attempt(wanted)
    except TypeError:  # a shape, an index or a branch in Python needs a concrete value
        if not wanted:
            raise
    possible: dict[str, Any] = {}
    for key, value in wanted.items():
        try:
            attempt({**possible, key: value})
        except TypeError:
            continue
        possible[key] = value
    return attempt(possible)


@contextmanager
def _recorded_reads() -> Iterator[dict[str, None]]:
    """The keys that this thread reads from the environment, in order."""
    reads: dict[str, None] = {}
    thread = threading.get_ident()
    with _patching:
        get = brainstate.environ.get

        def recording_get(key: str, *args: Any, **options: Any) -> Any:
            if options.get('env') is None and threading.get_ident() == thread:
                reads[key] = None
            return get(key, *args, **options)

        brainstate.environ.get = recording_get
        try:
            yield reads
        finally:
            brainstate.environ.get = get


def _present(key: str) -> Any:
    return brainstate.environ.get(key, default=MISSING)


def _can_move(key: str, value: Any) -> bool:
    """Whether a value could be an input of a step."""
    leaves = jax.tree.leaves(value)
    numbers = (int, float, complex, np.ndarray, np.number, jax.Array)
    return (
        key not in SETTINGS
        and bool(leaves)
        and all(isinstance(a, numbers) and not isinstance(a, bool) for a in leaves)
    )


def _is_scalar(value: Any) -> bool:
    return all(
        jnp.size(a) == 1 and not isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(value)
    )


def _fits(value: Any, like: PyTree) -> bool:
    if not _same_structure(value, like):
        return False
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(like), strict=True)
    return all(
        jnp.shape(a) == one.shape
        and (jnp.result_type(a) == one.dtype or _is_python_number(a, one.dtype))
        for a, one in pairs
    )


def _is_python_number(value: Any, dtype: Any) -> bool:
    """Whether a Python number takes on a type when it meets an array of it."""
    kinds = {int: jnp.number, float: jnp.inexact, complex: jnp.complexfloating}
    return type(value) in kinds and jnp.issubdtype(dtype, kinds[type(value)])


def _same(a: Any, b: Any) -> bool:
    """Whether the program is the same for two values of a constant."""
    if a is b:
        return True
    if not _same_structure(a, b):
        return False
    return all(map(_same_leaf, jax.tree.leaves(a), jax.tree.leaves(b)))


def _same_structure(a: PyTree, b: PyTree) -> bool:
    structures: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    return structures[0] == structures[1]


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
        return jnp.result_type(a) == jnp.result_type(b) and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _show(value: Any) -> str:
    return 'not set' if value is MISSING else repr(value)
