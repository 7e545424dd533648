"""Names that braintrace's ``nn`` once had, of layers that live in other packages."""

from .._deprecation import Superseded

__all__ = ['FORWARDED']

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

FORWARDED = {
    name: Superseded(home, f'{home}.{name}')
    for home, names in (('brainpy.state', _NEURONS), ('brainstate.nn', _LAYERS))
    for name in names
}
