"""A step's jaxpr, flattened: calls inlined, and control flow opened where a traced op is inside.

``jit``, ``remat``/``checkpoint`` and closed calls are always inlined. ``cond`` and ``scan`` are
opened only when an ETP op is inside (a ``cond`` becomes both branches and a ``select_n``, a short
``scan`` is unrolled, a long one divided by :mod:`.descent`); all others stay as they are, since
later passes look into them.
``custom_jvp`` and ``custom_vjp`` calls are never opened: their rule is the derivative that the
user asked for. A slice, an update or a ``scatter`` at a fixed index is taken apart, so that its
positions are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from .._compat import (
    UNKNOWN_LINE,
    Atom,
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Var,
    build_closed_jaxpr,
    jaxprs_in_params,
    new_var,
    open_jaxpr,
    rewire,
    scan_split,
    source_line,
    struct,
)
from ..op import ETPPrimitive
from .descent import Descent, plan_descent
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .liveness import needed_equations
from .primitives import CUSTOM_RULES, INLINED_CALLS, is_inexact
from .scatter import SCATTERS, scatter_in_pieces, update_in_pieces

__all__ = [
    'DEFAULT_CONTROL_FLOW_POLICY',
    'ControlFlowPolicy',
    'contains_etp_op',
    'flatten',
    'flatten_step',
    'has_body',
    'has_while',
]

FOLDED: dict[str, Callable[..., np.ndarray]] = {
    'add': lambda params, a, b: a + b,
    'broadcast_in_dim': lambda params, a: np.broadcast_to(_spread(params, a), params['shape']),
    'concatenate': lambda params, *parts: np.concatenate(parts, params['dimension']),
    'convert_element_type': lambda params, a: a.astype(params['new_dtype']),
    'lt': lambda params, a, b: np.asarray(a < b),
    'select_n': lambda params, which, *cases: np.choose(which.astype(int), cases),
}
"""The primitives by which JAX computes indices, as functions of small arrays."""
LARGEST_INDEX = 8

LONGEST_UNROLLED = 256
"""The longest scan that is unrolled beyond the policy's limit because it cannot be divided."""


@dataclass(frozen=True)
class ControlFlowPolicy:
    """What the compiler does with control flow inside a step.

    Parameters
    ----------
    cond : {'convert', 'opaque'}
        ``'convert'`` evaluates both branches of a ``cond`` that contains an ETP op and selects. The
        derivative of a branch that is only safe when taken (a guarded ``sqrt``, say) may then be
        NaN; keep the op out of such a ``cond``, or use ``'opaque'``.
    scan_unroll_limit : int
        The longest ``scan`` with an ETP op inside that is unrolled, so that every iteration has an
        op and a trace of its own.
    while_hidden : {'opaque-fwd', 'error'}
        A ``while`` without weights through which a hidden state passes has no reverse mode; with
        ``'opaque-fwd'`` its Jacobian is taken in forward mode.
    etp_in_control_flow : {'error', 'exclude'}
        An ETP op that remains inside control flow cannot be traced: refuse the model, or leave the
        op to the ordinary gradient of the step, with a diagnostic.
    scan_descent : {'auto', 'off'}
        What to do with a longer ``scan`` with an ETP op inside. With ``'auto'`` its iterations are
        substeps of the model, which share one op and one trace. Where that is not possible (the
        weight is sliced by the iteration, say), it is unrolled all the same. With ``'off'`` it is
        kept as it is, and ``etp_in_control_flow`` decides.
    fixpoint_iteration_limit : int
        How often the body of a loop is looked through, at most, until what is known of the
        positions of its carry no longer changes. A loop that takes longer counts as one that mixes
        positions.

    Raises
    ------
    ValueError
        If an option has another value.

    Examples
    --------
    >>> import braintrace_fast as braintrace
    >>> braintrace.ControlFlowPolicy(scan_unroll_limit=32).scan_unroll_limit
    32
    """

    cond: str = 'convert'
    scan_unroll_limit: int = 16
    while_hidden: str = 'opaque-fwd'
    etp_in_control_flow: str = 'error'
    scan_descent: str = 'auto'
    fixpoint_iteration_limit: int = 64

    def __post_init__(self) -> None:
        choices = {
            'cond': ('convert', 'opaque'),
            'while_hidden': ('opaque-fwd', 'error'),
            'etp_in_control_flow': ('error', 'exclude'),
            'scan_descent': ('auto', 'off'),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f'ControlFlowPolicy({field}={getattr(self, field)!r}) is not known; '
                    f'choose one of {allowed}.'
                )
        limit = self.fixpoint_iteration_limit
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(
                f'ControlFlowPolicy(fixpoint_iteration_limit={limit!r}): expected a positive int.'
            )


DEFAULT_CONTROL_FLOW_POLICY = ControlFlowPolicy()
"""That of a model for which none is given."""


def _inside(eqn: JaxprEqn, test: Callable[[JaxprEqn], bool]) -> bool:
    """Whether an equation inside an equation's parameters, at any depth, passes a test."""
    return bool(eqn.params) and any(
        test(inner) or _inside(inner, test)
        for sub in jaxprs_in_params(eqn.params)
        for inner in open_jaxpr(sub)[0].eqns
    )


def _is_etp(eqn: JaxprEqn) -> bool:
    return isinstance(eqn.primitive, ETPPrimitive)


def contains_etp_op(eqn: JaxprEqn) -> bool:
    """Whether an ETP op is inside the jaxprs of an equation's parameters."""
    return _inside(eqn, _is_etp)


def has_body(eqn: JaxprEqn) -> bool:
    """Whether an equation has a jaxpr inside."""
    return bool(eqn.params) and any(True for _ in jaxprs_in_params(eqn.params))


def has_while(eqn: JaxprEqn) -> bool:
    """Whether an equation is, or contains, a while loop outside custom derivatives."""
    name = eqn.primitive.name
    if not eqn.params or name in CUSTOM_RULES:
        return False
    inner = (e for sub in jaxprs_in_params(eqn.params) for e in open_jaxpr(sub)[0].eqns)
    return name == 'while' or any(map(has_while, inner))


def flatten(closed: ClosedJaxpr, policy: ControlFlowPolicy, opens_ops: bool = False) -> ClosedJaxpr:
    """Inline calls and open control flow around ETP ops; see the module's docstring.

    With ``opens_ops``, the ops themselves are replaced by what they compute, in plain JAX.

    Variables of the given jaxpr keep their identity; those of inlined bodies are renamed, because
    JAX shares one body between all its call sites.
    """
    return _flattened(closed, _Flattener(policy, opens_ops))


def flatten_step(
    closed: ClosedJaxpr, policy: ControlFlowPolicy
) -> tuple[ClosedJaxpr, dict[Var, int]]:
    """As :func:`flatten`, with the outputs of ops that all substeps of a scan share.

    They have an axis of substeps in front, and are given with its length.
    """
    flattener = _Flattener(policy, opens_ops=False)
    flat = _flattened(closed, flattener)
    made = {v for eqn in open_jaxpr(flat)[0].eqns for v in eqn.outvars}
    return flat, {y: length for y, length in flattener.substeps.items() if y in made}


def _flattened(closed: ClosedJaxpr, flattener: '_Flattener') -> ClosedJaxpr:
    jaxpr, consts = open_jaxpr(closed)
    flattener.constants.update(zip(jaxpr.constvars, consts, strict=True))
    env: dict[Var, Atom] = {}
    flattener.equations(jaxpr.eqns, env)
    outvars = [_read(env, v) for v in jaxpr.outvars]
    return build_closed_jaxpr(
        list(flattener.constants),
        list(flattener.constants.values()),
        jaxpr.invars,
        outvars,
        needed_equations(flattener.eqns, outvars, keep_effects=True),
    )


def _read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env.get(atom, atom)


class _Flattener:
    def __init__(self, policy: ControlFlowPolicy, opens_ops: bool) -> None:
        self.policy = policy
        self.opens_ops = opens_ops
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}
        self.indices: dict[Var, np.ndarray] = {}
        self.substeps: dict[Var, int] = {}

    def equations(
        self, eqns: Sequence[JaxprEqn], env: dict[Var, Atom], outer: JaxprEqn | None = None
    ) -> None:
        """Add equations; those of the body of an ``outer`` one are renamed."""
        for eqn in eqns:
            if outer is not None and source_line(eqn) == UNKNOWN_LINE:
                eqn = eqn.replace(source_info=outer.source_info)  # the body is JAX's own
            operands = [v if isinstance(v, Literal) else env.get(v, v) for v in eqn.invars]
            results = self.open(eqn, operands)
            if results is not None:
                env.update(
                    (v, r)
                    for v, r in zip(eqn.outvars, results, strict=True)
                    if not isinstance(v, DropVar)
                )
                continue
            outvars = list(eqn.outvars)
            if outer is not None:
                outvars = [v if isinstance(v, DropVar) else new_var(v.aval) for v in outvars]
                env.update(zip(eqn.outvars, outvars, strict=True))
            self.eqns.append(rewire(eqn, operands, outvars))
            self.fold(eqn, operands, outvars)

    def fold(self, eqn: JaxprEqn, operands: Sequence[Atom], outvars: Sequence[Var]) -> None:
        """Compute an index whose operands are known."""
        if eqn.primitive.name in FOLDED and not is_inexact(outvars[0].aval):
            values = self.known(operands)
            if values is not None and outvars[0].aval.size <= LARGEST_INDEX:
                self.indices[outvars[0]] = FOLDED[eqn.primitive.name](eqn.params, *values)

    def known(self, atoms: Sequence[Atom]) -> list[np.ndarray] | None:
        """The values of some indices, if all are known."""
        values = [
            np.asarray(a.val) if isinstance(a, Literal) else self.indices.get(a) for a in atoms
        ]
        return None if any(value is None for value in values) else values  # type: ignore[return-value]

    def inline(self, outer: JaxprEqn, closed: Any, operands: Sequence[Atom]) -> list[Atom]:
        jaxpr, consts = open_jaxpr(closed)
        env: dict[Var, Atom] = {}
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = new_var(var.aval)
            self.constants[env[var]] = value
        env.update(zip(jaxpr.invars, operands, strict=True))
        self.equations(jaxpr.eqns, env, outer)
        return [_read(env, v) for v in jaxpr.outvars]

    def call(self, outer: JaxprEqn, fun: Callable[..., Any], *operands: Atom) -> Atom:
        """Emit the equations of a one-result function on the operands, for an ``outer`` one."""
        jaxpr = open_jaxpr(jax.make_jaxpr(fun)(*map(struct, operands)))[0]
        env = dict(zip(jaxpr.invars, operands, strict=True))
        own = [eqn.replace(source_info=outer.source_info) for eqn in jaxpr.eqns]
        self.equations(own, env, outer)
        return _read(env, jaxpr.outvars[0])

    def open(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom] | None:
        """The results of an equation that is opened here, or None to keep it."""
        name = eqn.primitive.name
        if name in INLINED_CALLS:
            return self.inline(eqn, _body(eqn), operands)
        if self.opens_ops and _is_etp(eqn):
            return [self.call(eqn, partial(eqn.primitive.forward, **eqn.params), *operands)]
        if name == 'cond' and contains_etp_op(eqn):
            return self.convert_cond(eqn, operands)
        if name == 'scan' and contains_etp_op(eqn):
            return self.open_scan(eqn, operands)
        if name in SCATTERS:
            array, index, update = operands
            known = self.known([index])
            pieces = None if known is None else scatter_in_pieces(eqn, *known)
            return None if pieces is None else [self.call(eqn, pieces, array, update)]
        if name in ('dynamic_slice', 'dynamic_update_slice'):
            return self.index_at_fixed_place(eqn, operands)
        return None

    def index_at_fixed_place(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom] | None:
        """A dynamic slice, or the update of one, whose index is known."""
        is_slice = eqn.primitive.name == 'dynamic_slice'
        arrays, known = operands[: 2 - is_slice], self.known(operands[2 - is_slice :])
        if known is None:
            return None
        window = eqn.outvars[0].aval.shape if is_slice else operands[1].aval.shape
        sizes = zip(known, operands[0].aval.shape, window, strict=True)
        starts = [min(max(int(start), 0), n - w) for start, n, w in sizes]
        if not is_slice:
            return [self.call(eqn, partial(update_in_pieces, starts=starts), *arrays)]
        limits = [start + w for start, w in zip(starts, window, strict=True)]
        return [self.call(eqn, lambda a: lax.slice(a, starts, limits), *arrays)]

    def convert_cond(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom] | None:
        branches = eqn.params['branches']
        if self.policy.cond == 'opaque' or eqn.effects:
            reason = 'it has side effects' if eqn.effects else "the policy says cond='opaque'"
            message = f'a cond is kept because {reason}'
            _note(DiagnosticKind.COND_CONVERSION_SKIPPED, eqn, message, DiagnosticLevel.WARNING)
            return None
        index, *inputs = operands
        cases = [self.inline(eqn, branch, inputs) for branch in branches]
        _note(
            DiagnosticKind.COND_IF_CONVERTED,
            eqn,
            f'a cond with an ETP op inside evaluates all its {len(branches)} branches and selects',
        )
        return [self.call(eqn, lax.select_n, index, *case) for case in zip(*cases, strict=True)]

    def open_scan(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom] | None:
        """Unroll a scan or divide it, or keep it."""
        length, limit = eqn.params['length'], self.policy.scan_unroll_limit
        if 0 < length <= limit and not eqn.effects:
            return self.unroll_scan(eqn, operands)
        keeps = eqn.effects or not length or self.policy.scan_descent == 'off'
        reason = 'it has side effects' if eqn.effects else f'{length} steps are not 1 to {limit}'
        _note(
            DiagnosticKind.SCAN_UNROLL_SKIPPED,
            eqn,
            f'a scan is {"kept" if keeps else "not unrolled"} because {reason}',
            DiagnosticLevel.WARNING if keeps else DiagnosticLevel.INFO,
        )
        return None if keeps else self.descend(eqn, operands)

    def descend(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom] | None:
        """Divide a long scan, so that its iterations share their ops; or else unroll it."""
        length = eqn.params['length']
        body, inner = flatten_step(eqn.params['jaxpr'], self.policy)
        plan = 'there is another one inside' if inner else plan_descent(eqn, body)
        if isinstance(plan, Descent):
            results = self.divided(plan, operands)
            kind = DiagnosticKind.SCAN_DESCENT_APPLIED
            message = f'the {length} iterations of a scan are substeps, which share their ops'
            if not plan.traced:
                kind = DiagnosticKind.SCAN_DESCENT_NO_RELATIONS
                message = f'no op inside a scan of {length} steps drives what it carries'
            _note(kind, eqn, message)
            return results
        unrolls = length <= LONGEST_UNROLLED
        _note(
            DiagnosticKind.SCAN_DESCENT_SKIPPED,
            eqn,
            f'the {length} iterations of a scan are not made substeps because {plan}; it is '
            + ('unrolled' if unrolls else 'kept'),
            DiagnosticLevel.INFO if unrolls else DiagnosticLevel.WARNING,
        )
        return self.unroll_scan(eqn, operands) if unrolls else None

    def divided(self, plan: Descent, operands: list[Atom]) -> list[Atom]:
        """The results of a scan that is divided."""
        eqn, count = plan.eqn, len(plan.xs) + len(plan.mixed)
        results: list[Any] = [None] * len(eqn.outvars)
        if plan.recurs:
            given = self.calls(eqn, partial(plan.first, results_only=False), operands)
            given, rest = given[:count], given[count:]
        else:
            given = self.calls(eqn, plan.inputs, operands)
            rest = self.calls(eqn, partial(plan.first, results_only=True), operands)
        outputs: list[Atom] = []
        fixed: list[Atom] = []
        inputs = iter(given)
        for op in plan.ops:
            weights = self.calls(eqn, partial(plan.weights, op), operands)
            place = op.primitive.x_invar_index
            if place is not None:
                weights.insert(place, next(inputs))
            y = self.call(op, partial(op.primitive.bind, **op.params), *weights)
            (fixed if place is None else outputs).append(y)
            if place is not None:
                self.substeps[y] = plan.length
        carried = self.calls(eqn, plan.transition, operands, [*outputs, *inputs], fixed)
        for places, values in ((plan.results, rest), (plan.traced, carried)):
            for place, value in zip(places, values, strict=True):
                results[place] = value
        return results

    def calls(self, outer: JaxprEqn, fun: Callable[..., Any], *operands: list[Atom]) -> list[Atom]:
        """Emit the equations of a function of lists of operands, for an ``outer`` one."""
        closed = jax.make_jaxpr(fun)(*([struct(v) for v in own] for own in operands))
        return self.inline(outer, closed, [v for own in operands for v in own])

    def unroll_scan(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
        """Every iteration on its own."""
        length = eqn.params['length']
        num_consts, num_carry = scan_split(eqn)
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        sequences = operands[num_consts + num_carry :]
        collected: list[list[Atom]] = []
        steps = range(length)
        for step in reversed(steps) if eqn.params['reverse'] else steps:
            slices = [self.call(eqn, _at(step), xs) for xs in sequences]
            results = self.inline(eqn, eqn.params['jaxpr'], [*consts, *carry, *slices])
            carry = results[:num_carry]
            collected.append(results[num_carry:])
        if eqn.params['reverse']:
            collected.reverse()
        _note(
            DiagnosticKind.SCAN_UNROLLED,
            eqn,
            f'a scan of {length} steps with an ETP op inside is unrolled',
        )
        stacked = [self.call(eqn, _stack, *ys) for ys in zip(*collected, strict=True)]
        return [*carry, *stacked]


def _body(eqn: JaxprEqn) -> Any:
    return eqn.params['jaxpr'] if 'jaxpr' in eqn.params else eqn.params['call_jaxpr']


def _spread(params: dict[str, Any], a: np.ndarray) -> np.ndarray:
    sizes = dict(zip(params['broadcast_dimensions'], a.shape, strict=True))
    return a.reshape([sizes.get(axis, 1) for axis in range(len(params['shape']))])


def _at(step: int) -> Callable[[jax.Array], jax.Array]:
    return lambda xs: lax.index_in_dim(xs, step, keepdims=False)


def _stack(*ys: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(y, (0,)) for y in ys], 0)


def _note(
    kind: DiagnosticKind,
    eqn: JaxprEqn,
    message: str,
    level: DiagnosticLevel = DiagnosticLevel.INFO,
) -> None:
    line = source_line(eqn)
    emit(
        kind,
        level,
        f'{line}: {message}.',
        primitive=eqn.primitive,
        context={'source': line},
    )
