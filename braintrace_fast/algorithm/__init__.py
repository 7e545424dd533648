"""Learning rules: small configurations of the runtime."""

from .base import EligibilityTrace, ETraceAlgorithm
from .eprop import EProp
from .ostl import OSTLRecurrent
from .presets import D_RTRL, ES_D_RTRL, IODimVjpAlgorithm, ParamDimVjpAlgorithm, pp_prop
from .sequence import SequenceDriverMixin
from .signals import FixedRandomFeedback, KappaFilter
from .snap import SnAp
from .three_factor import ThreeFactor
from .vjp import ETraceVjpAlgorithm

__all__ = [
    'D_RTRL',
    'EProp',
    'ES_D_RTRL',
    'ETraceAlgorithm',
    'ETraceVjpAlgorithm',
    'EligibilityTrace',
    'FixedRandomFeedback',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'SequenceDriverMixin',
    'SnAp',
    'ThreeFactor',
    'pp_prop',
]
