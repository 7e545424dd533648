"""Layers and cells whose weights an online learner can trace."""

from typing import Any

from .._deprecation import superseded
from .conv import Conv1d, Conv2d, Conv3d
from .embedding import Embedding
from .forwards import FORWARDED
from .grouped import GroupedLinear
from .linear import Linear, ScaledWSLinear, SignedWLinear, SparseLinear
from .lora import LoRA
from .lru import LRUCell
from .minimal import CFNCell, MGUCell, MiniGRU, MiniLSTM, MinimalRNNCell
from .readout import LeakyRateReadout
from .rnn import GRUCell, LSTMCell, URLSTMCell, ValinaRNNCell

__all__ = [
    'CFNCell',
    'Conv1d',
    'Conv2d',
    'Conv3d',
    'Embedding',
    'GRUCell',
    'GroupedLinear',
    'LRUCell',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'LoRA',
    'MGUCell',
    'MiniGRU',
    'MiniLSTM',
    'MinimalRNNCell',
    'ScaledWSLinear',
    'SignedWLinear',
    'SparseLinear',
    'URLSTMCell',
    'ValinaRNNCell',
]


def __getattr__(name: str) -> Any:
    return superseded(__name__, name, FORWARDED)


def __dir__() -> list[str]:
    return sorted({*__all__, *FORWARDED})
