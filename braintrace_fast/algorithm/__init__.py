"""Learning rules: small configurations of the runtime."""

from .base import EligibilityTrace, ETraceAlgorithm, ETraceVjpAlgorithm
from .presets import D_RTRL, ES_D_RTRL, IODimVjpAlgorithm, ParamDimVjpAlgorithm, pp_prop
from .sequence import SequenceDriverMixin

__all__ = [
    'D_RTRL',
    'ES_D_RTRL',
    'ETraceAlgorithm',
    'ETraceVjpAlgorithm',
    'EligibilityTrace',
    'IODimVjpAlgorithm',
    'ParamDimVjpAlgorithm',
    'SequenceDriverMixin',
    'pp_prop',
]
