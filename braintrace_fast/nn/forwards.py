"""Names that braintrace's ``nn`` once had, of layers that live in other packages."""

import importlib
import warnings
from typing import Any

__all__ = ['FORWARDED', 'forwarded']

_NEURONS = 'IF LIF ALIF Expon Alpha DualExpon STP STD'.split()
_LAYERS = """
    ReLU RReLU Hardtanh ReLU6 Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU SELU GLU GELU
    Hardshrink LeakyReLU LogSigmoid Softplus Softshrink PReLU Softsign Tanhshrink Softmin Softmax
    Softmax2d LogSoftmax Dropout Dropout1d Dropout2d Dropout3d Identity SpikeBitwise
    Flatten Unflatten AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
    AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
    BatchNorm0d BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm RMSNorm GroupNorm
""".split()

FORWARDED = dict.fromkeys(_NEURONS, 'brainpy.state') | dict.fromkeys(_LAYERS, 'brainstate.nn')
"""By name, the package that has it."""


def forwarded(module: str, name: str) -> Any:
    """The layer of another package that a module forwards to, with a ``DeprecationWarning``."""
    if name not in FORWARDED:
        raise AttributeError(f'module {module!r} has no attribute {name!r}')
    home = FORWARDED[name]
    warnings.warn(
        f'{module}.{name} is deprecated, and will be removed: use {home}.{name}.',
        DeprecationWarning,
        stacklevel=3,
    )
    return getattr(importlib.import_module(home), name)
