"""The transition of a group with the influence that passes through what mixes positions.

With ``z = op(x)`` the products between old and new states, ``x[p]`` the element that comes from
position ``p``, and ``W[p, r] = d z[r] / d x[p]`` the same for all examples,

    d h_s[r] / d h_q[p] = delta[r, p] direct[s][q][p] + sum_z a[s][r] W[p, r] b[q][p]

where ``direct`` and ``a[s] = d h_s / d z`` are taken by one VJP per state with the products cut,
``b[q] = d x / d h_q`` by one per product. :class:`Coupled` keeps the diagonal, ``p = r``, which
needs no more of ``W`` than its own. What has another form (two products in a row, a softmax) is
probed: one VJP of the whole step per state and position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import Literal, Var
from ..errors import NotSupportedError
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.planes import Plane, add, times
from ..op import ETPPrimitive
from .chained import transition_of
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .flow import Flow, Slice
from .hidden_group import HiddenGroup
from .liveness import variables
from .mixing import Mixer, cut_out, find_mixers, num_example_axes, product_matrix
from .relation import HiddenParamOpRelation
from .transition import Planes, Transition

__all__ = ['CoupledTransition', 'coupled_transition']

Values = Mapping[Var, jax.Array]


def coupled_transition(
    flow: Flow, group: HiddenGroup, relations: Sequence[HiddenParamOpRelation]
) -> 'CoupledTransition':
    """Cut the transition of a group out of a step's flow, with all that is mixed in it."""
    olds, news = group.hidden_invars, group.hidden_outvars
    whole = cut_out(flow, olds, news)
    if whole.forward_only:
        raise NotSupportedError(
            f'{group.hidden_paths} pass through a while loop, of which there is no reverse mode, '
            'and which this learning rule needs. Use lax.scan, or D_RTRL.'
        )
    num_axes = num_example_axes(whole.jaxpr.eqns, group)
    mixers = find_mixers(flow, whole.jaxpr.eqns, group, num_axes)
    if mixers is None and not flow.scope.keeps_others:  # else its pattern says so
        _note_probing(group, num_axes)
    no_D = tuple((False,) * len(row) for row in group.pattern)
    return CoupledTransition(
        base=transition_of(flow, group._replace(pattern=no_D), relations),
        group=group,
        num_axes=num_axes,
        keeps_others=flow.scope.keeps_others,
        mixers=None if mixers is None else tuple(mixers),
        tail=whole if mixers is None else cut_out(flow, [*olds, *(m.z for m in mixers)], news),
        heads=tuple(cut_out(flow, olds, [mixer.x]) for mixer in mixers or ()),
    )


def _note_probing(group: HiddenGroup, num_axes: int) -> None:
    paths = tuple(group.hidden_paths)
    positions = math.prod(group.varshape[num_axes:])
    emit(
        DiagnosticKind.TRANSITION_PROBED,
        DiagnosticLevel.WARNING,
        f'{list(paths)} reach each other by other ways than position by position through single '
        f'products of matrices: their Jacobian is probed, by {positions * group.num_state} '
        'backward passes in every step. The gradient is right, but slow.',
        hidden_paths=paths,
    )


@dataclass(frozen=True, eq=False)
class CoupledTransition:
    """How old states, and the outputs of a group's ops, become new states, mixed or not.

    Attributes
    ----------
    base : Transition
        What has the columns of the ops' outputs.
    group : HiddenGroup
        The group.
    num_axes : int
        How many axes of its shape, in front, number examples, which are never mixed.
    keeps_others : bool
        Whether ``D`` is of all positions by all others.
    mixers : tuple of Mixer or None
        The products between old and new states; None if ``D`` is probed.
    tail : Slice
        From old states and the products' results to new states.
    heads : tuple of Slice
        Per product, from old states to its operand.
    """

    base: Transition
    group: HiddenGroup
    num_axes: int
    keeps_others: bool
    mixers: tuple[Mixer, ...] | None
    tail: Slice
    heads: tuple[Slice, ...]

    @cached_property
    def variables(self) -> list[Var]:
        """The variables of the step whose values :meth:`jacobians` needs."""
        own = [v for part in (self.tail, *self.heads) for v in part.constvars]
        for mixer in self.mixers or ():
            own += [mixer.z, *(v for v in variables(mixer.eqn.invars) if v is not mixer.x)]
        return list(dict.fromkeys([*self.base.variables, *self.group.hidden_invars, *own]))

    @property
    def forward_only(self) -> bool:
        """Whether only forward mode exists: never."""
        return False

    @property
    def D_pattern(self) -> Sequence[Sequence[bool]]:
        """``[s][q]`` is False where ``D[s][q]`` is zero by structure."""
        return self.group.pattern

    @property
    def uniform(self) -> list[bool]:
        """Per new plane, whether its factors are uniform: never, for a weight is in them."""
        return [False] * self.group.num_state

    @property
    def positions(self) -> int:
        """How many positions an example has."""
        return math.prod(self.group.varshape[self.num_axes :])

    def jacobians(
        self, values: Values, backend: Backend = PLAIN
    ) -> tuple[Planes, dict[Var, list[Plane]]]:
        """``D[s][q]`` and, by ``y``, ``f[s]``; structurally zero planes are ``None``."""
        _, f = self.base.jacobians(values, backend)
        D = self._probed(values) if self.mixers is None else self._composed(values)
        pattern = self.group.pattern
        return [
            [plane if kept else None for plane, kept in zip(*rows, strict=True)]
            for rows in zip(D, pattern, strict=True)
        ], f

    def _composed(self, values: Values) -> Planes:
        """``D`` from ``direct``, ``a``, ``W`` and ``b``."""
        size = range(self.group.num_state)
        mixers = self.mixers or ()
        olds = [values[v] for v in self.group.hidden_invars]
        inputs = [*olds, *(values[mixer.z] for mixer in mixers)]
        pulled = self._rows(_function(self.tail, values), inputs)
        direct = [self._planes(row[: len(olds)]) for row in pulled]
        a = [row[len(olds) :] for row in pulled]
        b = [self._head(head, values, olds) for head in self.heads]
        if not self.keeps_others:
            diagonals = [self._diagonal(mixer, values) for mixer in mixers]
            return [
                [
                    add(
                        [direct[s][q]]
                        + [
                            times(times(a[s][m], diagonal), b[m][q])
                            for m, diagonal in enumerate(diagonals)
                        ]
                    )
                    for q in size
                ]
                for s in size
            ]
        weights = [self._matrix(mixer, values).T for mixer in mixers]
        eye = jnp.eye(self.positions, dtype=bool)
        flat = self._flat
        return [
            [
                jnp.where(eye, flat(direct[s][q])[..., None, :], 0)
                + sum(
                    flat(a[s][m])[..., :, None]
                    * _like(W, flat(b[m][q]))
                    * flat(b[m][q])[..., None, :]
                    for m, W in enumerate(weights)
                )
                for q in size
            ]
            for s in size
        ]

    def _head(self, head: Slice, values: Values, olds: Sequence[jax.Array]) -> list[jax.Array]:
        """``d x / d h_q``, at the positions of ``h_q``."""
        (x,), pull_back = jax.vjp(_function(head, values), *olds)
        return self._planes(pull_back([jnp.ones_like(x)]))

    def _rows(self, function: Any, inputs: Sequence[jax.Array]) -> list[Any]:
        """Per new plane, the cotangents of all inputs by ones at its positions."""
        news, pull_back = jax.vjp(function, *inputs)
        zeros = [jnp.zeros_like(new) for new in news]
        rows = []
        for place, width in enumerate(self.group.widths):
            for plane in range(width or 1):
                ones = jnp.ones_like(zeros[place])
                if width:
                    ones = zeros[place].at[..., plane].set(1)
                rows.append(pull_back([*zeros[:place], ones, *zeros[place + 1 :]]))
        return rows

    def _probed(self, values: Values) -> Planes:
        """``D`` by one VJP per state and position."""
        olds = [values[v] for v in self.group.hidden_invars]
        news, pull_back = jax.vjp(_function(self.tail, values), *olds)
        zeros = [jnp.zeros_like(new) for new in news]
        shape = self.group.varshape
        rows: Planes = []
        for place, width in enumerate(self.group.widths):
            for plane in range(width or 1):

                def pulled(p: Any, place: int = place, plane: int = plane) -> list[jax.Array]:
                    at = (jnp.arange(self.positions) == p).reshape(shape[self.num_axes :])
                    ones = jnp.broadcast_to(at, shape).astype(zeros[place].dtype)
                    if self.group.widths[place]:
                        ones = zeros[place].at[..., plane].set(ones)
                    found = pull_back([*zeros[:place], ones, *zeros[place + 1 :]])
                    flat = [self._flat(own) for own in self._planes(found)]
                    return flat if self.keeps_others else [own[..., p] for own in flat]

                stacked = lax.map(pulled, jnp.arange(self.positions))
                rows.append([self._row(own) for own in stacked])
        return rows

    def _row(self, stacked: jax.Array) -> jax.Array:
        """What was probed per position, with that axis behind those of examples."""
        moved = jnp.moveaxis(stacked, 0, self.num_axes)
        return moved if self.keeps_others else moved.reshape(self.group.varshape)

    def _diagonal(self, mixer: Mixer, values: Values) -> jax.Array:
        """``W[p, p]``, to be broadcast over examples."""
        op, diagonal = mixer.eqn.primitive, None
        if isinstance(op, ETPPrimitive) and op.diagonal is not None:
            params, operands = dict(mixer.eqn.params), _operands(mixer, values)
            aux = {name: operands[i] for name, i in op.aux_invars(params).items()}
            weights = {name: operands[i] for name, i in op.trainable_invars(params).items()}
            diagonal = op.diagonal(weights, mixer.sources, **params, **aux)
        if diagonal is None:
            diagonal = jnp.diagonal(self._matrix(mixer, values))
        inner = self.group.varshape[self.num_axes :]
        return diagonal.reshape((*(1 for _ in range(self.num_axes)), *inner))

    def _matrix(self, mixer: Mixer, values: Values) -> jax.Array:
        """``W[p, r]`` of a product."""
        return product_matrix(mixer, _operands(mixer, values), self.num_axes, self.positions)

    def _flat(self, plane: jax.Array) -> jax.Array:
        """A plane with its positions in one axis, behind those of examples."""
        return plane.reshape(*plane.shape[: self.num_axes], self.positions)

    def _planes(self, states: Sequence[jax.Array]) -> list[jax.Array]:
        """The planes of arrays that are shaped like the states."""
        return [
            plane
            for state, width in zip(states, self.group.widths, strict=True)
            for plane in ([state[..., w] for w in range(width)] if width else [state])
        ]


def _function(part: Slice, values: Values) -> Any:
    constants = [values[v] for v in part.constvars]
    return lambda *inputs: jax.core.eval_jaxpr(part.jaxpr, constants, *inputs)


def _operands(mixer: Mixer, values: Values) -> list[Any]:
    """The operands of a product, but the one that the states reach."""
    return [
        None if place == mixer.place else v.val if isinstance(v, Literal) else values[v]
        for place, v in enumerate(mixer.eqn.invars)
    ]


def _like(matrix: jax.Array, plane: jax.Array) -> jax.Array:
    """A matrix that all examples share, of the rank that a plane makes one."""
    return lax.expand_dims(matrix, range(plane.ndim - 1))
