"""Which equations lead to some variables, and which variables others lead to."""

from collections.abc import Callable, Collection, Iterable, Sequence

from .._compat import Atom, JaxprEqn, Literal, Var

__all__ = ['needed_equations', 'reached_variables', 'read_variables', 'variables']


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are not literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def read_variables(eqns: Iterable[JaxprEqn]) -> dict[Var, None]:
    """The variables that some equations read, as an ordered set."""
    return dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))


def needed_equations(
    eqns: Sequence[JaxprEqn],
    results: Iterable[Atom],
    known: Collection[Var] = frozenset(),
    keep_effects: bool = False,
) -> list[JaxprEqn]:
    """The equations that lead to some results, in the order in which they run.

    What is ``known`` need not be computed. With ``keep_effects``, every equation with a side effect
    is kept, and what leads to it.
    """
    live = {v for v in variables(results) if v not in known}
    kept = []
    for eqn in reversed(eqns):
        if (keep_effects and eqn.effects) or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(v for v in variables(eqn.invars) if v not in known)
    return kept[::-1]


def reached_variables(
    eqns: Iterable[JaxprEqn],
    sources: Iterable[Var],
    into: Callable[[JaxprEqn], Iterable[Var]] = lambda eqn: eqn.outvars,
) -> set[Var]:
    """The sources, and all that they lead to by equations in the order in which they run.

    ``into`` says into which of its results an equation leads one of its operands; into all, by
    default.
    """
    reached = set(sources)
    for eqn in eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(into(eqn))
    return reached
