"""Small recurrent cells on the ``matmul`` op, with few gates; notation as in ``rnn.py``."""

from collections.abc import Callable
from typing import Any

from brainstate.nn import sigmoid
from brainstate.typing import Size

from .cell import ActiveCell, Cell, Init, join
from .initializers import ORTHOGONAL, ZERO
from .linear import Linear

__all__ = ['CFNCell', 'MGUCell', 'MiniGRU', 'MiniLSTM', 'MinimalRNNCell']

# Constructors repeat arguments: their order and their defaults are public, and differ.


class MinimalRNNCell(Cell):
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
        b_init: Init | None = ZERO,
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
        f = sigmoid(self.W_u(join(z, h)))
        self.h.value = f * h + (1 - f) * z
        return self.h.value


class _MiniCell(Cell):
    """A cell without an activation."""

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, state_init, name)
        self._make_layers(w_init, b_init)


class MiniGRU(_MiniCell):
    """The gated recurrent unit whose candidate reads the input alone, after [1]_.

    ``z = s(W_z [x, h])``, ``h = (1 - z) h + z W_x x``.

    Parameters
    ----------
    in_size, out_size, w_init, b_init, state_init, name
        As for :class:`GRUCell`.

    References
    ----------
    .. [1] Feng et al., https://arxiv.org/abs/2410.01201

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.MiniGRU(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _layers = ('W_x', 'W_z')
    _input_layers = ('W_x',)
    W_x: Linear
    W_z: Linear

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        h = self.h.value
        z = sigmoid(self.W_z(join(x, h)))
        self.h.value = (1 - z) * h + z * self.W_x(x)
        return self.h.value


class MiniLSTM(_MiniCell):
    """The long short-term memory whose candidate reads the input alone, after [1]_.

    ``h = s(W_f [x, h]) h + s(W_i [x, h]) W_x x``.

    Parameters
    ----------
    in_size, out_size, w_init, b_init, state_init, name
        As for :class:`GRUCell`.

    References
    ----------
    .. [1] Feng et al., https://arxiv.org/abs/2410.01201

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.MiniLSTM(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _layers = ('W_x', 'W_f', 'W_i')
    _input_layers = ('W_x',)
    W_x: Linear
    W_f: Linear
    W_i: Linear

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        h = self.h.value
        xh = join(x, h)
        f, i = sigmoid(self.W_f(xh)), sigmoid(self.W_i(xh))
        self.h.value = f * h + i * self.W_x(x)
        return self.h.value


class MGUCell(ActiveCell):
    """The minimal gated unit [1]_, with one gate.

    ``f = s(Wf [x, h])``, ``h = (1 - f) h + f activation(Wh [x, f h])``.

    Parameters
    ----------
    in_size, out_size, w_init, b_init, state_init, activation, name
        As for :class:`GRUCell`.

    References
    ----------
    .. [1] Zhou et al., https://arxiv.org/abs/1603.09420

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.MGUCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _layers = ('Wf', 'Wh')
    Wf: Linear
    Wh: Linear

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        h = self.h.value
        f = sigmoid(self.Wf(join(x, h)))
        candidate = self.activation(self.Wh(join(x, f * h)))
        self.h.value = (1 - f) * h + f * candidate
        return self.h.value


class CFNCell(ActiveCell):
    """The chaos-free network [1]_, whose state decays without an input.

    ``h = s(Wf [x, h]) activation(h) + s(Wi [x, h]) activation(Wh x)``.

    Parameters
    ----------
    in_size, out_size, w_init, b_init, state_init, activation, name
        As for :class:`GRUCell`.

    References
    ----------
    .. [1] Laurent and von Brecht, https://arxiv.org/abs/1612.06212

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> import jax.numpy as jnp
    >>> cell = braintrace.nn.CFNCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _layers = ('Wf', 'Wi', 'Wh')
    _input_layers = ('Wh',)
    Wf: Linear
    Wi: Linear
    Wh: Linear

    def update(self, x: Any) -> Any:
        """Take one step with input ``x`` of shape ``(..., in_size)``; returns the new ``h``."""
        h = self.h.value
        xh = join(x, h)
        f, i = sigmoid(self.Wf(xh)), sigmoid(self.Wi(xh))
        self.h.value = f * self.activation(h) + i * self.activation(self.Wh(x))
        return self.h.value
