"""Runs compiled steps with an engine: by step, in chunks, and in windows over sequences."""

from .chunk import needs_multi_step, run_chunk, run_forward
from .driver import Driver, Recorded, Rule, StepInputs
from .kernel_choices import kernel_choices
from .restart import restart
from .step_call import ChunkInside, EnvironmentChanged, StepCall
from .windows import Driven, Sequences, WindowRequest

__all__ = [
    'ChunkInside',
    'Driven',
    'Driver',
    'EnvironmentChanged',
    'Recorded',
    'Rule',
    'Sequences',
    'StepCall',
    'StepInputs',
    'WindowRequest',
    'kernel_choices',
    'needs_multi_step',
    'restart',
    'run_chunk',
    'run_forward',
]
