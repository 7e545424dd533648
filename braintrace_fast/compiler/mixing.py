"""Where the states of a group pass through products, and which element comes from which position.

The way from old states to new ones is followed with an index per array element: the position of the
group that it comes from. Views such as ``concatenate`` move the indices as they move values, and
what acts element by element keeps them. A product (an op, or a plain ``dot_general``) mixes them;
its output must have the shape of the group, and starts with indices of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import JaxprEqn, Literal, Var, build_jaxpr, equation_function, struct
from ..op import ETPPrimitive
from .alignment import align_results
from .flow import Flow, Slice, Source
from .hidden_group import HiddenGroup
from .liveness import needed_equations, reached_variables, read_variables, variables
from .positions import identity_alignment
from .primitives import is_product

__all__ = ['Mixer', 'cut_out', 'find_mixers', 'num_example_axes', 'product_matrix']

NOWHERE = -1
"""The index of an element that comes from no position of the group."""

_VIEWS = frozenset(
    'broadcast_in_dim concatenate copy expand_dims pad reshape rev slice squeeze transpose'.split()
)


class Mixer(NamedTuple):
    """A product through which old states reach new ones.

    Attributes
    ----------
    eqn : JaxprEqn
        Its equation.
    place : int
        Which of its operands the states reach.
    sources : numpy.ndarray
        Per position of an example, the element of that operand that comes from it; all are counted
        in flat order.
    """

    eqn: JaxprEqn
    place: int
    sources: np.ndarray

    @property
    def x(self) -> Var:
        """The operand that the states reach."""
        return self.eqn.invars[self.place]

    @property
    def z(self) -> Var:
        """The result."""
        return self.eqn.outvars[0]


def cut_out(flow: Flow, sources: Sequence[Var], results: Sequence[Var]) -> Slice:
    """All equations through which the sources reach the results, mixed or not."""
    eqns = [eqn for eqn in flow.eqns if any(flow.differentiated(eqn))]
    reached = reached_variables(eqns, sources, lambda eqn: _new(flow, eqn, sources))
    eqns = [eqn for eqn in eqns if not reached.isdisjoint(eqn.outvars)]
    kept = needed_equations(eqns, results, known=set(sources))
    kept = [eqn for eqn in kept if not reached.isdisjoint(variables(eqn.invars))]
    made = {v for eqn in kept for v in eqn.outvars}
    read = [*read_variables(kept), *(v for v in results if v not in made)]
    constants = [v for v in dict.fromkeys(read) if v not in made and v not in sources]
    loops = {id(flow.eqns[index]) for index in flow.loops}
    jaxpr = build_jaxpr(constants, sources, results, kept)
    return Slice(jaxpr, constants, any(id(eqn) in loops for eqn in kept))


def _new(flow: Flow, eqn: JaxprEqn, sources: Sequence[Var]) -> list[Var]:
    return [v for v in flow.differentiated(eqn) if v not in sources]


def product_matrix(
    mixer: Mixer, operands: Sequence[Any], num_axes: int, positions: int
) -> jax.Array:
    """``W[p, r]``: what a product does to a one at each position of an example.

    Parameters
    ----------
    mixer : Mixer
        The product.
    operands : sequence
        Its operands; that of the states is not read.
    num_axes, positions : int
        How many axes number examples, and how many positions an example has.
    """
    x, sources = mixer.x.aval, jnp.asarray(mixer.sources)
    inner = x.shape[num_axes:]
    function = equation_function(mixer.eqn)

    def linear(x: jax.Array) -> jax.Array:
        filled = list(operands)
        filled[mixer.place] = x
        return function(*filled)[0]

    zero = jnp.zeros(x.shape, x.dtype)

    def row(source: jax.Array) -> jax.Array:
        one = (jnp.arange(prod(inner)) == source).reshape(inner)
        tangent = jnp.broadcast_to(one, x.shape).astype(x.dtype)
        _, pushed = jax.jvp(linear, [zero], [tangent])
        return pushed.reshape(*pushed.shape[:num_axes], positions)[(0,) * num_axes]

    return jax.vmap(row)(sources)


def num_example_axes(eqns: Sequence[JaxprEqn], group: HiddenGroup) -> int:
    """How many axes of a group's shape, in front, number examples.

    Equations never mix examples, and a product does the same to all of them.
    """
    axes = range(len(group.varshape) - 1, 0, -1)
    return next((num for num in axes if _are_examples(eqns, group, num)), 0)


def _are_examples(eqns: Sequence[JaxprEqn], group: HiddenGroup, num: int) -> bool:
    products = [eqn for eqn in eqns if is_product(eqn)]
    if not all(_is_shared(eqn, num) for eqn in products):
        return False
    news, results = group.hidden_outvars, [eqn.outvars[0] for eqn in products]
    source = Source(group.varshape[:num])
    if any(z.aval.shape[:num] != source.shape for z in results):
        return False
    sources = dict.fromkeys([*group.hidden_invars, *results, *news], source)
    flow = Flow([eqn for eqn in eqns if not is_product(eqn)], sources, news)
    read = [v for eqn in products for v in variables(eqn.invars) if flow.of(v)]
    if any(v not in {eqn.invars[_place(eqn)] for eqn in products} for v in read):
        return False
    return all(
        not how.cut_by
        and how.alignment is not None
        and how.alignment[:num] == identity_alignment(source.shape)
        for v in (*read, *news)
        for how in flow.of(v).values()
    )


def _place(eqn: JaxprEqn) -> int:
    """Which operand of a product may have axes in front that number examples."""
    return getattr(eqn.primitive, 'x_invar_index', None) or 0


def _is_shared(eqn: JaxprEqn, num: int) -> bool:
    """Whether a product does the same along the first axes of its input, and keeps them."""
    op, (x, *others) = eqn.primitive, [struct(v) for v in eqn.invars]
    if op.name == 'dot_general':
        ((contracted, _), (batch, _)) = eqn.params['dimension_numbers']
        return not batch and min(contracted, default=0) >= num
    if not isinstance(op, ETPPrimitive) or not op.batched or op.x_invar_index != 0:
        return False
    one = x.update(shape=x.shape[num:])
    try:
        y = jax.eval_shape(partial(op.forward, **eqn.params), one, *others)
    except (TypeError, ValueError):  # fewer axes than the op needs
        return False
    return (*x.shape[:num], *y.shape) == eqn.outvars[0].aval.shape


def find_mixers(
    flow: Flow, eqns: Sequence[JaxprEqn], group: HiddenGroup, num_axes: int
) -> list[Mixer] | None:
    """The products on the ways from old states to new ones; None if there is more than them.

    Parameters
    ----------
    flow : Flow
        The flow of the step.
    eqns : sequence of JaxprEqn
        The equations of :func:`cut_out`.
    group : HiddenGroup
        The group.
    num_axes : int
        :func:`num_example_axes`.
    """
    return _Walk(flow, group, num_axes).mixers(eqns)


@dataclass
class _Walk:
    flow: Flow
    group: HiddenGroup
    num_axes: int

    def mixers(self, eqns: Sequence[JaxprEqn]) -> list[Mixer] | None:
        shape = self.group.varshape
        positions = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        where = {
            old: positions[..., None].repeat(width, -1) if width else positions
            for old, width in zip(self.group.hidden_invars, self.group.widths, strict=True)
        }
        own = dict(zip(self.group.hidden_outvars, where.values(), strict=True))
        behind: set[Var] = set()  # what a product leads to
        found = []
        for eqn in eqns:
            operands = [None if isinstance(v, Literal) else where.get(v) for v in eqn.invars]
            if all(index is None for index in operands):
                continue
            if _is_linear(eqn, operands):
                mixer = self.mixer(eqn, operands)
                if mixer is None or mixer.x in behind:
                    return None
                found.append(mixer)
                where[mixer.z] = positions
                behind.add(mixer.z)
                continue
            moved = _moved(eqn, operands)
            if moved is None:
                return None
            results = self.flow.differentiated(eqn)
            where.update((v, i) for v, i in zip(eqn.outvars, moved, strict=True) if v in results)
            if not behind.isdisjoint(variables(eqn.invars)):
                behind.update(results)
        news = [(where[new], index) for new, index in own.items() if new in where]
        return found if all(_agree(*pair) is not None for pair in news) else None

    def mixer(self, eqn: JaxprEqn, operands: Sequence[np.ndarray | None]) -> Mixer | None:
        """A product, if each position of an example comes in once, at the same place in all."""
        (place,) = (i for i, index in enumerate(operands) if index is not None)
        index, shape = operands[place], self.group.varshape
        examples, inner = shape[: self.num_axes], shape[self.num_axes :]
        if index is None or eqn.outvars[0].aval.shape != shape:
            return None
        if index.shape[: self.num_axes] != examples:
            return None
        size, num = int(np.prod(inner, dtype=int)), int(np.prod(examples, dtype=int))
        by_example = index.reshape(num, -1)
        expected = np.where(by_example[:1] < 0, NOWHERE, by_example[:1] % size)
        firsts = size * np.arange(num)[:, None]
        if not (by_example == np.where(expected < 0, NOWHERE, expected + firsts)).all():
            return None
        (elements,) = np.nonzero(expected[0] >= 0)
        sources = np.full(size, NOWHERE)
        sources[expected[0][elements]] = elements
        return Mixer(eqn, place, sources) if (sources >= 0).sum() == len(elements) else None


def _is_linear(eqn: JaxprEqn, operands: Sequence[np.ndarray | None]) -> bool:
    """Whether an equation is a product that is linear in the one operand that carries indices."""
    places = [i for i, index in enumerate(operands) if index is not None]
    if not is_product(eqn) or len(places) != 1:
        return False
    op = eqn.primitive
    return not isinstance(op, ETPPrimitive) or (
        bool(op.linear_in_x or op.diagonal) and places == [op.x_invar_index]
    )


def _moved(eqn: JaxprEqn, operands: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """The indices of an equation's results; None if they cannot be told, or are mixed."""
    if eqn.primitive.name in _VIEWS:
        filled = [
            np.full(v.aval.shape, NOWHERE, np.int32) if index is None else index
            for v, index in zip(eqn.invars, operands, strict=True)
        ]
        with jax.ensure_compile_time_eval():
            return [np.asarray(result) for result in equation_function(eqn)(*filled)]
    outcomes = align_results(
        eqn,
        [
            None if index is None else identity_alignment(v.aval.shape)
            for v, index in zip(eqn.invars, operands, strict=True)
        ],
    )
    carried = [index for index in operands if index is not None]
    results = []
    for v, outcome in zip(eqn.outvars, outcomes, strict=True):
        met: np.ndarray | None = np.full(v.aval.shape, NOWHERE, np.int32)
        if outcome is not None:
            if outcome != identity_alignment(v.aval.shape):
                return None
            for index in carried:
                met = None if met is None or index.shape != met.shape else _agree(met, index)
        if met is None:
            return None
        results.append(met)
    return results


def _agree(one: np.ndarray, other: np.ndarray) -> np.ndarray | None:
    """The indices of two arrays that meet element by element; None if they differ."""
    if np.any((one >= 0) & (other >= 0) & (one != other)):
        return None
    return np.maximum(one, other)
