"""Where tests may promote types and ranks implicitly, which the library never does."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def promoting() -> Iterator[None]:
    """Code that is not ours to change: another package, or a model as users write them."""
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        yield
