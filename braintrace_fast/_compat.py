"""The only file that knows JAX versions (0.10.2 to 0.12).

Differences handled here:

- from 0.12 on there is one ``Jaxpr`` class; a "closed" jaxpr is one with values attached, and the
  constvars of a jaxpr without values are its leading invars. Code elsewhere therefore keeps its own
  lists of constant variables and never reads ``.constvars`` of a jaxpr that it built open;
- a jaxpr built by hand needs a ``DebugInfo``;
- ``scan`` states how its operands are split in other parameters.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax.extend.core import DebugInfo, DropVar, Literal, Primitive, jaxprs_in_params
from jax.interpreters.batching import fancy_primitive_batchers

if TYPE_CHECKING:  # JAX types the variables of a jaxpr as values without shape or dtype
    ClosedJaxpr: TypeAlias = Any
    Jaxpr: TypeAlias = Any
    JaxprEqn: TypeAlias = Any
    Var: TypeAlias = Any
    Atom: TypeAlias = Any
else:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

    Atom = Var | Literal

__all__ = [
    'Atom',
    'ClosedJaxpr',
    'DropVar',
    'Jaxpr',
    'JaxprEqn',
    'Literal',
    'Primitive',
    'Var',
    'UNKNOWN_LINE',
    'build_closed_jaxpr',
    'build_jaxpr',
    'can_be_mapped',
    'equation_function',
    'jaxprs_in_params',
    'new_var',
    'open_jaxpr',
    'rewire',
    'scan_split',
    'source_line',
    'struct',
    'varying_alike',
]

_HERE = os.path.dirname(__file__)
UNKNOWN_LINE = 'an unknown line'


def _folders(libraries: Sequence[str]) -> list[str]:
    """The folders of those libraries that are installed, found without importing them."""
    specs = [importlib.util.find_spec(name) for name in libraries]
    places = [spec.submodule_search_locations for spec in specs if spec is not None]
    return [os.path.join(folder, '') for folders in places for folder in folders or ()]


_MODELS = tuple(_folders(['brainpy', 'brainpy_state', 'braintools']))
_LAYERS = ('op', 'compiler', 'runtime', 'reference_api', 'driver', 'algorithm')
_MACHINERY = (
    *_folders(['jax', 'brainstate', 'saiunit']),
    os.path.join(_HERE, 'nn', 'linear.py'),
    *(os.path.join(_HERE, layer, '') for layer in _LAYERS),
    os.path.join(_HERE, 'learner.py'),
    '<frozen',
)


def new_var(aval: Any) -> Var:
    """A fresh variable with the shape and dtype of ``aval``."""
    return Var(jax.core.ShapedArray(aval.shape, aval.dtype))


def rewire(eqn: JaxprEqn, invars: list[Atom], outvars: list[Var]) -> JaxprEqn:
    """An equation between other variables; the same object if they are the same."""
    if invars == eqn.invars and outvars == eqn.outvars:
        return eqn
    return eqn.replace(invars=invars, outvars=outvars)


def struct(atom: Atom) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a variable or literal, to trace with."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def build_jaxpr(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
) -> Jaxpr:
    """A jaxpr from its parts, with the union of its equations' effects."""
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    debug_info = DebugInfo('braintrace_fast', 'step', None, None)
    return Jaxpr(
        list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info=debug_info
    )


def build_closed_jaxpr(
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
) -> ClosedJaxpr:
    """Like :func:`build_jaxpr`, with values for the constvars."""
    return ClosedJaxpr(build_jaxpr(constvars, invars, outvars, eqns), list(consts))


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Split a closed or an open jaxpr into the jaxpr and the values of its constvars."""
    return getattr(jaxpr, 'jaxpr', jaxpr), getattr(jaxpr, 'consts', ())


def scan_split(eqn: JaxprEqn) -> tuple[int, int]:
    """The number of constant and of carried operands of a ``scan`` equation."""
    params = eqn.params
    if 'num_carry' in params:
        return params['num_consts'], params['num_carry']
    consts, carry, _ = params['ft_in'].unpack()
    return len(list(consts)), len(list(carry))


def equation_function(eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """One equation as a function of its operands (literals included), returning all results."""
    operands = [new_var(v.aval) for v in eqn.invars]
    results = [new_var(v.aval) for v in eqn.outvars]
    jaxpr = build_jaxpr((), operands, results, [eqn.replace(invars=operands, outvars=results)])
    return lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args)


_MAPPED_WITHOUT_RULE = ('custom_jvp_call', 'custom_vjp_call')


def can_be_mapped(eqn: JaxprEqn) -> bool:
    """Whether ``jax.vmap`` can run an equation; if that is in doubt, it is tried."""
    if _has_rule(eqn):
        return True
    mapped = [jax.ShapeDtypeStruct((2, *v.aval.shape), v.aval.dtype) for v in eqn.invars]
    try:
        jax.eval_shape(jax.vmap(equation_function(eqn)), *mapped)
    except Exception:  # rules of other libraries may raise anything
        return False
    return True


def _has_rule(eqn: JaxprEqn) -> bool:
    """Whether all primitives inside have a rule for ``jax.vmap`` that cannot refuse."""
    name = eqn.primitive.name
    if eqn.primitive not in fancy_primitive_batchers and name not in _MAPPED_WITHOUT_RULE:
        return False
    if 'vmap_method' in eqn.params or name == 'custom_vmap_call':
        return False
    inner = (e for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return all(map(_has_rule, inner))


def source_line(eqn: JaxprEqn) -> str:
    """Where the model made this equation, as ``file:line (function)``.

    Frames of JAX, brainstate and this library are passed over, and so are those of libraries of
    models if the user's own code is among them.
    """
    traceback = eqn.source_info.traceback
    origin = None
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_MACHINERY):
            origin = origin or frame
            if not frame.file_name.startswith(_MODELS):
                origin = frame
                break
    if origin is None:
        return UNKNOWN_LINE
    return f'{origin.file_name}:{origin.line_num} ({origin.function_name})'


def varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, inside ``shard_map`` made to vary over the same axes of the mesh.

    JAX's own operations do so with their operands; a primitive of one's own has to.
    """
    own = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    every = frozenset[str]().union(*own)
    return [
        jax.lax.pcast(a, tuple(sorted(every - axes)), to='varying')
        for a, axes in zip(arrays, own, strict=True)
    ]
