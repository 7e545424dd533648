"""The factors of a step by brute force, from dense Jacobians."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Literal, open_jaxpr
from .._typing import Path
from ..op import ETPPrimitive
from .interpreter import interpret
from .pure_step import PureStep, Values, derivative

__all__ = ['DenseFactors', 'DenseStep', 'flat']


class _Run(NamedTuple):
    """One evaluation of a step: results, and inputs and outputs of its ops in order."""

    loss: jax.Array
    hidden: list[jax.Array]
    x: list[Any]
    y: list[jax.Array]
    probes: list[jax.Array]


class DenseFactors(NamedTuple):
    """All that a recurrence needs of a step, dense, with positions and parameters flat.

    ``D[g]`` is ``(S, S, P)``, ``L[g]`` and ``R[g]`` ``(S, P)``, ``f[k][g]`` ``(S, P)``, ``J[k]``
    ``(Y, W)`` with ``W`` the elements of all parameters; ``x[k]`` is the input of op ``k``, or
    ``J[k]`` in place of indices, which cannot be smoothed.
    """

    step_gradient: Any
    D: list[Any]
    L: list[Any]
    R: list[Any]
    f: list[list[Any]]
    J: list[Any]
    x: list[Any]


class DenseStep:
    """The factors of a step by brute force, from its equations.

    Each is a derivative of :meth:`run`, which evaluates the step with shifts and cuts of choice.
    """

    def __init__(
        self, pure: PureStep, values: Values, slices: Any, groups: Any, forward_mode: bool
    ) -> None:
        self.jacobian = derivative(forward_mode)

        def step(values: Values, slices: Any) -> Any:
            loss, new, _ = pure.step(values, slices)
            return loss, new.hidden

        self.closed, shapes = jax.make_jaxpr(step, return_shape=True)(values, slices)
        before: Any = jax.tree.structure(values.hidden)
        if before != jax.tree.structure(shapes[1]):
            raise ValueError('The step changes the structure or the unit of a hidden state.')
        states = list(pure.hidden.items())
        grouped = _grouped([p for p, _ in states], values.hidden, pure.hidden, groups)
        self.groups = [[list(pure.hidden).index(p) for p in group] for group in grouped]
        self.widths = [
            s.num_state if isinstance(s, brainstate.HiddenGroupState) else 0 for _, s in states
        ]
        x, y = jax.eval_shape(lambda v, s: self.run(v, s)[2:4], values, slices)
        self.of_indices = list(map(_is_index, x))
        self.zeros = [np.zeros(a.shape, a.dtype) for a in y]
        self.columns = [
            [_columns(a.shape, self.varshape(values, g)) for g in range(len(self.groups))]
            for a in y
        ]
        self.factors = jax.jit(lambda v, s: (self._factors(v, s), *pure.step(v, s)[1:]))
        self.pulled = jax.jit(self._pulled)

    def varshape(self, values: Values, group: int) -> tuple[int, ...]:
        """The shape of the positions of a group."""
        index = self.groups[group][0]
        shape = jnp.shape(jax.tree.leaves(values.hidden[index])[0])
        return shape[:-1] if self.widths[index] else shape

    def run(
        self,
        values: Values,
        slices: Any,
        added: Sequence[Any] | None = None,
        exits: Sequence[Any] | None = None,
        follow: Any = None,
        inputs: Sequence[Any] | None = None,
        stop_new: bool = False,
    ) -> _Run:
        """Evaluate the step.

        ``added`` is added to the ops' outputs, and ``exits`` to the new states, for all that read
        them. Derivatives pass through the input of op ``k`` scaled by ``follow[k]``, and with
        ``stop_new`` through no new state. ``probes`` are the ops' outputs for other ``inputs``.
        """
        x: list[Any] = []
        y: list[Any] = []
        probes: list[Any] = []

        def on_op(primitive: ETPPrimitive, operands: list[Any], params: dict[str, Any]) -> Any:
            k, place, operands = len(y), primitive.x_invar_index, list(operands)
            x.append(None if place is None else operands[place])
            if inputs is not None:
                other = list(operands)
                if place is not None and not _is_index(operands[place]):
                    other[place] = inputs[k]
                probes.append(primitive.forward(*other, **params))
            if follow is not None and place is not None and not _is_index(operands[place]):
                fixed = lax.stop_gradient(operands[place])
                operands[place] = fixed + follow[k] * (operands[place] - fixed)
            out = primitive.forward(*operands, **params)
            y.append(out if added is None else out + added[k])
            return y[-1]

        jaxpr, _ = open_jaxpr(self.closed)
        news = jaxpr.outvars[1:]
        made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        on_write: dict[Any, Any] = {}
        for place, v in enumerate(news):
            if not isinstance(v, Literal) and v in made:
                if v in on_write:
                    raise ValueError('Two hidden states are the same value; keep one of them.')
                shift = None if exits is None else exits[place]
                on_write[v] = lambda new, shift=shift: _written(new, shift, stop_new)
        loss, *hidden = interpret(self.closed, jax.tree.leaves((values, slices)), on_op, on_write)
        if exits is not None:  # a state that is only read passes through
            hidden = [
                new if v in on_write else new + shift
                for v, new, shift in zip(news, hidden, exits, strict=True)
            ]
        return _Run(loss, hidden, x, y, probes)

    def planes(self, hidden: Sequence[Any]) -> list[jax.Array]:
        """Per group, the planes of its states, ``(S, P)``."""
        return [
            jnp.stack([p for i in group for p in _split(hidden[i], self.widths[i])])
            for group in self.groups
        ]

    def _factors(self, values: Values, slices: Any) -> DenseFactors:
        jacobians = self._new_planes_by(values, slices)
        J, x = self._weight_jacobians(values, slices), self.run(values, slices).x
        D = [self._own(by_old, g) for g, (by_old, _, _) in enumerate(jacobians)]
        influence = [self._own(by_exits, g) for g, (_, _, by_exits) in enumerate(jacobians)]
        step_gradient = self.jacobian(
            lambda params: self.run(values._replace(params=params), slices).loss
        )(values.params)
        return DenseFactors(
            step_gradient=flat(step_gradient),
            D=D,
            L=self._signals(values, slices, influence),
            R=self._past_the_groups(values, slices),
            f=[
                [
                    None if columns is None else _at(jacobians[g][1][k], columns)
                    for g, columns in enumerate(by_group)
                ]
                for k, by_group in enumerate(self.columns)
            ],
            J=J,
            x=[J if is_index else x for x, J, is_index in zip(x, J, self.of_indices, strict=True)],
        )

    def _new_planes_by(self, values: Values, slices: Any) -> list[tuple[Any, Any, Any]]:
        """Per group, Jacobians of new planes by old states, ops' outputs and shifts at the exit.

        Derivatives by the ops' inputs are cut.
        """
        hidden, tree = jax.tree.flatten(values.hidden)
        cut = jnp.zeros(len(self.zeros))

        def new_planes(old: Any, added: Any, exits: Any) -> list[jax.Array]:
            start = values._replace(hidden=jax.tree.unflatten(tree, old))
            return self.planes(self.run(start, slices, added, exits, cut).hidden)

        jacobians = self.jacobian(new_planes, argnums=(0, 1, 2))
        return jacobians(hidden, self.zeros, [jnp.zeros_like(h) for h in hidden])

    def _signals(self, values: Values, slices: Any, influence: list[Any]) -> list[jax.Array]:
        """``L`` from what shifts at the exit do to the loss, which is ``P^T L``."""
        none = [jnp.zeros_like(h) for h in jax.tree.leaves(values.hidden)]
        by_exits = self.jacobian(lambda e: self.run(values, slices, exits=e).loss)(none)
        return [
            jnp.linalg.solve(jnp.moveaxis(P, (0, 1), (-1, -2)), signal.T[..., None])[..., 0].T
            for P, signal in zip(influence, self.planes(by_exits), strict=True)
        ]

    def _past_the_groups(self, values: Values, slices: Any) -> list[jax.Array]:
        """``R``: the derivative of the loss by old states, on paths without a new state."""
        hidden, tree = jax.tree.flatten(values.hidden)

        def mixed(added: Any) -> jax.Array:
            return _projection(self.run(values, slices, added).hidden)

        # An op is recurrent if it reaches a new state, be it by way of other ops.
        is_recurrent = [jnp.any(g != 0) for g in self.jacobian(mixed)(self.zeros)]
        beside = 1.0 - jnp.asarray(is_recurrent, float)

        def loss(old: list[Any]) -> jax.Array:
            start = values._replace(hidden=jax.tree.unflatten(tree, old))
            return self.run(start, slices, follow=beside, stop_new=True).loss

        return self.planes(self.jacobian(loss)(hidden))

    def _weight_jacobians(self, values: Values, slices: Any) -> list[jax.Array]:
        """``J``: the derivatives of each op's output by all parameters."""
        cut = jnp.zeros(len(self.zeros))

        def outputs(params: list[Any]) -> list[jax.Array]:
            return self.run(values._replace(params=params), slices, follow=cut).y

        return [
            jnp.concatenate([a.reshape(y.size, -1) for a in jax.tree.leaves(rows)], axis=1)
            for y, rows in zip(self.zeros, self.jacobian(outputs)(values.params), strict=True)
        ]

    def _own(self, by_state: list[Any], group: int) -> jax.Array:
        """From ``(S, P, *state)`` per state, the derivatives of each position by itself."""
        columns = []
        for i in self.groups[group]:
            jac, width = by_state[i], self.widths[i] or 1
            jac = jac.reshape(*jac.shape[:2], jac.shape[1], width)
            own = jnp.diagonal(jac, axis1=1, axis2=2)  # (S, width, P)
            columns += [own[:, plane] for plane in range(width)]
        return jnp.stack(columns, axis=1)

    def _pulled(
        self, values: Values, slices: Any, inputs: Sequence[Any], cotangents: Sequence[Any]
    ) -> jax.Array:
        """Cotangents of the ops' outputs pulled back to the parameters, for other inputs."""
        places = range(len(cotangents))
        smooth = [k for k in places if not self.of_indices[k]]

        def product(params: list[Any]) -> jax.Array:
            y = self.run(values._replace(params=params), slices, inputs=inputs).probes
            terms = (jnp.sum(y[k] * cotangents[k].reshape(y[k].shape)) for k in smooth)
            return sum(terms, start=jnp.zeros(()))

        by_jacobians = (cotangents[k] @ inputs[k] for k in places if self.of_indices[k])
        return sum(by_jacobians, start=flat(self.jacobian(product)(values.params)))


def _is_index(x: Any) -> bool:
    return x is not None and not jnp.issubdtype(x.dtype, jnp.inexact)


def _written(new: Any, shift: Any, stop: bool) -> Any:
    new = lax.stop_gradient(new) if stop else new
    return new if shift is None else new + shift


def _split(value: jax.Array, width: int) -> Iterator[jax.Array]:
    for plane in range(width or 1):
        yield (value[..., plane] if width else value).ravel()


def flat(tree: Any) -> jax.Array:
    """All elements of a tree in one vector."""
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def _at(jacobian: jax.Array, columns: np.ndarray) -> jax.Array:
    """From ``(S, P, *output)``, the derivative of each position by its own element, ``(S, P)``."""
    positions = np.arange(len(columns))
    return jacobian.reshape(len(jacobian), len(columns), -1)[:, positions, columns]


def _projection(arrays: Sequence[jax.Array]) -> jax.Array:
    rng = np.random.default_rng(0)
    return sum((jnp.sum(a * rng.normal(size=a.shape)) for a in arrays), start=jnp.zeros(()))


def _columns(source: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray | None:
    """Which element each position broadcasts from, or None if shapes do not fit."""
    try:
        if np.broadcast_shapes(source, shape) != shape:
            return None
    except ValueError:
        return None
    return np.broadcast_to(np.arange(math.prod(source)).reshape(source), shape).ravel()


def _grouped(
    paths: list[Path], hidden: list[Any], states: Mapping[Path, Any], groups: Any
) -> list[list[Path]]:
    """States of one shape and layer, unless groups are given."""
    if groups is not None:
        return [list(group) for group in groups]
    grouped: dict[Any, list[Path]] = {}
    for path, value in zip(paths, hidden, strict=True):
        shape = jnp.shape(jax.tree.leaves(value)[0])
        shape = shape[:-1] if isinstance(states[path], brainstate.HiddenGroupState) else shape
        layer = tuple(path[: i + 1] for i, key in enumerate(path) if isinstance(key, int))
        grouped.setdefault((shape, layer), []).append(path)
    return list(grouped.values())
