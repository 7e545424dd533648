"""From a ``ParamState`` to the op that reads it: a function to pull gradients back through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._compat import Atom, Jaxpr, Literal, Primitive, Var, build_jaxpr, open_jaxpr
from .._typing import Path
from .alignment import through
from .flow import Flow
from .liveness import needed_equations, reached_variables, read_variables
from .module_info import ModuleInfo
from .positions import identity_alignment
from .primitives import is_inexact

__all__ = ['WeightWay', 'WeightWays']


@dataclass(frozen=True, eq=False)
class WeightWay:
    """What lies between the parameters and one trainable input of an op: ``2 * w``, ``w.T``, ...

    Attributes
    ----------
    param_vars : tuple of Var
        The parameter leaves that it starts from; those of integers (a mask) come last.
    paths : tuple of Path
        The paths of their ``ParamState``s.
    leaf_indices : tuple of int
        Which leaf of its ``ParamState`` each one is.
    varying_vars : tuple of Var
        Values of the step that it reads besides parameters and constants; empty if it is static.
    traced : tuple of int
        Which of the parameters can be traced: all floats, if it is static; if it varies, the main
        one, provided that the weight follows it element by element.
    chain : tuple of Primitive
        The primitives on the way.
    main : int
        Which of the parameters gives the weight its name: the first of the weight's size.
    """

    param_vars: tuple[Var, ...]
    paths: tuple[Path, ...]
    leaf_indices: tuple[int, ...]
    varying_vars: tuple[Var, ...]
    traced: tuple[int, ...]
    chain: tuple[Primitive, ...]
    main: int
    _jaxpr: Jaxpr
    _consts: tuple[Any, ...]

    @property
    def is_static(self) -> bool:
        """Whether it depends on parameters and constants only, so that it is fixed in a window."""
        return not self.varying_vars

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the op's weight."""
        return self._jaxpr.outvars[0].aval.shape

    @property
    def dtype(self) -> Any:
        """The type of the op's weight."""
        return self._jaxpr.outvars[0].aval.dtype

    @property
    def is_identity(self) -> bool:
        """Whether the op reads a parameter directly."""
        return not self._jaxpr.eqns

    def __call__(self, params: Sequence[jax.Array], varying: Sequence[jax.Array] = ()) -> jax.Array:
        """The weight as the op receives it, given the values of the parameters."""
        (weight,) = jax.core.eval_jaxpr(self._jaxpr, self._consts, *params, *varying)
        return weight

    def pull_back(
        self,
        params: Sequence[jax.Array],
        cotangent: jax.Array,
        varying: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, ...]:
        """Cotangents of the float parameters from the cotangent of the op's weight."""
        if self.is_identity:
            return (cotangent,)
        count = sum(is_inexact(v.aval) for v in self.param_vars)
        floats, fixed = params[:count], params[count:]
        return jax.vjp(lambda *p: self([*p, *fixed], varying), *floats)[1](cotangent)


class WeightWays:
    """The ways from the parameters of a traced model to its ops."""

    def __init__(self, minfo: ModuleInfo, flow: Flow) -> None:
        jaxpr, consts = open_jaxpr(minfo.closed_jaxpr)
        self._constants: Mapping[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        self._params = {v: place for place, v in enumerate(minfo.weight_invars)}
        self._eqns = jaxpr.eqns
        self._producer = flow.producer
        self._minfo = minfo
        inputs = [v for v in jaxpr.invars if v not in self._params]
        drawn = [v for eqn in jaxpr.eqns if eqn.effects for v in eqn.outvars]
        self._varying = reached_variables(jaxpr.eqns, [*inputs, *drawn])
        floats = [v for v in self._params if is_inexact(v.aval)]
        self._trained = reached_variables(jaxpr.eqns, floats, flow.differentiated)
        self._read = self._varying - self._trained

    def is_trained(self, atom: Atom) -> bool:
        """Whether a derivative by some parameter flows into a variable."""
        return not isinstance(atom, Literal) and atom in self._trained

    def is_weight(self, atom: Atom) -> bool:
        """Whether a variable is trained, and a function of parameters and constants only."""
        return self.is_trained(atom) and atom not in self._varying

    def find(self, atom: Atom) -> WeightWay | None:
        """The way to an op's input, or None if no parameter leads there."""
        return self._way(atom) if self.is_trained(atom) else None

    def find_fixed(self, atom: Atom) -> WeightWay | None:
        """The way to an input that is not trained, or None if it changes from step to step."""
        is_fixed = isinstance(atom, Literal) or atom not in self._varying
        return self._way(atom) if is_fixed else None

    def _way(self, atom: Atom) -> WeightWay:
        # What no parameter leads to is read as a value if it varies, and recomputed if not.
        before = self._eqns[: self._producer.get(atom, -1) + 1]
        eqns = needed_equations(before, [atom], known=self._read)
        read = read_variables(eqns)
        needed = {atom, *read}
        floats = [v for v in self._params if v in needed and v in self._trained]
        fixed = [v for v in self._params if v in needed and v not in self._trained]
        params = (*floats, *fixed)
        varying = tuple(v for v in read if v in self._read)
        constants = [v for v in self._constants if v in needed]
        paths = tuple(self._minfo.invar_to_weight_path[v] for v in params)
        jaxpr = build_jaxpr(constants, [*params, *varying], [atom], eqns)
        main = next((i for i, v in enumerate(floats) if v.aval.size == atom.aval.size), 0)
        traced = tuple(range(len(floats)))
        if varying:
            traced = (main,) if _is_element_wise(jaxpr, params[main]) else ()
        return WeightWay(
            param_vars=params,
            paths=paths,
            leaf_indices=tuple(
                self._minfo.weight_path_to_invars[path].index(v)
                for path, v in zip(paths, params, strict=True)
            ),
            varying_vars=varying,
            traced=traced,
            chain=tuple(
                eqn.primitive for eqn in eqns if any(v in self._trained for v in eqn.outvars)
            ),
            main=main,
            _jaxpr=jaxpr,
            _consts=tuple(self._constants[v] for v in constants),
        )


def _is_element_wise(jaxpr: Jaxpr, variable: Var) -> bool:
    """Whether the result of a jaxpr follows one of its inputs element by element."""
    identity = identity_alignment(variable.aval.shape)
    operands = [identity if v is variable else None for v in jaxpr.invars]
    same_shape = variable.aval.shape == jaxpr.outvars[0].aval.shape
    return same_shape and through(jaxpr, operands) == [identity]
