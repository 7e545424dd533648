"""Hidden states that drive each other position by position."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import brainstate
import jax
import numpy as np
import saiunit as u
from brainstate import HiddenGroupState

from .._compat import Jaxpr, Var
from .._typing import Path, PyTree
from ..errors import NotSupportedError
from ..kernels.promotion import common_type
from .pretty import pretty

if TYPE_CHECKING:
    from .neighbours import SnapPattern

__all__ = ['HiddenGroup']


class HiddenGroup(NamedTuple):
    r"""Hidden states over a common shape that drive each other position by position.

    .. math::

        h_1^t, h_2^t, \ldots = f(h_1^{t-1}, h_2^{t-1}, \ldots, x^t)

    Attributes
    ----------
    index : int
        The position of this group in the graph.
    hidden_paths : list of Path
        Where the states live.
    hidden_states : list of brainstate.HiddenState
        The states.
    hidden_invars, hidden_outvars : list of Var
        Their variables before and after the step.
    transition_jaxpr : Jaxpr
        The transition: it takes the values of ``transition_jaxpr_constvars``, then the old states.
        Everything that mixes positions is cut out, unless the scope keeps it.
    transition_jaxpr_constvars : list of Var
        The other variables of the step that the transition reads.
    is_diagonal_recurrence : bool
        False if the scope keeps what mixes positions (:class:`Coupled`, :class:`Neighbourhood`).
    snap : SnapPattern or None
        With the scope :class:`Neighbourhood`, which positions are neighbours.
    pattern : tuple of tuple of bool
        ``pattern[s][q]`` is False where ``d h_s(t) / d h_q(t-1)`` is zero by structure.
    is_position_wise : bool
        False if states of the group also reach each other through an operation other than a matrix
        product that mixes positions (a reduction, a permutation); that influence is not traced.

    Examples
    --------
    >>> import brainstate, braintrace_fast as braintrace, jax.numpy as jnp
    >>> lstm = braintrace.nn.LSTMCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(lstm)
    >>> (group,), _ = braintrace.find_hidden_groups_from_module(lstm, jnp.ones(3))
    >>> group.hidden_paths, group.pattern
    ([('c',), ('h',)], ((True, False), (True, False)))
    """

    index: int  # type: ignore[assignment]  # a field by the reference's name, hides tuple.index
    hidden_paths: list[Path]
    hidden_states: list[brainstate.HiddenState]
    hidden_invars: list[Var]
    hidden_outvars: list[Var]
    transition_jaxpr: Jaxpr
    transition_jaxpr_constvars: list[Var]
    is_diagonal_recurrence: bool = True
    snap: 'SnapPattern | None' = None
    pattern: tuple[tuple[bool, ...], ...] = ()
    is_position_wise: bool = True

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of one state plane, in the step that was compiled.

        The states themselves may since have got an axis more, over which a learner is mapped.
        """
        state = self.hidden_states[0]
        if not self.hidden_invars:
            return tuple(state.varshape)
        shape = tuple(self.hidden_invars[0].aval.shape)
        return shape[:-1] if isinstance(state, HiddenGroupState) else shape

    @property
    def num_state(self) -> int:
        """The number of state planes."""
        return sum(state.num_state for state in self.hidden_states)

    @property
    def trace_state_width(self) -> int:
        """How many planes a trace has: one per state and neighbour."""
        return self.num_state * (1 if self.snap is None else self.snap.num_neighbour)

    @property
    def widths(self) -> tuple[int, ...]:
        """Per state, the length of its own state axis; 0 for a state without one."""
        return tuple(
            state.num_state if isinstance(state, HiddenGroupState) else 0
            for state in self.hidden_states
        )

    def check_consistent_varshape(self) -> None:
        """Check that all states have one shape.

        Raises
        ------
        NotSupportedError
            If they have not.
        """
        shapes = {
            path: tuple(state.varshape)
            for path, state in zip(self.hidden_paths, self.hidden_states, strict=True)
        }
        if len(set(shapes.values())) > 1:
            raise NotSupportedError(
                f'The hidden states of group {self.index} have different shapes: {shapes}. States '
                'of a group are coupled position by position and must have the same shape; give '
                'them the same shape, or keep them in groups of their own.'
            )

    def transition(self, hidden_vals: Sequence[jax.Array], input_vals: PyTree) -> list[jax.Array]:
        """The new states.

        Parameters
        ----------
        hidden_vals : sequence of jax.Array
            The old states.
        input_vals : sequence of jax.Array
            The values of ``transition_jaxpr_constvars``.
        """
        return jax.core.eval_jaxpr(self.transition_jaxpr, input_vals, *hidden_vals)

    def diagonal_jacobian(self, hidden_vals: Sequence[jax.Array], input_vals: PyTree) -> jax.Array:
        """``[..., a, b] = d h_a(t) / d h_b(t-1)`` per position, of shape ``(*varshape, S, S)``.

        With the scope :class:`Neighbourhood`, ``a`` and ``b`` number states of neighbours, the
        states of the first neighbour first. The arguments are those of :meth:`transition`.
        """
        from ..reference_api.compiler import diagonal_jacobian  # it imports this class

        return diagonal_jacobian(self, hidden_vals, input_vals)

    def full_jacobian(self, hidden_vals: Sequence[jax.Array], input_vals: PyTree) -> jax.Array:
        """``[p, a, q, b] = d h_a[p](t) / d h_b[q](t-1)``, shape ``(*varshape, S, *varshape, S)``.

        The arguments are those of :meth:`transition`.
        """
        from ..reference_api.compiler import full_jacobian  # it imports this class

        return full_jacobian(self, hidden_vals, input_vals)

    def concat_hidden(self, splitted_hid_vals: Iterable[jax.Array]) -> jax.Array:
        """Join the states along a last axis of planes.

        Parameters
        ----------
        splitted_hid_vals : iterable of jax.Array
            One array per state; that of a ``HiddenGroupState`` has its own axis of planes.

        Returns
        -------
        jax.Array
            Shape ``(*varshape, num_state)``.

        Raises
        ------
        ValueError
            If there are more or fewer arrays than states.
        """
        values = list(splitted_hid_vals)
        if len(values) != len(self.hidden_states):
            raise ValueError(
                f'Found {len(values)} values for the {len(self.hidden_states)} states '
                f'of hidden group {self.index}, {self.hidden_paths}: give one for each.'
            )
        planes = [
            value if width else u.math.expand_dims(value, axis=-1)
            for value, width in zip(values, self.widths, strict=True)
        ]
        dtype = common_type(*(plane.dtype for plane in planes))
        return u.math.concatenate([plane.astype(dtype) for plane in planes], axis=-1)

    def split_hidden(self, concat_hid_vals: jax.Array) -> list[jax.Array]:
        """Undo :meth:`concat_hidden`.

        Raises
        ------
        ValueError
            If the last axis is not ``num_state`` long.
        """
        if concat_hid_vals.shape[-1] != self.num_state:
            raise ValueError(
                f'The last axis of an array of shape {concat_hid_vals.shape} should number the '
                f'{self.num_state} planes of hidden group {self.index}, {self.hidden_paths}.'
            )
        ends = np.cumsum([state.num_state for state in self.hidden_states])[:-1]
        planes = u.math.split(concat_hid_vals, ends, axis=-1)
        return [
            value if width else u.math.squeeze(value, axis=-1)
            for value, width in zip(planes, self.widths, strict=True)
        ]

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        return pretty(self)
