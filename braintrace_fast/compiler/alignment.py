"""How the positions of a result follow from the positions of an operand, equation by equation.

A rule maps the alignments of an equation's operands (``None`` for operands that do not carry the
source) to one outcome per result: an alignment, ``MIXED`` if a result position would depend on more
than one source position, or ``None`` if no derivative flows. Rules see one source at a time. Those
that axes alone decide are in :mod:`.shape_rules`; here are those of equations with a body, and what
is read off the derivative of a primitive without a rule. :mod:`.positions` says what an alignment
is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from .._compat import JaxprEqn, Literal, Var, equation_function, open_jaxpr, scan_split, struct
from ..op import ETPPrimitive
from .positions import MIXED, Alignment, Entry, Outcome, identity_alignment, join, runs
from .primitives import ELEMENTWISE, MIXING, NO_DERIVATIVE, is_inexact, passes_derivative
from .shape_rules import KEEP_PINS, SHAPE_RULES, Rule, elementwise, with_pins

__all__ = ['align_results', 'fixpoint_limit', 'through']


_fixpoint_limit: ContextVar[int] = ContextVar('fixpoint_limit', default=64)


@contextmanager
def fixpoint_limit(limit: int) -> Iterator[None]:
    """Look through the body of a loop so many times at most."""
    token = _fixpoint_limit.set(limit)
    try:
        yield
    finally:
        _fixpoint_limit.reset(token)


_being_derived: ContextVar[frozenset[Any]] = ContextVar('being_derived', default=frozenset())


def align_results(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    """Apply the rule of an equation's primitive to one source."""
    name = eqn.primitive.name
    if name in NO_DERIVATIVE:
        outcomes: list[Outcome] = [None] * len(eqn.outvars)
    elif name in MIXING:
        outcomes = [MIXED] * len(eqn.outvars)
    elif name in _BODY_RULES:
        outcomes = _BODY_RULES[name](eqn, operands)
    elif name in KEEP_PINS:
        outcomes = SHAPE_RULES[name](eqn, operands)
    elif name in ELEMENTWISE or name in SHAPE_RULES:
        outcomes = _of_entries(eqn, operands)
    else:
        outcomes = _by_derivative(eqn, operands)
    return [
        outcome if passes else None
        for passes, outcome in zip(passes_derivative(eqn), outcomes, strict=True)
    ]


def _of_entries(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    """Apply the rule to the entries of the operands' axes; pinned axes are passed on unchanged."""
    ranks = [v.aval.ndim for v in eqn.invars]
    pins = {a[n:] for a, n in zip(operands, ranks, strict=True) if a is not None}
    if len(pins) > 1:
        return [MIXED] * len(eqn.outvars)
    entries = [a if a is None else a[:n] for a, n in zip(operands, ranks, strict=True)]
    name = eqn.primitive.name
    rule = elementwise if name in ELEMENTWISE else SHAPE_RULES[name]
    outcomes = rule(eqn, entries)
    (common,) = pins
    if not common:
        return outcomes
    return [
        with_pins(outcome, common, v.aval.shape, name) if isinstance(outcome, tuple) else outcome
        for outcome, v in zip(outcomes, eqn.outvars, strict=True)
    ]


def _cond(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    branches = [through(branch, operands[1:]) for branch in eqn.params['branches']]
    return [join(outcomes) for outcomes in zip(*branches, strict=True)]


def _scan(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    num_consts, num_carry = scan_split(eqn)
    consts, rest = operands[:num_consts], operands[num_consts:]
    carry, sequences = rest[:num_carry], rest[num_carry:]
    scanned = {xs[0] for xs in sequences if xs is not None and runs(xs[0])}
    if scanned:
        others = [*consts, *carry, *(xs for xs in sequences if xs and not runs(xs[0]))]
        if len(scanned) > 1 or any(a is not None for a in others):
            return [MIXED] * len(eqn.outvars)  # an iteration reads more than its own positions
        return _map(eqn, sequences, scanned.pop())
    slices = [None if xs is None else xs[1:] for xs in sequences]
    last, ys = _fixpoint(eqn.params['jaxpr'], consts, carry, slices)
    return [*last, *((None, *y) if isinstance(y, tuple) else y for y in ys)]


def _map(eqn: JaxprEqn, sequences: Sequence[Alignment | None], entry: Entry) -> list[Outcome]:
    """A scan along an axis of positions, each of which is met by one iteration alone.

    Inside, the source is the part of it that the iteration reads. What an iteration hands to the
    next one mixes.
    """
    num_consts, num_carry = scan_split(eqn)
    slices = [None if xs is None else xs[1:] for xs in sequences]
    carry: list[Outcome] = [None] * num_carry
    while True:
        results = through(eqn.params['jaxpr'], [*[None] * num_consts, *carry, *slices])
        pairs = zip(carry, results[:num_carry], strict=True)
        handed = [old if new is None else MIXED for old, new in pairs]
        if handed == carry:
            break
        carry = handed
    ys = results[num_carry:]
    return [*carry, *((entry, *y) if isinstance(y, tuple) else y for y in ys)]


def _while(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    skipped, num_consts = eqn.params['cond_nconsts'], eqn.params['body_nconsts']
    consts = operands[skipped : skipped + num_consts]
    carry = operands[skipped + num_consts :]
    return _fixpoint(eqn.params['body_jaxpr'], consts, carry, [])[0]


def _fixpoint(
    body: Any, consts: Sequence[Outcome], carry: Sequence[Outcome], slices: Sequence[Outcome]
) -> tuple[list[Outcome], list[Outcome]]:
    """The carry and the collected results of a loop, repeated until nothing changes.

    If that takes too long, all is mixed.
    """
    for _ in range(_fixpoint_limit.get()):
        results = through(body, [*consts, *carry, *slices])
        pairs = zip(carry, results[: len(carry)], strict=True)
        joined = [join(pair) for pair in pairs]
        if joined == list(carry):
            return joined, results[len(carry) :]
        carry = joined
    return [MIXED] * len(carry), [MIXED] * (len(open_jaxpr(body)[0].outvars) - len(carry))


def through(closed: Any, operands: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes at the results of a jaxpr; a mixed operand mixes whatever it reaches."""
    jaxpr, _ = open_jaxpr(closed)
    env: dict[Var, Outcome] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Outcome:
        return None if isinstance(atom, Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if all(a is None for a in inputs):
            continue
        aligned = [a if isinstance(a, tuple) else None for a in inputs]
        outcomes: list[Outcome] = [None] * len(eqn.outvars)
        if any(a is MIXED for a in inputs) or _ends_paths(eqn):
            outcomes = [MIXED if passes else None for passes in passes_derivative(eqn)]
        elif any(a is not None for a in aligned):
            outcomes = align_results(eqn, aligned)
        env.update(zip(eqn.outvars, outcomes, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _ends_paths(eqn: JaxprEqn) -> bool:
    """Whether an equation inside another one is an op at which influence ends."""
    return isinstance(eqn.primitive, ETPPrimitive) and not eqn.primitive.gradient_enabled


def _call(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    return through(eqn.params['jaxpr'], operands)


def _by_derivative(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    """For primitives without a rule, and for custom derivatives: read the VJP's own jaxpr.

    The derivative is position-wise if the cotangent of an operand follows the cotangent of the
    result position by position.
    """
    key = (eqn.primitive, id(eqn.params.get('call_jaxpr')))
    if key in _being_derived.get():
        return [MIXED] * len(eqn.outvars)  # a linear primitive that is its own derivative
    token = _being_derived.set(_being_derived.get() | {key})
    try:
        return [_by_cotangent(eqn, operands, place) for place in range(len(eqn.outvars))]
    finally:
        _being_derived.reset(token)


def _by_cotangent(eqn: JaxprEqn, operands: Sequence[Alignment | None], place: int) -> Outcome:
    reached = _remembered_alignments(eqn, place, tuple(source is not None for source in operands))
    return join(
        [
            None if source is None or how is None else (source if how is True else MIXED)
            for source, how in zip(operands, reached, strict=True)
        ]
    )


_MOST_REMEMBERED = 1024
_remembered: dict[Any, list[bool | None]] = {}


def _remembered_alignments(
    eqn: JaxprEqn, place: int, carries: tuple[bool, ...]
) -> list[bool | None]:
    """:func:`_cotangent_alignments`, traced once per primitive and shapes.

    Custom derivatives are functions of one trace, so there is nothing to remember.
    """
    if any(callable(value) for value in eqn.params.values()) or 'call_jaxpr' in eqn.params:
        return _cotangent_alignments(eqn, place, carries)
    shapes = tuple([(v.aval.shape, v.aval.dtype) for v in eqn.invars])
    params = tuple([(name, _hashable(value)) for name, value in eqn.params.items()])
    key = (eqn.primitive, params, shapes, place, carries)
    alignments = _remembered.get(key)
    if alignments is None:
        if len(_remembered) >= _MOST_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        alignments = _remembered[key] = _cotangent_alignments(eqn, place, carries)
    return alignments


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def _cotangent_alignments(eqn: JaxprEqn, place: int, carries: Sequence[bool]) -> list[bool | None]:
    """Per operand: True if its cotangent is position-wise, None if it is zero, else False."""
    result = eqn.outvars[place].aval
    inexact = [c and is_inexact(v.aval) for c, v in zip(carries, eqn.invars, strict=True)]
    if not is_inexact(result):
        return [None] * len(eqn.invars)

    def cotangents(cotangent: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
        moving = [v for v, moves in zip(values, inexact, strict=True) if moves]

        def at_place(*moved: jax.Array) -> jax.Array:
            order = iter(moved)
            filled = [next(order) if m else v for v, m in zip(values, inexact, strict=True)]
            return equation_function(eqn)(*filled)[place]

        return jax.vjp(at_place, *moving)[1](cotangent)

    operands = map(struct, (eqn.outvars[place], *eqn.invars))
    try:
        closed = jax.make_jaxpr(cotangents)(*operands)
    except Exception:  # no reverse mode, or operands that cannot be abstract: say "mixes"
        return [False if moves else None for moves in inexact]
    identity = identity_alignment(result.shape)
    outcomes = iter(through(closed, [identity, *[None] * len(eqn.invars)]))
    reached: list[bool | None] = []
    for operand, moves in zip(eqn.invars, inexact, strict=True):
        outcome = next(outcomes) if moves else None
        same = outcome == identity and operand.aval.shape == result.shape
        reached.append(None if outcome is None else same)
    return reached


_BODY_RULES: dict[str, Rule] = {
    'closed_call': _call,
    'cond': _cond,
    'jit': _call,
    'remat2': _call,
    'scan': _scan,
    'while': _while,
}
"""The rules of equations with a body."""
