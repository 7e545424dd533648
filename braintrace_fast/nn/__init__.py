"""Layers and cells whose weights an online learner can trace."""

from .embedding import Embedding
from .grouped import GroupedLinear
from .linear import Linear, SignedWLinear, SparseLinear
from .lora import LoRA
from .readout import LeakyRateReadout
from .rnn import GRUCell, LSTMCell, MinimalRNNCell, ValinaRNNCell

__all__ = [
    'Embedding',
    'GRUCell',
    'GroupedLinear',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'LoRA',
    'MinimalRNNCell',
    'SignedWLinear',
    'SparseLinear',
    'ValinaRNNCell',
]
