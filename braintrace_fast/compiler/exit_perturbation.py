"""The runtime's own perturbed step: zeros added where the learning signals are read off.

- at the outputs of traced ops: the cotangent is ``c = dloss/dy``, by every path of the step;
- at the exits of groups: the cotangent is ``L = dloss/dh(t)``, the group's planes taken as
  independent;
- at old states, for what the loss reads of them past all new states: the cotangent is
  ``R = dloss/dh(t-1)`` by those paths alone, so that the past counts ``(L D + R) e``. As in ``D``,
  operations that mix positions on the way to a hidden state are not followed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    build_closed_jaxpr,
    new_var,
    open_jaxpr,
)
from .alignment import passes_derivative
from .control_flow import has_while
from .flow import Flow
from .hidden_group import HiddenGroup
from .module_info import ModuleInfo
from .perturbation import single_equation
from .relation import HiddenParamOpRelation
from .while_loop import with_reverse_mode

__all__ = ['ExitPerturbation', 'add_exit_perturbation']


@dataclass(frozen=True, eq=False)
class ExitPerturbation:
    """The step with zeros at the outputs of traced ops, at the exits of groups and beside them.

    The loss sees a new state with its perturbation, and so do other groups and everything that
    mixes positions; the other planes of the same group see it without, because ``D`` contains that
    path already. Old states are perturbed for what is computed from them past all new states, as an
    output that returns a value before it is stored. Equations that serve both sides are there
    twice.

    A traced op whose weights depend on parameters and constants only takes no derivative by them
    here: ``c (x) x`` gives it. All other weights are differentiated as usual.

    Attributes
    ----------
    y_vars : tuple of Var
        The ops' outputs in the original step, one per relation.
    hidden_outvars : tuple of Var
        The new states in the original step, group by group.
    bypass_invars : tuple of Var
        The old states that reach an output past all new states; usually there are none.
    closed_jaxpr : ClosedJaxpr
        The step; inputs are those of the original, then a zero per ``y``, per new state and per
        bypassing old state.
    """

    y_vars: tuple[Var, ...]
    hidden_outvars: tuple[Var, ...]
    bypass_invars: tuple[Var, ...]
    closed_jaxpr: ClosedJaxpr

    def zeros(self) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Zeros for the ops' outputs, for the new states and for the bypassing old ones."""
        y, exits, bypass = (
            [jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]
            for variables in (self.y_vars, self.hidden_outvars, self.bypass_invars)
        )
        return y, exits, bypass

    def eval_jaxpr(
        self,
        inputs: Sequence[jax.Array],
        y_perturb: Sequence[jax.Array],
        exit_perturb: Sequence[jax.Array],
        bypass_perturb: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Run the perturbed step on flat inputs; the outputs are those of the original."""
        jaxpr, consts = open_jaxpr(self.closed_jaxpr)
        return jax.core.eval_jaxpr(
            jaxpr, consts, *inputs, *y_perturb, *exit_perturb, *bypass_perturb
        )


def add_exit_perturbation(
    minfo: ModuleInfo,
    flow: Flow,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
) -> ExitPerturbation:
    """Build the runtime's perturbed step.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model, with all the outputs that are wanted.
    flow : Flow
        Its flow.
    groups : sequence of HiddenGroup
        The hidden groups.
    relations : sequence of HiddenParamOpRelation
        The relations.

    Returns
    -------
    ExitPerturbation
    """
    return _Rewriter(minfo, flow, groups, relations).rewrite()


World = frozenset[int]
"""What is seen without its perturbation: groups, by index, for their new states; ``OLD`` states."""

OUTSIDE: World = frozenset()
OLD = -1


class _Rewriter:
    """Evaluates every equation once per world in which its results are needed.

    Outside, all states carry their perturbation. A new state of group ``g`` is computed in a world
    that contains ``g`` and ``OLD``, and its perturbation is added on leaving. A variable is the
    same in worlds with and without a group if no new state of the group reaches it position by
    position, and with and without ``OLD`` if no old state reaches it past all new ones. Where
    nothing is differentiated, a value is taken from any world in which it is computed anyway.
    """

    def __init__(
        self,
        minfo: ModuleInfo,
        flow: Flow,
        groups: Sequence[HiddenGroup],
        relations: Sequence[HiddenParamOpRelation],
    ) -> None:
        self.minfo, self.flow = minfo, flow
        self.group_of = {new: group.index for group in groups for new in group.hidden_outvars}
        self.exits = {new: new_var(new.aval) for group in groups for new in group.hidden_outvars}
        self.bypasses = {old: new_var(old.aval) for group in groups for old in group.hidden_invars}
        self.y_zeros = {relation.y_var: new_var(relation.y_var.aval) for relation in relations}
        self.static_relations = {r.y_var: r for r in relations if r.is_static}
        self.past_new = self.reached_by_old_states()
        self.inside = frozenset([OLD, *self.group_of.values()])
        self.settled: dict[Var, World] = {}
        self.reached: dict[Var, World] = {}
        self.copies: dict[tuple[Var, World], Atom] = {}
        self.eqns: list[JaxprEqn] = []

    def rewrite(self) -> ExitPerturbation:
        jaxpr, consts = open_jaxpr(self.minfo.closed_jaxpr)
        num_main = self.minfo.num_var_out + self.minfo.num_var_state
        results = [(v, OUTSIDE) for v in jaxpr.outvars[:num_main]]
        needed, _ = self.plan(results, differentiated_only=True)
        self.settled = {v: min(worlds, key=sorted) for v, worlds in needed.items()}
        results += [(v, self.any_world(v)) for v in jaxpr.outvars[num_main:]]
        needed, planned = self.plan(results)
        bypassing = [old for old in self.bypasses if OUTSIDE in needed.get(old, ())]
        for old in bypassing:
            self.copies[old, OUTSIDE] = self.emit(lax.add, old, self.bypasses[old])
        for index, worlds in planned:
            for world in worlds:
                self.evaluate(index, world)
        zeros = [*self.y_zeros.values(), *self.exits.values()]
        closed = build_closed_jaxpr(
            jaxpr.constvars,
            consts,
            [*jaxpr.invars, *zeros, *(self.bypasses[old] for old in bypassing)],
            [self.copy(v, world) for v, world in results],
            self.eqns,
        )
        return ExitPerturbation(tuple(self.y_zeros), tuple(self.exits), tuple(bypassing), closed)

    def reached_by_old_states(self) -> set[Var]:
        """The variables that old states reach by paths without a new state on them."""
        leads_to_new = set(self.group_of)
        for eqn in reversed(self.flow.eqns):
            if any(v in leads_to_new for v in eqn.outvars):
                leads_to_new.update(v for v in eqn.invars if not isinstance(v, Literal))
        reached: set[Var] = set(self.bypasses)
        for index, eqn in enumerate(self.flow.eqns):
            if not any(v in reached for v in eqn.invars if not isinstance(v, Literal)):
                continue
            for v, passes in zip(eqn.outvars, passes_derivative(eqn), strict=True):
                recurrent = v in leads_to_new and self.cuts_old_state(index, v)
                if passes and v not in self.group_of and not recurrent:
                    reached.add(v)
        return reached

    def cuts_old_state(self, index: int, v: Var) -> bool:
        found = self.flow.of(v).items()
        return any(s in self.bypasses and index in d.cut_by for s, d in found)

    def any_world(self, v: Atom) -> World:
        return self.inside if isinstance(v, Literal) else self.settled.get(v, self.inside)

    def same(self, v: Atom, world: World) -> World:
        """The smallest world in which a variable has the same value."""
        if not world or isinstance(v, Literal):
            return OUTSIDE
        if v not in self.reached:
            found = {self.group_of[s] for s in self.flow.aligned(v) if s in self.group_of}
            self.reached[v] = frozenset(found | {OLD} if v in self.past_new else found)
        return world & self.reached[v]

    def inner(self, v: Var, world: World) -> World:
        """The world in which the equation of a variable is evaluated for a world."""
        if v in self.past_new:
            return self.same(v, world)
        others = {self.group_of[s] for s in self.flow.aligned(v) if s in self.group_of and s != v}
        if v in self.group_of:
            world = world | {self.group_of[v]}
        return (world & others) | {OLD}

    def plan(
        self, wanted: Sequence[tuple[Atom, World]], differentiated_only: bool = False
    ) -> tuple[dict[Var, set[World]], list[tuple[int, list[World]]]]:
        """The worlds in which variables are needed, and the equations evaluated, in order."""
        needed: dict[Var, set[World]] = {}

        def need(v: Atom, world: World) -> None:
            if not isinstance(v, Literal):
                needed.setdefault(v, set()).add(self.same(v, world))

        for v, world in wanted:
            need(v, world)
        planned = []
        for index in range(len(self.flow.eqns) - 1, -1, -1):
            eqn = self.flow.eqns[index]
            worlds = {self.inner(v, w) for v in eqn.outvars for w in needed.get(v, ())}
            if not worlds and eqn.effects:
                worlds = {OUTSIDE}
            for world in worlds:
                if differentiated_only and not any(passes_derivative(eqn)):
                    continue
                for place, v in enumerate(eqn.invars):
                    need(v, self.operand_world(index, place, world))
            if worlds:
                planned.append((index, sorted(worlds, key=sorted)))
        return needed, planned[::-1]

    def operand_world(self, index: int, place: int, world: World) -> World:
        """The world from which an equation takes an operand."""
        eqn = self.flow.eqns[index]
        if not any(passes_derivative(eqn)):
            return self.any_world(eqn.invars[place])
        # A detached operand sees new states from outside: D does not contain the path.
        detached = self.flow.detached.get(index, frozenset())
        return world & {OLD} if place in detached else world

    def evaluate(self, index: int, world: World) -> None:
        eqn = self.flow.eqns[index]
        constants = self.constant_operands(eqn)
        if has_while(eqn):
            eqn = with_reverse_mode(eqn)
        operands = []
        for place, v in enumerate(eqn.invars):
            operand = self.copy(v, self.operand_world(index, place, world))
            if place in constants and not isinstance(v, Literal):
                operand = self.emit(lax.stop_gradient, operand)
            operands.append(operand)
        results = [new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=operands, outvars=results))
        for v, result in zip(eqn.outvars, results, strict=True):
            self.store(v, world, result)

    def constant_operands(self, eqn: JaxprEqn) -> set[int]:
        """Operands by which nothing is differentiated.

        These are the traced weights, for which ``c (x) x`` stands.
        """
        relation = next((self.static_relations.get(v) for v in eqn.outvars), None)
        if relation is not None:
            positions = relation.primitive.trainable_invars(eqn.params)
            return {positions[key] for key in relation.trainable_vars}
        return set()

    def store(self, v: Var, world: World, result: Var) -> None:
        """Record a result for the worlds in which it holds."""
        if v in self.y_zeros:
            result = self.emit(lax.add, result, self.y_zeros[v])
        if v not in self.group_of:
            self.copies[v, self.same(v, world)] = result
            return
        group = self.group_of[v]
        if self.inner(v, world) - world:
            return  # evaluated for another result of the equation, where this group is perturbed
        inside = self.same(v, world | {group})
        self.copies[v, inside] = result
        self.copies[v, inside - {group}] = self.emit(lax.add, result, self.exits[v])

    def copy(self, v: Atom, world: World) -> Atom:
        if isinstance(v, Literal):
            return v
        return self.copies.get((v, self.same(v, world)), v)

    def emit(self, fun: Any, *operands: Var) -> Var:
        result = new_var(operands[0].aval)
        self.eqns.append(single_equation(fun, operands, result))
        return result
