"""Learning rules: small configurations of the runtime."""

from .axes import ETraceConfig
from .base import EligibilityTrace, ETraceAlgorithm
from .dni import DNI, SyntheticGradient, train_synthetic_gradient
from .eprop import EProp
from .grad_expon import GradExpon
from .ostl import OSTLFeedforward, OSTLRecurrent
from .presets import D_RTRL, ES_D_RTRL, IODimVjpAlgorithm, ParamDimVjpAlgorithm, pp_prop
from .sequence import SequenceDriverMixin
from .signals import FixedRandomFeedback, KappaFilter
from .snap import SnAp
from .three_factor import ThreeFactor
from .uoro import UORO, RandomProjectionVjpAlgorithm
from .vjp import ETraceVjpAlgorithm

__all__ = [
    'DNI',
    'D_RTRL',
    'UORO',
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
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'RandomProjectionVjpAlgorithm',
    'SequenceDriverMixin',
    'SnAp',
    'SyntheticGradient',
    'ThreeFactor',
    'pp_prop',
    'train_synthetic_gradient',
]
