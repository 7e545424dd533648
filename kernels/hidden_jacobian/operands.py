"""The operands of ``hidden_jacobian``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

__all__ = ['JacobianOperands']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JacobianOperands:
    """As :func:`braintrace_fast.kernels.hidden_jacobian.hidden_jacobian` takes them."""

    transition: Any = field(metadata={'static': True})
    constants: Sequence[Sequence[jax.Array]]
    inputs: Sequence[jax.Array]
