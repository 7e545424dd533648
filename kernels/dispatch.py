"""Which implementation of an op runs on which platform, and why.

An op is a folder with ``reference.py`` and a file per kind of kernel, such as ``triton.py``; each
has a function of the op's name, which takes the op's operands as one object. One traced program
holds the implementations for all platforms (:func:`jax.lax.platform_dependent`), and lowering picks
one of them.

A kernel says by ``supports(operands)`` why it cannot take some operands and, where XLA is known
to do as well, by ``redundant(operands)`` why nothing is lost without it: ``make accelerators``
compares the two. Where that differs between TPUs, :func:`tpu_kind` tells them apart.

The kinds of kernels are a registry, ``KINDS``. To add one, write its files and its entry there; or
pass its implementations to :func:`register_kind` from outside the package.
"""

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

__all__ = [
    'KINDS',
    'PLAIN',
    'Backend',
    'Choice',
    'FallbackError',
    'Implementation',
    'Kind',
    'implementation_of',
    'on_tpu',
    'platforms',
    'recording',
    'register_kind',
    'run',
    'tpu_kind',
    'unregister_kind',
]

logger = logging.getLogger('braintrace_fast')
_logged: set[Any] = set()
_record: ContextVar[list['Choice'] | None] = ContextVar('record', default=None)
_kind: ContextVar[str | None] = ContextVar('kind', default=None)


class Implementation(NamedTuple):
    """An op as a kind of kernel runs it.

    Attributes
    ----------
    run : callable
        From the operands to the results; with ``interpret=True``, in Pallas' interpreter.
    supports : callable
        From the operands, or their shapes, to why there is no kernel for them; None if there is.
    redundant : callable, optional
        Likewise, why plain JAX moves as few bytes; None if it does not.
    """

    run: Callable[..., Any]
    supports: Callable[[Any], str | None]
    redundant: Callable[[Any], str | None] | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of kernel.

    Attributes
    ----------
    name : str
        Its name, which is also that of its file in the folder of each op.
    platform : str
        Where it runs, as :func:`jax.lax.platform_dependent` names it.
    priority : int
        Of the kinds for a platform, the one with the highest priority that takes the operands runs.
    interpreted : bool
        Whether ``backend='interpret'`` may run it.
    implementations : mapping, optional
        By name of op, for a kind from outside the package; other ops have no such kernel. None if
        they are in the files of the ops, which must then have all of them.
    """

    name: str
    platform: str
    priority: int = 0
    interpreted: bool = False
    implementations: Mapping[str, Implementation] | None = None


KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (Kind('triton', 'cuda', interpreted=True), Kind('mosaic', 'tpu'))
}
"""The kinds of kernels that there are, by name; :func:`register_kind` adds to them."""


def register_kind(kind: Kind) -> None:
    """Add a kind of kernel.

    Learners see it from their next compilation on: what is traced already stays as it is.

    Examples
    --------
    >>> from braintrace_fast.kernels.dispatch import (
    ...     Implementation, Kind, platforms, register_kind, unregister_kind
    ... )
    >>> none = Implementation(run=lambda operands: None, supports=lambda operands: 'it is a toy')
    >>> register_kind(Kind('toy', 'rocm', implementations={'trace_step': none}))
    >>> platforms()
    ['cuda', 'tpu', 'rocm']
    >>> unregister_kind('toy')
    """
    if kind.name in (*KINDS, 'jax', 'reference'):
        raise ValueError(f'There is a kind {kind.name!r} already; the kinds are {[*KINDS]}.')
    KINDS[kind.name] = kind


def unregister_kind(name: str) -> None:
    """Remove a kind of kernel."""
    if name not in KINDS:
        raise ValueError(f'There is no kind {name!r}; the kinds are {[*KINDS]}.')
    del KINDS[name]


def platforms() -> list[str]:
    """The platforms for which there is a kind of kernel."""
    return list(dict.fromkeys(kind.platform for kind in KINDS.values()))


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
    choices: list[Choice] = []
    token = _record.set(choices)
    try:
        yield choices
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
    op: str, backend: Backend, operands: Any, *, cpu: Callable[[Any], Any] | None = None
) -> Any:
    """Run an op on its operands.

    Parameters
    ----------
    op : str
        Its name, which is that of its folder and of its function; ``folder.function`` for a
        second function, whose ``supports`` is called ``supports_function``.
    backend : Backend
        What was asked for.
    operands : object
        The op's operands: a pytree of arrays, with None where a plane is structurally zero.
    cpu : callable, optional
        What plain JAX runs on CPUs instead of the reference.
    """
    reference = _function(op, 'reference')
    if backend.name == 'interpret':
        kernel = _chosen(op, 'interpret', backend, operands)
        return reference(operands) if kernel is None else kernel(operands, interpret=True)
    by_platform = {} if cpu is None else {'cpu': cpu}
    if backend.name == 'pallas':
        for platform in dict.fromkeys([*platforms(), 'cpu']):
            kernel = _chosen(op, platform, backend, operands)
            by_platform |= {} if kernel is None else {platform: kernel}
    if not by_platform:
        return reference(operands)
    leaves, tree = jax.tree.flatten(operands)

    def of_leaves(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda *leaves: function(jax.tree.unflatten(tree, leaves))

    flat = {platform: of_leaves(function) for platform, function in by_platform.items()}
    return lax.platform_dependent(*leaves, default=of_leaves(reference), **flat)


def implementation_of(op: str, kind: str) -> Implementation | None:
    """An op as a kind of kernel runs it; None if there is no such kernel."""
    given = KINDS[kind].implementations
    if given is not None:
        return given.get(op)
    functions = (_function(op, kind, prefix) for prefix in ('', 'supports', 'redundant'))
    return Implementation(*functions)


def _function(op: str, module: str, prefix: str = '') -> Any:
    """What a module of an op says of it; Pallas is imported with the first kernel.

    Only ``redundant`` may be missing, and is None then.
    """
    folder, _, name = op.partition('.')
    wanted = f'{prefix}_{name}'.strip('_') if prefix else name or folder
    function = getattr(importlib.import_module(f'.{folder}.{module}', __package__), wanted, None)
    if function is None and prefix != 'redundant':
        raise NotImplementedError(f'{folder}/{module}.py has no {wanted}, which {op} needs.')
    return function


def _chosen(op: str, platform: str, backend: Backend, operands: Any) -> Callable[..., Any] | None:
    """The kernel that runs an op on a platform; None if plain JAX does. The choice is noted."""
    refused: dict[str, str] = {}
    for kind in sorted(KINDS.values(), key=lambda kind: -kind.priority):
        is_here = kind.interpreted if platform == 'interpret' else kind.platform == platform
        implementation = implementation_of(op, kind.name) if is_here else None
        if implementation is None:
            continue
        reason = implementation.supports(operands)
        is_optional = backend.auto and platform not in backend.strict
        if reason is None and is_optional and implementation.redundant is not None:
            reason = implementation.redundant(operands)
        if reason is None:
            cause = '; '.join([_cause(platform, backend), *_listed(refused)])
            _note(Choice(op, platform, kind.name, cause))
            return implementation.run
        refused[kind.name] = reason
    none = 'there are no kernels for CPUs' if platform == 'cpu' else 'no kind of kernel has it'
    reason = none if not refused else '; '.join(_listed(refused))
    if len(refused) == 1:
        (reason,) = refused.values()
    if platform in backend.strict:
        raise FallbackError(
            f'{op} has no kernel on {platform}: {reason}. Change that, leave {platform!r} out of '
            "strict=, or use backend='jax'."
        )
    _note(Choice(op, platform, 'jax', reason))
    return None


def _listed(refused: Mapping[str, str]) -> list[str]:
    return [f'not {kind}: {reason}' for kind, reason in refused.items()]


def _cause(platform: str, backend: Backend) -> str:
    """Why a kernel is taken."""
    if not backend.auto:
        return 'asked for'
    return 'asked for by strict=' if platform in backend.strict else 'moves fewer bytes than XLA'


def _note(choice: Choice) -> None:
    """Record a choice, and log it the first time."""
    record = _record.get()
    if record is not None and choice not in record:
        record.append(choice)
    if choice not in _logged:
        _logged.add(choice)
        is_fallback = choice.implementation == 'jax' and choice.platform != 'cpu'
        logger.log(logging.INFO if is_fallback else logging.DEBUG, '%s', choice)
