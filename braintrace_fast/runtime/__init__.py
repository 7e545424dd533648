"""From a compiled graph to factors, traces and gradients."""

from .executor import ETraceGraphExecutor
from .factorized import FactorizedEngine
from .factors import Factors, Signals, StepRunner
from .gradient import GradientSum
from .input_data import MultiStepData, SingleStepData
from .materialized import MaterializedEngine
from .planner import Plan

__all__ = [
    'ETraceGraphExecutor',
    'FactorizedEngine',
    'Factors',
    'GradientSum',
    'MaterializedEngine',
    'MultiStepData',
    'Plan',
    'Signals',
    'SingleStepData',
    'StepRunner',
]
