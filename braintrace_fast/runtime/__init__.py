"""From a compiled graph to factors, traces and gradients."""

from .engine import Engine, FactorTransform, Steps
from .executor import ETraceGraphExecutor
from .factorized import FactorizedEngine
from .factors import Factors, Signals, StepRunner
from .filtered import Filter
from .gradient import GradientSum
from .input_data import MultiStepData, SingleStepData
from .links import Link, links_of
from .materialized import MaterializedEngine
from .planner import Plan

__all__ = [
    'Engine',
    'FactorTransform',
    'Filter',
    'Link',
    'Steps',
    'links_of',
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
