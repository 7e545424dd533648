"""From a brainstate model to hidden groups, relations and perturbed steps."""

from .control_flow import ControlFlowPolicy
from .diagnostics import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    diagnostic_context,
)
from .exit_perturbation import ExitPerturbation
from .find_relations import (
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from .graph import (
    ETraceGraph,
    compile_etrace_graph,
    compiler_context,
    order_hidden_group_index,
)
from .hidden_group import (
    HiddenGroup,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
    group_merging,
    jacrev_last_dim,
)
from .module_info import ModuleInfo, extract_module_info
from .perturbation import (
    HiddenPerturbation,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_module,
)
from .relation import HiddenParamOpRelation
from .report import CompilationReport
from .scope import Scope
from .transition import GroupTransition
from .untraced import untraced_message, warn_of_untraced
from .weight_way import WeightWay

__all__ = [
    'CompilationRecord',
    'CompilationReport',
    'ControlFlowPolicy',
    'DiagnosticKind',
    'DiagnosticLevel',
    'ETraceGraph',
    'ExitPerturbation',
    'GroupTransition',
    'HiddenGroup',
    'HiddenParamOpRelation',
    'HiddenPerturbation',
    'ModuleInfo',
    'Scope',
    'WeightWay',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_module',
    'compile_etrace_graph',
    'compiler_context',
    'diagnostic_context',
    'extract_module_info',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
    'group_merging',
    'jacrev_last_dim',
    'order_hidden_group_index',
    'untraced_message',
    'warn_of_untraced',
]
