"""Transitions of groups in which an op reads an old state, or another op, position by position.

Influence passes through the output of such an op, and its own influence is asked for as well. So
each has a transition of its own, in which all others are passed through.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from .._compat import Var
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.planes import Plane
from .flow import Flow
from .hidden_group import HiddenGroup
from .relation import HiddenParamOpRelation
from .transition import GroupTransition, Planes, Transition, build_transition

__all__ = ['ChainedTransition', 'transition_of']


@dataclasses.dataclass(frozen=True)
class ChainedTransition:
    """The transition of a group, in parts that each have some of the columns.

    Attributes
    ----------
    parts : tuple of GroupTransition
        The first has ``D``, and the columns of all ops that read no others.
    """

    parts: tuple[GroupTransition, ...]

    @property
    def variables(self) -> list[Var]:
        """The variables of the step whose values :meth:`jacobians` needs."""
        return list(dict.fromkeys(v for part in self.parts for v in part.variables))

    @property
    def forward_only(self) -> bool:
        """Whether a ``while`` is inside, so that only forward mode exists."""
        return any(part.forward_only for part in self.parts)

    @property
    def uniform(self) -> list[bool]:
        """Per new plane, whether its factors are uniform."""
        return [all(own) for own in zip(*(part.uniform for part in self.parts), strict=True)]

    @property
    def D_pattern(self) -> Sequence[Sequence[bool]]:
        """``[s][q]`` is False where ``D[s][q]`` is zero by structure."""
        return self.parts[0].D_pattern

    def jacobians(
        self, values: Mapping[Var, jax.Array], backend: Backend = PLAIN
    ) -> tuple[Planes, dict[Var, list[Plane]]]:
        """``D[s][q]`` and, by ``y``, ``f[s]``, as :meth:`GroupTransition.jacobians`."""
        (D, f), *others = [part.jacobians(values, backend) for part in self.parts]
        for _, own in others:
            f |= own
        return D, f


def transition_of(
    flow: Flow, group: HiddenGroup, relations: Sequence[HiddenParamOpRelation]
) -> Transition:
    """Cut the transition of a group out of a step's flow."""
    columns = {
        relation.y_var: f_pattern
        for relation in relations
        for reached, f_pattern in zip(relation.hidden_groups, relation.f_patterns, strict=True)
        if reached.index == group.index
    }
    sources = {*group.hidden_invars, *columns}
    chained = [y for y in columns if any(v in sources for v in flow.aligned(y) if v is not y)]

    def part(ys: Sequence[Var], D: Sequence[Sequence[bool]]) -> GroupTransition:
        return build_transition(
            flow,
            group.hidden_invars,
            group.hidden_outvars,
            ys,
            group.widths,
            [(*row, *(columns[y][s] for y in ys)) for s, row in enumerate(D)],
            [len(flow.sources[y].shape) < len(group.varshape) for y in ys],
        )

    first = part([y for y in columns if y not in chained], group.pattern)
    if not chained:
        return first
    no_D = [[False] * len(row) for row in group.pattern]
    return ChainedTransition((first, *(part([y], no_D) for y in chained)))
