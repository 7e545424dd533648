"""Which influence a trace keeps: a policy that the compiler is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._typing import Path
from ..op import ETPPrimitive

__all__ = ['Scope']


@dataclass(frozen=True)
class Scope:
    """Which influence is kept from step to step, beyond that of each position on itself.

    Influence always follows plain operations position by position, and always ends where they mix
    positions. The scope decides about ops and about layers. This class keeps the influence through
    ops that say so (``gradient_enabled``) and between the states of one layer. To keep more or
    less, subclass it and pass an instance to ``compile_etrace_graph(..., scope=...)``.

    Parameters
    ----------
    couple_layers : bool
        Whether to keep the influence of states on those of other layers.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> class EveryOp(braintrace.Scope):
    ...     '''Follow all ops where they act position by position.'''
    ...     def follows(self, op, params):
    ...         return True
    >>> gain = braintrace.register_primitive('docs_scope_gain', lambda x, weight: x * weight)
    >>> braintrace.Scope().follows(gain, {}), EveryOp().follows(gain, {})
    (False, True)
    """

    couple_layers: bool = False

    def follows(self, op: ETPPrimitive, params: Mapping[str, Any]) -> bool:
        """Whether influence on the input of an op counts as influence on its output.

        If so, it does as far as the op acts position by position; if not, it ends at the op. An op
        inside control flow that is not opened is not asked about.

        Parameters
        ----------
        op : ETPPrimitive
            The op.
        params : mapping
            The parameters of its equation.
        """
        return op.gradient_enabled

    def couples(self, path: Path, other: Path) -> bool:
        """Whether a state that drives another one position by position is in one group with it.

        Paths that part at an integer, as ``('layers', 0, ...)`` and ``('layers', 1, ...)`` do, are
        of two layers.

        Parameters
        ----------
        path, other : Path
            The paths of the two states.
        """
        keys = zip(path, other, strict=False)
        parting = next((pair for pair in keys if pair[0] != pair[1]), ())
        return self.couple_layers or not any(isinstance(key, int) for key in parting)
