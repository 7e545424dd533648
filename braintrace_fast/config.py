"""Which implementation of the kernels runs: what a learner, block, process or environment asks."""

import contextlib
import os
from collections.abc import Collection, Iterator
from contextvars import ContextVar

import jax

from .kernels.dispatch import Backend, platforms

__all__ = ['BACKENDS', 'check_backend', 'resolve_backend', 'set_backend', 'use_backend']

BACKENDS = ('auto', 'jax', 'pallas', 'interpret')

Strict = bool | Collection[str]

_in_block: ContextVar[tuple[str, Strict] | None] = ContextVar('backend', default=None)
_of_platform: dict[str, str] = {}


def check_backend(backend: str) -> str:
    """Return a backend's name, if it is one.

    Raises
    ------
    ValueError
        If it is not, with the names that are.
    """
    if backend not in BACKENDS:
        raise ValueError(f'The backend {backend!r} is not known; choose one of {BACKENDS}.')
    return backend


@contextlib.contextmanager
def use_backend(name: str, strict: Strict = False) -> Iterator[None]:
    """Let learners that are compiled inside use a backend, if they do not ask for one themselves.

    Parameters
    ----------
    name : {'auto', 'jax', 'pallas', 'interpret'}
        The backend.
    strict : bool or collection of str
        Platforms (``'cuda'``, ``'tpu'``) on which it is an error if there is no kernel for an op;
        True for the platform of this process.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> with braintrace.use_backend('pallas'):
    ...     learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.ones(3))
    >>> learner.resolved_backend.name
    'pallas'
    """
    token = _in_block.set((check_backend(name), strict))
    try:
        yield
    finally:
        _in_block.reset(token)


def set_backend(platform: str, name: str) -> None:
    """Set the backend of a platform for this process.

    Parameters
    ----------
    platform : {'cpu', 'gpu', 'tpu'}
        What ``jax.default_backend()`` says there.
    name : {'auto', 'jax', 'pallas', 'interpret'}
        The backend; ``'auto'`` undoes it.
    """
    if platform not in ('cpu', 'gpu', 'tpu'):
        raise ValueError(f"The platform {platform!r} is not known; choose 'cpu', 'gpu' or 'tpu'.")
    _of_platform[platform] = check_backend(name)


def resolve_backend(asked: str, strict: Strict = False) -> Backend:
    """The backend of a learner that is compiled now.

    The first that is not ``'auto'`` counts: what the learner asks for, :func:`use_backend`,
    :func:`set_backend`, the environment's ``BRAINTRACE_FAST_BACKEND``; else it is plain JAX on
    CPUs, and on accelerators kernels wherever they move fewer bytes. ``BRAINTRACE_FAST_STRICT=1``,
    or a list of platforms, is the same as ``strict``.
    """
    platform = jax.default_backend()
    block, block_strict = _in_block.get() or ('auto', False)
    environment = os.environ.get('BRAINTRACE_FAST_BACKEND', 'auto')
    asked_in_order = (asked, block, _of_platform.get(platform, 'auto'), environment)
    names = [name for name in map(check_backend, asked_in_order) if name != 'auto']
    name = names[0] if names else ('jax' if platform == 'cpu' else 'pallas')
    own = 'interpret' if name == 'interpret' else {'gpu': 'cuda'}.get(platform, platform)
    platforms = _strict_platforms(strict or block_strict or _strict_environment(), own)
    return Backend(name, platforms, auto=not names and name == 'pallas')


def _strict_environment() -> Strict:
    text = os.environ.get('BRAINTRACE_FAST_STRICT', '0').strip()
    return text == '1' if text in ('', '0', '1') else text.replace(',', ' ').split()


def _strict_platforms(strict: Strict, own: str) -> frozenset[str]:
    if isinstance(strict, bool):
        return frozenset({own} if strict else ())
    unknown = {*strict} - {*platforms(), 'cpu', 'interpret'}
    if unknown:
        raise ValueError(
            f'strict names the platforms {sorted(unknown)}, which are not known; choose among '
            f'{platforms()}, or True for the platform of this process.'
        )
    return frozenset(strict)
