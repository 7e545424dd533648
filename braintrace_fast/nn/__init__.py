"""Layers and cells whose weights an online learner can trace."""

from .linear import Linear, SignedWLinear, SparseLinear
from .readout import LeakyRateReadout
from .rnn import GRUCell, LSTMCell, MinimalRNNCell, ValinaRNNCell

__all__ = [
    'GRUCell',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'MinimalRNNCell',
    'SignedWLinear',
    'SparseLinear',
    'ValinaRNNCell',
]
