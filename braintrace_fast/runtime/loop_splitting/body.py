"""One step of a loop as a flat list of equations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..._compat import Atom, ClosedJaxpr, JaxprEqn, Var, open_jaxpr
from ...compiler.control_flow import ControlFlowPolicy, flatten
from .products import split_products

__all__ = ['Body', 'flat_body']

OPAQUE = ControlFlowPolicy(cond='opaque', scan_unroll_limit=0)


@dataclasses.dataclass(frozen=True)
class Body:
    """The equations of a step and what goes in and out of them.

    Attributes
    ----------
    constvars, constants : sequence
        Constants of the step, and their values.
    old, new : list
        The carried values before and after the step.
    xs : list of Var
        The inputs of the step.
    ys, terms : list
        The results that are stacked, and those that are summed.
    eqns : list of JaxprEqn
        The equations, with joined products taken apart.
    """

    constvars: Sequence[Var]
    constants: Sequence[Any]
    old: list[Var]
    new: list[Atom]
    xs: list[Var]
    ys: list[Atom]
    terms: list[Atom]
    eqns: list[JaxprEqn]

    @property
    def moving(self) -> list[int]:
        """The places of the carried values that change."""
        pairs = zip(self.old, self.new, strict=True)
        return [place for place, (old, new) in enumerate(pairs) if old is not new]

    @property
    def moving_old(self) -> list[Var]:
        """Those values before the step."""
        return [self.old[place] for place in self.moving]

    @property
    def moving_new(self) -> list[Atom]:
        """Those values after the step."""
        return [self.new[place] for place in self.moving]

    @property
    def given(self) -> list[Var]:
        """The constants, and the carried values that never change."""
        moving = set(self.moving)
        return [*self.constvars, *(v for i, v in enumerate(self.old) if i not in moving)]


def flat_body(closed: ClosedJaxpr, sizes: Sequence[int]) -> Body:
    """The body of a traced step.

    Parameters
    ----------
    closed : ClosedJaxpr
        From carried values and inputs to carried values, ``ys`` and terms.
    sizes : sequence of int
        How many of each it returns.
    """
    num_carried, num_ys, _ = sizes
    jaxpr, constants = open_jaxpr(flatten(closed, OPAQUE, opens_ops=True))
    end = num_carried + num_ys
    body = Body(
        constvars=list(jaxpr.constvars),
        constants=constants,
        old=jaxpr.invars[:num_carried],
        new=jaxpr.outvars[:num_carried],
        xs=jaxpr.invars[num_carried:],
        ys=jaxpr.outvars[num_carried:end],
        terms=jaxpr.outvars[end:],
        eqns=jaxpr.eqns,
    )
    return dataclasses.replace(body, eqns=split_products(body.eqns, body.given, body.xs))
