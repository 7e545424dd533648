"""The operands of ``factored_trace`` and ``smooth``."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from ..planes import Plane

__all__ = ['FactoredOperands', 'SmoothOperands']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FactoredOperands:
    """As :func:`braintrace_fast.kernels.factored_trace.factored_trace` takes them."""

    D: Sequence[Sequence[Plane]]
    f: Sequence[Sequence[Plane]]
    start: Sequence[Sequence[jax.Array]]
    decay: float = field(metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SmoothOperands:
    """As :func:`braintrace_fast.kernels.factored_trace.smooth` takes them."""

    x: jax.Array
    left: jax.Array | None
    decay: float = field(metadata={'static': True})
    reverse: bool = field(default=False, metadata={'static': True})
