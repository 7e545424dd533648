"""How the positions of a result follow from those of an operand, where axes alone decide.

One rule per primitive: from the entries of its operands' axes (``None`` for an operand that does
not carry the source) to one outcome per result. :mod:`.positions` says what entries are.
"""

import itertools
from collections.abc import Callable, Sequence

from .._compat import JaxprEqn
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
    join,
    padded,
    pinned,
    runs,
    taken,
)

__all__ = ['KEEP_PINS', 'SHAPE_RULES', 'Rule', 'elementwise', 'with_pins']

Rule = Callable[[JaxprEqn, Sequence[Alignment | None]], list[Outcome]]

SHAPE_RULES: dict[str, Rule] = {}
KEEP_PINS = frozenset(['device_put', 'optimization_barrier', 'sharding_constraint', 'stack'])
"""Primitives whose rules take care of pinned source axes themselves."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        SHAPE_RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def with_pins(
    outcome: Alignment, pins: tuple[Pin, ...], shape: Sequence[int], name: str
) -> Alignment:
    """An outcome with pinned source axes, which new axes of size one may take up."""
    entries, left = list(outcome[: len(shape)]), sorted({*outcome[len(shape) :], *pins})
    if name in ('broadcast_in_dim', 'reshape'):
        for axis, size in enumerate(shape):
            if size == 1 and entries[axis] is None and left:
                entries[axis] = _unpinned(left.pop(0))
    return (*entries, *left)


def _unpinned(pin: Pin) -> Along:
    """The entry of an axis of size one that reads what is pinned."""
    return Along(pin.axis, pin.position, 1, pin.size)


def _present(operands: Sequence[Alignment | None]) -> list[Alignment]:
    return [a for a in operands if a is not None]


def elementwise(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
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
    (source,) = _present(operands)
    return [_repeat(source, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)]


@_rule('squeeze')
def _squeeze(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _present(operands)
    return [_without(source, eqn.params['dimensions'], eqn.invars[0].aval.shape)]


def _without(source: Alignment, axes: Sequence[int], shape: Sequence[int]) -> Outcome:
    """The outcome where some axes are gone: if one of them runs, its positions are lost.

    But the position in an axis of size one is known.
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
    (source,) = _present(operands)
    return [tuple(source[axis] for axis in eqn.params['permutation'])]


@_rule('reshape')
def _reshape(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _present(operands)
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
    return [with_pins(outcome, squeezed[len(wide) :], new_sizes, 'reshape')]


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
    (source,) = _present(operands)
    shape = eqn.invars[0].aval.shape
    starts, limits = eqn.params['start_indices'], eqn.params['limit_indices']
    strides = eqn.params['strides'] or (1,) * len(shape)
    indices = map(range, starts, limits, strides)
    return [_settled([taken(e, i, n) for e, i, n in zip(source, indices, shape, strict=True)])]


def _settled(entries: Sequence[Entry]) -> Outcome:
    """The outcome with some entries, one of which may mix, or read nothing."""
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
    (source,) = _present(operands)
    axis, sizes = eqn.params['axis'], eqn.params['sizes']
    ends = itertools.accumulate(sizes, initial=0)
    pieces = [
        taken(source[axis], range(begin, begin + size), eqn.invars[0].aval.shape[axis])
        for begin, size in zip(ends, sizes, strict=False)
    ]
    return [_settled([*source[:axis], piece, *source[axis + 1 :]]) for piece in pieces]


@_rule('unstack')
def _unstack(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _present(operands)
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
    (source,) = _present(operands)
    return [_without(source, eqn.params['axes'], eqn.invars[0].aval.shape)]


@_rule('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp')
def _cumulative(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _present(operands)
    return [MIXED if runs(source[eqn.params['axis']]) else forget_indices(source)]


@_rule('rev')
def _rev(eqn: JaxprEqn, operands: Sequence[Alignment | None]) -> list[Outcome]:
    (source,) = _present(operands)
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


def _ndim(eqn: JaxprEqn) -> int:
    return eqn.outvars[0].aval.ndim
