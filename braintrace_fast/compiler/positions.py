"""Which positions of a source array the positions of another array read.

An *alignment* says, for an array that depends on a source array position by position, which source
axis each of its axes runs along: one entry per axis,

- ``None``: the axis is free (broadcast, of size one, or a state axis);
- ``Only(indices)``: the axis is free, and only these of its indices depend on the source;
- ``Along(axis, start, step, size)``: index ``i`` of this axis reads index ``start + step * i`` of a
  source axis of that size, and nothing where that is out of range;
- ``Pieces(parts)``: the axis is a concatenation, and each part has an entry of its own;
- ``Merged(parts)``: a reshape folded several entries into this axis.

Behind them stand the source axes of which one index was taken, so that no axis runs along them:
``Pin(axis, position, size)`` says that everything here reads that one. Every source axis of size
above one is present in every alignment. An alignment says what may be read, not what is.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = [
    'MIXED',
    'NOTHING',
    'Alignment',
    'Along',
    'Entry',
    'Merged',
    'Only',
    'Outcome',
    'Pieces',
    'Pin',
    'clash',
    'concatenated',
    'flipped',
    'forget_indices',
    'identity_alignment',
    'join',
    'padded',
    'partly_in_place',
    'pinned',
    'runs',
    'taken',
]


class Merged(NamedTuple):
    """Several axes folded into one by a reshape: (entry, size) pairs."""

    parts: tuple[tuple[Any, int], ...]


class Only(NamedTuple):
    """A free axis of which only some indices depend on the source."""

    indices: frozenset[int]


class Along(NamedTuple):
    """Index ``i`` reads index ``start + step * i`` of a source axis, if there is one."""

    axis: int
    start: int
    step: int
    size: int

    def seen_from(self, start: int, step: int = 1) -> 'Along':
        """The entry of an axis whose index ``i`` is index ``start + step * i`` of this one."""
        return self._replace(start=self.start + self.step * start, step=self.step * step)

    def indices(self, length: int) -> range:
        """The indices below a length that read the source."""
        ends = (-self.start, self.size - 1 - self.start)
        low, high = ends if self.step > 0 else ends[::-1]
        return range(max(0, -(-low // self.step)), min(length, high // self.step + 1))


class Pieces(NamedTuple):
    """A concatenation: (begin, end, entry) in order; entries count from the start of the axis."""

    parts: tuple[tuple[int, int, Along], ...]


class Pin(NamedTuple):
    """A source axis of which only one index is read."""

    axis: int
    position: int
    size: int


class _Mixed:
    def __repr__(self) -> str:
        return 'MIXED'


MIXED = _Mixed()
Entry = Any
Alignment = tuple[Entry, ...]
Outcome = Alignment | _Mixed | None

NOTHING = Only(frozenset())
"""The entry of an axis of which no index depends on the source."""


def identity_alignment(
    shape: Sequence[int], ndim: int | None = None, plane: int | None = None
) -> Alignment:
    """The alignment of an array with itself; axes from ``ndim`` on are state axes, hence free.

    With ``plane``, the source is one plane along the last axis.
    """
    ndim = len(shape) if ndim is None else ndim
    entries: list[Entry] = [
        Along(axis, 0, 1, size) if axis < ndim and size > 1 else None
        for axis, size in enumerate(shape)
    ]
    if plane is not None:
        entries[-1] = Only(frozenset([plane]))
    return tuple(entries)


def forget_indices(source: Alignment) -> Alignment:
    """The alignment with free axes that are free at all indices."""
    return tuple(None if isinstance(entry, Only) else entry for entry in source)


def runs(entry: Entry) -> bool:
    """Whether an entry tells which positions of the source are read."""
    return entry is not None and not isinstance(entry, Only)


def join(outcomes: Iterable[Outcome]) -> Outcome:
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
        elif runs(a) or runs(b):
            return MIXED
        else:
            entries.append(None)
    return tuple(entries)


def taken(entry: Entry, indices: range, length: int) -> Entry:
    """The entry of some indices of an axis; ``NOTHING`` if none of them reads the source."""
    if entry is None or indices == range(length):
        return entry
    if isinstance(entry, Only):
        return Only(frozenset(indices.index(i) for i in entry.indices if i in indices))
    if isinstance(entry, Along):
        moved = entry.seen_from(indices.start, indices.step)
        return moved if moved.indices(len(indices)) else NOTHING
    if isinstance(entry, Pieces):
        parts = []
        for begin, end, part in entry.parts:
            inside = [i for i, index in enumerate(indices) if begin <= index < end]
            if inside:
                moved = part.seen_from(indices.start, indices.step)
                parts.append((inside[0], inside[-1] + 1, moved))
        return _pieces(parts)
    return MIXED


def padded(entry: Entry, low: int, interior: int) -> Entry:
    """The entry of an axis with ``low`` indices added before it, and some between any two."""
    if entry is None or (low == 0 and interior == 0):
        return entry
    if isinstance(entry, Only):
        return Only(frozenset(low + i * (interior + 1) for i in entry.indices))
    if isinstance(entry, Along) and entry.step % (interior + 1) == 0:
        return entry._replace(step=entry.step // (interior + 1)).seen_from(-low)
    if isinstance(entry, Pieces) and not interior:
        return _shifted(entry, low)
    return MIXED


def _shifted(entry: Pieces, by: int) -> Pieces:
    return Pieces(tuple((b + by, e + by, part.seen_from(-by)) for b, e, part in entry.parts))


def flipped(entry: Entry, length: int) -> Entry:
    """The entry of an axis in reverse."""
    if isinstance(entry, Only):
        return Only(frozenset(length - 1 - i for i in entry.indices))
    if isinstance(entry, Merged):
        return Merged(tuple((flipped(part, size), size) for part, size in entry.parts))
    if isinstance(entry, Pieces):
        parts = [(length - e, length - b, flipped(p, length)) for b, e, p in entry.parts]
        return Pieces(tuple(reversed(parts)))
    return entry if entry is None else entry.seen_from(length - 1, -1)


def concatenated(sources: Sequence[tuple[int, int, Alignment]], axis: int) -> Outcome:
    """The outcome for arrays that are concatenated along an axis: (begin, size, alignment) each."""
    outcomes: list[Alignment] = []
    parts: list[tuple[int, int, Along]] = []
    for begin, size, source in sources:
        entry = source[axis]
        if isinstance(entry, Merged) and begin:
            return MIXED
        if isinstance(entry, Pieces):
            entry = _shifted(entry, begin)
            parts += entry.parts
        elif isinstance(entry, Along):
            entry = entry.seen_from(-begin)
            parts.append((begin, begin + size, entry))
        elif not isinstance(entry, Merged):
            here = range(size) if entry is None else entry.indices
            entry = Only(frozenset(i + begin for i in here))
        outcomes.append((*source[:axis], entry, *source[axis + 1 :]))
    others = {(*outcome[:axis], *outcome[axis + 1 :]) for outcome in outcomes}
    if len(others) == 1 and all(isinstance(o[axis], Along | Pieces) for o in outcomes):
        entry = _pieces(parts)
        if entry == NOTHING:
            return None
        return (*outcomes[0][:axis], entry, *outcomes[0][axis + 1 :])
    return join(outcomes)


def _pieces(parts: Iterable[tuple[int, int, Along]]) -> Entry:
    """The entry of some parts in order, neighbours with equal entries joined."""
    merged: list[tuple[int, int, Along]] = []
    for begin, end, entry in parts:
        reading = entry.indices(end)
        if max(reading.start, begin) >= reading.stop:
            continue
        if merged and merged[-1][2] == entry:
            begin = merged.pop()[0]
        merged.append((begin, end, entry))
    if not merged:
        return NOTHING
    return merged[0][2] if len(merged) == 1 else Pieces(tuple(merged))


def partly_in_place(alignment: Alignment, shape: Sequence[int]) -> bool:
    """Whether some pieces of an axis as long as the source's are where they were."""
    return any(
        isinstance(entry, Pieces)
        and any((p.start, p.step, p.size) == (0, 1, length) for _, _, p in entry.parts)
        for entry, length in zip(alignment, shape, strict=False)
    )


def pinned(entry: Entry, index: int) -> Pin | None:
    """What is known of an axis of which one index is taken; None if that reads nothing."""
    if isinstance(entry, Pieces):
        parts = [part for begin, end, part in entry.parts if begin <= index < end]
        return pinned(parts[0], index) if parts else None
    position = entry.start + entry.step * index
    return Pin(entry.axis, position, entry.size) if 0 <= position < entry.size else None


@functools.lru_cache(maxsize=4096)
def clash(one: Alignment, other: Alignment, shape: tuple[int, ...], fewer: int = 0) -> bool:
    """Whether some index reads a source and, at another position, a second source.

    The second source lacks the first ``fewer`` axes of the first one.
    """
    lanes = _lanes(one, other, shape)
    if lanes is None:
        return True
    differ = False
    places: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for lane, (*entries, length) in enumerate(lanes):
        for place, entry in zip(places, entries, strict=True):
            if runs(entry):
                place[_axis(entry)] = lane
        both = [
            (first, second)
            for first, second in zip(*(_read(e, length) for e in entries), strict=True)
            if first is not None and second is not None
        ]
        if not both:
            return False
        differ = differ or any(a and b and a != (b[0] + fewer, b[1]) for a, b in both)
    for place, alignment in zip(places, (one, other), strict=True):
        place.update((pin.axis, pin) for pin in alignment[len(shape) :])
    for axis, there in places[1].items():
        if isinstance(there, Pin):
            there = there._replace(axis=axis + fewer)
        differ = differ or places[0].get(axis + fewer, there) != there
    return differ


def _lanes(
    one: Alignment, other: Alignment, shape: tuple[int, ...]
) -> list[tuple[Entry, Entry, int]] | None:
    """Pairs of entries with the sizes of their axes, merged ones split; None if they differ."""
    lanes: list[tuple[Entry, Entry, int]] = []
    for *entries, length in zip(one, other, shape, strict=False):
        merged = [entry for entry in entries if isinstance(entry, Merged)]
        if not merged:
            lanes.append((*entries, length))
            continue
        sizes = [size for _, size in merged[0].parts]
        split = [
            entry if isinstance(entry, Merged) else Merged(tuple((None, n) for n in sizes))
            for entry in entries
            if isinstance(entry, Merged) or entry is None
        ]
        if len(split) < 2 or any([n for _, n in entry.parts] != sizes for entry in split):
            return None
        pairs = zip(*(entry.parts for entry in split), strict=True)
        lanes += [(first, second, n) for (first, n), (second, _) in pairs]
    return lanes


def _axis(entry: Along | Pieces) -> int:
    return entry.parts[0][2].axis if isinstance(entry, Pieces) else entry.axis


def _read(entry: Entry, length: int) -> Sequence[tuple[int, ...] | None]:
    """Per index, the source axis and position that it reads; empty for any, None for none."""
    if entry is None:
        return [()] * length
    if isinstance(entry, Only):
        return [() if i in entry.indices else None for i in range(length)]
    read: list[tuple[int, ...] | None] = [None] * length
    parts = entry.parts if isinstance(entry, Pieces) else ((0, length, entry),)
    for begin, end, part in parts:
        for i in part.indices(end):
            if i >= begin:
                read[i] = (part.axis, part.start + part.step * i)
    return read
