"""The operands of ``trace_step`` and ``trace_carry``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..planes import OpRules, Plane

__all__ = ['TraceOperands']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TraceOperands:
    """What takes the trace of one op across a step, or across a window of K steps.

    Attributes
    ----------
    rules : OpRules
        The op's trace rules: ``outer`` or, over a window, ``outer_sum``, and ``decay`` and
        ``contract``; and ``is_outer`` or ``entries``, by which kernels do without them.
    x : array or None
        The op's input, of shape ``(K, ...)`` over a window; None for an op of weights alone.
    decay : sequence of sequence of array or None
        ``D[s][q]``, or ``P[s][q]`` of a window; None where it is structurally zero.
    fresh : sequence of array or None
        ``f[s]``, or ``u[s]`` of shape ``(K, ...)``.
    trace : sequence
        The old trace, per plane; None for planes that are not kept.
    signal : sequence of array or None, optional
        What the loss says of the old states, per plane: it reads the old trace.
    seed : int array, optional
        Rounds what is stored in bfloat16 stochastically.
    live : bool array, optional
        If it is not set, the old trace counts as zero, whatever it holds.
    w : array, optional
        The cotangent of the op's output, whose product with ``x`` is added to what is read.
    total : dict, optional
        That product, shaped like the weights. A kernel computes the weight's entry itself.
    """

    rules: OpRules = field(metadata={'static': True})
    x: Any
    decay: Sequence[Sequence[Plane]]
    fresh: Sequence[Plane]
    trace: Sequence[Any]
    signal: Sequence[Plane] | None = None
    seed: Any = None
    live: Any = None
    w: Plane = None
    total: Any = None

    @property
    def places(self) -> tuple[Any, Any] | None:
        """The rows and columns of the entries of a sparse weight; None for another one."""
        return None if self.rules.entries is None else self.rules.entries()

    def op(self, name: str) -> str:
        """The op that takes the trace across a ``'step'``, or a window by ``'carry'``."""
        return f'{"trace" if self.rules.entries is None else "sparse"}_{name}'
