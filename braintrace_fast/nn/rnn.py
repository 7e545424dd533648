"""Recurrent cells on the ``matmul`` op; ``[a, b]`` joins features and ``s`` is the sigmoid."""

from collections.abc import Callable
from typing import Any

import brainstate
import saiunit as u
from brainstate.nn import init, sigmoid
from brainstate.typing import ArrayLike, Size

from .initializers import ORTHOGONAL, XAVIER_NORMAL, ZERO
from .linear import Linear

__all__ = ['GRUCell', 'LSTMCell', 'MinimalRNNCell', 'ValinaRNNCell']

Init = ArrayLike | Callable[..., Any]

# Constructors repeat arguments: their order and their defaults are public, and differ.


class _Cell(brainstate.nn.RNNCell):
    """Sizes and hidden states, which every cell makes in the same way."""

    _hidden_names: tuple[str, ...] = ('h',)
    in_size: Any
    out_size: Any
    h: brainstate.HiddenState

    def __init__(self, in_size: Size, out_size: Size, state_init: Init, name: str | None) -> None:
        super().__init__(name=name)  # type: ignore[call-arg]
        self.in_size = in_size
        self.out_size = out_size
        self._state_initializer = state_init

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Make the hidden states."""
        for name in self._hidden_names:
            setattr(self, name, brainstate.HiddenState(self._initial_value(batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Give the hidden states their initial values again."""
        for name in self._hidden_names:
            getattr(self, name).value = self._initial_value(batch_size)

    def _initial_value(self, batch_size: int | None) -> Any:
        return init.param(self._state_initializer, self.out_size, batch_size)


class _ActiveCell(_Cell):
    """An activation, and layers from the input and the hidden state to the hidden state."""

    _layers: tuple[str, ...]

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable[[Any], Any] = 'tanh',
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, state_init, name)
        self.activation = _activation(activation)
        num_in, num_out = self.in_size[-1], self.out_size[-1]
        for layer in self._layers:
            setattr(self, layer, Linear(num_in + num_out, num_out, w_init=w_init, b_init=b_init))


class ValinaRNNCell(_ActiveCell):
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
        b_init: Init = ZERO,
        activation: str | Callable[[Any], Any] = 'relu',
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        self.h.value = self.activation(self.W(_join(x, self.h.value)))
        return self.h.value


class GRUCell(_ActiveCell):
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
        xh = _join(x, h)
        z = sigmoid(self.Wz(xh))
        r = sigmoid(self.Wr(xh))
        candidate = self.activation(self.Wh(_join(x, r * h)))
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value


class LSTMCell(_ActiveCell):
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
        b_init: Init = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable[[Any], Any] = 'tanh',
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        xh = _join(x, self.h.value)
        i, g, f, o = self.Wi(xh), self.Wg(xh), self.Wf(xh), self.Wo(xh)
        c = sigmoid(f + 1.0) * self.c.value + sigmoid(i) * self.activation(g)
        self.h.value = sigmoid(o) * self.activation(c)
        self.c.value = c
        return self.h.value


class MinimalRNNCell(_Cell):
    """The minimal recurrent cell [1]_.

    ``z = phi(x)``, ``f = s(W_u [z, h])``, ``h = f h + (1 - f) z``.

    Parameters
    ----------
    in_size, out_size, w_init, b_init, state_init, name
        As for :class:`GRUCell`.
    phi : Callable, optional
        From the input to ``z``, which has the size of the hidden state. Default a :class:`Linear`.

    References
    ----------
    .. [1] Chen, https://arxiv.org/abs/1711.06788

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.MinimalRNNCell(4, 4, phi=jnp.tanh)
    >>> cell.init_state()
    >>> cell(jnp.ones(4)).shape
    (4,)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init = ZERO,
        state_init: Init = ZERO,
        phi: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, state_init, name)
        num_in, num_out = self.in_size[-1], self.out_size[-1]
        if phi is None:
            phi = Linear(num_in, num_out, w_init=w_init, b_init=b_init)
        elif not callable(phi):
            raise TypeError(
                f'MinimalRNNCell: found phi={phi!r}, expected a function or a module. '
                'Leave phi out for a dense layer.'
            )
        self.phi = phi
        self.W_u = Linear(2 * num_out, num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        h = self.h.value
        z = self.phi(x)
        f = sigmoid(self.W_u(_join(z, h)))
        self.h.value = f * h + (1 - f) * z
        return self.h.value


def _join(a: Any, b: Any) -> Any:
    return u.math.concatenate([a, b], axis=-1)


def _activation(activation: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    function: Any = activation
    if isinstance(activation, str):
        function = getattr(brainstate.nn, activation, None)
    if not callable(function):
        raise ValueError(
            f'found activation={activation!r}, expected a function or the name of one in '
            "brainstate.nn, such as 'relu' or 'tanh'."
        )
    return function
