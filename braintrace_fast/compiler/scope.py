"""Which influence a trace keeps: a policy that the compiler is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .._typing import Path
from ..errors import NotSupportedError
from ..op import ETPPrimitive

__all__ = ['Coupled', 'Neighbourhood', 'Scope', 'requested_scope']


@dataclass(frozen=True)
class Scope:
    """Which influence is kept from step to step, beyond that of each position on itself.

    Influence always follows plain operations position by position. The scope decides about ops,
    about layers, and about influence that passes through what mixes positions. This class keeps
    the influence through ops that say so (``gradient_enabled``) and between the states of one
    layer, and none through what mixes positions. :class:`Coupled` and :class:`Neighbourhood` keep
    more. For other choices, subclass it and pass an instance to
    ``compile_etrace_graph(..., scope=...)``.

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
    mixes: ClassVar[bool] = False
    """Whether states of a group may also reach each other through what mixes positions."""
    keeps_others: ClassVar[bool] = False
    """Whether ``D`` holds, for a pair of states, a matrix of all positions by all others."""

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


@dataclass(frozen=True)
class Coupled(Scope):
    """Keep what each position does to itself by any path, through recurrent ops too.

    ``D`` is the block diagonal of the whole step of a group. Of a recurrent op it takes the
    diagonal of the weight, which costs no Jacobian.

    Parameters
    ----------
    couple_layers : bool
        As for :class:`Scope`.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> rnn = braintrace.nn.ValinaRNNCell(3, 4)
    >>> rnn.init_state()
    >>> graph = braintrace.compile_etrace_graph(rnn, jnp.ones(3), scope=braintrace.Coupled())
    >>> graph.hidden_groups[0].pattern
    ((True,),)
    """

    mixes: ClassVar[bool] = True


@dataclass(frozen=True)
class Neighbourhood(Coupled):
    """Keep what each position does to those that it reaches in fewer than ``n`` steps.

    ``D[s][q]`` is then ``d h_s(t) / d h_q(t-1)`` of all positions by all others, with two more
    axes in place of those of positions: the result's, then the source's.

    Parameters
    ----------
    couple_layers : bool
        As for :class:`Scope`.
    n : int
        How many steps a neighbourhood reaches, itself included: 1 is :class:`Coupled`.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> braintrace.Neighbourhood(n=2).keeps_others
    True
    """

    n: int = 2
    keeps_others: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise TypeError(f'n is {self.n!r}; a neighbourhood needs an integer of at least 1.')
        if self.n < 1:
            raise ValueError(f'n is {self.n}; a neighbourhood needs an integer of at least 1.')


def requested_scope(
    include_recurrent_mixing: bool, sparse_n: int | None, couple_layers: bool = False
) -> Scope:
    """The scope that braintrace's arguments ask for.

    Parameters
    ----------
    include_recurrent_mixing : bool
        Whether it is at least :class:`Coupled`.
    sparse_n : int, optional
        The order of a :class:`Neighbourhood`.
    couple_layers : bool
        As for :class:`Scope`.

    Raises
    ------
    TypeError, ValueError
        If ``sparse_n`` is no integer, or less than 1.
    NotSupportedError
        If there is one, but no recurrent mixing.
    """
    if sparse_n is None:
        return Coupled(couple_layers) if include_recurrent_mixing else Scope(couple_layers)
    scope = Neighbourhood(couple_layers, sparse_n)
    if not include_recurrent_mixing:
        raise NotSupportedError(
            f'sparse_n={sparse_n} without recurrent mixing would leave every position alone in its '
            'neighbourhood (K=1), since positions reach each other through recurrent ops only. '
            'Pass include_recurrent_mixing=True as well, or no sparse_n.'
        )
    return scope
