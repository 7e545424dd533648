"""From a brainstate model to hidden groups, relations and perturbed steps."""

from typing import Any

from .compile_graph import compile_etrace_graph, compiler_context
from .control_flow import ControlFlowPolicy
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel, diagnostic_context
from .exit_perturbation import ExitPerturbation
from .find_groups import find_hidden_groups_from_minfo, find_hidden_groups_from_module
from .find_relations import (
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from .graph import ETraceGraph
from .hidden_group import HiddenGroup
from .module_info import ModuleInfo, extract_module_info
from .relation import HiddenParamOpRelation
from .report import CompilationReport
from .scope import Coupled, Neighbourhood, Scope
from .transition import GroupTransition
from .untraced import check_traced, untraced_message, warn_of_untraced
from .weight_way import WeightWay

__all__ = [
    'CompilationRecord',
    'CompilationReport',
    'ControlFlowPolicy',
    'Coupled',
    'DiagnosticKind',
    'DiagnosticLevel',
    'ETraceGraph',
    'ExitPerturbation',
    'GroupTransition',
    'HiddenGroup',
    'HiddenParamOpRelation',
    'ModuleInfo',
    'Neighbourhood',
    'Scope',
    'WeightWay',
    'check_traced',
    'compile_etrace_graph',
    'compiler_context',
    'diagnostic_context',
    'extract_module_info',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
    'untraced_message',
    'warn_of_untraced',
]


def __getattr__(name: str) -> Any:
    """The names of this package in braintrace that the compiler itself does not use."""
    from ..reference_api import compiler as reference  # it imports this package

    if name in reference.__all__:
        return getattr(reference, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
