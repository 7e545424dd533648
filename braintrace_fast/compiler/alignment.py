"""How the positions of a result follow from the positions of an operand, primitive by primitive.

An *alignment* says, for an array that depends on a source array position by position, which source
axis each of its axes runs along: one entry per axis,

- ``None``: the axis is free (broadcast, of size one, or a state axis);
- ``Only(indices)``: the axis is free, and only these of its indices depend on the source;
- ``(source_axis, offset)``: index ``i`` of this axis reads index ``i + offset`` of the source axis;
- ``Merged(parts)``: a reshape folded several entries into this axis.

A rule maps the alignments of an equation's operands (``None`` for operands that do not carry the
source) to one outcome per result: an alignment, ``MIXED`` if a result position would depend on more
than one source position, or ``None`` if no derivative flows. Rules see one source at a time; every
source axis of size above one is present in every alignment.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compat import JaxprEqn, Literal, Var, equation_function, open_jaxpr, scan_split, struct
from ..op import ETPPrimitive

__all__ = [
    'MIXED',
    'Alignment',
    'Merged',
    'Only',
    'Outcome',
    'align_results',
    'always_mixes',
    'cuts_by_design',
    'even_arrays',
    'forget_indices',
    'identity_alignment',
    'is_element_wise',
    'is_inexact',
    'keeps_even',
    'passes_derivative',
    'through',
]


class Merged(NamedTuple):
    """Several axes folded into one by a reshape: (entry, size) pairs."""

    parts: tuple[tuple[Any, int], ...]


class Only(NamedTuple):
    """A free axis of which only some indices depend on the source."""

    indices: frozenset[int]


Entry = Any
Alignment = tuple[Entry, ...]


class _Mixed:
    def __repr__(self) -> str:
        return 'MIXED'


MIXED = _Mixed()
Outcome = Alignment | _Mixed | None
Rule = Callable[[JaxprEqn, Sequence[Alignment | None]], list[Outcome]]

_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp complex conj
    convert_element_type copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1 imag
    integer_pow lgamma log log1p logistic max min mul name neg pow real reduce_precision rem
    rsqrt select_n sin sinh sqrt square sub tan tanh
    """.split()
)
_NO_DERIVATIVE = frozenset(
    """
    and argmax argmin ceil clz eq eq_to floor ge gt iota is_finite le le_to lt lt_to ne not or
    population_count random_bits random_fold_in random_seed random_split random_unwrap
    random_wrap round shift_left shift_right_arithmetic shift_right_logical sign stop_gradient
    xor
    """.split()
)
_EVEN = frozenset(
    """
    and broadcast_in_dim ceil eq expand_dims exprel floor ge gt is_finite le lt ne not or reshape
    round sign slice squeeze stop_gradient transpose xor
    """.split()
)
_MIXING = frozenset(['conv_general_dilated', 'fft', 'triangular_solve', 'cholesky', 'top_k'])
_RULES: dict[str, Rule] = {}
_being_derived: ContextVar[frozenset[Any]] = ContextVar('being_derived', default=frozenset())


def identity_alignment(
    shape: Sequence[int], ndim: int | None = None, plane: int | None = None
) -> Alignment:
    """The alignment of an array with itself; axes from ``ndim`` on are state axes, hence free.

    With ``plane``, the source is one plane along the last axis.
    """
    ndim = len(shape) if ndim is None else ndim
    entries: list[Entry] = [
        (axis, 0) if axis < ndim and size > 1 else None for axis, size in enumerate(shape)
    ]
    if plane is not None:
        entries[-1] = Only(frozenset([plane]))
    return tuple(entries)


def align_results(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    """Apply the rule of an equation's primitive to one source."""
    name = eqn.primitive.name
    if name in _ELEMENTWISE:
        outcomes: list[Outcome] = [_elementwise(eqn, operands)]
    elif name in _NO_DERIVATIVE:
        outcomes = [None] * len(eqn.outvars)
    elif always_mixes(eqn):
        outcomes = [MIXED] * len(eqn.outvars)
    elif name in _RULES:
        outcomes = _RULES[name](eqn, operands)
    else:
        outcomes = _by_derivative(eqn, operands)
    return [
        outcome if passes else None
        for passes, outcome in zip(passes_derivative(eqn), outcomes, strict=True)
    ]


def always_mixes(eqn: JaxprEqn) -> bool:
    """Whether an equation mixes positions whatever its operands."""
    return eqn.primitive.name in _MIXING or cuts_by_design(eqn.primitive)


def cuts_by_design(primitive: Any) -> bool:
    """Whether an op is a place where paths between positions end, as an ETP op does."""
    return isinstance(primitive, ETPPrimitive) and not primitive.gradient_enabled


def passes_derivative(eqn: JaxprEqn) -> list[bool]:
    """Per result, whether any derivative can flow into it."""
    stops = eqn.primitive.name in _NO_DERIVATIVE
    return [not stops and is_inexact(v.aval) for v in eqn.outvars]


def is_inexact(aval: Any) -> bool:
    """Whether values of a type can carry a derivative."""
    return hasattr(aval, 'dtype') and _is_inexact_type(aval.dtype)


@functools.cache
def _is_inexact_type(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def is_element_wise(eqn: JaxprEqn) -> bool:
    """Whether the result depends on its operands element by element."""
    return eqn.primitive.name in _ELEMENTWISE


def keeps_even(eqn: JaxprEqn) -> bool:
    """Whether an equation makes arrays of one number each of such arrays."""
    name = eqn.primitive.name
    if name in ('custom_jvp_call', 'jit', 'pjit'):
        called = eqn.params['call_jaxpr' if name == 'custom_jvp_call' else 'jaxpr']
        inner, constants = open_jaxpr(called)
        return not constants and all(map(keeps_even, inner.eqns))
    return name in _ELEMENTWISE or name in _EVEN


def even_arrays(eqns: Iterable[JaxprEqn], is_number: Callable[[Var], bool]) -> set[Var]:
    """The results that are one number throughout, by the way they are made of single numbers."""
    found: set[Var] = set()
    for eqn in eqns:
        if keeps_even(eqn) and all(
            not v.aval.ndim if isinstance(v, Literal) else v in found or is_number(v)
            for v in eqn.invars
        ):
            found.update(eqn.outvars)
    return found


def _carried(operands: Sequence[Alignment | None]) -> list[Alignment]:
    return [a for a in operands if a is not None]


def _join(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome for values that meet: equal alignments stay, different ones mix."""
    joined: Outcome = None
    for outcome in outcomes:
        if outcome is MIXED:
            return MIXED
        if outcome is not None and outcome != joined:
            joined = outcome if joined is None else _join_entries(joined, outcome)
            if joined is MIXED:
                return MIXED
    return joined


def _join_entries(one: Outcome, other: Outcome) -> Outcome:
    """Alignments that differ at most in which indices of free axes they depend on."""
    if not isinstance(one, tuple) or not isinstance(other, tuple) or len(one) != len(other):
        return MIXED
    entries: list[Entry] = []
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Only) and isinstance(b, Only):
            entries.append(Only(a.indices | b.indices))
        elif a == b:
            entries.append(a)
        elif _runs(a) or _runs(b):
            return MIXED
        else:
            entries.append(None)
    return tuple(entries)


def _runs(entry: Entry) -> bool:
    """Whether a source axis runs along an axis."""
    return entry is not None and not isinstance(entry, Only)


def _elementwise(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> Outcome:
    """Operands that are scalars, or have axes of size one, are repeated to the result's shape."""
    shape = eqn.outvars[0].aval.shape
    return _join(
        [
            None if source is None else _repeat(source, v.aval.shape or (1,) * len(shape), shape)
            for source, v in zip(operands, eqn.invars, strict=True)
        ]
    )


def _repeat(source: Alignment, sizes: Sequence[int], shape: Sequence[int]) -> Outcome:
    """The outcome for an array whose axes of size one are repeated up to a shape."""
    entries: list[Entry] = []
    for entry, size, wanted in zip(source or (None,) * len(shape), sizes, shape, strict=True):
        if size != wanted and _runs(entry):
            return MIXED  # one position of the source is spread over others
        entries.append(entry if size == wanted else None)
    return tuple(entries)


def forget_indices(source: Alignment) -> Alignment:
    """The alignment with its free axes wholly free."""
    return tuple(None if isinstance(entry, Only) else entry for entry in source)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule('optimization_barrier', 'device_put', 'sharding_constraint')
def _each_to_each(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    return list(operands)


@_rule('broadcast_in_dim')
def _broadcast(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    shape = eqn.params['shape']
    entries: list[Entry] = [None] * len(shape)
    sizes = list(shape)
    axes = eqn.params['broadcast_dimensions']
    for axis, size, entry in zip(axes, eqn.invars[0].aval.shape, operands[0] or (), strict=True):
        entries[axis], sizes[axis] = entry, size
    return [_repeat(tuple(entries), sizes, shape)]


@_rule('tile')
def _tile(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [_repeat(source, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)]


@_rule('squeeze')
def _squeeze(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [_without(source, eqn.params['dimensions'])]


def _without(source: Alignment, axes: Sequence[int]) -> Outcome:
    """The outcome where some axes are gone; with one that runs, its positions are lost."""
    if any(_runs(source[axis]) for axis in axes):
        return MIXED
    return tuple(entry for axis, entry in enumerate(source) if axis not in axes)


@_rule('transpose')
def _transpose(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [tuple(source[axis] for axis in eqn.params['permutation'])]


@_rule('reshape')
def _reshape(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    sizes = eqn.invars[0].aval.shape
    if _without(source, [axis for axis, n in enumerate(sizes) if n == 1]) is MIXED:
        return [MIXED]
    old = [(e, n) for e, n in zip(source, sizes, strict=True) if n != 1]
    new_sizes = [n for n in eqn.outvars[0].aval.shape if n != 1]
    entries = _refold(old, new_sizes)
    if entries is None:
        return [MIXED]
    remaining = iter(entries)
    return [tuple(None if n == 1 else next(remaining) for n in eqn.outvars[0].aval.shape)]


def _refold(old: list[tuple[Entry, int]], sizes: list[int]) -> list[Entry] | None:
    """Entries for axes of the given sizes that hold the old axes in the same order."""
    parts = [part for e, n in old for part in (e.parts if isinstance(e, Merged) else ((e, n),))]
    entries: list[Entry] = []
    position = 0
    for size in sizes:
        start, product = position, 1
        while product < size and position < len(parts):
            product *= parts[position][1]
            position += 1
        group = tuple(parts[start:position])
        if product != size:
            # An axis is split: only possible where no source runs along it.
            return None if any(_runs(e) for e, _ in parts) else [None] * len(sizes)
        if len(group) == 1:
            entries.append(group[0][0])
        else:
            entries.append(Merged(group) if any(_runs(e) for e, _ in group) else None)
    return entries


@_rule('slice')
def _slice(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    shape = eqn.invars[0].aval.shape
    strides = eqn.params['strides'] or (1,) * len(shape)
    entries: list[Entry] = []
    for entry, size, start, limit, stride in zip(
        source,
        shape,
        eqn.params['start_indices'],
        eqn.params['limit_indices'],
        strides,
        strict=True,
    ):
        whole = start == 0 and limit == size and stride == 1
        if entry is None or whole:
            entries.append(entry)
        elif isinstance(entry, Only):
            taken = range(start, limit, stride)
            kept = frozenset(taken.index(i) for i in entry.indices if i in taken)
            if not kept:
                return [None]
            entries.append(Only(kept))
        elif isinstance(entry, Merged) or stride != 1:
            return [MIXED]
        else:
            entries.append((entry[0], entry[1] + start))
    return [tuple(entries)]


@_rule('dynamic_slice')
def _dynamic_slice(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    source = operands[0]
    if source is None:
        return [None]
    entries: list[Entry] = []
    sizes = eqn.params['slice_sizes']
    for entry, n, size in zip(source, eqn.invars[0].aval.shape, sizes, strict=True):
        if n != size and _runs(entry):
            return [MIXED]
        entries.append(entry if n == size else None)
    return [tuple(entries)]


@_rule('dynamic_update_slice')
def _dynamic_update_slice(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    array, update, *_ = operands
    if update is not None:
        shapes = zip(update, eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
        if any(_runs(entry) and n != m for entry, n, m in shapes):
            return [MIXED]
        update = forget_indices(update)
    return [_join([array, update])]


@_rule('concatenate', 'stack')
def _concatenate(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    axis = eqn.params['dimension'] if 'dimension' in eqn.params else eqn.params['axis']
    outcomes: list[Outcome] = []
    position = 0
    for source, operand in zip(operands, eqn.invars, strict=True):
        stacked = eqn.primitive.name == 'stack'
        size = 1 if stacked else operand.aval.shape[axis]
        if source is not None:
            entry: Entry = None if stacked else source[axis]
            if isinstance(entry, Merged) and position:
                return [MIXED]
            if isinstance(entry, Only):
                entry = Only(frozenset(i + position for i in entry.indices))
            elif _runs(entry) and not isinstance(entry, Merged):
                entry = (entry[0], entry[1] - position)
            elif entry is None:
                entry = Only(frozenset(range(position, position + size)))
            outcomes.append((*source[:axis], entry, *source[axis + (not stacked) :]))
        position += size
    return [_join(outcomes)]


@_rule('split')
def _split(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    axis, entry, start = eqn.params['axis'], source[eqn.params['axis']], 0
    if isinstance(entry, Merged):
        return [MIXED] * len(eqn.outvars)
    outcomes: list[Outcome] = []
    for size in eqn.params['sizes']:
        piece = entry
        if isinstance(entry, Only):
            here = range(start, start + size)
            piece = Only(frozenset(i - start for i in entry.indices if i in here))
        elif entry is not None:
            piece = (entry[0], entry[1] + start)
        reached = piece != Only(frozenset())
        outcomes.append((*source[:axis], piece, *source[axis + 1 :]) if reached else None)
        start += size
    return outcomes


@_rule('unstack')
def _unstack(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    entry = source[eqn.params['axis']]
    piece = _without(source, [eqn.params['axis']])
    return [
        None if isinstance(entry, Only) and i not in entry.indices else piece
        for i in range(len(eqn.outvars))
    ]


@_rule('pad')
def _pad(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    array, fill = operands
    if array is None:
        return [_ones_position(fill, _ndim(eqn))]
    entries: list[Entry] = []
    for entry, (low, _, interior) in zip(array, eqn.params['padding_config'], strict=True):
        if entry is None or (low == 0 and interior == 0):
            entries.append(entry)
        elif isinstance(entry, Only):
            entries.append(None)
        elif isinstance(entry, Merged) or interior:
            return [MIXED]
        else:
            entries.append((entry[0], entry[1] - low))
    return [_join([tuple(entries), _ones_position(fill, _ndim(eqn))])]


def _ones_position(alignment: Alignment | None, ndim: int) -> Outcome:
    return None if alignment is None else (None,) * ndim


@_rule('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or')
def _reduce(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [_without(source, eqn.params['axes'])]


@_rule('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp')
def _cumulative(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [MIXED if _runs(source[eqn.params['axis']]) else forget_indices(source)]


@_rule('rev')
def _rev(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    mixes = any(_runs(source[axis]) for axis in eqn.params['dimensions'])
    return [MIXED if mixes else forget_indices(source)]


@_rule('sort')
def _sort(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    joined = _join(operands)
    if isinstance(joined, tuple):
        runs = _runs(joined[eqn.params['dimension']])
        joined = MIXED if runs else forget_indices(joined)
    return [joined] * len(eqn.outvars)


@_rule('dot_general')
def _dot_general(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    contracting, batch = eqn.params['dimension_numbers']
    free_axes = [
        [a for a in range(v.aval.ndim) if a not in contracting[side] and a not in batch[side]]
        for side, v in enumerate(eqn.invars)
    ]
    outcomes: list[Outcome] = []
    for side, source in enumerate(operands):
        if source is None:
            continue
        if any(_runs(source[axis]) for axis in contracting[side]):
            return [MIXED]
        before = free_axes[0] if side else []
        after = [] if side else free_axes[1]
        kept = [source[axis] for axis in [*batch[side], *free_axes[side]]]
        head, tail = kept[: len(batch[side])], kept[len(batch[side]) :]
        outcomes.append((*head, *[None] * len(before), *tail, *[None] * len(after)))
    return [_join(outcomes)]


@_rule('gather')
def _gather(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    source, _ = operands
    if source is None:
        return [None]
    numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
    moved = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [axis for axis in range(len(source)) if axis not in moved]
    entries: list[Entry] = [None] * _ndim(eqn)
    for place, axis in zip(numbers.offset_dims, windows, strict=True):
        entries[place] = source[axis] if _runs(source[axis]) else None
    untouched = all(
        not _runs(entry) or (axis in windows and sizes[axis] == eqn.invars[0].aval.shape[axis])
        for axis, entry in enumerate(source)
    )
    return [tuple(entries) if untouched else MIXED]


@_rule('scatter', 'scatter-add', 'scatter-sub', 'scatter-mul', 'scatter-min', 'scatter-max')
def _scatter(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    array, _, updates = operands
    if updates is None:
        return [array]
    numbers = eqn.params['dimension_numbers']
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    shape = eqn.invars[0].aval.shape
    windows = [axis for axis in range(len(shape)) if axis not in inserted]
    entries: list[Entry] = [None] * len(shape)
    for place, axis in zip(numbers.update_window_dims, windows, strict=True):
        entries[axis] = updates[place] if _runs(updates[place]) else None
        if _runs(updates[place]) and eqn.invars[2].aval.shape[place] != shape[axis]:
            return [MIXED]
    if sum(map(_runs, entries)) != sum(map(_runs, updates)):
        return [MIXED]
    return [_join([array, tuple(entries)])]


@_rule('cond')
def _cond(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    branches = [through(branch, operands[1:]) for branch in eqn.params['branches']]
    return [_join(outcomes) for outcomes in zip(*branches, strict=True)]


@_rule('scan')
def _scan(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    num_consts, num_carry = scan_split(eqn)
    consts, rest = operands[:num_consts], operands[num_consts:]
    sequences = rest[num_carry:]
    if any(xs is not None and _runs(xs[0]) for xs in sequences):
        return [MIXED] * len(eqn.outvars)  # the source runs along the scanned axis
    slices = [None if xs is None else xs[1:] for xs in sequences]
    carry, ys = _fixpoint(eqn.params['jaxpr'], consts, rest[:num_carry], slices)
    return [*carry, *((None, *y) if isinstance(y, tuple) else y for y in ys)]


@_rule('while')
def _while(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    skipped, num_consts = eqn.params['cond_nconsts'], eqn.params['body_nconsts']
    consts = operands[skipped : skipped + num_consts]
    carry = operands[skipped + num_consts :]
    return _fixpoint(eqn.params['body_jaxpr'], consts, carry, [])[0]


def _fixpoint(
    body: Any, consts: Sequence[Outcome], carry: Sequence[Outcome], slices: Sequence[Outcome]
) -> tuple[list[Outcome], list[Outcome]]:
    """The carried and the collected results of a loop, repeated until nothing changes."""
    while True:
        results = through(body, [*consts, *carry, *slices])
        pairs = zip(carry, results[: len(carry)], strict=True)
        joined = [_join(pair) for pair in pairs]
        if joined == list(carry):
            return joined, results[len(carry) :]
        carry = joined


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
        if any(a is not None for a in aligned):
            outcomes = align_results(eqn, aligned)
        if any(a is MIXED for a in inputs):
            outcomes = [MIXED if passes else None for passes in passes_derivative(eqn)]
        env.update(zip(eqn.outvars, outcomes, strict=True))
    return [read(v) for v in jaxpr.outvars]


@_rule('jit', 'closed_call', 'remat2')
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
    return _join(
        [
            None if source is None or how is None else (source if how is True else MIXED)
            for source, how in zip(operands, reached, strict=True)
        ]
    )


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
    if key not in _remembered:
        _remembered[key] = _cotangent_alignments(eqn, place, carries)
    return _remembered[key]


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
    found = iter(through(closed, [identity, *[None] * len(eqn.invars)]))
    reached: list[bool | None] = []
    for operand, moves in zip(eqn.invars, inexact, strict=True):
        outcome = next(found) if moves else None
        same = outcome == identity and operand.aval.shape == result.shape
        reached.append(None if outcome is None else same)
    return reached


def _ndim(eqn: JaxprEqn) -> int:
    return eqn.outvars[0].aval.ndim
