"""Which planes of a trace can be non-zero, which are read again, and how they are kept."""

import dataclasses
from collections.abc import Sequence

from ..compiler import ETraceGraph
from .links import Link

__all__ = ['TracePlanes', 'direct_ops', 'trace_planes']

Pattern = Sequence[Sequence[bool]]
"""``[s][q]`` is False where ``D[s][q]`` is zero by structure."""


@dataclasses.dataclass(frozen=True)
class TracePlanes:
    """The planes of a link's trace.

    Attributes
    ----------
    alive : tuple of bool
        Which can be non-zero.
    kept : tuple of bool
        Which of them are read again, and carried.
    uniform : tuple of bool
        Which are the same for all outputs of the op, and may be kept for one of them.
    inputs : tuple of bool
        Which are kept as filtered inputs of the op.
    """

    alive: tuple[bool, ...]
    kept: tuple[bool, ...]
    uniform: tuple[bool, ...]
    inputs: tuple[bool, ...]

    def not_kept(self) -> 'TracePlanes':
        """The same where none is carried."""
        return dataclasses.replace(self, kept=(False,) * len(self.kept))


def trace_planes(
    graph: ETraceGraph, link: Link, entry_is_read: bool, copies: int, compresses: bool
) -> TracePlanes:
    """The planes of a link's trace.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled model.
    link : Link
        The link.
    entry_is_read : bool
        Whether every plane is read where a chunk of steps starts.
    copies : int
        How many times there are planes: those behind the first are filters, and all read.
    compresses : bool
        Whether a plane may be kept as a filtered input.
    """
    pattern = graph.transitions[link.group.index].D_pattern
    alive = _alive(link, pattern)
    read = [True] * len(alive) if entry_is_read else _read_again(graph, link, pattern)
    kept = [*(a and r for a, r in zip(alive, read, strict=True)), *alive * (copies - 1)]
    rules, none = link.relation.primitive.trace_rules, (False,) * len(kept)
    if rules is None:  # it may be learned in fresh windows
        return TracePlanes(tuple(alive * copies), none, none, none)
    uniform = tuple(_uniform(graph, link, alive, pattern) * copies)
    by_output = uniform if rules.is_outer and rules.plane_view is None else none
    by_input = uniform if rules.keeps_input and compresses else none
    return TracePlanes(tuple(alive * copies), tuple(kept), by_output, by_input)


def direct_ops(graph: ETraceGraph) -> Sequence[bool]:
    """Per op, whether it reaches the loss of its step other than by hidden states."""
    perturb = graph.exit_perturb
    return [True] * len(graph.hidden_param_op_relations) if perturb is None else perturb.y_bypasses


def _alive(link: Link, pattern: Pattern) -> list[bool]:
    """Which planes can be non-zero: those that an op reaches, and what these reach."""
    alive = list(link.f_pattern)
    for _ in pattern:
        alive = [a or any(map(_both, row, alive)) for a, row in zip(alive, pattern, strict=True)]
    return alive


def _read_again(graph: ETraceGraph, link: Link, pattern: Pattern) -> list[bool]:
    """Which planes the next step reads, by its states or past them."""
    group = link.group
    bypassed = set() if graph.exit_perturb is None else set(graph.exit_perturb.bypass_invars)
    past = [
        old in bypassed
        for old, width in zip(group.hidden_invars, group.widths, strict=True)
        for _ in range(width or 1)
    ]
    return [any(column) or p for column, p in zip(zip(*pattern, strict=True), past, strict=True)]


def _uniform(graph: ETraceGraph, link: Link, alive: Sequence[bool], pattern: Pattern) -> list[bool]:
    """Which planes are made of uniform factors, and of no plane that is not uniform."""
    relation, shape = link.relation, link.group.varshape
    applies = relation.is_static and relation.y_var.aval.shape == shape
    if not applies or shape[-1:] == (1,):
        return [False] * len(alive)
    uniform = graph.transitions[link.group.index].uniform
    for _ in uniform:
        others = [a and not e for a, e in zip(alive, uniform, strict=True)]
        uniform = [
            own and not any(map(_both, row, others))
            for own, row in zip(uniform, pattern, strict=True)
        ]
    return uniform


def _both(a: bool, b: bool) -> bool:
    return a and b
