"""Layers and cells whose weights an online learner can trace."""

from .conv import Conv1d, Conv2d, Conv3d
from .linear import Linear, SignedWLinear
from .readout import LeakyRateReadout
from .rnn import GRUCell, LSTMCell, MinimalRNNCell, ValinaRNNCell

__all__ = [
    'Conv1d',
    'Conv2d',
    'Conv3d',
    'GRUCell',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'MinimalRNNCell',
    'SignedWLinear',
    'ValinaRNNCell',
]
