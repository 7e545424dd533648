"""What every recurrent cell has: sizes, hidden states, and layers in a given order."""

from collections.abc import Callable
from typing import Any

import brainstate
import saiunit as u
from brainstate.nn import init
from brainstate.typing import ArrayLike, Size

from .initializers import ORTHOGONAL, ZERO
from .linear import Linear

__all__ = ['ActiveCell', 'Activation', 'Cell', 'Init', 'as_activation', 'join']

Init = ArrayLike | Callable[..., Any]
Activation = str | Callable[[Any], Any]


class Cell(brainstate.nn.RNNCell):
    """Sizes, hidden states that are made alike, and layers to the size of the hidden states.

    ``_layers`` are made in this order, which is that of their random numbers. Those in
    ``_input_layers`` take the input alone, the others the input joined with a hidden state.
    """

    _hidden_names: tuple[str, ...] = ('h',)
    _layers: tuple[str, ...] = ()
    _input_layers: tuple[str, ...] = ()
    in_size: Any
    out_size: Any
    h: brainstate.HiddenState

    def __init__(self, in_size: Size, out_size: Size, state_init: Init, name: str | None) -> None:
        super().__init__(name=name)  # type: ignore[call-arg]
        self.in_size = in_size
        self.out_size = out_size
        self._state_initializer = state_init

    def _make_layers(self, w_init: Init, b_init: Init | None) -> None:
        num_in, num_out = self.in_size[-1], self.out_size[-1]
        for layer in self._layers:
            size = num_in if layer in self._input_layers else num_in + num_out
            setattr(self, layer, Linear(size, num_out, w_init=w_init, b_init=b_init))

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


class ActiveCell(Cell):
    """A cell with an activation."""

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: Activation = 'tanh',
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, out_size, state_init, name)
        self.activation = as_activation(activation)
        self._make_layers(w_init, b_init)


def join(a: Any, b: Any) -> Any:
    """``[a, b]``: the features of two arrays side by side."""
    return u.math.concatenate([a, b], axis=-1)


def as_activation(activation: Activation) -> Callable[[Any], Any]:
    """A function, or the function of that name in ``brainstate.nn``."""
    function: Any = activation
    if isinstance(activation, str):
        function = getattr(brainstate.nn, activation, None)
    if not callable(function):
        raise ValueError(
            f'found activation={activation!r}, expected a function or the name of one in '
            "brainstate.nn, such as 'relu' or 'tanh'."
        )
    return function
