"""Traces that one number carries from step to step, whatever the hidden states do."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from .._compat import Var
from ..compiler import ETraceGraph, HiddenGroup
from ..compiler.transition import Planes, Transition
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.planes import Plane
from .links import group_plane

__all__ = ['Leak', 'with_leak']


@dataclasses.dataclass(frozen=True, eq=False)
class Leak:
    """A transition with ``D = decay 1``, and with the ``f`` of another one.

    Parameters
    ----------
    transition : Transition
        The one that the model has.
    group : HiddenGroup
        Its group.
    decay : float
        How much is kept from step to step; if nothing, ``D`` has no planes.
    """

    transition: Transition
    group: HiddenGroup
    decay: float

    @property
    def variables(self) -> list[Var]:
        """The variables of the step whose values :meth:`jacobians` needs."""
        return self.transition.variables

    @property
    def forward_only(self) -> bool:
        """Whether a ``while`` is inside, so that only forward mode exists."""
        return self.transition.forward_only

    @property
    def uniform(self) -> list[bool]:
        """Per new plane, whether its factors are uniform."""
        return self.transition.uniform

    @property
    def D_pattern(self) -> Sequence[Sequence[bool]]:
        """``[s][q]`` is False where ``D[s][q]`` is zero by structure."""
        planes = range(self.group.num_state)
        return [[s == q and self.decay != 0 for q in planes] for s in planes]

    def jacobians(
        self, values: Mapping[Var, jax.Array], backend: Backend = PLAIN
    ) -> tuple[Planes, dict[Var, list[Plane]]]:
        """``D[s][q]`` and, by ``y``, ``f[s]``."""
        _, f = self.transition.jacobians(values, backend)
        like = group_plane(self.group)
        kept = jnp.full(like.shape, self.decay, like.dtype)
        return [[kept if own else None for own in row] for row in self.D_pattern], f


def with_leak(graph: ETraceGraph, decay: float) -> ETraceGraph:
    """The graph of a model whose groups all leak so."""
    pairs = zip(graph.transitions, graph.hidden_groups, strict=True)
    return graph._replace(transitions=tuple(Leak(*pair, decay) for pair in pairs))
