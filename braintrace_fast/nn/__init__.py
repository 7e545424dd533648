"""Layers and cells whose weights an online learner can trace."""

from .conv import Conv1d, Conv2d, Conv3d
from .embedding import Embedding
from .grouped import GroupedLinear
from .linear import Linear, SignedWLinear
from .lora import LoRA
from .readout import LeakyRateReadout
from .rnn import GRUCell, LSTMCell, MinimalRNNCell, ValinaRNNCell

__all__ = [
    'Conv1d',
    'Conv2d',
    'Conv3d',
    'Embedding',
    'GRUCell',
    'GroupedLinear',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'LoRA',
    'MinimalRNNCell',
    'SignedWLinear',
    'ValinaRNNCell',
]
