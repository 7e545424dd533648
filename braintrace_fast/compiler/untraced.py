"""The one warning of a compilation, and its refusal: weights that could be traced, and are not."""

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path as FilePath

from .._typing import Path
from ..errors import CompilationError, UntracedWarning
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from .graph import ETraceGraph

__all__ = ['check_traced', 'untraced_message', 'warn_of_untraced']

_PACKAGE = str(FilePath(__file__).parents[1])
_SHOWN = 3
_IN_PART = frozenset(
    [
        DiagnosticKind.RELATION_PARTIAL_PATH,
        DiagnosticKind.TAIL_NOT_POSITION_WISE,
        DiagnosticKind.TRANSITION_NOT_POSITION_WISE,
        DiagnosticKind.HIDDEN_COUPLING_NOT_TRACED,
        DiagnosticKind.CONTROL_FLOW_OPAQUE_FWD,
        DiagnosticKind.CONTROL_FLOW_RECURRENT_MIXING,
    ]
)
"""Kinds that concern weights of which only a part of the influence is traced."""


def check_traced(graph: ETraceGraph) -> None:
    """Refuse a model of which no weight is traced.

    Raises
    ------
    CompilationError
        If there is none; it says why.
    """
    if graph.hidden_param_op_relations:
        return
    reasons = [f'  - {record.message}' for record in graph.diagnostics if record.weight_path]
    listed = '\n'.join(reasons) or '  - The step uses no ParamState at all.'
    raise CompilationError(
        'No weight of the model can be traced, so there is nothing to learn online. Pass the '
        'weights whose influence lasts through an op of this library (matmul, element_wise, or a '
        f'layer of braintrace_fast.nn). What was found:\n{listed}'
    )


def warn_of_untraced(graph: ETraceGraph) -> None:
    """Warn once, at the line of the user's code that compiles, if the model deserves a look."""
    message = untraced_message(graph)
    if message is not None:
        warnings.warn(message, UntracedWarning, stacklevel=_level_of_user())


def untraced_message(graph: ETraceGraph) -> str | None:
    """How many weights are left out or traced in part, where, and what to change."""
    places: dict[tuple[DiagnosticKind, str], list[CompilationRecord]] = {}
    for record in graph.diagnostics:
        if record.level is DiagnosticLevel.WARNING and _weights(graph, record):
            source = (record.context or {}).get('source', record.message)
            places.setdefault((record.kind, source), []).append(record)
    if not places:
        return None
    concerned = [_concerned(graph, records) for records in places.values()]
    worst = sorted(
        zip(places, concerned, strict=True),
        key=lambda item: (item[0][0] in _IN_PART, -len(item[1])),
    )
    count = len(set().union(*concerned))
    lines = [
        f'  - {places[place][0].message}{_and_more(len(weights) - 1, "weight")}'
        for place, weights in worst[:_SHOWN]
    ]
    if len(worst) > _SHOWN:
        lines.append(f'  -{_and_more(len(worst) - _SHOWN, "place")}')
    return '\n'.join(
        [
            f'{count} weight{" is" if count == 1 else "s are"} not traced, or only in part: some '
            'of what they did in earlier steps is missing in their gradient.',
            *lines,
            'learner.report(2) shows all. If it is meant, silence this by '
            "warnings.filterwarnings('ignore', category=braintrace_fast.UntracedWarning).",
        ]
    )


def _and_more(count: int, what: str) -> str:
    return f' (and {count} more {what}{"s" if count > 1 else ""})' if count > 0 else ''


def _concerned(graph: ETraceGraph, records: Iterable[CompilationRecord]) -> set[Path]:
    return {path for record in records for path in _weights(graph, record)}


def _weights(graph: ETraceGraph, record: CompilationRecord) -> set[Path]:
    """The weights that a record concerns: its own, or those that reach the states it names."""
    if record.weight_path is not None:
        return {record.weight_path}
    states = (record.context or {}).get('drivers', record.hidden_paths)
    groups = {graph.hid_path_to_group[path].index for path in states}
    return {
        way.paths[place]
        for relation in graph.hidden_param_op_relations
        if any(group.index in groups for group in relation.hidden_groups)
        for way in relation.weight_ways.values()
        for place in way.traced
    }


def _level_of_user() -> int:
    """How far up the stack the user's own code is, as seen by the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
