"""The memory of a window, counted as a function of its number of steps.

A window is traced once for a number of steps that stands for any other. Each of its arrays then
either grows with the steps or does not. Those that grow are all counted, as if none were freed
before the end of the window: nobody knows in which order a compiler runs what is independent. Of
those that do not grow (traces, gradients), the fullest moment counts.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import brainstate
import jax

from .._compat import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxprs_in_params,
    open_jaxpr,
    scan_split,
)
from .._typing import PyTree
from ..compiler.primitives import FREE, FUSED, REDUCTIONS, SLICES, VIEWS

__all__ = ['Count', 'count_window', 'tree_bytes']

STAND_IN = 10007
"""Stands for the number of steps: it and (itself - 1) / 2 are prime, so no other size divides."""


class Count(NamedTuple):
    """The memory of a window: ``fixed + steps * per_step`` bytes.

    Examples
    --------
    >>> from braintrace_fast.runtime.window_memory import Count
    >>> count = Count(fixed=1000, per_step=60)
    >>> count.bytes(10), count.steps(4000)
    (1600, 50)
    """

    fixed: int
    per_step: int

    def bytes(self, steps: int) -> int:
        """What a window of so many steps takes."""
        return self.fixed + steps * self.per_step

    def steps(self, budget: int) -> int:
        """The most steps that fit into a budget; 0 if not even one does."""
        return max(budget - self.fixed, 0) // max(self.per_step, 1)


def tree_bytes(tree: PyTree) -> int:
    """The bytes of all arrays, or shapes, of a tree."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def count_window(window: Callable[..., Any], inputs: PyTree, *args: Any) -> Count:
    """Count the memory of a window by its number of steps.

    Parameters
    ----------
    window : callable
        ``(inputs, *args)``, which may use states. It is traced but not run.
    inputs : PyTree
        Arrays with a leading axis of steps, of any length.
    *args
        Further arguments, which do not depend on the number of steps.

    Returns
    -------
    Count

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.runtime.window_memory import count_window
    >>> count_window(lambda x: jnp.cumsum(x, axis=0), jnp.ones((5, 100)))
    Count(fixed=0, per_step=800)
    """
    stood_in = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((STAND_IN, *a.shape[1:]), a.dtype), inputs
    )
    function = brainstate.transform.StatefulFunction(window, name='window')
    closed = function.make_jaxpr(stood_in, *args).get_jaxpr(stood_in, *args)
    jaxpr, _ = open_jaxpr(closed)
    count = _count(jaxpr)
    return count._replace(per_step=count.per_step + sum(_size(v).per_step for v in jaxpr.invars))


def _size(atom: Atom) -> Count:
    if isinstance(atom, Literal):
        return Count(0, 0)
    elements = math.prod(atom.aval.shape)
    also_start = atom.aval.shape[:1] == (STAND_IN + 1,)  # which may be a size of the model
    for steps in (STAND_IN + 1,) if also_start else (STAND_IN, STAND_IN - 1):
        if elements and elements % steps == 0:
            return Count(0, elements // steps * atom.aval.dtype.itemsize)
    return Count(elements * atom.aval.dtype.itemsize, 0)


class _Access(NamedTuple):
    """An equation that allocates arrays, with the arrays that it reads and those it allocates."""

    eqn: JaxprEqn
    reads: set[Var]
    allocates: list[Var]


def _count(jaxpr: Jaxpr) -> Count:
    """What a jaxpr takes besides its inputs."""
    accesses, results = _accesses(jaxpr)
    last = {v: place for place, a in enumerate(accesses) for v in (*a.reads, *a.allocates)}
    freed: dict[int, int] = {}
    for v in {v for a in accesses for v in a.allocates} - results:
        freed[last[v]] = freed.get(last[v], 0) + _size(v).fixed
    fixed = fullest = per_step = 0
    for place, (eqn, _, allocates) in enumerate(accesses):
        inner = [_inner_count(jaxpr) for jaxpr in _inner_jaxprs(eqn)]
        fixed += sum(_size(v).fixed for v in allocates)
        fullest = max(fullest, fixed + max((count.fixed for count in inner), default=0))
        per_step += sum(_size(v).per_step for v in allocates)
        per_step += max((count.per_step for count in inner), default=0)
        fixed -= freed.get(place, 0)
    return Count(fullest, per_step)


def _inner_count(jaxpr: Jaxpr) -> Count:
    """What a jaxpr inside an equation takes besides the equation's operands and results."""
    count = _count(jaxpr)
    results = sum(_size(v).per_step for v in jaxpr.outvars)
    return count._replace(per_step=max(count.per_step - results, 0))


class _Use(NamedTuple):
    """The names of a variable's readers, from last to first, and the last of them."""

    readers: list[str]
    last: JaxprEqn | None


def _live(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], dict[Var, _Use]]:
    """The equations that lead to results or have effects, and the use of live variables."""
    uses = {v: _Use(['a result'], None) for v in jaxpr.outvars if _is_var(v)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in uses for v in eqn.outvars):
            live.append(eqn)
            for v in filter(_is_var, eqn.invars):
                uses.setdefault(v, _Use([], eqn)).readers.append(eqn.primitive.name)
    return live[::-1], uses


def _accesses(jaxpr: Jaxpr) -> tuple[list[_Access], set[Var]]:
    """The equations that allocate arrays; and the arrays of the results."""
    live, uses = _live(jaxpr)
    behind: dict[Var, set[Var]] = {}  # the arrays that hold, or make up, other variables

    def arrays(atoms: Sequence[Atom]) -> set[Var]:
        return {array for v in atoms if _is_var(v) for array in behind.get(v, {v})}

    def is_overwritten(operand: Var, eqn: JaxprEqn) -> bool:
        use = uses[operand]
        return use.last is eqn and set(use.readers[1:]) <= SLICES

    accesses = []
    for eqn in live:
        reads, name = arrays(eqn.invars), eqn.primitive.name
        first = next(iter(eqn.outvars), None)  # a callback may have none
        if name in VIEWS or _is_fused(name, uses[first].readers if first in uses else []):
            behind[first] = reads
            continue
        in_place = {v: o for v, o in _in_place(eqn).items() if is_overwritten(o, eqn)}
        behind |= {v: arrays([operand]) for v, operand in in_place.items()}
        allocates = [v for v in eqn.outvars if v in uses and v not in in_place]
        accesses.append(_Access(eqn, reads, allocates))
    return accesses, arrays(jaxpr.outvars)


def _inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs inside an equation; of one per platform, that of the present platform."""
    inner = [open_jaxpr(sub)[0] for sub in jaxprs_in_params(eqn.params)]
    platforms = eqn.params.get('branches_platforms')
    if platforms is None:
        return inner
    names = {'gpu': {'cuda', 'rocm', 'gpu'}}.get(backend := jax.default_backend(), {backend})
    return [
        next(j for j, own in zip(inner, platforms, strict=True) if own is None or names & {*own})
    ]


def _in_place(eqn: JaxprEqn) -> dict[Var, Var]:
    """Results that take the memory of an operand, if nothing else reads the operand."""
    operands: Sequence[Any] = ()
    if eqn.primitive.name == 'dynamic_update_slice':
        operands = eqn.invars[:1]
    elif eqn.primitive.name == 'while':
        operands = eqn.invars[eqn.params['cond_nconsts'] + eqn.params['body_nconsts'] :]
    elif eqn.primitive.name == 'scan':
        first, number = scan_split(eqn)
        operands = eqn.invars[first : first + number]
    elif eqn.params.get('branches_platforms') is not None:
        (branch,) = _inner_jaxprs(eqn)
        within = {v: o for inner in branch.eqns for v, o in _in_place(inner).items()}
        outside = dict(zip(branch.invars, eqn.invars[1:], strict=True))
        operands = [outside.get(within.get(v)) for v in branch.outvars]
    taken = zip(eqn.outvars, operands, strict=False)  # a scan also has results that it stacks
    return {v: operand for v, operand in taken if operand is not None and _is_var(operand)}


def _is_fused(name: str, readers: Sequence[str]) -> bool:
    """Whether a result is fused into its only reader."""
    single = len(readers) == 1 or name in FREE
    return name in FUSED and single and all(r in FUSED | REDUCTIONS for r in readers)


def _is_var(atom: Atom) -> bool:
    return not isinstance(atom, Literal)
