"""The runtime's own perturbed step: zeros added where the learning signals are read off.

- at the outputs of traced ops: the cotangent is ``c = dloss/dy``, by every path of the step;
- at the exits of groups: the cotangent is ``L = dloss/dh(t)``, the group's planes taken as
  independent;
- at old states, for what the loss reads of them past all new states: the cotangent is
  ``R = dloss/dh(t-1)`` by those paths alone, so that the past counts ``(L D + R) e``. As in ``D``,
  operations that mix positions on the way to a hidden state are not followed.
"""

import functools
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass

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
    rewire,
)
from .control_flow import has_while
from .equations import single_equation
from .flow import Flow
from .hidden_group import HiddenGroup
from .liveness import needed_equations, reached_variables, read_variables, variables
from .module_info import ModuleInfo
from .primitives import passes_derivative
from .relation import HiddenParamOpRelation
from .while_loop import with_reverse_mode

__all__ = ['ExitPerturbation', 'add_exit_perturbation']


@dataclass(frozen=True, eq=False)
class ExitPerturbation:
    """The step with zeros at the outputs of traced ops, at the exits of groups and beside them.

    The loss sees a new state with its perturbation, and so do other groups and everything that
    mixes positions; the other planes of the same group see it without, because ``D`` contains that
    path already. Old states are perturbed for what is computed from them past all new states, such
    as an output that returns a value before it is stored. Equations that serve both sides are
    evaluated twice.

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
    y_bypasses : tuple of bool
        Per ``y``, whether it may reach the loss other than by the paths that ``f`` contains and the
        exits of its group; if not, ``c = sum_s f[s] L[s]``.
    """

    y_vars: tuple[Var, ...]
    hidden_outvars: tuple[Var, ...]
    bypass_invars: tuple[Var, ...]
    closed_jaxpr: ClosedJaxpr
    y_bypasses: tuple[bool, ...]

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


World = int
"""Which states are seen without their perturbation, as bits: ``OLD`` ones and, from bit 1 on, the
new ones of each group in order."""

OUTSIDE: World = 0
OLD: World = 1


class _Rewriter:
    """Evaluates every equation once in each world that needs its results.

    Take ``i' = i + y; v' = v + i'; out = v'`` with one group of ``i`` and ``v``. The loss must see
    ``i' + p`` and ``v' + q``, but ``v'`` itself must be computed from ``i'`` without ``p``. So
    ``i'`` exists in two worlds: inside the group as it was computed, outside with its perturbation.

    Outside, all states carry their perturbation. A new state of a group is computed in a world that
    contains the group and ``OLD``, and its perturbation is added on leaving. A variable is the same
    in worlds with and without a group if no new state of the group reaches it position by position,
    and with and without ``OLD`` if no old state reaches it past all new ones. Where nothing is
    differentiated, a value is taken from any world in which it is computed anyway.
    """

    def __init__(
        self,
        minfo: ModuleInfo,
        flow: Flow,
        groups: Sequence[HiddenGroup],
        relations: Sequence[HiddenParamOpRelation],
    ) -> None:
        self.minfo, self.flow = minfo, flow
        self.group_of = {new: 2 << group.index for group in groups for new in group.hidden_outvars}
        self.exits = {new: new_var(new.aval) for group in groups for new in group.hidden_outvars}
        self.bypasses = {old: new_var(old.aval) for group in groups for old in group.hidden_invars}
        self.y_zeros = {relation.y_var: new_var(relation.y_var.aval) for relation in relations}
        self.static_relations = {r.y_var: r for r in relations if r.is_static}
        self.relations = relations
        self.past_new = self.reached_by_old_states()
        self.inside: World = (2 << len(groups)) - 1
        self.worlds: dict[Var, World] = {}
        self.needed: dict[Var, set[World]] = {}
        self.copies: dict[Var, dict[World, Var]] = {}
        self.eqns: list[JaxprEqn] = []

    def rewrite(self) -> ExitPerturbation:
        jaxpr, consts = open_jaxpr(self.minfo.closed_jaxpr)
        num_main = self.minfo.num_var_out + self.minfo.num_var_state
        planned = self.plan(jaxpr.outvars[:num_main], jaxpr.outvars[num_main:])
        bypassing = [old for old in self.bypasses if OUTSIDE in self.needed.get(old, ())]
        for old in bypassing:
            self.copies[old] = {OLD: old, OUTSIDE: self.add(old, self.bypasses[old])}
        for index, worlds in planned:
            for world in worlds:
                self.evaluate(index, world, keep_names=len(worlds) == 1)
        zeros = [*self.y_zeros.values(), *self.exits.values()]
        closed = build_closed_jaxpr(
            jaxpr.constvars,
            consts,
            [*jaxpr.invars, *zeros, *(self.bypasses[old] for old in bypassing)],
            [
                *(self.copy(v, OUTSIDE) for v in jaxpr.outvars[:num_main]),
                *(self.any_copy(v) for v in jaxpr.outvars[num_main:]),
            ],
            self.eqns,
        )
        results = [self.copy(v, OUTSIDE) for v in jaxpr.outvars[:num_main]]
        return ExitPerturbation(
            tuple(self.y_zeros),
            tuple(self.exits),
            tuple(bypassing),
            closed,
            self.bypassing_ys(results),
        )

    def bypassing_ys(self, results: Sequence[Atom]) -> tuple[bool, ...]:
        """Per relation, whether its ``y`` reaches a result other than through ``f`` and an exit."""
        told: dict[Var, int] = {}  # by zero of an exit: the relations whose f contains all paths
        reached: dict[Var, int] = {}  # by variable: the relations that reach it by other paths
        for r, relation in enumerate(self.relations):
            reached[self.y_zeros[relation.y_var]] = 1 << r
            for path, how in relation.path_classification.items():
                if how == 'all_direct' and len(relation.hidden_groups) == 1:
                    zero = self.exits[self.minfo.hidden_path_to_outvar[path]]
                    told[zero] = told.get(zero, 0) | 1 << r
        for eqn in self.eqns:
            operands = variables(eqn.invars)
            reaching = functools.reduce(operator.or_, (reached.get(v, 0) for v in operands), 0)
            for v in operands:
                reaching &= ~told.get(v, 0)
            if reaching:
                flows = zip(eqn.outvars, passes_derivative(eqn), strict=True)
                reached.update((v, reaching) for v, passes in flows if passes)
        ends = [reached.get(v, 0) for v in variables(results)]
        return tuple(any(end >> r & 1 for end in ends) for r in range(len(self.relations)))

    def reached_by_old_states(self) -> set[Var]:
        """The variables that old states reach by paths without a new state on them."""
        leads_to_new = read_variables(needed_equations(self.flow.eqns, self.group_of))

        def into(eqn: JaxprEqn) -> list[Var]:
            old = (v for v in self.flow.differentiated(eqn) if v not in self.group_of)
            return [v for v in old if not (v in leads_to_new and self.cuts_old_state(v))]

        return reached_variables(self.flow.eqns, self.bypasses, into)

    def cuts_old_state(self, v: Var) -> bool:
        """Whether the equation of a variable cuts the path of an old state."""
        if self.flow.scope.mixes:
            return False
        index, dependences = self.flow.producer[v], self.flow.of(v).items()
        return any(index in d.cut_by and s in self.bypasses for s, d in dependences)

    def reached_groups(self, v: Var) -> World:
        """The groups whose new states reach a variable as in ``D``, as bits."""
        sources = self.flow.of(v) if self.flow.scope.mixes else self.flow.aligned(v)
        groups = (self.group_of.get(s, OUTSIDE) for s in sources if s is not v)
        return functools.reduce(operator.or_, groups, OUTSIDE)

    def same(self, v: Var, world: World) -> World:
        """The smallest world in which a variable has the same value."""
        seen = self.worlds.get(v)
        if seen is None:
            own = self.group_of.get(v, OUTSIDE) | (OLD if v in self.past_new else OUTSIDE)
            seen = self.worlds[v] = own | self.reached_groups(v)
        return world & seen

    def inner(self, v: Var, world: World) -> World:
        """The world in which the equation of a variable is evaluated for a world."""
        if v in self.group_of:
            return ((world | self.group_of[v]) & self.reached_groups(v)) | OLD
        return self.same(v, world) | (OUTSIDE if v in self.past_new else OLD)

    def plan(
        self, outputs: Sequence[Atom], values: Sequence[Atom]
    ) -> list[tuple[int, list[World]]]:
        """The equations to evaluate, in order, and the worlds to evaluate each in.

        ``outputs`` are wanted outside, ``values`` in any world. By the time that the walk, from the
        last equation to the first, comes to a variable's own equation, it has met all its readers.
        """
        needed = self.needed
        anywhere = set(variables(values))
        for v in variables(outputs):
            needed.setdefault(v, set()).add(OUTSIDE)
        planned = []
        for index in range(len(self.flow.eqns) - 1, -1, -1):
            eqn = self.flow.eqns[index]
            for v in eqn.outvars:
                if v in anywhere and v not in needed:
                    needed[v] = {self.same(v, self.inside)}
            worlds = {self.inner(v, w) for v in eqn.outvars for w in needed.get(v, ())}
            if not worlds and not eqn.effects:
                continue
            planned.append((index, sorted(worlds) or [OUTSIDE]))
            operands = [(i, v) for i, v in enumerate(eqn.invars) if not isinstance(v, Literal)]
            if not any(self.flow.passes[index]):
                anywhere.update(v for _, v in operands)
                continue
            detached = self.detached(index)
            for world in planned[-1][1]:
                for place, v in operands:
                    seen = self.same(v, _seen_by(place, detached, world))
                    needed.setdefault(v, set()).add(seen)
        return planned[::-1]

    def evaluate(self, index: int, world: World, keep_names: bool) -> None:
        eqn = self.flow.eqns[index]
        constants = self.constant_operands(eqn)
        if has_while(eqn):
            eqn = with_reverse_mode(eqn)
        if any(self.flow.passes[index]):
            detached = self.detached(index)
            operands = [
                self.copy(v, _seen_by(place, detached, world)) for place, v in enumerate(eqn.invars)
            ]
        else:
            operands = [self.any_copy(v) for v in eqn.invars]
        for place in constants:
            plain, operands[place] = operands[place], new_var(eqn.invars[place].aval)
            self.eqns.append(single_equation(lax.stop_gradient, [plain], operands[place]))
        results = list(eqn.outvars) if keep_names else [new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(rewire(eqn, operands, results))
        for v, result in zip(eqn.outvars, results, strict=True):
            self.store(v, world, result)

    def detached(self, index: int) -> Container[int]:
        """The operands of an equation through which ``D`` does not pass."""
        return () if self.flow.scope.mixes else self.flow.detached.get(index, ())

    def constant_operands(self, eqn: JaxprEqn) -> list[int]:
        """The traced weights of an op: no gradient is taken, since it is ``c (x) x``."""
        relation = self.static_relations.get(eqn.outvars[0]) if eqn.outvars else None
        if relation is not None:
            positions = relation.primitive.trainable_invars(eqn.params)
            return [positions[key] for key in relation.weight_ways]
        return []

    def store(self, v: Var, world: World, result: Var) -> None:
        """Record a result for the worlds in which it holds."""
        if v in self.y_zeros:
            result = self.add(result, self.y_zeros[v])
        if v not in self.group_of:
            if result is not v:
                self.copies.setdefault(v, {})[self.same(v, world)] = result
            return
        group = self.group_of[v]
        if self.inner(v, world) & ~world:
            return  # evaluated for another result of the equation, where this group is perturbed
        inside = self.same(v, world | group)
        copies = self.copies.setdefault(v, {})
        copies[inside] = result
        copies[inside & ~group] = self.add(result, self.exits[v])

    def copy(self, v: Atom, world: World) -> Atom:
        """A variable as it is in a world."""
        if isinstance(v, Literal) or v not in self.copies:
            return v
        return self.copies[v][self.same(v, world)]

    def any_copy(self, v: Atom) -> Atom:
        """A variable as it is in some world in which it is computed."""
        if isinstance(v, Literal) or v not in self.copies:
            return v
        return self.copies[v][min(self.needed[v])]

    def add(self, one: Var, other: Var) -> Var:
        result = new_var(one.aval)
        self.eqns.append(single_equation(lax.add, [one, other], result))
        return result


def _seen_by(place: int, detached: Container[int], world: World) -> World:
    """The world from which a differentiated equation takes an operand.

    A detached operand sees new states from outside: ``D`` does not contain the path.
    """
    return world & OLD if place in detached else world
