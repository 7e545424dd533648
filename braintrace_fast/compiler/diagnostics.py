"""What the compiler decided, and why, as data."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .._typing import Path

__all__ = [
    'CompilationRecord',
    'DiagnosticKind',
    'DiagnosticLevel',
    'DiagnosticReporter',
    'diagnostic_context',
    'emit',
]


class DiagnosticLevel(StrEnum):
    """How much a record should worry the user."""

    INFO = 'info'
    WARNING = 'warning'
    ERROR = 'error'


class DiagnosticKind(StrEnum):
    """The reason for a record, for machines to match on.

    The last ones are braintrace's, so that code that matches on them runs. No record has them: what
    they are about is supported here, or is reported as one of the others.
    """

    RELATION_INCLUDED = 'relation_included'
    RELATION_EXCLUDED_NO_PARAMSTATE = 'relation_excluded_no_paramstate'
    RELATION_EXCLUDED_NON_TEMPORAL = 'relation_excluded_non_temporal'
    RELATION_EXCLUDED_SHAPE_MISMATCH = 'relation_excluded_shape_mismatch'
    RELATION_EXCLUDED_WEIGHT_TO_WEIGHT = 'relation_excluded_weight_to_weight'
    RELATION_EXCLUDED_POSITION_MIXING = 'relation_excluded_position_mixing'
    RELATION_PARTIAL_PATH = 'relation_partial_path'
    TAIL_NOT_POSITION_WISE = 'tail_not_position_wise'
    TRANSITION_NOT_POSITION_WISE = 'transition_not_position_wise'
    TRAINABLE_INVAR_NOT_PARAMSTATE = 'trainable_invar_not_paramstate'
    WEIGHT_WITHOUT_ETP_OP = 'weight_without_etp_op'
    WEIGHT_NOT_USED = 'weight_not_used'
    WEIGHT_VARIES_IN_TIME = 'weight_varies_in_time'
    WEIGHT_IN_WHILE = 'weight_in_while'
    COND_IF_CONVERTED = 'cond_if_converted'
    COND_CONVERSION_SKIPPED = 'cond_conversion_skipped'
    SCAN_UNROLLED = 'scan_unrolled'
    SCAN_UNROLL_SKIPPED = 'scan_unroll_skipped'
    SCAN_DESCENT_APPLIED = 'scan_descent_applied'
    SCAN_DESCENT_SKIPPED = 'scan_descent_skipped'
    SCAN_DESCENT_NO_RELATIONS = 'scan_descent_no_relations'
    CONTROL_FLOW_OPAQUE_FWD = 'control_flow_opaque_fwd'
    CONTROL_FLOW_RECURRENT_MIXING = 'control_flow_recurrent_mixing'
    PRIMITIVE_INSIDE_CONTROL_FLOW = 'primitive_inside_control_flow'
    PRIMITIVE_INSIDE_CUSTOM_RULE = 'primitive_inside_custom_rule'
    HIDDEN_GROUP_MERGED = 'hidden_group_merged'
    HIDDEN_COUPLING_NOT_TRACED = 'hidden_coupling_not_traced'
    HIDDEN_STATE_READ_ONLY = 'hidden_state_read_only'
    TRANSITION_PROBED = 'transition_probed'
    SNAP_PATTERN_CONSERVATIVE = 'snap_pattern_conservative'
    SNAP_PATTERN_DEGENERATE = 'snap_pattern_degenerate'
    CARRIED_STATE_NOT_TRACED = 'carried_state_not_traced'
    STATE_MISMATCH = 'state_mismatch'

    MULTI_OUTPUT_PRIMITIVE_DETECTED = 'multi_output_primitive_detected'
    PRIMITIVE_INSIDE_NESTED_JIT = 'primitive_inside_nested_jit'
    PYTREE_WEIGHT_LEAF_AMBIGUOUS = 'pytree_weight_leaf_ambiguous'
    RELATION_EXCLUDED_SLICED_WEIGHT = 'relation_excluded_sliced_weight'
    TRANSITION_TAIL_BOUNDED = 'transition_tail_bounded'
    WEIGHT_IN_CONTROL_FLOW = 'weight_in_control_flow'


@dataclass(frozen=True)
class CompilationRecord:
    """One decision of the compiler.

    Parameters
    ----------
    kind : DiagnosticKind
        The reason, for machines.
    level : DiagnosticLevel
        The severity.
    message : str
        The reason, for people: what was found, and what to change.
    primitive : object, optional
        The JAX primitive concerned.
    weight_path : tuple, optional
        The path of the ``ParamState`` concerned.
    hidden_paths : tuple of tuple, optional
        The paths of the hidden states concerned.
    context : dict, optional
        Further facts, such as ``source``, the line of the user's code.
    """

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: Any | None = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: dict[str, Any] | None = None


class DiagnosticReporter(list[CompilationRecord]):
    """The records of a block, in order of emission."""

    def records(self) -> tuple[CompilationRecord, ...]:
        """Those that there are by now."""
        return tuple(self)


class _Reporters(threading.local):
    def __init__(self) -> None:
        self.stack: list[DiagnosticReporter] = []


_reporters = _Reporters()


@contextmanager
def diagnostic_context() -> Iterator[DiagnosticReporter]:
    """Collect the records emitted by this thread inside the block, in order of emission."""
    records = DiagnosticReporter()
    _reporters.stack.append(records)
    try:
        yield records
    finally:
        _reporters.stack.pop()


def emit(kind: DiagnosticKind, level: DiagnosticLevel, message: str, **fields: Any) -> None:
    """Add a record to the innermost :func:`diagnostic_context`; without one it is dropped."""
    if _reporters.stack:
        _reporters.stack[-1].append(CompilationRecord(kind, level, message, **fields))
