"""Where tests may promote types and ranks implicitly, which the library never does."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def promoting(allowed: bool = True) -> Iterator[None]:
    """For code that is not ours to change: another package's, or a model as users write them."""
    types, ranks = ('standard', 'allow') if allowed else ('strict', 'raise')
    with jax.numpy_dtype_promotion(types), jax.numpy_rank_promotion(ranks):
        yield
