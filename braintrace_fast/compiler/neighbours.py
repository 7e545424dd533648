"""Which positions of a group reach which others within some steps: the pattern of SnAp."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import NotSupportedError
from ..op import ETPPrimitive
from .auxiliary import aux_values
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .flow import Flow
from .hidden_group import HiddenGroup
from .mixing import Mixer, cut_out, find_mixers, num_example_axes, product_matrix
from .module_info import ModuleInfo

__all__ = ['MOST_ELEMENTS', 'SnapPattern', 'check_size', 'snap_pattern']

MOST_ELEMENTS = 2**24
"""How many elements Jacobians between neighbours have at most, unless the caller says more."""

_UNKNOWN = 'its states reach each other by other ways than single products of matrices'


class SnapPattern:
    """The neighbourhoods of the positions of a group: those that each reaches in ``n - 1`` steps.

    Parameters
    ----------
    n : int
        How many steps a neighbourhood reaches, itself included.
    varshape : tuple of int
        The shape of the group.
    links : numpy.ndarray
        ``[r, p]``: whether a position of an example may depend on another one of the step before.
    num_axes : int
        How many axes of ``varshape``, in front, number examples, which do not reach each other.
    reason : str
        Why all positions count as neighbours of all others; empty if the links are known.
    """

    def __init__(
        self,
        n: int,
        varshape: tuple[int, ...],
        links: np.ndarray,
        num_axes: int = 0,
        reason: str = '',
    ) -> None:
        self.n, self.varshape, self.links = n, tuple(varshape), links
        self.num_axes, self.reason = num_axes, reason

    @cached_property
    def members(self) -> np.ndarray:
        """``[p, k]``: the neighbours of a position of an example, itself first; -1 for none."""
        reached = np.eye(len(self.links), dtype=bool)
        for _ in range(min(self.n - 1, len(self.links))):
            reached = self.links @ reached
        rows = [
            [p, *np.flatnonzero(own & (np.arange(len(own)) != p))]
            for p, own in enumerate(reached.T)
        ]
        return np.array([row + [-1] * (max(map(len, rows)) - len(row)) for row in rows])

    @cached_property
    def valid(self) -> np.ndarray:
        """``[p, k]``: whether a position, counted over all examples, has a ``k``-th neighbour."""
        return np.tile(self.members >= 0, (self.num_examples, 1))

    @cached_property
    def neighbours(self) -> np.ndarray:
        """``[p, k]``: the neighbours of a position, itself in place of those that it lacks.

        Positions are counted over all examples.
        """
        size = len(self.links)
        own = np.where(self.members >= 0, self.members, np.arange(size)[:, None])
        return np.concatenate([own + size * example for example in range(self.num_examples)])

    @property
    def num_examples(self) -> int:
        """How many examples there are."""
        return math.prod(self.varshape[: self.num_axes])

    @property
    def num_position(self) -> int:
        """How many positions there are, over all examples."""
        return math.prod(self.varshape)

    @property
    def num_neighbour(self) -> int:
        """How many neighbours the largest neighbourhood has."""
        return self.members.shape[1]

    @property
    def conservative(self) -> bool:
        """Whether all positions count as neighbours because the links are not known."""
        return bool(self.reason)

    @property
    def is_degenerate(self) -> bool:
        """Whether no position reaches another one."""
        return self.num_neighbour == 1

    @property
    def is_saturated(self) -> bool:
        """Whether all positions of an example are in all neighbourhoods."""
        return self.num_neighbour == len(self.links) and bool((self.members >= 0).all())

    def __repr__(self) -> str:
        return (
            f'SnapPattern(n={self.n}, varshape={self.varshape}, '
            f'num_neighbour={self.num_neighbour}, conservative={self.conservative})'
        )


class _Products(NamedTuple):
    """The products of a group's step, None if there is more than them, and its example axes."""

    mixers: list[Mixer] | None
    num_axes: int


def snap_pattern(minfo: ModuleInfo, flow: Flow, group: HiddenGroup, n: int) -> SnapPattern:
    """The neighbourhoods of a group.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.
    flow : Flow
        Its flow.
    group : HiddenGroup
        The group.
    n : int
        How many steps a neighbourhood reaches, itself included.
    """
    eqns = cut_out(flow, group.hidden_invars, group.hidden_outvars).jaxpr.eqns
    num_axes = num_example_axes(eqns, group)
    products = _Products(find_mixers(flow, eqns, group, num_axes), num_axes)
    links = _links(minfo, group, products)
    reason = _UNKNOWN if products.mixers is None else ''
    pattern = SnapPattern(n, group.varshape, links, num_axes, reason)
    _note(group, pattern)
    return pattern


def _links(minfo: ModuleInfo, group: HiddenGroup, products: _Products) -> np.ndarray:
    positions = math.prod(group.varshape[products.num_axes :])
    if products.mixers is None:
        return np.ones((positions, positions), bool)
    found = np.eye(positions, dtype=bool)
    for mixer in products.mixers:
        found |= _linked_by(minfo, mixer, products.num_axes, positions)
    return found


def _linked_by(minfo: ModuleInfo, mixer: Mixer, num_axes: int, positions: int) -> np.ndarray:
    """What a product connects, whatever its weights: where those of ones are not zero."""
    everything = (mixer.sources >= 0)[None].repeat(positions, 0)
    op = mixer.eqn.primitive
    if not isinstance(op, ETPPrimitive):
        return everything
    try:
        named = aux_values(minfo, mixer.eqn)
    except NotSupportedError:  # entries that change from step to step
        return everything
    places = op.aux_invars(mixer.eqn.params)
    aux = {places[name]: value for name, value in named.items()}
    with jax.ensure_compile_time_eval():
        ones = [
            aux.get(place, jnp.ones(v.aval.shape, v.aval.dtype))
            for place, v in enumerate(mixer.eqn.invars)
        ]
        return np.asarray(product_matrix(mixer, ones, num_axes, positions)).T != 0


def _note(group: HiddenGroup, pattern: SnapPattern) -> None:
    paths = list(group.hidden_paths)
    if pattern.conservative:
        emit(
            DiagnosticKind.SNAP_PATTERN_CONSERVATIVE,
            DiagnosticLevel.WARNING,
            f'{paths}: every position counts as a neighbour of every other one, because '
            f'{pattern.reason}. The gradient is right, but takes '
            f'{len(pattern.links) * group.num_state} backward passes in every step.',
            hidden_paths=tuple(paths),
        )
    elif pattern.is_degenerate and pattern.n > 1:
        emit(
            DiagnosticKind.SNAP_PATTERN_DEGENERATE,
            DiagnosticLevel.INFO,
            f'{paths}: no position reaches another one, so that every neighbourhood is one '
            'position: the scope is the same as Coupled.',
            hidden_paths=tuple(paths),
        )


def check_size(groups: Sequence[HiddenGroup], most: int) -> None:
    """Refuse groups whose Jacobians between neighbours have too many elements.

    Raises
    ------
    NotSupportedError
        If those of a step, per position the square of neighbours times states, have more than
        ``most``.
    """
    for group in groups:
        elements = math.prod(group.varshape) * group.trace_state_width**2
        if elements > most:
            raise NotSupportedError(
                f'The Jacobians of {group.hidden_paths} between neighbours have {elements} '
                f'elements in each step, more than snap_max_jacobian_elements={most}. Take fewer '
                'neurons, a smaller sparse_n, or a higher limit.'
            )
