"""The part of a step that moves one hidden group, and its derivatives ``D`` and ``f``.

Reverse mode takes one VJP per state plane ``s`` and gives row ``s`` of ``D`` and ``f[s]`` of every
relation at once. Forward mode takes one JVP per input; it serves transitions that contain a
``while``, and ops whose output has fewer axes than the states (a time constant that the batch
shares), where a VJP would sum over the axes that are missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._compat import Jaxpr, Literal, Var, equation_function, source_line
from ..errors import NotSupportedError
from .control_flow import has_while
from .flow import Flow, Slice

__all__ = ['GroupTransition', 'Plane', 'Planes', 'build_transition', 'is_forward_only']

Plane = jax.Array | None
"""A derivative per position; ``None`` where it is structurally zero."""

Planes = list[list[Plane]]


def is_forward_only(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has no reverse mode."""
    return any(map(has_while, jaxpr.eqns))


@dataclass(frozen=True, eq=False)
class GroupTransition:
    """How the old states of a group and the outputs of its ops become the new states.

    Attributes
    ----------
    hidden_invars : tuple of Var
        The old states of the group.
    y_vars : tuple of Var
        The outputs of the ETP ops that reach the group.
    widths : tuple of int
        How many planes each state holds; 0 for an ordinary state, its number of states for a
        ``HiddenGroupState``, whose planes lie along its last axis.
    rows : tuple of Slice
        One function per state: (constants, old states, ys) to the new state.
    reached : tuple of tuple of bool
        Per row, which of (old states, ys) it depends on.
    pattern : tuple of tuple of bool
        Per new plane, which of (old planes, ys) it depends on.
    shared : tuple of bool
        Per y, whether it has fewer axes than the states.
    forward_only : bool
        Whether a ``while`` is inside, so that only forward mode exists.
    """

    hidden_invars: tuple[Var, ...]
    y_vars: tuple[Var, ...]
    widths: tuple[int, ...]
    rows: tuple[Slice, ...]
    reached: tuple[tuple[bool, ...], ...]
    pattern: tuple[tuple[bool, ...], ...]
    shared: tuple[bool, ...]
    forward_only: bool

    @property
    def variables(self) -> list[Var]:
        """The variables of the step whose values :meth:`jacobians` needs."""
        constants = (v for row in self.rows for v in row.constvars)
        return list(dict.fromkeys([*self.hidden_invars, *self.y_vars, *constants]))

    def jacobians(self, values: Mapping[Var, jax.Array]) -> tuple[Planes, dict[Var, list[Plane]]]:
        """``D[s][q]`` and, by ``y``, ``f[s]``, at the given values of :attr:`variables`.

        Structurally zero planes are ``None``.
        """
        inputs = [values[v] for v in (*self.hidden_invars, *self.y_vars)]
        columns: list[list[Plane]] = []  # one per row plane: derivatives by every input plane
        for row, reached in zip(range(len(self.rows)), self.reached, strict=True):
            columns.extend(self._row(row, reached, inputs, values))
        columns = [
            [plane if present else None for plane, present in zip(column, row, strict=True)]
            for column, row in zip(columns, self.pattern, strict=True)
        ]
        num_planes = sum(width or 1 for width in self.widths)
        D = [column[:num_planes] for column in columns]
        f = {
            y: [column[num_planes + place] for column in columns]
            for place, y in enumerate(self.y_vars)
        }
        return D, f

    def _row(
        self,
        row: int,
        reached: Sequence[bool],
        inputs: list[jax.Array],
        values: Mapping[Var, jax.Array],
    ) -> list[list[Plane]]:
        """The derivatives of one new state by every input plane, per plane of the state."""
        shared = (*(False for _ in self.widths), *self.shared)
        constants = [values[v] for v in self.rows[row].constvars]
        jaxpr = self.rows[row].jaxpr
        by_forward = [r and (self.forward_only or s) for r, s in zip(reached, shared, strict=True)]
        by_reverse = [r and not fwd for r, fwd in zip(reached, by_forward, strict=True)]
        width = self.widths[row]
        found: list[list[list[jax.Array] | None]] = [
            [None] * len(inputs) for _ in range(width or 1)
        ]
        if any(by_reverse):
            moving = [place for place, moves in enumerate(by_reverse) if moves]
            new, pull_back = jax.vjp(
                lambda *moved: _evaluate(jaxpr, constants, inputs, moving, moved),
                *(inputs[place] for place in moving),
            )
            for plane in range(width or 1):
                cotangents = pull_back(_one_plane(new, plane, width))
                for place, cotangent in zip(moving, cotangents, strict=True):
                    found[plane][place] = self._split(place, cotangent)
        for place, moves in enumerate(by_forward):
            if moves:
                tangents = self._columns(jaxpr, constants, inputs, place)
                for plane in range(width or 1):
                    found[plane][place] = [t[..., plane] if width else t for t in tangents]
        return [list(self._flatten(per_input)) for per_input in found]

    def _columns(
        self, jaxpr: Jaxpr, constants: list[jax.Array], inputs: list[jax.Array], place: int
    ) -> list[jax.Array]:
        """Tangents of a row for a one in every plane of one input."""
        width = self.widths[place] if place < len(self.widths) else 0
        result = []
        for plane in range(width or 1):
            tangents: list[jax.Array | None] = [None] * len(inputs)
            tangents[place] = _one_plane(inputs[place], plane, width)
            (new,), (tangent,) = position_wise_jvp(jaxpr, constants, inputs, tangents)
            result.append(jnp.zeros_like(new) if tangent is None else tangent)
        return result

    def _split(self, place: int, cotangent: jax.Array) -> list[jax.Array]:
        width = self.widths[place] if place < len(self.widths) else 0
        return [cotangent[..., plane] for plane in range(width)] if width else [cotangent]

    def _flatten(self, per_input: list[list[jax.Array] | None]) -> Iterator[Plane]:
        for place, planes in enumerate(per_input):
            width = self.widths[place] if place < len(self.widths) else 0
            yield from planes if planes is not None else [None] * (width or 1)


def build_transition(
    flow: Flow,
    hidden_invars: Sequence[Var],
    hidden_outvars: Sequence[Var],
    y_vars: Sequence[Var],
    widths: Sequence[int],
    pattern: Sequence[Sequence[bool]],
    shared: Sequence[bool],
) -> GroupTransition:
    """Cut the transition of a group out of a step's flow.

    ``pattern`` has, per new plane, a column per old plane and per ``y``.
    """
    sources = [*hidden_invars, *y_vars]
    rows = tuple(flow.slice(sources, [new]) for new in hidden_outvars)
    return GroupTransition(
        hidden_invars=tuple(hidden_invars),
        y_vars=tuple(y_vars),
        widths=tuple(widths),
        rows=rows,
        reached=tuple(
            tuple(source in flow.aligned(new) for source in sources) for new in hidden_outvars
        ),
        pattern=tuple(map(tuple, pattern)),
        shared=tuple(shared),
        forward_only=any(row.forward_only for row in rows),
    )


def _evaluate(
    jaxpr: Jaxpr,
    constants: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    moving: Sequence[int],
    moved: Sequence[jax.Array],
) -> jax.Array:
    values = list(inputs)
    for place, value in zip(moving, moved, strict=True):
        values[place] = value
    (new,) = jax.core.eval_jaxpr(jaxpr, constants, *values)
    return new


def _one_plane(like: jax.Array, plane: int, width: int) -> jax.Array:
    if not width:
        return jnp.ones_like(like)
    return jnp.zeros_like(like).at[..., plane].set(1)


def position_wise_jvp(
    jaxpr: Jaxpr,
    constants: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    tangents: Sequence[jax.Array | None],
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Push tangents through a position-wise jaxpr, custom VJPs included.

    A ``custom_vjp`` has no forward mode; but where it is position-wise, its VJP at ones is its
    derivative, which multiplies the tangent.
    """
    variables = [*jaxpr.constvars, *jaxpr.invars]  # one list from jax 0.12 on, two before
    primal: dict[Var, Any] = dict(zip(variables, [*constants, *inputs], strict=True))
    tangent: dict[Var, Any] = dict(zip(variables[len(constants) :], tangents, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else primal[atom]

    def moves(atom: Any) -> Any:
        return None if isinstance(atom, Literal) else tangent.get(atom)

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        moving = [i for i, v in enumerate(eqn.invars) if moves(v) is not None]
        function = equation_function(eqn)
        if not moving:
            primal.update(zip(eqn.outvars, function(*operands), strict=True))
            continue

        def of_moving(
            *moved: Any, function: Any = function, operands: Any = operands, moving: Any = moving
        ) -> list[Any]:
            filled = list(operands)
            for place, v in zip(moving, moved, strict=True):
                filled[place] = v
            return function(*filled)

        points = [operands[i] for i in moving]
        directions = [moves(eqn.invars[i]) for i in moving]
        if eqn.primitive.name.startswith('custom_vjp_call'):
            results = of_moving(*points)
            pushed = [
                _push_through_vjp(of_moving, points, directions, place)
                for place in range(len(results))
            ]
        else:
            try:
                results, pushed = jax.jvp(of_moving, points, directions)
            except TypeError as error:
                raise NotSupportedError(
                    f'{source_line(eqn)}: a derivative is needed in forward mode here, and '
                    f'{eqn.primitive.name} has none ({error}). Define the surrogate by '
                    'jax.custom_jvp instead of jax.custom_vjp.'
                ) from error
        primal.update(zip(eqn.outvars, results, strict=True))
        tangent.update(
            (v, t) for v, t in zip(eqn.outvars, pushed, strict=True) if t.dtype != jax.dtypes.float0
        )
    return [value(v) for v in jaxpr.outvars], [moves(v) for v in jaxpr.outvars]


def _push_through_vjp(
    function: Any, points: list[jax.Array], directions: list[jax.Array], place: int
) -> jax.Array:
    out, pull_back = jax.vjp(lambda *moved: function(*moved)[place], *points)
    slopes = pull_back(jnp.ones_like(out))
    return sum(
        (slope * direction for slope, direction in zip(slopes, directions, strict=True)),
        start=jnp.zeros_like(out),
    )
