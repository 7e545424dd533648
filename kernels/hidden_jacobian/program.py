"""A position-wise function of arrays, as a program that can be evaluated on tiles of them."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..expand import EXPANSIONS
from . import reference
from .operands import JacobianOperands

__all__ = ['COMMON', 'Program', 'evaluate', 'kind_of', 'program_of', 'reason']

COMMON = frozenset(
    """
    abs add add_any and ceil clamp convert_element_type cos div eq exp exp2 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt select_n sign sin
    sqrt square sub tan tanh xor
    """.split()
)
"""What every kernel language evaluates position by position."""

UNCHANGED = frozenset('broadcast_in_dim copy expand_dims reshape squeeze stop_gradient'.split())
"""What tiles do not need, because they broadcast by themselves."""

FLOATS = ('float32', 'bfloat16')
OTHERS = ('bool', 'int8', 'int16', 'int32', 'uint8', 'uint16', 'uint32')


class Program(NamedTuple):
    """A traced function.

    Attributes
    ----------
    jaxpr : Jaxpr
        What it does.
    operands : tuple
        What its results depend on, each array once.
    variables : tuple of tuple of Var
        The variables that have the value of each operand.
    structure : PyTreeDef
        The structure of its results.
    varshape : tuple of int
        The positions.
    """

    jaxpr: Any
    operands: tuple[Any, ...]
    variables: tuple[tuple[Any, ...], ...]
    structure: Any
    varshape: tuple[int, ...]

    @property
    def full_arrays(self) -> int:
        """How many arrays of a number per position are read and written."""
        kinds = [kind_of(operand.shape, self.varshape) for operand in self.operands]
        return kinds.count('full') + len(self.jaxpr.outvars)


def program_of(operands: JacobianOperands) -> Program:
    """The derivatives of a transition, as :func:`reference.hidden_jacobian` takes them."""
    leaves, tree = jax.tree.flatten(operands)

    def planes(*leaves: Any) -> Any:
        return reference.hidden_jacobian(jax.tree.unflatten(tree, leaves))

    closed, shapes = jax.make_jaxpr(planes, return_shape=True)(*leaves)
    jaxpr, values = closed.jaxpr, (*closed.consts, *leaves)
    read = {v for eqn in _needed(jaxpr) for v in _variables(eqn.invars)} | _variables(jaxpr.outvars)
    by_value: dict[int, tuple[Any, list[Any]]] = {}
    for v, value in zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True):
        if v in read:
            by_value.setdefault(id(value), (value, []))[1].append(v)
    return Program(
        jaxpr,
        tuple(value for value, _ in by_value.values()),
        tuple(tuple(variables) for _, variables in by_value.values()),
        jax.tree.structure(shapes),
        tuple(operands.inputs[0].shape),
    )


def kind_of(shape: Sequence[int], varshape: Sequence[int]) -> str:
    """How an array lies beside states of a shape: a ``'full'`` one has a number per position.

    A ``'row'`` is the same for all rows of positions, a ``'column'`` has one number for each of
    them, and ``'one'`` number is uniform; anything else is ``'other'``.
    """
    if math.prod(shape) == 1:
        return 'one'
    if tuple(shape) == tuple(varshape):
        return 'full'
    if math.prod(shape) == shape[-1] == varshape[-1]:
        return 'row'
    return 'column' if tuple(shape) == (*varshape[:-1], 1) else 'other'


def reason(
    operands: JacobianOperands, kind: str, known: Collection[str], most: int | None = None
) -> str | None:
    """Why a kind of kernel cannot take this transition, or None.

    It evaluates ``known`` primitives and those that have an expansion, and has room for ``most``
    arrays.
    """
    transition = operands.transition
    if any(transition.widths):
        return 'a state holds several planes along an axis of its own'
    if any(transition.shared):
        return 'an op has fewer axes than the states that it feeds'
    if transition.forward_only:
        return 'the transition has a while loop'
    if not operands.inputs[0].size:
        return 'there are no positions'
    if not any(map(any, transition.pattern)):
        return 'all derivatives are zero'
    program = program_of(operands)
    for operand in program.operands:
        if operand.dtype.name not in (*FLOATS, *OTHERS):
            return f'an operand is of type {operand.dtype}'
        if kind_of(operand.shape, program.varshape) == 'other':
            return f'an operand has shape {operand.shape} beside states of {program.varshape}'
    arrays = program.full_arrays
    if most is not None and arrays > most:
        return f'it reads and writes {arrays} arrays, and a kernel holds {most}'
    return _unknown(program.jaxpr, program.varshape, {*known, *EXPANSIONS[kind]})


def _unknown(
    jaxpr: Any,
    varshape: tuple[int, ...],
    known: set[str],
    fixed: Collection[Any] = (),
) -> str | None:
    """Why tiles cannot go through the equations, or None; ``fixed`` variables are numbers."""
    numbers = {*fixed}  # known beforehand, and the same at all positions
    for eqn in _needed(jaxpr):
        name, inner = eqn.primitive.name, _inner(eqn)
        atoms = (*eqn.invars, *eqn.outvars)
        is_number = _variables(eqn.invars) <= numbers
        if is_number:
            numbers.update(eqn.outvars)
        if inner is not None:
            pairs = zip(inner[0].invars, eqn.invars, strict=True)
            own = {v for v, atom in pairs if hasattr(atom, 'val') or atom in numbers}
            unknown = _unknown(inner[0], varshape, known, own)
            if unknown or any(np.size(constant) > 1 for constant in inner[1]):
                return unknown or f'{name} holds an array'
        elif is_number and name not in known | UNCHANGED:
            if any(v.aval.shape for v in atoms):
                return f'{name} makes an array of shape {eqn.outvars[0].aval.shape} of numbers'
        elif name not in known | UNCHANGED:
            return f'{name} has no expansion (see register_expansion)'
        if is_number:
            continue
        for v in atoms:
            if v.aval.dtype.name not in (*FLOATS, *OTHERS):
                return f'{name} works on {v.aval.dtype}'
        for v in eqn.outvars:
            if kind_of(v.aval.shape, varshape) == 'other':
                return f'{name} makes an array of shape {v.aval.shape}'
        if name in UNCHANGED and not _is_unchanged(eqn, varshape):
            return f'{name} moves positions'
    return None


def _is_unchanged(eqn: Any, varshape: tuple[int, ...]) -> bool:
    """Whether the equation does only what tiles do by themselves: broadcast."""
    old, new = (kind_of(v.aval.shape, varshape) for v in (eqn.invars[0], *eqn.outvars))
    if old in ('one', new):
        return True
    last_axis = eqn.params.get('broadcast_dimensions', (None,))[-1]
    return new == 'full' and (old == 'column' or last_axis == len(varshape) - 1)


def evaluate(program: Program, kind: str, tiles: Sequence[Any]) -> list[jax.Array]:
    """The results of a program for tiles of its operands; bfloat16 is computed in float32."""
    pairs = zip(program.variables, tiles, strict=True)
    known = {v: _wide(tile) for variables, tile in pairs for v in variables}
    results = zip(program.jaxpr.outvars, _evaluate(program.jaxpr, kind, known), strict=True)
    return [_traced(value).astype(v.aval.dtype) for v, value in results]


def _wide(value: Any) -> Any:
    return value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value


def _evaluate(jaxpr: Any, kind: str, known: dict[Any, Any]) -> list[Any]:
    def read(atom: Any) -> Any:
        if hasattr(atom, 'val'):
            return _wide(np.asarray(atom.val, atom.aval.dtype))
        return known[atom]

    for eqn in _needed(jaxpr):
        operands, inner = [read(atom) for atom in eqn.invars], _inner(eqn)
        if inner is not None:
            variables = (*inner[0].constvars, *inner[0].invars)
            values = zip(variables, (*map(_wide, inner[1]), *operands), strict=True)
            results = _evaluate(inner[0], kind, dict(values))
        elif all(isinstance(a, np.ndarray) for a in operands):  # known while tracing
            with jax.ensure_compile_time_eval():
                results = [np.asarray(a) for a in _apply(eqn, {}, operands)]
        else:
            results = _apply(eqn, EXPANSIONS[kind], [_traced(a) for a in operands])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _traced(value: Any) -> jax.Array:
    """A number that a kernel can work with: it cannot hold arrays."""
    return jnp.full((), value.item(), value.dtype) if isinstance(value, np.ndarray) else value


def _apply(
    eqn: Any, expansions: Mapping[str, Callable[..., Any]], operands: list[Any]
) -> list[Any]:
    name = eqn.primitive.name
    if name in UNCHANGED:
        return operands[:1]
    if name in expansions:
        results = expansions[name](*operands, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [_single(results)]
    shape = jnp.broadcast_shapes(*map(jnp.shape, operands))
    tiles = [jnp.broadcast_to(a, shape) for a in operands]
    params = eqn.params
    if params.get('new_dtype') == jnp.bfloat16:
        params = {**params, 'new_dtype': np.dtype('float32')}
    results = eqn.primitive.bind(*tiles, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _single(results: Any) -> Any:
    return results[0] if isinstance(results, tuple | list) else results


def _inner(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr and the constants of an equation that calls one."""
    if eqn.primitive.name in ('cond', 'while', 'scan'):
        return None
    for name in ('jaxpr', 'call_jaxpr', 'fun_jaxpr'):
        inner = eqn.params.get(name)
        if inner is not None:
            return (inner.jaxpr, inner.consts) if hasattr(inner, 'consts') else (inner, ())
    return None


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that results depend on, in order."""
    wanted, needed = _variables(jaxpr.outvars), []
    for eqn in reversed(jaxpr.eqns):
        if any(v in wanted for v in eqn.outvars):
            wanted |= _variables(eqn.invars)
            needed.append(eqn)
    return needed[::-1]


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {v for v in atoms if not hasattr(v, 'val')}
