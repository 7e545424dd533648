"""Which implementation of the engines runs: the names of backends, checked in one place."""

__all__ = ['BACKENDS', 'check_backend']

BACKENDS = ('auto', 'jax', 'pallas', 'interpret')


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
