"""Run a step's equations with its ops, and variables of choice, passed through functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._compat import Literal, equation_function, jaxprs_in_params, open_jaxpr, scan_split
from ..op import ETPPrimitive

__all__ = ['interpret']

_CALLS = ('jit', 'pjit', 'closed_call', 'core_call', 'remat', 'remat2', 'checkpoint')


def _has_op(eqn: Any) -> bool:
    inner = [open_jaxpr(j)[0] for j in jaxprs_in_params(eqn.params)]
    return isinstance(eqn.primitive, ETPPrimitive) or any(_has_op(e) for j in inner for e in j.eqns)


def interpret(
    closed: Any,
    args: Sequence[Any],
    on_op: Callable[[ETPPrimitive, list[Any], dict[str, Any]], Any],
    on_write: Mapping[Any, Callable[[Any], Any]],
) -> list[Any]:
    """Run a jaxpr, with every ETP op and some variables passed through functions.

    Parameters
    ----------
    closed : ClosedJaxpr
        The jaxpr.
    args : sequence
        Its inputs.
    on_op : callable
        ``(primitive, operands, params) -> result``, run in the place of each ETP op.
    on_write : dict
        Functions that variables are passed through once they are computed.
    """
    jaxpr, consts = open_jaxpr(closed)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        pending = {v: on_write[v] for v in eqn.outvars if v in on_write}
        if isinstance(eqn.primitive, ETPPrimitive):
            results = [on_op(eqn.primitive, operands, eqn.params)]
        elif eqn.primitive.name in _CALLS:
            inner = eqn.params['jaxpr'] if 'jaxpr' in eqn.params else eqn.params['call_jaxpr']
            results = interpret(inner, operands, on_op, _moved_inside(inner, eqn, pending))
        elif not _has_op(eqn):
            results = equation_function(eqn)(*operands)
        elif eqn.primitive.name == 'cond':
            branches = [interpret(b, operands[1:], on_op, {}) for b in eqn.params['branches']]
            results = [lax.select_n(operands[0], *values) for values in zip(*branches, strict=True)]
        elif eqn.primitive.name == 'scan':
            results = _interpret_scan(eqn, operands, on_op)
        else:
            raise ValueError(f'The oracle cannot see ETP ops inside {eqn.primitive.name}.')
        for v, value in zip(eqn.outvars, results, strict=True):
            env[v] = pending[v](value) if v in pending else value
    return [read(v) for v in jaxpr.outvars]


def _moved_inside(inner: Any, eqn: Any, pending: dict[Any, Any]) -> dict[Any, Any]:
    """Take from the pending functions those of variables that are computed inside a call."""
    jaxpr, _ = open_jaxpr(inner)
    made = {v for e in jaxpr.eqns for v in e.outvars}
    pairs = zip(jaxpr.outvars, eqn.outvars, strict=True)
    return {
        v: pending.pop(out)
        for v, out in pairs
        if out in pending and not isinstance(v, Literal) and v in made
    }


def _interpret_scan(eqn: Any, operands: list[Any], on_op: Any) -> list[Any]:
    num_consts, num_carry = scan_split(eqn)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    order = range(eqn.params['length'])
    stacked = []
    for i in reversed(order) if eqn.params['reverse'] else order:
        slices = [x[i] for x in operands[num_consts + num_carry :]]
        results = interpret(eqn.params['jaxpr'], [*consts, *carry, *slices], on_op, {})
        carry = results[:num_carry]
        stacked.append(results[num_carry:])
    if eqn.params['reverse']:
        stacked.reverse()
    return [*carry, *(jnp.stack(ys) for ys in zip(*stacked, strict=True))]
