"""Long scans with ETP ops inside: divided so that all their iterations share one op outside.

A *substep* is an iteration of such a scan. With ``x[l]`` the input of an op in substep ``l``, and
``h[l]`` what the scan carries, the scan becomes

    X, results = scan(body)            the scan as it was, its ops in plain JAX
    Y          = op(X, weight)         all substeps at once: the one ETP op that is traced
    h          = scan(transition, Y)   what is carried, position by position, given the ops' outputs

These are ordinary equations, with the same values and the same derivatives, so that all later
passes see a step without control flow around its ops. ``Y`` has an axis of substeps in front;
``f[l] = d h / d Y[l]`` is the derivative of what the step leaves, and a trace is
``e' = D e + sum_l f[l] (x) X[l]``: the same as of a scan that is unrolled, with one trace and one
op for all substeps. Results that the scan stacks are those of the first scan, so that the gradient
of a loss that reads them is exact.

If the inputs of the ops do not depend on what is carried, and no result is read, the first scan is
no scan. Values that the body mixes by convolutions of its own pass from the first scan to the
second one as the ops' inputs do. What cannot be divided so is unrolled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Var,
    equation_function,
    jaxprs_in_params,
    open_jaxpr,
    scan_split,
    source_line,
)
from ..op import ETPPrimitive
from .alignment import align_results
from .liveness import needed_equations, reached_variables, read_variables, variables
from .positions import MIXED, Alignment, identity_alignment
from .primitives import MIXING, is_inexact

__all__ = ['Descent', 'plan_descent']

Values = Mapping[Var, Any]


@dataclass(frozen=True, eq=False)
class Descent:
    """A scan and its flattened body, and how they are divided.

    Attributes
    ----------
    eqn : JaxprEqn
        The scan.
    body : ClosedJaxpr
        Its body, flattened, with ops as equations of its own.
    """

    eqn: JaxprEqn
    body: ClosedJaxpr

    @cached_property
    def eqns(self) -> list[JaxprEqn]:
        """The equations of the body."""
        return list(open_jaxpr(self.body)[0].eqns)

    @cached_property
    def constants(self) -> dict[Var, Any]:
        """The constants of the body."""
        jaxpr, values = open_jaxpr(self.body)
        return dict(zip(jaxpr.constvars, values, strict=True))

    @cached_property
    def parts(self) -> tuple[list[Var], list[Var], list[Var]]:
        """The inputs of the body: those that are invariant, carried, and scanned over."""
        invars, (consts, carry) = list(open_jaxpr(self.body)[0].invars), scan_split(self.eqn)
        return invars[:consts], invars[consts : consts + carry], invars[consts + carry :]

    @cached_property
    def outvars(self) -> tuple[list[Atom], list[Atom]]:
        """The results of the body: what is carried, and what is stacked."""
        outvars, carry = list(open_jaxpr(self.body)[0].outvars), scan_split(self.eqn)[1]
        return outvars[:carry], outvars[carry:]

    @cached_property
    def ops(self) -> list[JaxprEqn]:
        """The ops of the body."""
        return [eqn for eqn in self.eqns if isinstance(eqn.primitive, ETPPrimitive)]

    @cached_property
    def varying(self) -> set[Var]:
        """What may differ from substep to substep."""
        _, carry, sequences = self.parts
        return reached_variables(self.eqns, [*carry, *sequences])

    @cached_property
    def ys(self) -> list[Var]:
        """The outputs of the ops that have an input."""
        return [op.outvars[0] for op in self.ops if op.primitive.x_invar_index is not None]

    @cached_property
    def fixed_ys(self) -> list[Var]:
        """The outputs of ops of weights alone."""
        return [op.outvars[0] for op in self.ops if op.primitive.x_invar_index is None]

    @cached_property
    def given(self) -> list[Var]:
        """What the second scan is given besides: outputs of the ops, and mixed values."""
        sources = [*self.parts[1], *self.ys]
        reached = reached_variables(self.eqns, sources)
        mixed = [
            v
            for eqn in self.eqns
            if eqn.primitive.name in MIXING and not reached.isdisjoint(variables(eqn.invars))
            for v in eqn.outvars
            if not isinstance(v, DropVar)
        ]
        return [*self.ys, *mixed]

    @cached_property
    def traced(self) -> list[int]:
        """The places of what is carried that the second scan computes."""
        _, carry, _ = self.parts
        outs = self.outvars[0]
        known = {*self.given, *self.fixed_ys}
        reached = reached_variables(
            [eqn for eqn in self.eqns if known.isdisjoint(eqn.outvars)], self.ys
        )
        chosen: set[int] = set()
        while True:
            new = {i for i, v in enumerate(outs) if is_inexact(v.aval) and v in reached}
            if new <= chosen:
                break
            chosen |= new
            begun = [*self.ys, *(carry[i] for i in chosen)]
            free = [eqn for eqn in self.eqns if known.isdisjoint(eqn.outvars)]
            reached = reached_variables(free, begun)
        return self._with_needed(chosen, [], known)

    @cached_property
    def mixed(self) -> list[Var]:
        """The mixed values that the second scan reads."""
        wanted = [self.outvars[0][i] for i in self.traced]
        known = {*self.given, *self.fixed_ys}
        eqns = needed_equations(self.eqns, wanted, known)
        read = {*read_variables(eqns), *variables(wanted)}
        return [v for v in self.given if v in read and v not in self.ys]

    @cached_property
    def xs(self) -> list[Atom]:
        """The inputs of the ops that have one."""
        return [
            op.invars[op.primitive.x_invar_index]
            for op in self.ops
            if op.primitive.x_invar_index is not None
        ]

    @property
    def recurs(self) -> bool:
        """Whether what the second scan is given depends on what is carried."""
        wanted = [*self.xs, *self.mixed]
        return bool(self._with_needed(set(), wanted, {}))

    @property
    def results(self) -> list[int]:
        """The places of the scan's results that the first scan computes."""
        return [
            place
            for place, v in enumerate(self.eqn.outvars)
            if place not in self.traced and not isinstance(v, DropVar)
        ]

    def _with_needed(
        self, chosen: Iterable[int], wanted: Sequence[Atom], known: Iterable[Var]
    ) -> list[int]:
        """Places of what is carried, with all that is needed to compute it and what is wanted."""
        _, carry, _ = self.parts
        places, known = set(chosen), set(known)
        while True:
            targets = [*wanted, *(self.outvars[0][i] for i in places)]
            eqns = needed_equations(self.eqns, targets, known)
            read = {*read_variables(eqns), *variables(targets)} - known
            needed = {i for i, v in enumerate(carry) if v in read}
            if needed <= places:
                return sorted(places)
            places |= needed

    def refuses(self) -> str | None:
        """Why the scan cannot be divided; None if it can."""
        if any(_has_op(eqn) for eqn in self.eqns):
            return 'an op is inside control flow in its body'
        carried = reached_variables(self.eqns, self.parts[1])
        for op in self.ops:
            place = op.primitive.x_invar_index
            weights = [v for i, v in enumerate(op.invars) if i != place]
            if not self.varying.isdisjoint(variables(weights)):
                return f'the weights of {op.primitive} ({source_line(op)}) vary inside it'
            if place is None:
                continue
            if not op.primitive.batched:
                return f'{op.primitive} ({source_line(op)}) takes no leading axes'
            if op.primitive.gradient_enabled and op.invars[place] in carried:
                return f'influence passes through {op.primitive} ({source_line(op)})'
        return self._moves()

    def _moves(self) -> str | None:
        """Whether positions of what is carried move, or fit those of no op."""
        _, carry, sequences = self.parts
        given = [*self.ys, *self.mixed]
        structs = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in [*self.parts[0], *carry]
        ]
        structs += [self._stacked(v) for v in sequences]
        stacks = [self._stacked(v) for v in given]
        fixed = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.fixed_ys]
        closed = jax.make_jaxpr(self.transition)(structs, stacks, fixed)
        jaxpr = open_jaxpr(closed)[0]
        loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'scan']
        if not self.traced or len(loops) != 1:
            return None
        inputs = [*jaxpr.invars]
        num = len(structs)
        sources = {inputs[len(self.parts[0]) + i]: 0 for i in self.traced}
        sources |= {v: 1 for v in inputs[num : num + len(self.ys)]}
        for source, leading in sources.items():
            if source not in loops[0].invars or not is_inexact(source.aval):
                continue
            shape = source.aval.shape[leading:]
            own: Alignment = (*[None] * leading, *identity_alignment(shape))
            outcomes = align_results(
                loops[0], [own if v is source else None for v in loops[0].invars]
            )
            for outcome, v in zip(outcomes, loops[0].outvars, strict=True):
                if outcome is MIXED:
                    return 'its body moves or mixes the positions of a state'
                if outcome is not None and leading and v.aval.shape != shape:
                    return 'the output of an op has another shape than a state that it drives'
        return None

    def _stacked(self, v: Var) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.length, *v.aval.shape), v.aval.dtype)

    @property
    def length(self) -> int:
        """The number of substeps."""
        return self.eqn.params['length']

    def _bound(self, operands: Sequence[Any]) -> tuple[dict[Var, Any], list[Any], list[Any]]:
        """The values of all that is invariant; what is carried first; the sequences."""
        consts, carry, _ = self.parts
        split = len(consts)
        fixed = {**self.constants, **dict(zip(consts, operands[:split], strict=True))}
        return (
            fixed,
            list(operands[split : split + len(carry)]),
            list(operands[split + len(carry) :]),
        )

    def weights(self, op: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """The operands of an op but its input."""
        fixed, _, _ = self._bound(operands)
        place = op.primitive.x_invar_index
        return evaluate(self.eqns, fixed, [v for i, v in enumerate(op.invars) if i != place])

    def inputs(self, operands: Sequence[Any]) -> list[Any]:
        """The inputs of the ops, and mixed values, of all substeps; if nothing recurs."""
        fixed, _, sequences = self._bound(operands)
        wanted = [*self.xs, *self.mixed]

        def at_substep(slices: Sequence[Any]) -> list[Any]:
            varying = dict(zip(self.parts[2], slices, strict=True))
            return evaluate(self.eqns, {**fixed, **varying}, wanted)

        if not sequences:
            same = at_substep(())
            return [jnp.broadcast_to(a, (self.length, *jnp.shape(a))) for a in same]
        return self._in_order(jax.vmap(at_substep)(sequences))

    def _in_order(self, stacks: Sequence[Any]) -> list[Any]:
        """Values of all substeps in the order in which they run, or back from it."""
        return [jnp.flip(a, 0) if self.eqn.params['reverse'] else a for a in stacks]

    def first(self, operands: Sequence[Any], results_only: bool) -> list[Any]:
        """The first scan: its results; and, unless only they are wanted, :meth:`inputs`."""
        num = len(self.parts[1])
        carried = [place for place in self.results if place < num]
        wanted = [] if results_only else [*self.xs, *self.mixed]
        wanted += [self.outvars[1][place - num] for place in self.results if place >= num]
        places = self._with_needed(carried, wanted, {})
        last, stacks = self._scan(operands, places, wanted, {}, {})
        at = dict(zip(places, last, strict=True))
        split = len(wanted) - sum(place >= num for place in self.results)
        given = self._in_order(stacks[:split])
        return [*given, *(at[place] for place in carried), *stacks[split:]]

    def transition(
        self, operands: Sequence[Any], given: Sequence[Any], fixed_ys: Sequence[Any]
    ) -> list[Any]:
        """The second scan: what is carried, from the outputs of the ops and mixed values."""
        stacks = dict(zip([*self.ys, *self.mixed], self._in_order(given), strict=True))
        fixed = dict(zip(self.fixed_ys, fixed_ys, strict=True))
        return self._scan(operands, self.traced, [], stacks, fixed)[0]

    def _scan(
        self,
        operands: Sequence[Any],
        places: Sequence[int],
        wanted: Sequence[Atom],
        stacks: Values,
        known: Values,
    ) -> tuple[list[Any], list[Any]]:
        """Run some of what is carried, and stack some values."""
        fixed, start, sequences = self._bound(operands)
        _, carry, scanned = self.parts
        fixed |= known
        targets = [*(self.outvars[0][place] for place in places), *wanted]
        over = {**dict(zip(scanned, sequences, strict=True)), **stacks}
        eqns = needed_equations(self.eqns, targets, {*stacks, *known})
        read = {*read_variables(eqns), *variables(targets)}
        over = {v: value for v, value in over.items() if v in read}

        def substep(values: list[Any], slices: list[Any]) -> Any:
            own = dict(zip([carry[place] for place in places], values, strict=True))
            own |= dict(zip(over, slices, strict=True))
            results = evaluate(self.eqns, {**fixed, **own}, targets)
            return results[: len(places)], results[len(places) :]

        return lax.scan(
            substep,
            [start[place] for place in places],
            list(over.values()),
            length=self.length,
            reverse=self.eqn.params['reverse'],
        )


def plan_descent(eqn: JaxprEqn, body: ClosedJaxpr) -> Descent | str:
    """How a scan is divided, given its flattened body; or why it cannot be."""
    descent = Descent(eqn, body)
    reason = descent.refuses()
    return descent if reason is None else reason


def evaluate(eqns: Sequence[JaxprEqn], values: Values, wanted: Sequence[Atom]) -> list[Any]:
    """Some variables from the values of others, with ops in plain JAX."""
    env = dict(values)

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in needed_equations(eqns, wanted, known=set(env)):
        operands = [read(v) for v in eqn.invars]
        if isinstance(eqn.primitive, ETPPrimitive):
            forward: Callable[..., Any] = partial(eqn.primitive.forward, **eqn.params)
            results = [forward(*operands)]
        else:
            results = equation_function(eqn)(*operands)
        for v, result in zip(eqn.outvars, results, strict=True):
            env.setdefault(v, result)
    return [read(v) for v in wanted]


def _has_op(eqn: JaxprEqn) -> bool:
    """Whether an ETP op is inside the jaxprs of an equation's parameters."""
    inner = (e for sub in jaxprs_in_params(eqn.params) for e in open_jaxpr(sub)[0].eqns)
    return any(isinstance(e.primitive, ETPPrimitive) or _has_op(e) for e in inner)
