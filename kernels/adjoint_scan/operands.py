"""The operands of ``adjoint_scan``."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from ..planes import Plane

__all__ = ['AdjointOperands']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdjointOperands:
    """The planes of one group over a window, and what is wanted of them.

    Attributes
    ----------
    D, f, L, R, c, later, beyond
        As :func:`braintrace_fast.kernels.adjoint_scan.adjoint_scan` takes them.
    within : tuple of bool, optional
        Per op, whether ``L`` counts for it within its own step.
    carry : bool
        Whether ``P`` and ``u`` are wanted.
    """

    D: Sequence[Sequence[Plane]]
    f: Sequence[Sequence[Plane]]
    L: Sequence[Plane] | None = None
    R: Sequence[Plane] | None = None
    c: Sequence[Plane] | None = None
    later: Sequence[Plane] | None = None
    beyond: Sequence[Sequence[Plane]] | None = None
    within: tuple[bool, ...] | None = field(default=None, metadata={'static': True})
    carry: bool = field(default=False, metadata={'static': True})
