"""Which positions of a group are traced together (SnAp)."""

from typing import NamedTuple

import numpy as np

__all__ = ['SnapPattern', 'snap_pattern']


class SnapPattern(NamedTuple):
    """The neighbourhoods of a group: the positions that each one reaches in fewer than ``n`` steps.

    Attributes
    ----------
    n : int
        How many steps a neighbourhood reaches, itself included.
    links : np.ndarray
        ``[r, p]``: whether position ``r`` may depend on position ``p`` of the step before.
    neighbours : np.ndarray
        ``[p, k]``: the positions in the neighbourhood of ``p``, itself first and, where it has
        fewer than others, again at the end.
    valid : np.ndarray
        ``[p, k]`` is False for what only fills the row.
    conservative : bool
        Whether it could not be told who reaches whom, so that all count as reached.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(2, 3)
    >>> learner = braintrace.compile(cell, braintrace.SnAp, jnp.ones(2), n=2)
    >>> learner.graph.hidden_groups[0].snap.neighbours.tolist()
    [[0, 1, 2], [1, 0, 2], [2, 0, 1]]
    """

    n: int
    links: np.ndarray
    neighbours: np.ndarray
    valid: np.ndarray
    conservative: bool

    @property
    def num_position(self) -> int:
        """How many positions an example has."""
        return len(self.links)

    @property
    def num_neighbour(self) -> int:
        """How many positions the largest neighbourhood has."""
        return self.neighbours.shape[1]

    @property
    def is_degenerate(self) -> bool:
        """Whether no position reaches another one."""
        return self.num_neighbour == 1

    @property
    def is_saturated(self) -> bool:
        """Whether all positions are in all neighbourhoods."""
        return self.num_neighbour == self.num_position and bool(self.valid.all())


def snap_pattern(links: np.ndarray, n: int, conservative: bool) -> SnapPattern:
    """The neighbourhoods, from who may depend on whom in one step."""
    reached = np.eye(len(links), dtype=bool)
    for _ in range(min(n - 1, len(links))):
        reached = links @ reached
    rows = [
        [p, *np.flatnonzero(own & (np.arange(len(own)) != p))] for p, own in enumerate(reached.T)
    ]
    width = max(map(len, rows))
    neighbours = np.array([row + row[:1] * (width - len(row)) for row in rows])
    valid = np.array([[k < len(row) for k in range(width)] for row in rows])
    return SnapPattern(n, links, neighbours, valid, conservative)
