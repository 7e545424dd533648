"""States, neither hidden nor weights, that carry influence from step to step untraced."""

from collections.abc import Iterable

import brainstate
import jax

from .._compat import JaxprEqn, Literal, Var
from .._typing import Path
from .liveness import reached_variables, variables
from .module_info import ModuleInfo
from .primitives import is_inexact, passes_derivative

__all__ = ['CarriedStates']


class CarriedStates:
    """The floating-point values that a step carries over in states that are not traced.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.
    """

    def __init__(self, minfo: ModuleInfo) -> None:
        traced = brainstate.ParamState | brainstate.HiddenState
        self._eqns = minfo.jaxpr.eqns
        self._pairs: dict[Path, list[tuple[Var, Var]]] = {
            minfo.state_id_to_path[id(state)]: [
                (old, new)
                for old, new in zip(jax.tree.leaves(olds), jax.tree.leaves(news), strict=True)
                if is_inexact(old.aval) and not isinstance(new, Literal)
            ]
            for state, olds, news in zip(
                minfo.compiled_model_states,
                minfo.state_tree_invars,
                minfo.state_tree_outvars,
                strict=True,
            )
            if not isinstance(state, traced)
        }
        results = variables(minfo.jaxpr.outvars[: minfo.num_var_out])
        self._results = frozenset([*results, *minfo.hidden_outvar_to_invar])

    def reached_from(
        self, sources: Iterable[Var], over_time: bool = False, stop: Iterable[Var] = ()
    ) -> set[Var]:
        """The variables that derivatives by the sources flow into, past those of ``stop``.

        With ``over_time``, also in later steps.
        """
        stop = frozenset(stop)

        def into(eqn: JaxprEqn) -> list[Var]:
            flows = zip(eqn.outvars, passes_derivative(eqn), strict=True)
            return [v for v, passes in flows if passes and v not in stop]

        reached = {v for v in sources if is_inexact(v.aval)}
        size = -1
        while len(reached) > size:
            size = len(reached)
            reached = reached_variables(self._eqns, reached, into)
            if not over_time:
                break
            pairs = (pair for of_state in self._pairs.values() for pair in of_state)
            reached.update(old for old, new in pairs if new in reached)
        return reached

    def lasting(self, sources: Iterable[Var]) -> list[Path]:
        """The states through which the sources reach results or hidden states of later steps."""
        if not any(self._pairs.values()):
            return []
        reached = self.reached_from(sources, over_time=True)
        return [
            path
            for path, pairs in self._pairs.items()
            if any(
                new in reached and not self._results.isdisjoint(self.reached_from([old], True))
                for old, new in pairs
            )
        ]
