"""Divide a body into its parts: a chain of stages, each a function of those before it.

======================= ============================================================================
stage                   decides
======================= ============================================================================
:class:`Invariant`      what is computed once
:class:`Results`        what the rest has to compute, in order and at once
:class:`Schedule`       what runs ahead of the loop, and what runs in it
:class:`Deferred`       what runs after the loop, and what the loop keeps for it
:class:`SplitLoop`      all of them, with the invariant values that anyone reads
======================= ============================================================================
"""

import dataclasses
from collections.abc import Sequence

from ..._compat import Atom, JaxprEqn, Literal, Var, can_be_mapped
from ...compiler.liveness import needed_equations
from ...compiler.primitives import CHEAP
from ...compiler.uniform import uniform_arrays
from .body import Body
from .equations import divide, is_one_of, num_bytes, results
from .products import pays_ahead
from .sums import Sum, sum_of

__all__ = ['SplitLoop', 'split_loop']


@dataclasses.dataclass(frozen=True)
class Invariant:
    """What is the same in all steps.

    Attributes
    ----------
    eqns : list of JaxprEqn
        The loop-invariant equations.
    variables : dict
        What is given and what those compute; a dictionary because sets have no order.
    uniform : set of Var
        The arrays among their results that are uniform.
    repeated : list of JaxprEqn
        The cheap ones that make uniform arrays: steps repeat them rather than read the arrays.
    varying : list of JaxprEqn
        All other equations, after the repeated ones.
    """

    eqns: list[JaxprEqn]
    variables: dict[Var, None]
    uniform: set[Var]
    repeated: list[JaxprEqn]
    varying: list[JaxprEqn]

    def has(self, v: Atom) -> bool:
        """Whether an atom is the same in all steps."""
        return isinstance(v, Literal) or v in self.variables


@dataclasses.dataclass(frozen=True)
class Results:
    """What has to be computed in every step.

    Attributes
    ----------
    sums : list of Sum
        How each of the terms is summed.
    shown : list of Atom
        The ``ys``, if the progress of the loop is shown.
    in_order : list of Atom
        What the loop itself has to compute.
    at_once : list of Var
        The ``ys`` and what sums are computed from, for all steps.
    """

    sums: list[Sum]
    shown: list[Atom]
    in_order: list[Atom]
    at_once: list[Var]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What runs ahead of the loop and what runs in it.

    Attributes
    ----------
    ahead : list of JaxprEqn
        What runs for all steps before the loop.
    foreseen : list of Var
        Its results that the loop reads.
    in_order : list of JaxprEqn
        What runs in the loop.
    unmapped : set of Var
        The results of equations that JAX cannot map.
    """

    ahead: list[JaxprEqn]
    foreseen: list[Var]
    in_order: list[JaxprEqn]
    unmapped: set[Var]


@dataclasses.dataclass(frozen=True)
class Deferred:
    """What runs for all steps after the loop.

    Attributes
    ----------
    eqns : list of JaxprEqn
        What runs.
    states : list of int
        The places of the carried values that it reads both old and new. They are kept in one array
        of one step more.
    kept : list of Var
        What else it reads of the loop.
    """

    eqns: list[JaxprEqn]
    states: list[int]
    kept: list[Var]


@dataclasses.dataclass(frozen=True)
class SplitLoop:
    """A body in its parts.

    Attributes
    ----------
    body, invariant, results, schedule, deferred
        The stages.
    read : list of Var
        The invariant variables that steps read.
    once : list of Var
        These, and the invariant variables that are given back.
    first : list of JaxprEqn
        The invariant equations that lead to them.
    """

    body: Body
    invariant: Invariant
    results: Results
    schedule: Schedule
    deferred: Deferred
    read: list[Var]
    once: list[Var]
    first: list[JaxprEqn]


def split_loop(body: Body, shows: bool) -> SplitLoop:
    """All stages of a body; ``shows`` if the progress of the loop is shown."""
    invariant = _invariant(body)
    wanted = _results(body, invariant, shows)
    schedule = _schedule(body, invariant, wanted)
    deferred = _deferred(body, invariant, wanted, schedule)
    in_steps = *schedule.ahead, *schedule.in_order, *deferred.eqns
    atoms = *wanted.in_order, *wanted.at_once, *(v for eqn in in_steps for v in eqn.invars)
    reads = {v for v in atoms if not isinstance(v, Literal)}.difference(results(invariant.repeated))
    read = [v for v in invariant.variables if v in reads]
    given_back = [v for v in (*body.ys, *body.terms) if is_one_of(v, invariant.variables)]
    once = list(dict.fromkeys([*read, *given_back]))
    first = needed_equations(invariant.eqns, once)
    return SplitLoop(body, invariant, wanted, schedule, deferred, read, once, first)


def _invariant(body: Body) -> Invariant:
    eqns, varying = divide(body.eqns, body.given)
    uniform = uniform_arrays(eqns, lambda v: not v.aval.ndim)
    repeated = [e for e in eqns if e.outvars[0] in uniform and e.primitive.name in CHEAP]
    return Invariant(
        eqns=eqns,
        variables=dict.fromkeys([*body.given, *results(eqns)]),
        uniform={v for v in uniform if v.aval.size and v.aval.ndim},
        repeated=repeated,
        varying=[*repeated, *varying],
    )


def _results(body: Body, invariant: Invariant, shows: bool) -> Results:
    producer = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    sums = [sum_of(v, producer, invariant.has) for v in body.terms]
    leaves = [leaf for s in sums for leaf in s.leaves]
    moving_ys = [v for v in body.ys if not invariant.has(v)]
    shown = body.ys if shows else []
    return Results(
        sums=sums,
        shown=shown,
        in_order=[*body.moving_new, *shown],
        at_once=list(dict.fromkeys([*moving_ys, *leaves])),
    )


def _schedule(body: Body, invariant: Invariant, wanted: Results) -> Schedule:
    varying = invariant.varying
    used = needed_equations(varying, [*wanted.in_order, *wanted.at_once])
    unmapped = set(results(eqn for eqn in used if not can_be_mapped(eqn)))
    early, _ = divide(varying, [*invariant.variables, *body.xs], unmapped)
    products = set(results(eqn for eqn in early if pays_ahead(eqn, invariant.variables)))
    in_order = needed_equations(varying, [*wanted.in_order, *unmapped], products, keep_effects=True)
    read_in_order = *wanted.in_order, *(v for eqn in in_order for v in eqn.invars)
    foreseen = list(dict.fromkeys(v for v in read_in_order if is_one_of(v, products)))
    return Schedule(needed_equations(early, foreseen), foreseen, in_order, unmapped)


def _deferred(body: Body, invariant: Invariant, wanted: Results, schedule: Schedule) -> Deferred:
    """Choose between reading new states and computing them again, by the bytes to keep."""
    costly = [eqn for eqn in schedule.in_order if eqn.primitive.name not in CHEAP]
    computed = set(results(schedule.in_order))
    known = {*results(costly), *body.moving_old, *schedule.foreseen, *schedule.unmapped}
    pairs = zip(body.moving_old, body.moving_new, strict=True)
    after = {new: old for old, new in pairs if is_one_of(new, computed)}

    def bytes_kept(choice: tuple[list[JaxprEqn], list[Var]]) -> int:
        kept = {after.get(v, v) for v in choice[1]}.difference(schedule.foreseen)
        return sum(map(num_bytes, kept))

    choices = (
        _with_reads(invariant.varying, wanted.at_once, known),
        _with_reads(invariant.varying, wanted.at_once, known.union(after)),
    )
    eqns, read = min(choices, key=bytes_kept)
    kept = [v for v in read if v not in schedule.foreseen]
    states = [i for i in body.moving if {body.old[i], body.new[i]} <= set(kept)]
    in_states = {v for i in states for v in (body.old[i], body.new[i])}
    return Deferred(eqns, states, [v for v in kept if v not in in_states])


def _with_reads(
    eqns: Sequence[JaxprEqn], wanted: Sequence[Var], known: set[Var]
) -> tuple[list[JaxprEqn], list[Var]]:
    """The equations that lead to wanted variables, and what they read of the known ones."""
    needed = needed_equations(eqns, wanted, known)
    atoms = *(v for eqn in needed for v in eqn.invars), *wanted
    return needed, list(dict.fromkeys(v for v in atoms if is_one_of(v, known)))
