"""Arrays that are uniform, that is, one number at all positions, by the way they are computed."""

from collections.abc import Callable, Iterable

from .._compat import JaxprEqn, Literal, Var, open_jaxpr
from .primitives import UNIFORM

__all__ = ['keeps_uniform', 'uniform_arrays']


def keeps_uniform(eqn: JaxprEqn) -> bool:
    """Whether an equation makes uniform arrays of uniform arrays."""
    name = eqn.primitive.name
    if name in ('custom_jvp_call', 'jit', 'pjit'):
        called = eqn.params['call_jaxpr' if name == 'custom_jvp_call' else 'jaxpr']
        inner, constants = open_jaxpr(called)
        return not constants and all(map(keeps_uniform, inner.eqns))
    return name in UNIFORM


def uniform_arrays(eqns: Iterable[JaxprEqn], is_number: Callable[[Var], bool]) -> set[Var]:
    """The results that are uniform, given which other variables are single numbers."""
    uniform: set[Var] = set()
    for eqn in eqns:
        if keeps_uniform(eqn) and all(
            not v.aval.ndim if isinstance(v, Literal) else v in uniform or is_number(v)
            for v in eqn.invars
        ):
            uniform.update(eqn.outvars)
    return uniform
