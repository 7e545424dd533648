"""Online learning of spiking and recurrent networks in JAX, with eligibility traces."""

from typing import TYPE_CHECKING, Any

from . import nn
from ._deprecation import superseded
from .algorithm import (
    D_RTRL,
    DNI,
    ES_D_RTRL,
    UORO,
    EligibilityTrace,
    EProp,
    ETraceAlgorithm,
    ETraceConfig,
    ETraceVjpAlgorithm,
    FixedRandomFeedback,
    GradExpon,
    IODimVjpAlgorithm,
    KappaFilter,
    OSTLFeedforward,
    OSTLRecurrent,
    ParamDimVjpAlgorithm,
    RandomProjectionVjpAlgorithm,
    SequenceDriverMixin,
    SnAp,
    SyntheticGradient,
    ThreeFactor,
    pp_prop,
    train_synthetic_gradient,
)
from .compiler import (
    CompilationRecord,
    CompilationReport,
    ControlFlowPolicy,
    Coupled,
    DiagnosticKind,
    DiagnosticLevel,
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    ModuleInfo,
    Neighbourhood,
    Scope,
    compile_etrace_graph,
    extract_module_info,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from .config import set_backend, use_backend
from .deprecated import DEPRECATED
from .errors import (
    CheckpointError,
    CompilationError,
    FallbackError,
    NotSupportedError,
    UntracedWarning,
)
from .learner import ETraceVmap, compile
from .op import (
    ETPPrimitive,
    TraceRules,
    conv,
    einsum,
    element_wise,
    embedding,
    grouped_matmul,
    lora_matmul,
    matmul,
    register_primitive,
    sparse_matmul,
)
from .reference_api.compiler import (
    HiddenPerturbation,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_module,
)
from .reference_api.executor import ETraceVjpGraphExecutor
from .runtime import ETraceGraphExecutor, MultiStepData, SingleStepData

if TYPE_CHECKING:  # a type checker sees no warning
    from .deprecated.ops import *  # noqa: F403
    from .deprecated.params import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        return superseded(__name__, name, DEPRECATED)


__version__ = '0.1.0'
__version_info__ = tuple(map(int, __version__.split('.')))

__all__ = [
    'CheckpointError',
    'CompilationError',
    'CompilationRecord',
    'CompilationReport',
    'ControlFlowPolicy',
    'Coupled',
    'DNI',
    'D_RTRL',
    'DiagnosticKind',
    'DiagnosticLevel',
    'EProp',
    'ES_D_RTRL',
    'ETPPrimitive',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceGraph',
    'ETraceGraphExecutor',
    'ETraceVjpAlgorithm',
    'ETraceVjpGraphExecutor',
    'ETraceVmap',
    'EligibilityTrace',
    'FallbackError',
    'FixedRandomFeedback',
    'GradExpon',
    'HiddenGroup',
    'HiddenParamOpRelation',
    'HiddenPerturbation',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'ModuleInfo',
    'MultiStepData',
    'Neighbourhood',
    'NotSupportedError',
    'OSTLFeedforward',
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'RandomProjectionVjpAlgorithm',
    'Scope',
    'SequenceDriverMixin',
    'SingleStepData',
    'SnAp',
    'SyntheticGradient',
    'ThreeFactor',
    'TraceRules',
    'UORO',
    'UntracedWarning',
    '__version__',
    '__version_info__',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_module',
    'compile',
    'compile_etrace_graph',
    'conv',
    'einsum',
    'element_wise',
    'embedding',
    'extract_module_info',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
    'grouped_matmul',
    'lora_matmul',
    'matmul',
    'nn',
    'pp_prop',
    'register_primitive',
    'set_backend',
    'sparse_matmul',
    'train_synthetic_gradient',
    'use_backend',
]


def __dir__() -> list[str]:
    return sorted({*globals(), *DEPRECATED})
