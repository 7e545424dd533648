"""Which implementation of an op runs on which platform, and why.

An op is a folder with ``reference.py`` and, where there are kernels, ``triton.py`` and
``mosaic.py``, or ``blocked.py`` for CPUs; each has a function of the op's name. One traced program
holds the implementations of all platforms (:func:`jax.lax.platform_dependent`); lowering picks one.

A kernel says by ``supports(...)`` why it cannot take some operands and, where XLA is known to do as
well, by ``redundant(...)`` why nothing is lost without it: ``make accelerators`` compares the two.
Where that differs between TPUs, :func:`tpu_kind` is asked.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax import lax

__all__ = [
    'KERNELS',
    'PLAIN',
    'Backend',
    'Choice',
    'FallbackError',
    'on_tpu',
    'recording',
    'run',
    'tpu_kind',
]

KERNELS = {'cuda': 'triton', 'tpu': 'mosaic'}
"""The kind of kernel of each platform."""

logger = logging.getLogger('braintrace_fast')
_logged: set[Any] = set()
_record: ContextVar[list['Choice'] | None] = ContextVar('record', default=None)
_kind: ContextVar[str | None] = ContextVar('kind', default=None)


class FallbackError(RuntimeError):
    """There is no kernel for an op on a platform where plain JAX was not to be taken instead."""


class Backend(NamedTuple):
    """What was asked for, as it is passed to every op.

    Attributes
    ----------
    name : {'jax', 'pallas', 'interpret'}
        Plain JAX; kernels where there are any; or kernels in Pallas' interpreter.
    strict : frozenset of str
        Platforms on which it is an error if there is no kernel.
    auto : bool
        Whether nobody asked for kernels: plain JAX then runs where it moves as few bytes as they.
    """

    name: str = 'jax'
    strict: frozenset[str] = frozenset()
    auto: bool = False


PLAIN = Backend()


class Choice(NamedTuple):
    """The implementation of an op on a platform.

    Attributes
    ----------
    op, platform, implementation : str
        What, where, and by what.
    reason : str
        Why.
    """

    op: str
    platform: str
    implementation: str
    reason: str

    def __str__(self) -> str:
        return f'{self.op} on {self.platform}: {self.implementation}, {self.reason}'


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """Collect the choices that are made inside."""
    found: list[Choice] = []
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


@contextlib.contextmanager
def on_tpu(kind: str) -> Iterator[None]:
    """Choose as for a kind of TPU, whatever this process has.

    Parameters
    ----------
    kind : str
        As ``device_kind`` of a device names it, such as ``'TPU v4'``.
    """
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)


def tpu_kind() -> str | None:
    """The kind of TPU that programs of this process run on; None if there is none.

    A program does not know which device it is traced for: this is the first one, or that of
    :func:`on_tpu`.
    """
    if (stated := _kind.get()) is not None:
        return stated
    first = jax.devices()[0]
    return first.device_kind if first.platform == 'tpu' else None


def run(
    op: str,
    backend: Backend,
    bind: Callable[[Any], Callable[..., Any]],
    *operands: Any,
    cpu: Callable[..., Any] | None = None,
) -> Any:
    """Run an op on its operands.

    Parameters
    ----------
    op : str
        Its name, which is that of its folder and of its function; ``folder.function`` for a
        second function, whose ``supports`` is called ``supports_function``.
    backend : Backend
        What was asked for.
    bind : callable
        Gives an implementation its other arguments: ``bind(function)(*operands)``.
    *operands
        Trees of arrays, with None where a plane is structurally zero.
    cpu : callable, optional
        What to run on CPUs instead of the reference.
    """
    reference = bind(_function(op, 'reference'))
    if backend.name == 'interpret':
        reason = bind(_function(op, 'triton', 'supports'))(*operands)
        _note(op, 'interpret', 'triton', reason, backend)
        kernel = functools.partial(_function(op, 'triton'), interpret=True)
        return (reference if reason else bind(kernel))(*operands)
    by_platform = {} if cpu is None else {'cpu': cpu}
    if backend.name == 'pallas':
        for platform, kind in KERNELS.items():
            reason = bind(_function(op, kind, 'supports'))(*operands)
            redundant = _function(op, kind, 'redundant')
            if backend.auto and platform not in backend.strict and redundant is not None:
                reason = reason or bind(redundant)(*operands)
            _note(op, platform, kind, reason, backend)
            if reason is None:
                by_platform[platform] = bind(_function(op, kind))
        _note(op, 'cpu', 'none', 'there are no kernels for CPUs', backend)
    if not by_platform:
        return reference(*operands)
    return lax.platform_dependent(*operands, default=reference, **by_platform)


def _function(op: str, module: str, kind: str = '') -> Any:
    """What a module of an op says of it; Pallas is imported with the first kernel.

    Only ``redundant`` may be missing, and is None then.
    """
    folder, _, name = op.partition('.')
    function = f'{kind}_{name}'.strip('_') if kind else name or folder
    found = getattr(importlib.import_module(f'.{folder}.{module}', __package__), function, None)
    if found is None and kind != 'redundant':
        raise NotImplementedError(f'{folder}/{module}.py has no {function}, which {op} needs.')
    return found


def _cause(platform: str, backend: Backend) -> str:
    """Why a kernel is taken."""
    if not backend.auto:
        return 'asked for'
    return 'asked for by strict=' if platform in backend.strict else 'moves fewer bytes than XLA'


def _note(op: str, platform: str, kind: str, reason: str | None, backend: Backend) -> None:
    """Record, log and if need be refuse a choice; ``reason`` is why there is no kernel."""
    if reason and platform in backend.strict:
        raise FallbackError(
            f'{op} has no kernel on {platform}: {reason}. Change that, leave {platform!r} out of '
            "strict=, or use backend='jax'."
        )
    choice = Choice(op, platform, 'jax' if reason else kind, reason or _cause(platform, backend))
    found = _record.get()
    if found is not None and choice not in found:
        found.append(choice)
    if choice not in _logged:
        _logged.add(choice)
        level = logging.INFO if reason and platform != 'cpu' else logging.DEBUG
        logger.log(level, '%s', choice)
