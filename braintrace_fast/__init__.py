"""Online learning of spiking and recurrent networks in JAX, with eligibility traces."""

from . import nn
from .algorithm import (
    D_RTRL,
    ES_D_RTRL,
    EligibilityTrace,
    ETraceAlgorithm,
    ETraceVjpAlgorithm,
    IODimVjpAlgorithm,
    ParamDimVjpAlgorithm,
    SequenceDriverMixin,
    pp_prop,
)
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
from .errors import CheckpointError, CompilationError, NotSupportedError
from .learner import ETraceVmap, compile
from .op import ETPPrimitive, TraceRules, element_wise, matmul, register_primitive
from .runtime import (
    ETraceGraphExecutor,
    ETraceVjpGraphExecutor,
    MultiStepData,
    SingleStepData,
)

__version__ = '0.1.0'
__version_info__ = tuple(map(int, __version__.split('.')))

__all__ = [
    'CheckpointError',
    'CompilationError',
    'CompilationRecord',
    'CompilationReport',
    'ControlFlowPolicy',
    'D_RTRL',
    'DiagnosticKind',
    'DiagnosticLevel',
    'ES_D_RTRL',
    'ETPPrimitive',
    'ETraceAlgorithm',
    'ETraceGraph',
    'ETraceGraphExecutor',
    'ETraceVjpAlgorithm',
    'ETraceVjpGraphExecutor',
    'ETraceVmap',
    'EligibilityTrace',
    'HiddenGroup',
    'HiddenParamOpRelation',
    'HiddenPerturbation',
    'IODimVjpAlgorithm',
    'ModuleInfo',
    'MultiStepData',
    'NotSupportedError',
    'ParamDimVjpAlgorithm',
    'SequenceDriverMixin',
    'SingleStepData',
    'TraceRules',
    '__version__',
    '__version_info__',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_module',
    'compile',
    'compile_etrace_graph',
    'element_wise',
    'extract_module_info',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
    'matmul',
    'nn',
    'pp_prop',
    'register_primitive',
]
