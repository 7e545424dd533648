"""A variable of its own for every new hidden state, as later passes need."""

from collections.abc import Iterable, Sequence

from .._compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    build_closed_jaxpr,
    new_var,
    open_jaxpr,
    rewire,
    source_line,
)
from .._typing import Path
from ..errors import CompilationError
from ..op import ETPPrimitive
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .equations import copy_equation
from .liveness import reached_variables, variables

__all__ = ['check_same_types', 'give_own_variables', 'note_old_values']


def check_same_types(old: dict[Path, Atom], new: dict[Path, Atom]) -> None:
    """Refuse a step that changes the shape or type of a hidden state."""
    for path, before in old.items():
        after, expected = new[path].aval, before.aval
        if (after.shape, after.dtype) != (expected.shape, expected.dtype):
            raise CompilationError(
                f'The step changes the hidden state at {path} from {expected.dtype} of shape '
                f'{expected.shape} to {after.dtype} of shape {after.shape}. A hidden state must '
                'keep its shape and type from step to step; initialise it as the step leaves it.'
            )


def note_old_values(old: dict[Path, Atom], new: dict[Path, Atom], eqns: Sequence[JaxprEqn]) -> None:
    """Say which states are left as they are, or set to the old value of another one."""
    for path, value in new.items():
        source = next((p for p, v in old.items() if v is value), None)
        if source == path:
            emit(
                DiagnosticKind.HIDDEN_STATE_READ_ONLY,
                DiagnosticLevel.INFO,
                f'The hidden state at {path} is read but not written by the step; it is '
                'carried as it is.',
                hidden_paths=(path,),
            )
        elif source is not None and (product := _product_of(old[source], eqns)) is not None:
            line = source_line(product)
            emit(
                DiagnosticKind.HIDDEN_COUPLING_NOT_TRACED,
                DiagnosticLevel.WARNING,
                f'{line}: the hidden state at {path} is set to the old value of the one at '
                f'{source}, so that a product which reads the new {path} cannot be told from one '
                f'that reads the old {source}. It is taken for the latter, and not traced from '
                'step to step. If the former is meant, set the state to a copy, '
                'jnp.array(value, copy=True), and read that.',
                hidden_paths=(path, source),
                context={'source': line},
            )


def _product_of(value: Atom, eqns: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """The first product that reads a value, or anything computed from it."""
    made = reached_variables(eqns, [value])
    products = (
        eqn
        for eqn in eqns
        if isinstance(eqn.primitive, ETPPrimitive) or eqn.primitive.name == 'dot_general'
    )
    return next((eqn for eqn in products if not made.isdisjoint(variables(eqn.invars))), None)


def give_own_variables(closed: ClosedJaxpr, places: Sequence[int]) -> ClosedJaxpr:
    """Define every new hidden state, at some places of the outputs, by an ordinary equation.

    A state that is not written, or set to an input, to a literal, to the output of an ETP op or to
    the same value as another state gets a copy. Whoever reads the output of an op that a state is
    set to reads the copy, as with any other value that a state is set to.
    """
    jaxpr, consts = open_jaxpr(closed)
    outvars = list(jaxpr.outvars)
    eqns = _copied_ops(jaxpr.eqns, [outvars[place] for place in places])
    ordinary = {
        v for eqn in eqns if not isinstance(eqn.primitive, ETPPrimitive) for v in eqn.outvars
    }
    for place in places:
        new = outvars[place]
        if isinstance(new, Literal) or new not in ordinary:
            outvars[place] = new_var(new.aval)
            eqns.append(copy_equation(new, outvars[place]))
        else:
            ordinary.remove(new)
    return build_closed_jaxpr(jaxpr.constvars, consts, jaxpr.invars, outvars, eqns)


def _copied_ops(eqns: Iterable[JaxprEqn], states: Sequence[Atom]) -> list[JaxprEqn]:
    """Put a copy between ETP ops whose output is a new state and all its readers."""
    copied: list[JaxprEqn] = []
    for eqn in eqns:
        if isinstance(eqn.primitive, ETPPrimitive) and any(v is eqn.outvars[0] for v in states):
            (state,) = eqn.outvars
            output = new_var(state.aval)
            copied += [rewire(eqn, eqn.invars, [output]), copy_equation(output, state)]
        else:
            copied.append(eqn)
    return copied
