"""How the positions of a result follow from the positions of an operand, primitive by primitive.

A rule maps the alignments of an equation's operands (``None`` for operands that do not carry the
source) to one outcome per result: an alignment, ``MIXED`` if a result position would depend on more
than one source position, or ``None`` if no derivative flows. Rules see one source at a time.
:mod:`.positions` says what an alignment is.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from .._compat import JaxprEqn, Literal, Var, equation_function, open_jaxpr, scan_split, struct
from ..op import ETPPrimitive
from .positions import (
    MIXED,
    NOTHING,
    Alignment,
    Along,
    Entry,
    Merged,
    Outcome,
    Pin,
    concatenated,
    flipped,
    forget_indices,
    identity_alignment,
    join,
    padded,
    pinned,
    runs,
    taken,
)

__all__ = [
    'align_results',
    'always_mixes',
    'even_arrays',
    'is_element_wise',
    'is_inexact',
    'keeps_even',
    'passes_derivative',
    'through',
]


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
_KEEP_PINS = frozenset(
    """
    closed_call cond device_put jit optimization_barrier remat2 scan sharding_constraint stack while
    """.split()
)
"""Rules that see to source axes of which one index was taken."""
_being_derived: ContextVar[frozenset[Any]] = ContextVar('being_derived', default=frozenset())


def align_results(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    """Apply the rule of an equation's primitive to one source."""
    name = eqn.primitive.name
    if name in _NO_DERIVATIVE:
        outcomes: list[Outcome] = [None] * len(eqn.outvars)
    elif always_mixes(eqn):
        outcomes = [MIXED] * len(eqn.outvars)
    elif name in _KEEP_PINS:
        outcomes = _RULES[name](eqn, operands)
    elif name in _ELEMENTWISE or name in _RULES:
        outcomes = _of_entries(eqn, operands)
    else:
        outcomes = _by_derivative(eqn, operands)
    return [
        outcome if passes else None
        for passes, outcome in zip(passes_derivative(eqn), outcomes, strict=True)
    ]


def _of_entries(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    """Apply the rule to what the operands' axes run along; axes without one go along unchanged."""
    ranks = [v.aval.ndim for v in eqn.invars]
    pins = {a[n:] for a, n in zip(operands, ranks, strict=True) if a is not None}
    if len(pins) > 1:
        return [MIXED] * len(eqn.outvars)
    entries = [a if a is None else a[:n] for a, n in zip(operands, ranks, strict=True)]
    name = eqn.primitive.name
    rule = _elementwise if name in _ELEMENTWISE else _RULES[name]
    outcomes = rule(eqn, entries)
    (common,) = pins
    if not common:
        return outcomes
    return [
        _with_pins(outcome, common, v.aval.shape, name) if isinstance(outcome, tuple) else outcome
        for outcome, v in zip(outcomes, eqn.outvars, strict=True)
    ]


def _with_pins(
    outcome: Alignment, pins: tuple[Pin, ...], shape: Sequence[int], name: str
) -> Alignment:
    """An outcome with source axes of which one index is read; a new axis of size one may be it."""
    entries, left = list(outcome[: len(shape)]), sorted({*outcome[len(shape) :], *pins})
    if name in ('broadcast_in_dim', 'reshape'):
        for axis, size in enumerate(shape):
            if size == 1 and entries[axis] is None and left:
                entries[axis] = _unpinned(left.pop(0))
    return (*entries, *left)


def _unpinned(pin: Pin) -> Along:
    """The entry of an axis of size one that reads what is pinned."""
    return Along(pin.axis, pin.position, 1, pin.size)


def always_mixes(eqn: JaxprEqn) -> bool:
    """Whether an equation mixes positions whatever its operands."""
    return eqn.primitive.name in _MIXING


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


def _elementwise(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    """Operands that are scalars, or have axes of size one, are repeated to the result's shape."""
    shape = eqn.outvars[0].aval.shape
    joined = join(
        None if source is None else _repeat(source, v.aval.shape or (1,) * len(shape), shape)
        for source, v in zip(operands, eqn.invars, strict=True)
    )
    return [joined]


def _repeat(source: Alignment, sizes: Sequence[int], shape: Sequence[int]) -> Outcome:
    """The outcome for an array whose axes of size one are repeated up to a shape."""
    entries: list[Entry] = []
    for entry, size, wanted in zip(source or (None,) * len(shape), sizes, shape, strict=True):
        if size != wanted and runs(entry):
            return MIXED  # one position of the source is spread over others
        entries.append(entry if size == wanted else None)
    return tuple(entries)


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
    return [_without(source, eqn.params['dimensions'], eqn.invars[0].aval.shape)]


def _without(source: Alignment, axes: Sequence[int], shape: Sequence[int]) -> Outcome:
    """The outcome where some axes are gone; with one that runs, its positions are lost.

    Of an axis of size one, the position is known.
    """
    pins = []
    for axis in axes:
        if runs(source[axis]):
            if shape[axis] != 1 or isinstance(source[axis], Merged):
                return MIXED
            pin = pinned(source[axis], 0)
            if pin is None:
                return None
            pins.append(pin)
    kept = [entry for axis, entry in enumerate(source) if axis not in axes]
    return (*kept, *sorted(pins))


@_rule('transpose')
def _transpose(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [tuple(source[axis] for axis in eqn.params['permutation'])]


@_rule('reshape')
def _reshape(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    sizes, new_sizes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    singles = [axis for axis, n in enumerate(sizes) if n == 1]
    squeezed = _without(source, singles, sizes)
    if not isinstance(squeezed, tuple):
        return [squeezed]
    wide = [n for n in sizes if n != 1]
    entries = _refold(
        list(zip(squeezed[: len(wide)], wide, strict=True)), [n for n in new_sizes if n != 1]
    )
    if entries is None:
        return [MIXED]
    remaining = iter(entries)
    outcome = tuple(None if n == 1 else next(remaining) for n in new_sizes)
    return [_with_pins(outcome, squeezed[len(wide) :], new_sizes, 'reshape')]


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
            return None if any(runs(e) for e, _ in parts) else [None] * len(sizes)
        if len(group) == 1:
            entries.append(group[0][0])
        else:
            entries.append(Merged(group) if any(runs(e) for e, _ in group) else None)
    return entries


@_rule('slice')
def _slice(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    shape = eqn.invars[0].aval.shape
    starts, limits = eqn.params['start_indices'], eqn.params['limit_indices']
    strides = eqn.params['strides'] or (1,) * len(shape)
    indices = map(range, starts, limits, strides)
    return [_settled([taken(e, i, n) for e, i, n in zip(source, indices, shape, strict=True)])]


def _settled(entries: Sequence[Entry]) -> Outcome:
    """The outcome by its entries, one of which may mix, or read nothing."""
    if MIXED in entries:
        return MIXED
    return None if NOTHING in entries else tuple(entries)


@_rule('dynamic_slice')
def _dynamic_slice(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    source = operands[0]
    if source is None:
        return [None]
    entries: list[Entry] = []
    sizes = eqn.params['slice_sizes']
    for entry, n, size in zip(source, eqn.invars[0].aval.shape, sizes, strict=True):
        if n != size and runs(entry):
            return [MIXED]
        entries.append(entry if n == size else None)
    return [tuple(entries)]


@_rule('dynamic_update_slice')
def _dynamic_update_slice(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    array, update, *_ = operands
    if update is not None:
        shapes = zip(update, eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
        if any(runs(entry) and n != m for entry, n, m in shapes):
            return [MIXED]
        update = forget_indices(update)
    return [join([array, update])]


@_rule('concatenate')
def _concatenate(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    axis = eqn.params['dimension']
    sizes = [v.aval.shape[axis] for v in eqn.invars]
    begins = itertools.accumulate(sizes, initial=0)
    sources = [
        (begin, size, a)
        for begin, size, a in zip(begins, sizes, operands, strict=False)
        if a is not None
    ]
    return [concatenated(sources, axis)]


@_rule('stack')
def _stack(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    axis, rank = eqn.params['axis'], eqn.invars[0].aval.ndim
    sources = []
    for place, source in enumerate(operands):
        if source is not None:
            pins = source[rank:]
            entry = _unpinned(pins[0]) if pins else None
            sources.append((place, 1, (*source[:axis], entry, *source[axis:rank], *pins[1:])))
    return [concatenated(sources, axis)]


@_rule('split')
def _split(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    axis, sizes = eqn.params['axis'], eqn.params['sizes']
    ends = itertools.accumulate(sizes, initial=0)
    pieces = [
        taken(source[axis], range(begin, begin + size), eqn.invars[0].aval.shape[axis])
        for begin, size in zip(ends, sizes, strict=False)
    ]
    return [_settled([*source[:axis], piece, *source[axis + 1 :]]) for piece in pieces]


@_rule('unstack')
def _unstack(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    axis, shape = eqn.params['axis'], eqn.invars[0].aval.shape
    outcomes: list[Outcome] = []
    for i in range(len(eqn.outvars)):
        piece = taken(source[axis], range(i, i + 1), shape[axis])
        one = _settled([*source[:axis], piece, *source[axis + 1 :]])
        sizes = (*shape[:axis], 1, *shape[axis + 1 :])
        outcomes.append(_without(one, [axis], sizes) if isinstance(one, tuple) else one)
    return outcomes


@_rule('pad')
def _pad(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    array, fill = operands
    filled = None if fill is None else (None,) * _ndim(eqn)
    if array is None:
        return [filled]
    config = eqn.params['padding_config']
    entries = [
        padded(entry, low, interior)
        for entry, (low, _, interior) in zip(array, config, strict=True)
    ]
    return [join([_settled(entries), filled])]


@_rule('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or')
def _reduce(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [_without(source, eqn.params['axes'], eqn.invars[0].aval.shape)]


@_rule('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp')
def _cumulative(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    return [MIXED if runs(source[eqn.params['axis']]) else forget_indices(source)]


@_rule('rev')
def _rev(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _carried(operands)
    shape, axes = eqn.invars[0].aval.shape, eqn.params['dimensions']
    return [tuple(flipped(e, shape[i]) if i in axes else e for i, e in enumerate(source))]


@_rule('sort')
def _sort(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    joined = join(operands)
    if isinstance(joined, tuple):
        mixes = runs(joined[eqn.params['dimension']])
        joined = MIXED if mixes else forget_indices(joined)
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
        if any(runs(source[axis]) for axis in contracting[side]):
            return [MIXED]
        before = free_axes[0] if side else []
        after = [] if side else free_axes[1]
        kept = [source[axis] for axis in [*batch[side], *free_axes[side]]]
        head, tail = kept[: len(batch[side])], kept[len(batch[side]) :]
        outcomes.append((*head, *[None] * len(before), *tail, *[None] * len(after)))
    return [join(outcomes)]


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
        entries[place] = source[axis] if runs(source[axis]) else None
    untouched = all(
        not runs(entry) or (axis in windows and sizes[axis] == eqn.invars[0].aval.shape[axis])
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
        entries[axis] = updates[place] if runs(updates[place]) else None
        if runs(updates[place]) and eqn.invars[2].aval.shape[place] != shape[axis]:
            return [MIXED]
    if sum(map(runs, entries)) != sum(map(runs, updates)):
        return [MIXED]
    return [join([array, tuple(entries)])]


@_rule('cond')
def _cond(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    branches = [through(branch, operands[1:]) for branch in eqn.params['branches']]
    return [join(outcomes) for outcomes in zip(*branches, strict=True)]


@_rule('scan')
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
        joined = [join(pair) for pair in pairs]
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
        if any(a is MIXED for a in inputs) or _ends_paths(eqn):
            outcomes = [MIXED if passes else None for passes in passes_derivative(eqn)]
        elif any(a is not None for a in aligned):
            outcomes = align_results(eqn, aligned)
        env.update(zip(eqn.outvars, outcomes, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _ends_paths(eqn: JaxprEqn) -> bool:
    """Whether an equation inside another one is an op at which influence ends."""
    return isinstance(eqn.primitive, ETPPrimitive) and not eqn.primitive.gradient_enabled


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
    return join(
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
