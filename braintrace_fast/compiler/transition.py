"""The part of a step that moves one hidden group, and its derivatives ``D`` and ``f``.

The derivatives are taken by :mod:`braintrace_fast.kernels.hidden_jacobian`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from .._compat import Jaxpr, JaxprEqn, Literal, Var, equation_function, source_line
from ..errors import NotSupportedError
from ..kernels.dispatch import PLAIN, Backend
from ..kernels.hidden_jacobian import hidden_jacobian
from ..kernels.planes import Plane
from .control_flow import has_while
from .flow import Flow, Slice
from .primitives import SUMS
from .uniform import uniform_arrays

__all__ = ['GroupTransition', 'Planes', 'Transition', 'build_transition', 'is_forward_only']

Planes = list[list[Plane]]


def is_forward_only(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has no reverse mode."""
    return any(map(has_while, jaxpr.eqns))


class Transition(Protocol):
    """What the runtime asks of the transition of a group."""

    @property
    def variables(self) -> list[Var]:
        """The variables of the step whose values :meth:`jacobians` needs."""

    @property
    def forward_only(self) -> bool:
        """Whether a ``while`` is inside, so that only forward mode exists."""

    @property
    def uniform(self) -> list[bool]:
        """Per new plane, whether its factors are uniform, whatever the values."""

    @property
    def D_pattern(self) -> Sequence[Sequence[bool]]:
        """``[s][q]`` is False where ``D[s][q]`` is zero by structure."""

    def jacobians(
        self, values: Mapping[Var, jax.Array], backend: Backend = PLAIN
    ) -> tuple[Planes, dict[Var, list[Plane]]]:
        """``D[s][q]`` and, by ``y``, ``f[s]``; structurally zero planes are ``None``."""


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

    @property
    def D_pattern(self) -> Sequence[Sequence[bool]]:
        """``[s][q]`` is False where ``D[s][q]`` is zero by structure."""
        return [row[: len(self.pattern)] for row in self.pattern]

    def jacobians(
        self, values: Mapping[Var, jax.Array], backend: Backend = PLAIN
    ) -> tuple[Planes, dict[Var, list[Plane]]]:
        """``D[s][q]`` and, by ``y``, ``f[s]``, at the given values of :attr:`variables`.

        Structurally zero planes are ``None``.
        """
        inputs = [values[v] for v in (*self.hidden_invars, *self.y_vars)]
        constants = [[values[v] for v in row.constvars] for row in self.rows]
        columns = hidden_jacobian(self, constants, inputs, backend=backend)
        num_planes = sum(width or 1 for width in self.widths)
        D = [column[:num_planes] for column in columns]
        f = {
            y: [column[num_planes + place] for column in columns]
            for place, y in enumerate(self.y_vars)
        }
        return D, f

    @cached_property
    def uniform(self) -> list[bool]:
        """Per new plane, whether it is a sum of old planes and ys, each times a single number.

        This is read off its equations, whatever the values.
        """
        return [
            not width and _is_uniform_sum(row.jaxpr, len(row.constvars))
            for row, width in zip(self.rows, self.widths, strict=True)
            for _ in range(width or 1)
        ]

    def evaluate(
        self, row: int, constants: Sequence[jax.Array], inputs: Sequence[jax.Array]
    ) -> jax.Array:
        """One new state, from a row's constants and all inputs."""
        (new,) = jax.core.eval_jaxpr(self.rows[row].jaxpr, constants, *inputs)
        return new

    def push_forward(
        self,
        row: int,
        constants: Sequence[jax.Array],
        inputs: Sequence[jax.Array],
        tangents: Sequence[jax.Array | None],
    ) -> jax.Array:
        """The tangent of one new state, by those of some inputs."""
        jaxpr = self.rows[row].jaxpr
        (new,), (tangent,) = position_wise_jvp(jaxpr, constants, inputs, tangents)
        return jnp.zeros_like(new) if tangent is None else tangent


def _is_uniform_sum(jaxpr: Jaxpr, num_constants: int) -> bool:
    """Whether a result is a sum of the inputs behind the constants, each times a single number."""
    moving = set([*jaxpr.constvars, *jaxpr.invars][num_constants:])
    uniform = uniform_arrays(jaxpr.eqns, lambda v: not v.aval.ndim and v not in moving)

    def is_uniform(atom: Any) -> bool:
        return not atom.aval.ndim or (not isinstance(atom, Literal) and atom in uniform)

    for eqn in jaxpr.eqns:
        moves = [not isinstance(v, Literal) and v in moving for v in eqn.invars]
        if not any(moves):
            continue
        others_are_uniform = all(m or is_uniform(v) for v, m in zip(eqn.invars, moves, strict=True))
        is_scaled = {
            'mul': sum(moves) == 1 and others_are_uniform,
            'div': moves == [True, False] and others_are_uniform,
        }
        if eqn.primitive.name not in SUMS and not is_scaled.get(eqn.primitive.name, False):
            return False
        moving.update(eqn.outvars)
    return True


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
        directions = {i: moves(v) for i, v in enumerate(eqn.invars) if moves(v) is not None}
        results, pushed = _push_through(eqn, [value(v) for v in eqn.invars], directions)
        primal.update(zip(eqn.outvars, results, strict=True))
        pairs = zip(eqn.outvars, pushed, strict=bool(directions))
        tangent.update((v, t) for v, t in pairs if t.dtype != jax.dtypes.float0)
    return [value(v) for v in jaxpr.outvars], [moves(v) for v in jaxpr.outvars]


def _push_through(
    eqn: JaxprEqn, operands: Sequence[Any], directions: Mapping[int, jax.Array]
) -> tuple[list[Any], list[Any]]:
    """The results of an equation, and their tangents by those of some operands, if any."""
    function = equation_function(eqn)

    def of_moving(*moved: Any) -> list[Any]:
        filled = dict(enumerate(operands)) | dict(zip(directions, moved, strict=True))
        return function(*filled.values())

    points, tangents = [operands[i] for i in directions], list(directions.values())
    if not directions:
        return of_moving(), []
    if eqn.primitive.name.startswith('custom_vjp_call'):
        results = of_moving(*points)
        places = range(len(results))
        return results, [_push_through_vjp(of_moving, points, tangents, p) for p in places]
    try:
        results, pushed = jax.jvp(of_moving, points, tangents)
    except TypeError as error:
        raise NotSupportedError(
            f'{source_line(eqn)}: a derivative is needed in forward mode here, and '
            f'{eqn.primitive.name} has none ({error}). Define the surrogate by '
            'jax.custom_jvp instead of jax.custom_vjp.'
        ) from error
    return results, pushed


def _push_through_vjp(
    function: Any, points: list[jax.Array], directions: list[jax.Array], place: int
) -> jax.Array:
    out, pull_back = jax.vjp(lambda *moved: function(*moved)[place], *points)
    slopes = pull_back(jnp.ones_like(out))
    return sum(
        (slope * direction for slope, direction in zip(slopes, directions, strict=True)),
        start=jnp.zeros_like(out),
    )
