"""Layers and cells whose weights an online learner can trace."""

from typing import Any

from .forwards import FORWARDED, forwarded
from .linear import Linear, ScaledWSLinear, SignedWLinear
from .lru import LRUCell
from .minimal import CFNCell, MGUCell, MiniGRU, MiniLSTM, MinimalRNNCell
from .readout import LeakyRateReadout
from .rnn import GRUCell, LSTMCell, URLSTMCell, ValinaRNNCell

__all__ = [
    'CFNCell',
    'GRUCell',
    'LRUCell',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'MGUCell',
    'MiniGRU',
    'MiniLSTM',
    'MinimalRNNCell',
    'ScaledWSLinear',
    'SignedWLinear',
    'URLSTMCell',
    'ValinaRNNCell',
]


def __getattr__(name: str) -> Any:
    return forwarded(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *FORWARDED})
