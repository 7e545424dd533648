"""Split a loop into what must run in order and what can run for all steps at once.

A training loop computes, in every step, the next states and, beside them, a gradient that no later
step waits for. Here the first part alone runs as a scan. The rest runs afterwards on all steps
together: small products become large ones, and element-wise work is fused over time. Products of
inputs alone run before it, in the same way.

The equations of the body fall into four parts:

- *fixed*: what depends on constants and on carried values that never change; computed once, but
  for arrays of one number, of which the number is kept;
- *ahead*: products of what depends on no moving state with weights that do not change, mapped over
  the steps. It spares the scan to read the weights in every step, and is done where that is more
  than to write the results and to read them. A product of inputs and states side by side,
  ``[x, h] @ w``, is taken apart for it: ``x @ w[:n] + h @ w[n:]``;
- *in order*: what the carried values depend on, in a scan, and what JAX cannot map, such as a
  callback to the host;
- *at once*: all else, mapped over the steps. It computes again what is cheap, and reads the rest of
  what was computed in order from memory: from the states, where those say it all, which are kept
  once for the step after which they are new and the one before which they are old.
"""

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    build_jaxpr,
    can_be_mapped,
    equation_function,
    jaxprs_in_params,
    open_jaxpr,
    rewire,
    struct,
)
from .._typing import PyTree
from ..compiler.control_flow import ControlFlowPolicy, flatten
from ..compiler.uniform import uniform_arrays
from ..op.matmul import outer_total
from .factors import stacked

__all__ = ['StatefulLoop', 'loop']

CHEAP = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp concatenate convert_element_type copy div eq
    expand_dims ge gt heaviside_surrogate_gradient integer_pow iota is_finite le lt max min mul ne
    neg not one_minus_square or reshape rsqrt select_n sign slice sqrt square squeeze stop_gradient
    sub transpose xor
    """.split()
)
"""What is computed again rather than kept: one pass over its operands, which are kept anyway.

Spikes are so for all neurons whose spike is read off a state; there is nothing to keep narrow.
"""

LINEAR = frozenset('neg transpose reshape reduce_sum squeeze copy broadcast_in_dim'.split())

OPAQUE = ControlFlowPolicy(cond='opaque', scan_unroll_limit=0)

Progress = Callable[[jax.Array, PyTree], None]
"""Called in order with the number of a step and its ``ys``."""


def loop(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree, PyTree]],
    carry: PyTree,
    xs: PyTree,
    progress: Progress | None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Run a body over the leading axis of ``xs``.

    Parameters
    ----------
    body : callable
        ``(carry, x) -> (carry, ys, terms)``.
    carry : PyTree
        The values to start with.
    xs : PyTree
        Arrays with a common leading axis.
    progress : callable, optional
        Called in every step of the scan with its number and its ``ys``, which are then computed in
        order.

    Returns
    -------
    tuple
        The last carry, the stacked ``ys``, and the sums of the ``terms``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.runtime.fission import loop
    >>> last, ys, total = loop(lambda c, x: (c + x, c * x, 2 * c), 0.0, jnp.arange(4.0))
    >>> float(last), ys.tolist(), float(total)
    (6.0, [0.0, 0.0, 2.0, 9.0], 8.0)
    """
    carry = jax.tree.map(_as_array, carry)
    xs = jax.tree.map(_as_array, xs)
    traced = _Loop(body, carry, _slices(xs), progress is not None)
    last, ys, sums = traced.run(carry, xs, progress)
    return last, stacked(ys, jax.tree.leaves(xs)[0].shape[0], traced.shapes[1]), sums


class _Loop:
    """A body that is traced once, to be run over sequences of any length."""

    def __init__(
        self,
        body: Callable[[PyTree, PyTree], Any],
        carry: PyTree,
        step: PyTree,
        shows: bool = False,
    ) -> None:
        closed, self.shapes = jax.make_jaxpr(body, return_shape=True)(carry, step)
        sizes = [len(jax.tree.leaves(part)) for part in self.shapes]
        self.parts = _Parts(flatten(closed, OPAQUE, opens_ops=True), sizes, shows)

    def run(
        self, carry: PyTree, xs: PyTree, progress: Progress | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        flat_carry, carry_tree = jax.tree.flatten(carry)
        _, ys_tree, sums_tree = map(jax.tree.structure, self.shapes)

        def show(step: jax.Array, ys: list[jax.Array]) -> None:
            if progress is not None:
                progress(step, jax.tree.unflatten(ys_tree, ys))

        last, ys, sums = self.parts.run(flat_carry, jax.tree.leaves(xs), show)
        return (
            jax.tree.unflatten(carry_tree, last),
            jax.tree.unflatten(ys_tree, ys),
            jax.tree.unflatten(sums_tree, sums),
        )


class StatefulLoop:
    """A function of brainstate states, traced once, to be run over sequences of any length.

    Parameters
    ----------
    step : callable
        ``(*slices) -> (ys, terms)``; it may read and write states.
    xs : sequence of PyTree
        Arguments with a common leading axis; only their shapes are looked at.
    shows : bool
        Whether calls may show progress, so that ``ys`` are computed in order.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> from braintrace_fast.runtime.fission import StatefulLoop
    >>> count = brainstate.ShortTermState(jnp.zeros(()))
    >>> def step(x):
    ...     count.value = count.value + 1
    ...     return count.value * x, x
    >>> loop = StatefulLoop(step, (jnp.ones(3),))
    >>> ys, total = loop((jnp.ones(4),))
    >>> ys.tolist(), float(total), float(count.value)
    ([1.0, 2.0, 3.0, 4.0], 4.0, 4.0)
    """

    def __init__(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        xs: Sequence[PyTree],
        shows: bool = False,
    ) -> None:
        slices = _slices(tuple(xs))
        function = brainstate.transform.StatefulFunction(
            step, name='window', return_only_write=False
        ).make_jaxpr(*slices)
        self._touched = function.get_state_trace(*slices)

        def body(values: Any, x: Any) -> Any:
            values, (ys, terms) = function.jaxpr_call(values, *x)
            return values, ys, terms

        values = jax.tree.map(_as_array, [state.value for state in self._touched.states])
        self._loop = _Loop(body, values, slices, shows)

    @property
    def ys(self) -> PyTree:
        """The shapes of one step's ``ys``."""
        return self._loop.shapes[1]

    @property
    def bytes_per_step(self) -> int:
        """The bytes of all that a step reads and computes, each by itself."""
        parts = self._loop.parts
        eqns = *parts.ahead, *parts.in_order, *parts.at_once
        return sum(map(_bytes, (*parts.xs, *_made(eqns))))

    @property
    def are_zero(self) -> PyTree:
        """Which of the ``ys`` are zero in all steps, by the way they are computed."""
        parts = self._loop.parts
        zeros = _zeros(parts.first)
        return jax.tree.unflatten(jax.tree.structure(self.ys), [_in(v, zeros) for v in parts.ys])

    def __call__(
        self, xs: Sequence[PyTree], progress: Progress | None = None
    ) -> tuple[PyTree, PyTree]:
        """Run over the leading axis of the arguments; ``progress`` as in :func:`loop`.

        Returns
        -------
        tuple
            The stacked ``ys``, and the sums of the ``terms``. Those ``ys`` that are the same in all
            steps have a leading axis of 1, and those that are one number have no other axes.
        """
        states = self._touched.states
        values = jax.tree.map(_as_array, [state.value for state in states])
        last, ys, sums = self._loop.run(values, jax.tree.map(_as_array, tuple(xs)), progress)
        for state, value, written in zip(states, last, self._touched.been_writen, strict=True):
            if written:
                state.value = value
        return ys, sums


class _Parts:
    """The four parts of a flat body."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        sizes: Sequence[int],
        shows: bool,
    ) -> None:
        num_carry, num_ys, _ = sizes
        jaxpr, self.constants = open_jaxpr(closed)
        self.constvars = list(jaxpr.constvars)
        self.old, self.xs = jaxpr.invars[:num_carry], jaxpr.invars[num_carry:]
        self.new = jaxpr.outvars[:num_carry]
        self.ys = jaxpr.outvars[num_carry : num_carry + num_ys]
        self.terms = jaxpr.outvars[num_carry + num_ys :]
        self.moving = [
            i for i, (a, b) in enumerate(zip(self.old, self.new, strict=True)) if a is not b
        ]
        unmoved = [v for i, v in enumerate(self.old) if i not in set(self.moving)]
        self.given = [*self.constvars, *unmoved]
        eqns = _split_products(jaxpr.eqns, self.given, self.xs)
        self.producer = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.first, varying = _divide(eqns, self.given)
        self.fixed = dict.fromkeys([*self.given, *_outvars(self.first)])

        self.shown = self.ys if shows else []
        results = [*(self.new[i] for i in self.moving), *self.shown]
        again, self.even = _of_one_number(self.first)
        varying = [*again, *varying]
        self.sums = [_Sum(self, v) for v in self.terms]
        leaves = [v for s in self.sums for v in s.leaves]
        moving_ys = [v for v in self.ys if not self.is_fixed(v)]
        self.wanted: list[Any] = list(dict.fromkeys([*moving_ys, *leaves]))
        used = _needed_for(varying, [*results, *self.wanted], set(), False)
        unmapped = {v for eqn in used if not can_be_mapped(eqn) for v in eqn.outvars}
        foreseen, _ = _divide(varying, [*self.fixed, *self.xs], unmapped)
        products = {v for eqn in foreseen if _is_heavy(eqn, self.fixed) for v in eqn.outvars}
        self.in_order = _needed_for(varying, [*results, *unmapped], products, True)
        read_in_order = *results, *(v for eqn in self.in_order for v in eqn.invars)
        self.foreseen = list(dict.fromkeys(v for v in read_in_order if _in(v, products)))
        self.ahead = _needed_for(foreseen, self.foreseen, set(), False)
        computed = {v: eqn.primitive.name for eqn in self.in_order for v in eqn.outvars}
        known = {v for v, name in computed.items() if name not in CHEAP}
        known |= {self.old[i] for i in self.moving} | set(self.foreseen) | unmapped
        after = {self.new[i]: self.old[i] for i in self.moving if _in(self.new[i], computed)}
        choices = [_at_once(varying, self.wanted, k) for k in (known, known | set(after))]
        self.at_once, read = min(
            choices,
            key=lambda choice: sum(
                map(_bytes, {after.get(v, v) for v in choice[1]}.difference(self.foreseen))
            ),
        )
        kept = [v for v in read if v not in self.foreseen]
        # States that are read both old and new are kept in one array of a step more.
        self.states = [i for i in self.moving if {self.old[i], self.new[i]} <= set(kept)]
        in_states = {v for i in self.states for v in (self.old[i], self.new[i])}
        self.kept = [v for v in kept if v not in in_states]
        in_steps = *self.ahead, *self.in_order, *self.at_once
        atoms = *results, *self.wanted, *(v for eqn in in_steps for v in eqn.invars)
        reads = {v for v in atoms if not isinstance(v, Literal)}
        made = {v for eqn in again for v in eqn.outvars}
        self.read = [v for v in self.fixed if v in reads and v not in made]
        given_back = [v for v in (*self.ys, *self.terms) if _in(v, self.fixed)]
        self.once = list(dict.fromkeys([*self.read, *given_back]))
        self.first = _needed_for(self.first, self.once, set(), False)

    def is_fixed(self, v: Atom) -> bool:
        return isinstance(v, Literal) or v in self.fixed

    def run(
        self,
        carry: Sequence[jax.Array],
        xs: Sequence[jax.Array],
        show: Callable[[jax.Array, list[jax.Array]], None],
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        length = xs[0].shape[0]
        values = dict(zip((*self.constvars, *self.old), (*self.constants, *carry), strict=True))
        found = _evaluate(self.first, self.given, self.once, [values[v] for v in self.given])
        fixed = dict(zip(self.once, found, strict=True))
        for v in self.even.intersection(fixed):  # one number is enough
            fixed[v] = lax.slice(fixed[v], (0,) * v.aval.ndim, (1,) * v.aval.ndim)
        moving_vars = [self.old[i] for i in self.moving]

        def whole() -> list[jax.Array]:
            return [jnp.broadcast_to(fixed[v], v.aval.shape) for v in self.read]

        def ahead(x: Any) -> Any:
            return _evaluate(self.ahead, [*self.read, *self.xs], self.foreseen, [*whole(), *x])

        def in_order(carry: Any, x: Any) -> Any:
            step, moving, states = carry
            outs = [*(self.new[i] for i in self.moving), *self.kept, *self.shown]
            inputs = [*self.read, *moving_vars, *self.xs, *self.foreseen]
            found = _evaluate(self.in_order, inputs, outs, [*whole(), *moving, *x])
            end = len(moving) + len(self.kept)
            if self.shown:
                show(step, found[end:])
            new = dict(zip(self.moving, found, strict=False))
            states = [
                lax.dynamic_update_index_in_dim(all_steps, new[i], step + 1, 0)
                for i, all_steps in zip(self.states, states, strict=True)
            ]
            return (step + 1, found[: len(moving)], states), found[len(moving) : end]

        def at_once(kept: Any, x: Any) -> Any:
            inputs = [*self.read, *self.kept, *old_vars, *new_vars, *self.xs, *self.foreseen]
            return _evaluate(self.at_once, inputs, self.wanted, [*whole(), *kept, *x])

        xs = [*xs, *jax.vmap(ahead, axis_size=length)(list(xs))]
        start = [carry[i] for i in self.moving]
        rooms = [jnp.broadcast_to(carry[i], (length + 1, *carry[i].shape)) for i in self.states]
        first = (jnp.zeros((), jnp.int32), start, rooms)
        (_, last, states), kept = lax.scan(in_order, first, xs)
        old_vars, new_vars = ([side[i] for i in self.states] for side in (self.old, self.new))
        before = [lax.slice_in_dim(a, 0, length) for a in states]
        kept = [*kept, *before, *(lax.slice_in_dim(a, 1, length + 1) for a in states)]
        found = jax.vmap(at_once, axis_size=length)(kept, xs)
        ends = list(carry)
        for i, value in zip(self.moving, last, strict=True):
            ends[i] = value
        moved = dict(zip(self.wanted, found, strict=True))
        ys = [_fixed_value(v, fixed)[None] if self.is_fixed(v) else moved[v] for v in self.ys]
        return ends, ys, [s.evaluate(moved, fixed, length) for s in self.sums]


class _Sum:
    """The sum of one variable over all steps, with products summed inside the product."""

    def __init__(self, parts: _Parts, v: Atom) -> None:
        self.v, self.parts = v, parts
        self.eqn: Any = None if isinstance(v, Literal) else parts.producer.get(v)
        if parts.is_fixed(v):
            self.eqn = None
        self.operands: list[_Sum] = []
        name = '' if self.eqn is None else self.eqn.primitive.name
        self.is_dot = False
        if name in ('add', 'add_any') and all(
            a.aval.shape == v.aval.shape for a in self.eqn.invars
        ):
            self.operands = [_Sum(parts, a) for a in self.eqn.invars]
        elif name in LINEAR or (name == 'convert_element_type' and _inexact(self.eqn.invars[0])):
            self.operands = [_Sum(parts, self.eqn.invars[0])]
        elif name == 'dot_general' and not any(map(parts.is_fixed, self.eqn.invars)):
            self.is_dot = True
        self.leaves: list[Var] = []
        if self.is_dot:
            self.leaves = list(self.eqn.invars)
        elif self.operands:
            self.leaves = [leaf for operand in self.operands for leaf in operand.leaves]
        elif not parts.is_fixed(v):
            self.leaves = [v]

    def evaluate(
        self, stacked: dict[Var, jax.Array], fixed: dict[Var, jax.Array], length: int
    ) -> jax.Array:
        if self.operands:
            values = [operand.evaluate(stacked, fixed, length) for operand in self.operands]
            return equation_function(self.eqn)(*values)[0]
        if self.is_dot:
            a, b = (stacked[v] for v in self.eqn.invars)
            (ca, cb), (ba, bb) = self.eqn.params['dimension_numbers']
            ca, cb = ((0, *(axis + 1 for axis in axes)) for axes in (ca, cb))
            ba, bb = (tuple(axis + 1 for axis in axes) for axes in (ba, bb))
            params = {k: v for k, v in self.eqn.params.items() if k != 'dimension_numbers'}
            if ca == tuple(range(a.ndim - 1)) and cb == tuple(range(b.ndim - 1)):
                return outer_total(a, b, **params)
            return lax.dot_general(a, b, ((ca, cb), (ba, bb)), **params)
        if self.leaves:
            return stacked[self.leaves[0]].sum(0)
        return jnp.broadcast_to(_fixed_value(self.v, fixed) * length, self.v.aval.shape)


def _fixed_value(v: Atom, fixed: dict[Var, jax.Array]) -> jax.Array:
    return jnp.asarray(v.val) if isinstance(v, Literal) else fixed[v]


def _at_once(
    eqns: Sequence[JaxprEqn], results: Sequence[Var], known: set[Var]
) -> tuple[list[JaxprEqn], list[Var]]:
    """The equations that lead to some results, and what they read of what is known."""
    needed = _needed_for(eqns, results, known, False)
    read = [v for eqn in needed for v in eqn.invars]
    return needed, list(dict.fromkeys(v for v in (*read, *results) if _in(v, known)))


def _divide(
    eqns: Sequence[JaxprEqn], known: Iterable[Var], late_results: Container[Var] = ()
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations that read only what is known and what they make of it, and the others.

    Those that make one of the late results are among the others.
    """
    known = set(known)
    early: list[JaxprEqn] = []
    late: list[JaxprEqn] = []
    for eqn in eqns:
        reads_known = all(isinstance(v, Literal) or v in known for v in eqn.invars)
        if reads_known and not eqn.effects and not any(v in late_results for v in eqn.outvars):
            early.append(eqn)
            known.update(eqn.outvars)
        else:
            late.append(eqn)
    return early, late


def _is_heavy(eqn: JaxprEqn, fixed: Container[Var]) -> bool:
    """Whether an equation is a product that is worth to be computed ahead."""
    weights = sum(_bytes(v) for v in eqn.invars if _in(v, fixed))
    return eqn.primitive.name == 'dot_general' and _outweigh(weights, eqn.outvars[0])


def _outweigh(weight_bytes: float, result: Var) -> bool:
    """Whether weights are more to read than a result is to write and to read again."""
    return weight_bytes > 2 * _bytes(result)


def _split_products(
    eqns: Sequence[JaxprEqn], given: Sequence[Var], xs: Sequence[Var]
) -> list[JaxprEqn]:
    """Take products apart whose left sides are joined of what is known ahead and what is not."""
    fixed = {*given, *_outvars(_divide(eqns, given)[0])}
    known = {*given, *xs, *_outvars(_divide(eqns, [*given, *xs])[0])}
    joined = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive.name == 'concatenate'}
    found = []
    for eqn in eqns:
        pieces = _pieces(eqn, joined, fixed, known)
        found += [eqn] if pieces is None else pieces
    return found


def _pieces(
    eqn: JaxprEqn, joined: dict[Var, JaxprEqn], fixed: set[Var], known: set[Var]
) -> list[JaxprEqn] | None:
    """The equations of a product taken apart, if the part that is known ahead is worth it.

    One with results of less than 32 bits stays whole: in two parts they would be rounded twice.
    """
    if eqn.primitive.name != 'dot_general' or not _in(eqn.invars[0], joined):
        return None
    left, weights = joined[eqn.invars[0]], eqn.invars[1]
    axis, axes = left.params['dimension'], eqn.params['dimension_numbers'][0]
    if axis not in axes[0] or not _in(weights, fixed) or eqn.outvars[0].aval.dtype.itemsize < 4:
        return None
    rows = axes[1][axes[0].index(axis)]
    early = [_in(v, known) for v in left.invars]
    num_early = sum(v.aval.shape[axis] for v in itertools.compress(left.invars, early))
    share = num_early / weights.aval.shape[rows]
    if all(early) or not _outweigh(_bytes(weights) * share, eqn.outvars[0]):
        return None

    def product(weights: jax.Array, *parts: jax.Array) -> jax.Array:
        products, end = [], 0
        for _, run in itertools.groupby(zip(early, parts, strict=True), lambda pair: pair[0]):
            part = lax.concatenate([array for _, array in run], axis)
            start, end = end, end + part.shape[axis]
            own = lax.slice_in_dim(weights, start, end, axis=rows)
            products.append(lax.dot_general(part, own, **eqn.params))
        return functools.reduce(lax.add, products)

    operands = [weights, *left.invars]
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(product)(*map(struct, operands)))
    env = dict(zip((*jaxpr.invars, *jaxpr.outvars), (*operands, *eqn.outvars), strict=True))

    def renamed(atoms: Sequence[Atom]) -> list[Atom]:
        return [v if isinstance(v, Literal) else env.get(v, v) for v in atoms]

    return [rewire(e, renamed(e.invars), renamed(e.outvars)) for e in jaxpr.eqns]


def _outvars(eqns: Sequence[JaxprEqn]) -> list[Var]:
    return [v for eqn in eqns for v in eqn.outvars]


def _of_one_number(eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], set[Var]]:
    """The cheap equations that make arrays of one number, and all such arrays."""
    even = uniform_arrays(eqns, lambda v: not v.aval.ndim)
    cheap = [eqn for eqn in eqns if eqn.outvars[0] in even and eqn.primitive.name in CHEAP]
    return cheap, {v for v in even if v.aval.size and v.aval.ndim}


def _made(eqns: Sequence[JaxprEqn]) -> Iterator[Var]:
    """What equations compute, those inside them included."""
    for eqn in eqns:
        yield from eqn.outvars
        for inner in jaxprs_in_params(eqn.params):
            yield from _made(inner.eqns)


def _bytes(v: Var) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _needed_for(
    eqns: Sequence[JaxprEqn], results: Sequence[Atom], known: set[Var], effects: bool
) -> list[JaxprEqn]:
    """The equations that lead to some results from variables that are known."""
    needed = {v for v in results if not isinstance(v, Literal)} - known
    kept = []
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal) and v not in known)
    return kept[::-1]


def _evaluate(
    eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outs: Sequence[Atom], values: Sequence[Any]
) -> list[jax.Array]:
    return jax.core.eval_jaxpr(build_jaxpr((), inputs, outs, eqns), (), *values)


def _zeros(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The variables that are zero whatever the values of others."""
    found: set[Var] = set()
    for eqn in eqns:
        if eqn.primitive.name in LINEAR and all(
            not np.any(v.val) if isinstance(v, Literal) else v in found for v in eqn.invars
        ):
            found.update(eqn.outvars)
    return found


def _in(v: Atom, known: Container[Var]) -> bool:
    return not isinstance(v, Literal) and v in known


def _inexact(v: Atom) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _as_array(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _slices(xs: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), xs)
