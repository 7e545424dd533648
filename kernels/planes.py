"""Arithmetic on planes, of which some are structurally zero."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    'OpRules',
    'Plane',
    'PyTree',
    'TraceArithmetic',
    'add',
    'add_read',
    'add_trees',
    'after',
    'check_planes',
    'check_shapes',
    'closure',
    'if_live',
    'read_trace',
    'times',
    'update_order',
    'walk',
]

PyTree = Any

Plane = jax.Array | None
"""An array, or ``None`` where it is structurally zero: it is neither stored nor multiplied."""


def add(parts: Iterable[Plane]) -> Plane:
    """The sum of the planes that are there; None if there are none."""
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def times(a: Plane, b: Plane) -> Plane:
    """The product of two planes; None if either is zero."""
    return None if a is None or b is None else a * b


def if_live(live: Any, made: PyTree) -> PyTree:
    """What was computed from a trace, or zero if there is a flag and it is not set.

    It selects and does not multiply, because a dead trace may hold NaNs; and it selects what was
    computed, not the trace, which would cost a pass over it.
    """
    if live is None:
        return made
    return jax.tree.map(lambda a: jnp.where(live, a, jnp.zeros_like(a)), made)


def closure(pattern: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """Where products of any number of matrices of a pattern, also of none, can be non-zero."""
    size = range(len(pattern))
    reached = [[s == q for q in size] for s in size]
    for _ in size:
        reached = [
            [reached[s][q] or any(reached[s][r] and pattern[r][q] for r in size) for q in size]
            for s in size
        ]
    return reached


def check_planes(op: str, size: int, **given: Sequence[Any] | None) -> None:
    """Refuse operands whose number of planes is not that of their group."""
    for name, planes in given.items():
        if planes is not None and len(planes) != size:
            raise ValueError(f'{op}: {name} has {len(planes)} planes, expected {size}.')


def check_shapes(op: str, planes: PyTree) -> None:
    """Refuse planes of a window that do not broadcast to one shape, as steps and positions may."""
    shapes = {plane.shape for plane in jax.tree.leaves(planes)}
    whole = {shape for shape in shapes if set(shape) != {1}} or shapes  # or all are of one number
    if len({shape[1:] for shape in whole}) != 1 or len({shape[0] for shape in whole} - {1}) > 1:
        raise ValueError(
            f'{op}: the planes have the shapes {sorted(shapes)}; all of one group must be of one '
            'shape (steps, *varshape), with 1 for steps where all are the same, and with 1 all '
            'over where it is one number; and there must be one.'
        )


def walk(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    start: PyTree,
    xs: PyTree,
    reverse: bool = False,
) -> tuple[PyTree, PyTree]:
    """``lax.scan`` in which ``xs`` that are the same in all steps may have a leading axis of 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.kernels.planes import walk
    >>> walk(lambda old, x: (old * x[0] + x[1],) * 2, 0.0, (jnp.full(1, 2.0), jnp.ones(3)))[1]
    Array([1., 3., 7.], dtype=float32)
    """
    leaves, tree = jax.tree.flatten(xs)
    steps = max(map(len, leaves))
    fixed = {
        k: lax.index_in_dim(leaf, 0, keepdims=False)
        for k, leaf in enumerate(leaves)
        if len(leaf) < steps
    }
    moving = {k: leaf for k, leaf in enumerate(leaves) if k not in fixed}

    def step(state: PyTree, now: dict[int, jax.Array]) -> tuple[PyTree, PyTree]:
        values = fixed | now
        return body(state, jax.tree.unflatten(tree, [values[k] for k in range(len(leaves))]))

    return lax.scan(step, start, moving, reverse=reverse)


def update_order(pattern: Sequence[Sequence[bool]]) -> list[int]:
    """An order to overwrite planes in: each before the planes whose old values it reads.

    Planes that read each other come last, in their own order, as no order would do for them.

    Examples
    --------
    >>> from braintrace_fast.kernels.planes import update_order
    >>> update_order([[True, False], [True, True]])
    [1, 0]
    """
    left = list(range(len(pattern)))
    order: list[int] = []
    while left:
        free = [q for q in left if not any(pattern[s][q] for s in left if s != q)]
        order += free or left
        left = [q for q in left if q not in order]
    return order


def after(plane: Plane, done: PyTree) -> Plane:
    """The same plane, which on a CPU becomes available only after ``done``.

    XLA for CPUs updates an array in place only if every reader of its old value is known to run
    first; otherwise it copies the array. Elsewhere it fuses all readers, and this does nothing.
    """
    if plane is None:
        return None
    for leaf in jax.tree.leaves(done):
        if leaf.size and plane.size:
            plane = lax.platform_dependent(plane, leaf, cpu=_bound, default=_free)
    return plane


def _bound(plane: jax.Array, done: jax.Array) -> jax.Array:
    """A branch waits for the whole array; any other reader might be fused with what computes it."""

    def first(done: jax.Array) -> jax.Array:
        return done[(0,) * done.ndim].astype(plane.dtype)

    def zero(done: jax.Array) -> jax.Array:
        return jnp.zeros((), plane.dtype)

    never = plane[(0,) * plane.ndim] > jnp.inf  # which no compiler can know
    return plane + lax.cond(never, first, zero, done)


def _free(plane: jax.Array, done: jax.Array) -> jax.Array:
    return plane


def add_trees(parts: Sequence[PyTree]) -> PyTree:
    """The sum of trees of arrays; None if there are none."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts) if parts else None


class TraceArithmetic(Protocol):
    """How the trace of an op is built, decayed and read, its equation's parameters bound."""

    @property
    def outer(self) -> Callable[..., dict[str, jax.Array]]:
        """``(x, plane) -> trace``."""

    @property
    def outer_sum(self) -> Callable[..., dict[str, jax.Array]]:
        """The same for a window, added up over its steps."""

    @property
    def decay(self) -> Callable[..., dict[str, jax.Array]]:
        """``(plane, trace) -> trace``."""

    @property
    def contract(self) -> Callable[..., dict[str, jax.Array]]:
        """``(plane, trace) -> weights``."""


class OpRules(TraceArithmetic, Protocol):
    """The trace rules of an op."""

    @property
    def is_outer(self) -> bool:
        """Whether kernels may do without them; see ``TraceRules``."""

    @property
    def groups(self) -> int:
        """How many axes in front of inputs and outputs number groups, if ``is_outer``."""

    @property
    def entries(self) -> Callable[..., tuple[jax.Array, jax.Array]] | None:
        """The rows and columns of the weight's entries, if kernels may do with these."""


def read_trace(
    rules: TraceArithmetic,
    signal: Sequence[Plane] | None,
    trace: Sequence[Any],
    total: Any = None,
    live: Any = None,
) -> PyTree:
    """``total + sum_q signal[q] . trace[q]``, shaped like the weights; None if there is neither.

    The trace counts as zero if there is a flag ``live`` and it is not set.
    """
    pairs = zip(signal or [None] * len(trace), trace, strict=True)
    parts = [rules.contract(p, e) for p, e in pairs if p is not None and e is not None]
    return add_read(total, if_live(live, add_trees(parts)))


def add_read(total: Any, read: Any) -> Any:
    """The gradient of a product plus what is read of a trace; either may be None.

    Entries that the first does not have are left out.
    """
    if total is None or read is None:
        return read if total is None else total
    return {name: value + read[name] for name, value in total.items()}
