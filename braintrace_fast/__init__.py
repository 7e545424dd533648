"""Online learning of spiking and recurrent networks in JAX, with eligibility traces."""

from . import nn
from .compiler import (
    CompilationRecord,
    CompilationReport,
    ControlFlowPolicy,
    DiagnosticKind,
    DiagnosticLevel,
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    HiddenPerturbation,
    ModuleInfo,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_module,
    compile_etrace_graph,
    extract_module_info,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from .errors import CompilationError, NotSupportedError
from .op import ETPPrimitive, TraceRules, element_wise, matmul, register_primitive

__version__ = '0.1.0'
__version_info__ = tuple(map(int, __version__.split('.')))

__all__ = [
    'CompilationError',
    'CompilationRecord',
    'CompilationReport',
    'ControlFlowPolicy',
    'DiagnosticKind',
    'DiagnosticLevel',
    'ETPPrimitive',
    'ETraceGraph',
    'HiddenGroup',
    'HiddenParamOpRelation',
    'HiddenPerturbation',
    'ModuleInfo',
    'NotSupportedError',
    'TraceRules',
    '__version__',
    '__version_info__',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_module',
    'compile_etrace_graph',
    'element_wise',
    'extract_module_info',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
    'matmul',
    'nn',
    'register_primitive',
]
