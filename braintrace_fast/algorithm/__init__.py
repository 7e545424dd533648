"""Learning rules: small configurations of the runtime."""

from .axes import ETraceConfig
from .base import EligibilityTrace, ETraceAlgorithm
from .eprop import EProp
from .grad_expon import GradExpon
from .ostl import OSTLFeedforward
from .presets import D_RTRL, ES_D_RTRL, IODimVjpAlgorithm, ParamDimVjpAlgorithm, pp_prop
from .sequence import SequenceDriverMixin
from .signals import FixedRandomFeedback, KappaFilter
from .three_factor import ThreeFactor
from .vjp import ETraceVjpAlgorithm

__all__ = [
    'D_RTRL',
    'EProp',
    'ES_D_RTRL',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceVjpAlgorithm',
    'EligibilityTrace',
    'FixedRandomFeedback',
    'GradExpon',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'OSTLFeedforward',
    'ParamDimVjpAlgorithm',
    'SequenceDriverMixin',
    'ThreeFactor',
    'pp_prop',
]
