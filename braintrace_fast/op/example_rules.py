"""Rules of an op as braintrace takes them, for one example, made into those of this library.

    xy_to_dw(x, plane, weights, **params) -> plane * d y / d weight, per trainable input
    dt_to_t(plane, trace, **params)       -> plane * trace

They see one example of a batch, and are linear in the plane.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from .trace_rules import Weights

__all__ = ['ExampleRules']


class ExampleRules:
    """The rules of one op, as far as they are registered.

    Parameters
    ----------
    name : str
        The name of the op, for messages.
    axes : int
        How many axes of examples its input and output have in front.
    """

    def __init__(self, name: str, axes: int) -> None:
        self.name = name
        self.axes = axes
        self.given: dict[str, Callable[..., Any]] = {}

    def with_axis(self) -> 'ExampleRules':
        """The same for one more axis of examples."""
        other = ExampleRules(self.name, self.axes + 1)
        other.given = self.given
        return other

    def missing(self) -> list[str]:
        """What is still to be registered for a trace that is carried, as methods of the op."""
        return [f'register_{rule}' for rule in ('xy_to_dw', 'dt_to_t') if rule not in self.given]

    def weight_vjp(
        self, x: Any, cotangent: jax.Array, weights: Weights, leading_axes: int, **params: Any
    ) -> Weights:
        """See :meth:`ETPPrimitive.weight_vjp`."""
        axes = self.axes + leading_axes
        found = self._outer(axes, x, cotangent, weights, params)
        return {key: _like_weight(_sum(a, axes), weights[key]) for key, a in found.items()}

    def outer(self, x: jax.Array, plane: jax.Array, *, weights: Weights, **params: Any) -> Weights:
        """See :class:`TraceRules`."""
        return self._outer(self.axes, x, plane, weights, params)

    def outer_sum(
        self, x: jax.Array, plane: jax.Array, *, weights: Weights, **params: Any
    ) -> Weights:
        """See :class:`TraceRules`."""
        found = self._outer(self.axes + 1, x, plane, weights, params)
        return {key: a.sum(0) for key, a in found.items()}

    def decay(self, plane: jax.Array, trace: Weights, **params: Any) -> Weights:
        """See :class:`TraceRules`."""

        def rule(plane: jax.Array, trace: Weights) -> Weights:
            return self._checked('dt_to_t', self.given['dt_to_t'](plane, trace, **params), trace)

        return _mapped(rule, self.axes)(plane, trace)

    def contract(self, plane: jax.Array, trace: Weights, **params: Any) -> Weights:
        """See :class:`TraceRules`."""
        decayed = self.decay(plane, trace, **params)
        return {key: _sum(a, self.axes) for key, a in decayed.items()}

    def _outer(
        self, axes: int, x: jax.Array, plane: jax.Array, weights: Weights, params: dict[str, Any]
    ) -> Weights:
        def rule(x: jax.Array, plane: jax.Array) -> Weights:
            found = self.given['xy_to_dw'](x, plane, weights, **params)
            return self._checked('xy_to_dw', found, weights)

        return _mapped(rule, axes)(x, plane)

    def _checked(self, rule: str, found: Any, expected: Mapping[str, Any]) -> Weights:
        """What a rule returned, if there is an array for each name."""
        names = sorted(found) if isinstance(found, dict) else type(found).__name__
        if names != sorted(expected):
            raise TypeError(
                f'{rule} of {self.name!r} returned {names}, expected a dict with the arrays '
                f"{sorted(expected)}: one per trainable input that register_primitive's "
                'trainable_invars_fn names.'
            )
        return found


def _mapped(rule: Callable[..., Weights], axes: int) -> Callable[..., Weights]:
    for _ in range(axes):
        rule = jax.vmap(rule)
    return rule


def _sum(a: jax.Array, axes: int) -> jax.Array:
    return a.sum(tuple(range(axes)))


def _like_weight(gradient: jax.Array, weight: jax.Array) -> jax.Array:
    """A gradient added up where the weight has fewer positions, as a bias that is broadcast."""
    extra = gradient.ndim - weight.ndim
    total = _sum(gradient, extra) if extra > 0 else gradient
    single = [i for i, size in enumerate(weight.shape) if size == 1 != total.shape[i]]
    return total.sum(tuple(single), keepdims=True) if single else total
