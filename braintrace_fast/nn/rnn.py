"""Recurrent cells on the ``matmul`` op; ``[a, b]`` joins features and ``s`` is the sigmoid."""

from typing import Any

import brainstate
import saiunit as u
from brainstate.nn import sigmoid
from brainstate.typing import Size

from ..op import element_wise
from .cell import Activation, ActiveCell, Cell, Init, as_activation, join
from .factors import as_factor
from .initializers import XAVIER_NORMAL, ZERO
from .linear import Linear

__all__ = ['GRUCell', 'LSTMCell', 'URLSTMCell', 'ValinaRNNCell']

# Constructors repeat arguments: their order and their defaults are public, and differ.


class ValinaRNNCell(ActiveCell):
    """The plain recurrent cell: ``h = activation(W [x, h])``.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        The sizes of the input and of the hidden state.
    state_init, w_init, b_init : Callable or ArrayLike
        Make the hidden state (zeros), the weight (Xavier normal) and the bias (zeros).
    activation : str or Callable
        The activation, or its name in ``brainstate.nn``.
    name : str, optional
        The name of the module.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.ValinaRNNCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _layers = ('W',)
    W: Linear

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        state_init: Init = ZERO,
        w_init: Init = XAVIER_NORMAL,
        b_init: Init | None = ZERO,
        activation: Activation = 'relu',
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        self.h.value = self.activation(self.W(join(x, self.h.value)))
        return self.h.value


class GRUCell(ActiveCell):
    """The gated recurrent unit [1]_.

    ``z = s(Wz [x, h])``, ``r = s(Wr [x, h])``, ``h = (1 - z) h + z activation(Wh [x, r h])``.

    Parameters
    ----------
    in_size, out_size, activation, name
        As for :class:`ValinaRNNCell`. Default activation ``'tanh'``.
    w_init, b_init, state_init : Callable or ArrayLike
        Make the weights (orthogonal), the biases (zeros) and the hidden state (zeros).

    References
    ----------
    .. [1] Cho et al., https://arxiv.org/abs/1406.1078

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.GRUCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _layers = ('Wz', 'Wr', 'Wh')
    Wz: Linear
    Wr: Linear
    Wh: Linear

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        h = self.h.value
        xh = join(x, h)
        z = sigmoid(self.Wz(xh))
        r = sigmoid(self.Wr(xh))
        candidate = self.activation(self.Wh(join(x, r * h)))
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value


class LSTMCell(ActiveCell):
    """The long short-term memory [1]_, with 1 added to the forget gate [2]_.

    With ``i, g, f, o`` the layers ``Wi, Wg, Wf, Wo`` of ``[x, h]``:
    ``c = s(f + 1) c + s(i) activation(g)``, ``h = s(o) activation(c)``.

    Parameters
    ----------
    in_size, out_size, b_init, state_init, activation, name
        As for :class:`GRUCell`; both hidden states are made alike.
    w_init : Callable or ArrayLike
        Makes the weights (Xavier normal).

    References
    ----------
    .. [1] Zaremba, Sutskever and Vinyals, https://arxiv.org/abs/1409.2329
    .. [2] Jozefowicz, Zaremba and Sutskever, ICML 2015, pp. 2342-2350

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.LSTMCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.c.value.shape
    ((2, 4), (2, 4))
    """

    _hidden_names = ('c', 'h')
    _layers = ('Wi', 'Wg', 'Wf', 'Wo')
    c: brainstate.HiddenState
    Wi: Linear
    Wg: Linear
    Wf: Linear
    Wo: Linear

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER_NORMAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: Activation = 'tanh',
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        xh = join(x, self.h.value)
        i, g, f, o = self.Wi(xh), self.Wg(xh), self.Wf(xh), self.Wo(xh)
        c = sigmoid(f + 1.0) * self.c.value + sigmoid(i) * self.activation(g)
        self.h.value = sigmoid(o) * self.activation(c)
        self.c.value = c
        return self.h.value


class URLSTMCell(Cell):
    """The long short-term memory with a refined forget gate, started at many time scales [1]_.

    With ``u, f, r, o`` the layers ``Wu, Wf, Wr, Wo`` of ``[x, h]`` and ``b`` the ``bias``:
    ``f = s(f + b)``, ``r = s(r - b)``, ``g = 2 r f + (1 - 2 r) f**2``,
    ``c = g c + (1 - g) activation(u)``, ``h = s(o) activation(c)``.

    Parameters
    ----------
    in_size, out_size, w_init, state_init, activation, name
        As for :class:`LSTMCell`. The layers have no biases of their own.

    Attributes
    ----------
    bias : brainstate.ParamState
        Drawn such that ``s(bias)`` is uniform from ``1 / n`` to ``1 - 1 / n`` for ``n`` outputs.

    References
    ----------
    .. [1] Gu et al., https://arxiv.org/abs/1910.09890

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.URLSTMCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.c.value.shape
    ((2, 4), (2, 4))
    """

    _hidden_names = ('c', 'h')
    _layers = ('Wu', 'Wf', 'Wr', 'Wo')
    c: brainstate.HiddenState
    Wu: Linear
    Wf: Linear
    Wr: Linear
    Wo: Linear

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER_NORMAL,
        state_init: Init = ZERO,
        activation: Activation = 'tanh',
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, state_init, name)
        self.activation = as_activation(activation)
        self._make_layers(w_init, None)
        least = 1 / self.out_size[-1]
        gate = brainstate.random.uniform(least, 1 - least, (self.out_size[-1],))
        self.bias = brainstate.ParamState(-u.math.log(1 / gate - 1))

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        c = self.c.value
        xh = join(x, self.h.value)
        bias = as_factor(element_wise(self.bias.value), c)
        f, r = sigmoid(self.Wf(xh) + bias), sigmoid(self.Wr(xh) - bias)
        g = 2 * r * f + (1 - 2 * r) * f**2
        self.c.value = g * c + (1 - g) * self.activation(self.Wu(xh))
        self.h.value = sigmoid(self.Wo(xh)) * self.activation(self.c.value)
        return self.h.value
