"""Runs compiled steps and yields their factors, in state-major planes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from jax import lax

from .._compat import Var
from .._typing import Path, PyTree
from ..compiler import ETraceGraph, ExitPerturbation, HiddenGroup
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.planes import Plane
from .asked import Cut, whole
from .links import Link, links_of

__all__ = ['Entry', 'Factors', 'GroupPlanes', 'Signals', 'StepRunner', 'Values', 'Zeros']

Values = dict[Path, Any]
"""Values of states, by path."""


Zeros = tuple[list[jax.Array], list[jax.Array], list[jax.Array]]
"""At the ops' outputs, at the exits of groups and at the old states that bypass them."""

GroupPlanes = tuple[tuple[Plane, ...], ...]
"""Per group and state, a plane."""


class Factors(NamedTuple):
    """What one step says of the past: ``x``, ``f``, ``D`` and what the weights' ways read.

    Those of a window have a leading axis of steps; see :func:`as_window`.

    Attributes
    ----------
    x : tuple
        Per relation, the op's input; None for an op of weights alone.
    f : tuple
        Per link, ``d h_s / d y`` per plane ``s``.
    D : tuple
        Per group, ``d h_s(t) / d h_q(t-1)``, ``[s][q]``.
    varying : tuple
        Per relation and trainable input, the values that its way reads besides parameters.
    keep : jax.Array, optional
        Per example, or for all, 0 where the states started anew before the step; ``D`` holds it.
    """

    x: tuple[jax.Array | None, ...]
    f: tuple[tuple[Plane, ...], ...]
    D: tuple[GroupPlanes, ...]
    varying: tuple[dict[str, tuple[jax.Array, ...]], ...]
    keep: jax.Array | None = None

    def after_restart(self, keep: jax.Array | None) -> 'Factors':
        """The same where some examples started anew before the step."""
        return self if keep is None else self._replace(D=kept(self.D, keep), keep=keep)


class Entry(NamedTuple):
    """The trace before a step or a window.

    Attributes
    ----------
    trace : PyTree
        What an engine carries.
    live : jax.Array
        A flag; if it is not set, the trace counts as zero, whatever it holds, NaN included. So it
        can be dropped without a pass over it. A small trace is zero then.
    """

    trace: Any
    live: jax.Array


class Signals(NamedTuple):
    """What the loss of one step says of its states.

    Attributes
    ----------
    c : tuple
        Per relation, ``dloss / dy`` by every path of the step.
    L : tuple
        Per group and plane, ``dloss / dh_s(t)``, the planes taken as independent.
    R : tuple
        Per group and plane, ``dloss / dh_q(t-1)`` by paths past all new states; None if there are
        none.
    """

    c: tuple[jax.Array, ...]
    L: GroupPlanes
    R: GroupPlanes

    def after_restart(self, keep: jax.Array | None) -> 'Signals':
        """The same where some examples started anew before the step."""
        return self if keep is None else self._replace(R=kept(self.R, keep))


class StepRunner:
    """A compiled graph as pure functions of parameters, hidden states and other states."""

    def __init__(self, graph: ETraceGraph, backend: Backend = PLAIN) -> None:
        self.graph = graph
        self.backend = backend
        self.links = links_of(graph)

    def run(
        self, args: Sequence[Any], params: Values, hidden: Values, others: Values
    ) -> tuple[PyTree, Values, Values, Factors]:
        """One step: results, new hidden states, new other states, factors."""
        states = self.flat_states(params, hidden, others)
        out, hidden, others, temps = self.graph.module_info.jaxpr_call(*args, old_state_vals=states)
        return out, hidden, others, self.factors(temps)

    def run_perturbed(
        self, args: Sequence[Any], params: Values, hidden: Values, others: Values, zeros: Zeros
    ) -> tuple[tuple[PyTree, Values, Values], Factors]:
        """One step with zeros added where the signals are read; nothing flows to the old states."""
        states = self.flat_states(params, lax.stop_gradient(hidden), lax.stop_gradient(others))
        out, hidden, others, temps = self.graph.call_exit_perturb(args, *zeros, states)
        return (out, hidden, others), self.factors(temps)

    def run_with_vjp(
        self, args: Sequence[Any], params: Values, hidden: Values, others: Values, cut: Cut = whole
    ) -> tuple[tuple[PyTree, Values, Values], Any, Factors]:
        """One step as :meth:`run`, and its VJP for :meth:`signals`, by the inputs left by a cut."""

        def step(args: Any, params: Values, zeros: Zeros) -> Any:
            return self.run_perturbed(cut(args), params, hidden, others, zeros)

        return jax.vjp(step, tuple(args), params, self.zeros(), has_aux=True)

    def signals(
        self, vjp: Any, cotangents: tuple[PyTree, Values, Values]
    ) -> tuple[Any, Values, Signals]:
        """Cotangents of a step's results to those of its inputs, and to signals.

        Returns the cotangents of the inputs, those of the parameters by all that is not traced, and
        the signals.
        """
        ct_args, ct_params, ct_zeros = vjp(cotangents)
        return ct_args, ct_params, self.as_signals(ct_zeros)

    def zeros(self) -> Zeros:
        """The zeros of :meth:`run_perturbed`."""
        return self._perturbation.zeros()

    def as_signals(self, cotangents: Zeros) -> Signals:
        """The signals, from the cotangents of the zeros."""
        c, L, R = cotangents
        exits = dict(zip(self._perturbation.hidden_outvars, L, strict=True))
        passed = dict(zip(self._perturbation.bypass_invars, R, strict=True))
        groups = self.graph.hidden_groups
        return Signals(
            c=tuple(c),
            L=tuple(group_planes(group, group.hidden_outvars, exits) for group in groups),
            R=tuple(group_planes(group, group.hidden_invars, passed) for group in groups),
        )

    @property
    def _perturbation(self) -> ExitPerturbation:
        if self.graph.exit_perturb is None:
            raise ValueError(
                'The graph has no perturbed step; compile it with include_hidden_perturb=True.'
            )
        return self.graph.exit_perturb

    def entry_planes(self, hidden: Values) -> tuple[tuple[jax.Array, ...], ...]:
        """Cotangents of hidden states, by path, as planes per group."""
        return tuple(
            tuple(
                plane
                for path, width in zip(group.hidden_paths, group.widths, strict=True)
                for plane in split_planes(u.get_mantissa(hidden[path]), width)
            )
            for group in self.graph.hidden_groups
        )

    def exit_cotangents(
        self, results: tuple[PyTree, Values, Values], planes: GroupPlanes
    ) -> tuple[PyTree, Values, Values]:
        """Cotangents of a step's results, all zero but for these of hidden states.

        The results, or cotangents of them, are given for their shapes.
        """
        out, hidden, others = jax.tree.map(_zero_cotangent, results)
        for group, own in zip(self.graph.hidden_groups, planes, strict=True):
            values = join_planes(own, group.widths)
            for path, value in zip(group.hidden_paths, values, strict=True):
                (zero,), tree = jax.tree.flatten(hidden[path])
                hidden[path] = jax.tree.unflatten(tree, [value.astype(zero.dtype)])
        return out, hidden, others

    def flat_states(self, params: Values, hidden: Values, others: Values) -> list[Any]:
        """Values in the order of the compiled states."""
        info = self.graph.module_info
        values = {**params, **hidden, **others}
        return [values[info.state_id_to_path[id(s)]] for s in info.compiled_model_states]

    def flat_inputs(
        self, args: Sequence[Any], params: Values, hidden: Values, others: Values
    ) -> list[jax.Array]:
        """The values of the inputs of the step's jaxpr, without units."""
        return self.graph.module_info.flat_inputs(args, self.flat_states(params, hidden, others))

    def factors(self, temps: Mapping[Var, jax.Array]) -> Factors:
        """The factors, from the values of a step's output variables; they carry no gradient."""
        temps = {v: lax.stop_gradient(value) for v, value in temps.items()}
        relations = self.graph.hidden_param_op_relations
        solved = [
            transition.jacobians(temps, self.backend) for transition in self.graph.transitions
        ]
        return Factors(
            x=tuple(None if r.x_var is None else temps[r.x_var] for r in relations),
            f=tuple(tuple(solved[link.group.index][1][link.relation.y_var]) for link in self.links),
            D=tuple(tuple(tuple(row) for row in D) for D, _ in solved),
            varying=tuple(
                {k: tuple(temps[v] for v in way.varying_vars) for k, way in r.weight_ways.items()}
                for r in relations
            ),
        )


def as_window(factors: Factors, links: Sequence[Link], steps: int, shapes: Factors) -> Factors:
    """The factors of a window of so many steps, from those that a loop gives.

    ``f`` and ``D`` that are the same in all steps, or one number, stay as they are, as long as one
    plane of each op and its group has all steps. ``shapes`` are those of one step.
    """
    moves = [
        any(
            plane.shape == (steps, *one.shape)
            for plane, one in zip(jax.tree.leaves(D), jax.tree.leaves(like), strict=True)
        )
        for D, like in zip(factors.D, shapes.D, strict=True)
    ]
    f = tuple(
        planes if moves[link.group.index] else stacked(planes, steps, like)
        for link, planes, like in zip(links, factors.f, shapes.f, strict=True)
    )
    x, varying, keep = (
        stacked(getattr(factors, name), steps, getattr(shapes, name))
        for name in ('x', 'varying', 'keep')
    )
    return Factors(x, f, factors.D, varying, keep)


def without_zeros(signals: Signals, are_zero: Signals) -> Signals:
    """Signals without planes of ``L`` and ``R`` of which it is known that they are zero."""

    def drop(planes: Any, zero: Any) -> Any:
        return tuple(
            tuple(None if z else plane for plane, z in zip(*pair, strict=True))
            for pair in zip(planes, zero, strict=True)
        )

    return signals._replace(L=drop(signals.L, are_zero.L), R=drop(signals.R, are_zero.R))


def stacked(tree: PyTree, steps: int, shapes: PyTree) -> PyTree:
    """Arrays with a leading axis of all steps, from what a loop gives; with shapes of one step."""
    return jax.tree.map(lambda a, one: jnp.broadcast_to(a, (steps, *one.shape)), tree, shapes)


def kept(planes: PyTree, keep: jax.Array) -> PyTree:
    """Planes that multiply the past, zero where it does not count."""
    return jax.tree.map(lambda plane: per_example(keep, plane) * plane, planes)


def per_example(values: jax.Array, like: jax.Array) -> jax.Array:
    """Values of the leading axes of a plane, to be broadcast to it."""
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim)).astype(like.dtype)


def split_planes(value: jax.Array, width: int) -> list[jax.Array]:
    """The planes of a state's value; ``width`` is the length of its state axis, 0 without one."""
    return [value[..., plane] for plane in range(width)] if width else [value]


def join_planes(planes: Sequence[Any], widths: Sequence[int]) -> list[jax.Array]:
    """The values of a group's states from all their planes."""
    left = iter(planes)
    return [
        jnp.stack([next(left) for _ in range(width)], -1) if width else next(left)
        for width in widths
    ]


def group_planes(
    group: HiddenGroup, variables: Sequence[Var], values: Mapping[Var, jax.Array]
) -> tuple[Plane, ...]:
    """The planes of a group from its states' values; None for states without one."""
    planes: list[Plane] = []
    for v, width in zip(variables, group.widths, strict=True):
        planes += split_planes(values[v], width) if v in values else [None] * (width or 1)
    return tuple(planes)


def _zero_cotangent(a: Any) -> Any:
    """A cotangent of zeros; that of integers is empty."""
    if jnp.issubdtype(a.dtype, jnp.inexact):
        return jnp.zeros_like(a)
    return np.zeros(a.shape, jax.dtypes.float0)


def sum_middle(value: jax.Array, ndim: int) -> jax.Array:
    """As :func:`sum_leading`, behind a leading axis of steps."""
    return value.sum(tuple(range(1, 1 + value.ndim - ndim)))


def sum_leading(value: jax.Array, ndim: int) -> jax.Array:
    """Sum over the axes that an op shared by the batch does not have."""
    return value.sum(tuple(range(value.ndim - ndim)))
