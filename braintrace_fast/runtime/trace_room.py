"""Whether there is room for a trace, before it is made."""

from collections.abc import Sequence
from typing import Any

from ..compiler import HiddenParamOpRelation
from .links import Link
from .memory_budget import show_bytes
from .window_memory import tree_bytes

__all__ = ['too_large']


def too_large(
    relations: Sequence[HiddenParamOpRelation],
    links: Sequence[Link],
    trace: Sequence[Any],
    room: int | None,
) -> str | None:
    """Why a trace, of these shapes per link, cannot be carried in so many bytes; None if it can."""
    sizes = [tree_bytes(planes) for planes in trace]
    if room is None or sum(sizes) <= room:
        return None
    _, op = max(zip(sizes, (link.op for link in links), strict=True))
    return (
        f'The trace of this model takes {show_bytes(sum(sizes))}, and there is room for '
        f'{show_bytes(room)}, so it cannot be carried from step to step. {show_bytes(max(sizes))} '
        f'of it are for {relations[op].path} ({relations[op].source}). Learn whole sequences with '
        "etrace_grad(..., trace='fresh'), which carries none, or use pp_prop, whose trace is no "
        'larger than what a step computes. If there is room, say so by memory_budget, in bytes.'
    )
