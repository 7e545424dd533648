"""Which derivatives flow where in a step, position by position.

Sources are hidden states (old and new values) and the outputs of ETP ops. For every variable that a
source reaches, the flow records how the positions correspond, and which equations cut a path: those
that mix positions, as ETP ops, matrix products, reductions and permutations do. Paths that are cut
are not part of ``D`` and ``f``: that is what "diagonal" means.

A path is *cut* where it meets an equation that mixes positions; the equations that cut it are kept
with the dependence. An operand is *detached*, so that slices take it as a constant, if through it a
source would be mixed into a result that is aligned through other operands, or be read at other
positions than a source that is in place. A source is *unfit* for a new state whose shape does not
correspond to its own, so that no path between them can line up.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from .._compat import Atom, Jaxpr, JaxprEqn, Literal, Var, build_jaxpr, new_var, rewire
from ..op import ETPPrimitive
from .alignment import align_results
from .control_flow import has_body, has_while
from .liveness import read_variables, variables
from .positions import (
    MIXED,
    Alignment,
    Only,
    Outcome,
    clash,
    forget_indices,
    identity_alignment,
    partly_in_place,
)
from .primitives import MIXING, is_element_wise, passes_derivative
from .scope import Scope
from .uniform import uniform_arrays

__all__ = ['Dependence', 'Flow', 'Slice', 'Source']


class Dependence(NamedTuple):
    """How a variable depends on a source: by aligned paths, and by paths that were cut."""

    alignment: Alignment | None
    cut_by: tuple[int, ...] = ()


Dependences = dict[Var, Dependence]
"""By source."""


class Source(NamedTuple):
    """What a source's positions are: its shape, less any state axis.

    A source that may be shared has fewer (leading) axes than the states that it reaches. With
    ``plane``, the source is one plane of a state with several along its last axis. It may have
    axes of its own in ``front``, along which every index has all positions.
    """

    shape: tuple[int, ...]
    may_be_shared: bool = False
    plane: int | None = None
    front: int = 0


class Slice(NamedTuple):
    """The equations between some sources and some results, as a jaxpr of their own.

    ``jaxpr`` takes the values of ``constvars`` (variables of the step), then of the sources.
    ``forward_only`` says that a ``while`` is inside, so that it has no reverse mode.
    """

    jaxpr: Jaxpr
    constvars: list[Var]
    forward_only: bool


class Flow:
    """The dependences of every variable of a flat jaxpr on the given sources.

    Parameters
    ----------
    eqns : sequence of JaxprEqn
        The flattened step.
    sources : mapping of Var to Source
        The variables whose influence is followed.
    targets : iterable of Var
        Those of the sources that are new hidden states: positions must line up there.
    scope : Scope, optional
        Through which ops influence is followed.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        sources: Mapping[Var, Source],
        targets: Iterable[Var] = (),
        scope: Scope | None = None,
    ) -> None:
        self.scope = Scope() if scope is None else scope
        self.eqns = list(eqns)
        self.sources = dict(sources)
        self.targets = frozenset(targets)
        self.dependences: dict[Var, dict[Var, Dependence]] = {}
        self.detached: dict[int, frozenset[int]] = {}
        self.unfit: set[tuple[Var, Var]] = set()
        self.movers: dict[int, int] = {}
        self.producer = {v: index for index, eqn in enumerate(eqns) for v in eqn.outvars}
        self.passes = [passes_derivative(eqn) for eqn in eqns]
        self.nested = [index for index, eqn in enumerate(eqns) if has_body(eqn)]
        self.loops = frozenset(index for index in self.nested if has_while(eqns[index]))
        for source in self.sources:
            if source not in self.producer:
                self.dependences[source] = self._itself(source)
        for index, eqn in enumerate(self.eqns):
            self._visit(index, eqn)
        self._aligned: dict[Var, dict[Var, None]] = {}
        self._reached: dict[Var, set[Var]] = {source: set() for source in self.sources}
        for v, by_source in self.dependences.items():
            aligned = [s for s, d in by_source.items() if d.alignment is not None]
            self._aligned[v] = dict.fromkeys(aligned)
            for source in aligned:
                self._reached[source].add(v)

    def of(self, atom: Atom) -> Dependences:
        """How a variable depends on the sources that reach it."""
        return {} if isinstance(atom, Literal) else self.dependences.get(atom, {})

    def differentiated(self, eqn: JaxprEqn) -> list[Var]:
        """The results of one of the equations that a derivative can flow into."""
        if not eqn.outvars:
            return []
        passes = self.passes[self.producer[eqn.outvars[0]]]
        return [v for v, flows in zip(eqn.outvars, passes, strict=True) if flows]

    def mixer(self, cut: int) -> JaxprEqn:
        """The equation to blame for a cut: an earlier one, if that moved the positions."""
        return self.eqns[self.movers.get(cut, cut)]

    def reaches(self, source: Var, target: Var, width: int) -> list[bool]:
        """Per plane of a new state (``width`` along its last axis), whether a source reaches it."""
        alignment = self._alignment(target, source)
        if alignment is None:
            return [False] * (width or 1)
        last = alignment[-1] if width else None
        return [not isinstance(last, Only) or i in last.indices for i in range(width or 1)]

    def aligned(self, atom: Atom) -> dict[Var, None]:
        """The sources that reach a variable position by position, as an ordered set."""
        return {} if isinstance(atom, Literal) else self._aligned.get(atom, {})

    def _alignment(self, v: Var, source: Var) -> Alignment | None:
        """How the positions of a variable follow those of a source, if they do."""
        dependence = self.of(v).get(source)
        return None if dependence is None else dependence.alignment

    def _itself(self, source: Var) -> Dependences:
        shape, _, plane, front = self.sources[source]
        own = identity_alignment(source.aval.shape[front:], len(shape), plane)
        return {source: Dependence((*[None] * front, *own))}

    def _line_up(self, source: Var, target: Var, index: int, old: Dependence) -> Dependence:
        """Cut a dependence whose positions do not correspond one to one at a new hidden state."""
        if old.alignment is None:
            return old
        ours, theirs = self.sources[source], self.sources[target]
        missing = len(theirs.shape) - len(ours.shape)
        fits = (missing == 0 or (ours.may_be_shared and missing > 0)) and theirs.shape[
            missing:
        ] == ours.shape
        axes = identity_alignment(ours.shape)
        expected = (*[None] * max(missing, 0), *axes)
        expected += (None,) * (target.aval.ndim - len(theirs.shape))
        if fits and forget_indices(old.alignment) == expected:
            return old
        if not fits:
            self.unfit.add((source, target))
        self.movers.setdefault(index, self._mover(index, source))
        return Dependence(None, (*old.cut_by, index))

    def _visit(self, index: int, eqn: JaxprEqn) -> None:
        inputs = [self.of(v) for v in eqn.invars]
        results: list[Dependences] = [{}] * len(eqn.outvars)
        if any(inputs) and any(self.passes[index]):
            results = self._meet_in_place(eqn, inputs) or self._met(index, eqn, inputs)
        for v, by_source in zip(eqn.outvars, results, strict=True):
            if v in self.targets:
                by_source = {s: self._line_up(s, v, index, d) for s, d in by_source.items()}
            if v in self.sources:
                by_source = {**by_source, **self._itself(v)}
            if by_source:
                self.dependences[v] = by_source

    def _meet_in_place(self, eqn: JaxprEqn, inputs: list[Dependences]) -> list[Dependences] | None:
        """The common case: sources meet element by element, each with one alignment; else None."""
        shape = eqn.outvars[0].aval.shape
        carrying = [(v, own) for v, own in zip(eqn.invars, inputs, strict=True) if own]
        if not is_element_wise(eqn) or any(v.aval.shape != shape for v, _ in carrying):
            return None
        (_, met), *others = carrying
        for _, other in others:
            if other is met:
                continue
            met = dict(met)
            for source, theirs in other.items():
                ours = met.setdefault(source, theirs)
                if ours is theirs or ours == theirs:
                    continue
                alignments = {a for a in (ours.alignment, theirs.alignment) if a is not None}
                if len(alignments) > 1:
                    return None
                cuts = tuple(dict.fromkeys((*ours.cut_by, *theirs.cut_by)))
                met[source] = Dependence(next(iter(alignments), None), cuts)
        if others:
            by_source = {s: d.alignment for s, d in met.items() if d.alignment is not None}
            if self._out_of_place(by_source, shape):
                return None
        return [met]

    def _met(self, index: int, eqn: JaxprEqn, inputs: list[Dependences]) -> list[Dependences]:
        """Per result, the sources that reach it through one equation."""
        sources = dict.fromkeys(source for operand in inputs for source in operand)
        passes = self.passes[index]
        if isinstance(eqn.primitive, ETPPrimitive) and not self.scope.follows(
            eqn.primitive, eqn.params
        ):
            here = Dependence(None, (index,))  # whatever was mixed before
            cut_here = dict.fromkeys(sources, here)
            return [cut_here if passed else {} for passed in passes]
        results: list[Dependences] = [{} for _ in eqn.outvars]
        outcomes = self._outcomes(index, eqn, inputs, sources)
        for source in sources:
            met = (operand[source].cut_by for operand in inputs if source in operand)
            before = dict.fromkeys(cut for cuts in met for cut in cuts)
            for place, outcome in enumerate(outcomes[source]):
                if outcome is None and not (before and passes[place]):
                    continue
                cut = outcome is MIXED or source in outcomes.lost
                cuts = (*before, index) if cut else tuple(before)
                alignment = outcome if isinstance(outcome, tuple) else None
                results[place][source] = Dependence(alignment, cuts)
        return results

    def _outcomes(
        self,
        index: int,
        eqn: JaxprEqn,
        inputs: list[Dependences],
        sources: Iterable[Var],
    ) -> '_Outcomes':
        """Outcomes per source, with operands detached that would mix into an aligned result.

        A source that arrives in place through some operands is kept out of others that move it. And
        a result that is aligned with one source keeps out another one that is mixed, or at other
        positions. Such operands are taken as constants, for every source.
        """
        detached: frozenset[int] = frozenset()
        meet = sum(map(bool, inputs)) > 1
        while True:
            outcomes = _Outcomes(eqn, inputs, sources, detached)
            clashing = self._clashing(eqn, outcomes) if meet else set()
            mixes = clashing or any(map(partial(_moves, eqn), outcomes.values()))
            if not mixes or eqn.primitive.name in MIXING:
                break
            moved = self._moving_operands(eqn, inputs, outcomes, detached)
            if moved:
                detached |= moved
                continue
            live = [
                place
                for place in range(len(eqn.outvars))
                if any(isinstance(results[place], tuple) for results in outcomes.values())
            ]
            mixing = clashing | {
                source
                for source, results in outcomes.items()
                if any(results[place] is MIXED for place in live)
            }
            bad = frozenset(
                place
                for place, operand in enumerate(inputs)
                if any(s in mixing and d.alignment is not None for s, d in operand.items())
            )
            if bad <= detached:
                break
            detached |= bad
        if detached:
            self.detached[index] = detached
            movers = (self._mover(index, source) for source in outcomes.lost)
            self.movers[index] = next((m for m in movers if m != index), index)
        return outcomes

    def _clashing(self, eqn: JaxprEqn, outcomes: Mapping[Var, Sequence[Outcome]]) -> set[Var]:
        """Sources that a result reads at other positions than a source that is in place there."""
        clashing: set[Var] = set()
        for place, v in enumerate(eqn.outvars):
            at_place = ((source, outcome[place]) for source, outcome in outcomes.items())
            alignments = {source: how for source, how in at_place if isinstance(how, tuple)}
            clashing |= self._out_of_place(alignments, v.aval.shape)
        return clashing

    def _out_of_place(
        self, alignments: Mapping[Var, Alignment], shape: tuple[int, ...]
    ) -> set[Var]:
        if len(set(alignments.values())) < 2:
            return set()
        in_place = (s for s, a in alignments.items() if self._in_place(s, [a]))
        first = next(in_place, next(iter(alignments)))
        return {s for s in alignments if self._clash(first, s, alignments, shape)}

    def _clash(
        self, first: Var, second: Var, alignments: Mapping[Var, Alignment], shape: tuple[int, ...]
    ) -> bool:
        """Whether two sources with corresponding positions are read at different ones."""
        if len(self.sources[first].shape) < len(self.sources[second].shape):
            first, second = second, first
        wide, narrow = self.sources[first].shape, self.sources[second].shape
        fewer = len(wide) - len(narrow)
        return wide[fewer:] == narrow and clash(alignments[first], alignments[second], shape, fewer)

    def _mover(self, index: int, source: Var) -> int:
        """The equation that moved a source out of place on its way to an equation."""
        while True:
            displaced = (
                self.producer[v]
                for v in variables(self.eqns[index].invars)
                if v in self.producer and self._is_displaced(v, source)
            )
            earlier = next(displaced, None)
            if earlier is None:
                return index
            index = earlier

    def _is_displaced(self, v: Var, source: Var) -> bool:
        alignment = self._alignment(v, source)
        return alignment is not None and not self._in_place(source, [alignment])

    def _moving_operands(
        self,
        eqn: JaxprEqn,
        inputs: list[Dependences],
        outcomes: '_Outcomes',
        detached: frozenset[int],
    ) -> frozenset[int]:
        """Operands through which a source mixes, where it arrives in place through others."""
        for source in (s for s, results in outcomes.items() if _moves(eqn, results)):
            alignments = {
                place: own[source].alignment
                for place, own in enumerate(inputs)
                if place not in detached and source in own and own[source].alignment is not None
            }
            alone = {
                place: align_results(eqn, [a if i == place else None for i in range(len(inputs))])
                for place, a in alignments.items()
                if len(alignments) > 1
            }
            moved = frozenset(p for p, moves in alone.items() if not self._in_place(source, moves))
            if 0 < len(moved) < len(alone):
                return moved
        return frozenset()

    def _in_place(self, source: Var, outcomes: Sequence[Outcome]) -> bool:
        expected = [e for e in identity_alignment(self.sources[source].shape) if e is not None]
        return MIXED not in outcomes and all(
            [e for e in forget_indices(outcome) if e is not None] == expected
            for outcome in outcomes
            if isinstance(outcome, tuple)
        )

    def slice(self, sources: Sequence[Var], results: Sequence[Var]) -> Slice:
        """The part of the step through which the sources reach the results position by position.

        Every other variable that it needs becomes a constant of the slice. But a uniform array is
        computed inside the slice from its number, which is cheaper to pass.
        """
        reached: set[Var] = set().union(*(self._reached[source] for source in sources))
        inner = reached.difference(sources)
        kept: set[int] = set()
        pending = [v for v in results if v in inner]
        while pending:
            index = self.producer[pending.pop()]
            if index not in kept:
                kept.add(index)
                detached = self.detached.get(index, ())
                pending += [
                    v
                    for place, v in enumerate(self.eqns[index].invars)
                    if not isinstance(v, Literal) and v in inner and place not in detached
                ]
        made = self._ways(read_variables(self.eqns[index] for index in kept))
        kept.update(made.values())
        constants: dict[Var, Var] = {}
        eqns = []
        for index in sorted(kept):
            eqn, detached = self.eqns[index], self.detached.get(index, ())
            operands = list(eqn.invars)
            for place, v in enumerate(operands):
                if isinstance(v, Literal) or v in made:
                    continue
                if v not in reached:
                    constants[v] = v
                elif place in detached:
                    operands[place] = constants.setdefault(v, new_var(v.aval))
            # A result that no source reaches is a constant too: rename it out of the way.
            outvars = [v if v in reached or v in made else new_var(v.aval) for v in eqn.outvars]
            eqns.append(rewire(eqn, operands, outvars))
        constants.update((v, v) for v in results if v not in reached and v not in made)
        jaxpr = build_jaxpr(list(constants.values()), sources, results, eqns)
        return Slice(jaxpr, list(constants), not self.loops.isdisjoint(kept))

    @cached_property
    def _uniform(self) -> set[Var]:
        """The uniform arrays that no source reaches."""
        return uniform_arrays(self.eqns, lambda v: v.aval.shape == () and not self.of(v))

    def _ways(self, read: Iterable[Var]) -> dict[Var, int]:
        """Those of some variables that are uniform, and what leads to them, by equation."""
        made: dict[Var, int] = {}
        pending = [v for v in read if v in self._uniform]
        while pending:
            v = pending.pop()
            if v not in made:
                made[v] = self.producer[v]
                operands = variables(self.eqns[made[v]].invars)
                pending += [a for a in operands if a in self._uniform]
        return made


def _moves(eqn: JaxprEqn, outcomes: Sequence[Outcome]) -> bool:
    """Whether a source is mixed, or only a part of it is where it was."""
    return any(
        partly_in_place(how, v.aval.shape) if isinstance(how, tuple) else how is MIXED
        for how, v in zip(outcomes, eqn.outvars, strict=True)
    )


class _Outcomes(dict[Var, list[Outcome]]):
    """The outcome of one equation per source, given operands that are taken as constants.

    ``lost`` are the sources that such operands carry.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        inputs: list[Dependences],
        sources: Iterable[Var],
        detached: frozenset[int],
    ) -> None:
        cache: dict[tuple[Alignment | None, ...], list[Outcome]] = {}
        self.lost: set[Var] = set()
        for source in sources:
            alignments = tuple(f[source].alignment if source in f else None for f in inputs)
            kept = tuple(None if i in detached else a for i, a in enumerate(alignments))
            if kept not in cache:
                aligned = any(a is not None for a in kept)
                cache[kept] = align_results(eqn, kept) if aligned else [None] * len(eqn.outvars)
            self[source] = list(cache[kept])
            if kept != alignments:
                self.lost.add(source)
                self[source] = [MIXED if o is None else o for o in self[source]]
