"""The step with a perturbation added to every new hidden state, for all who read it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u
from jax import lax

from .._compat import (
    ClosedJaxpr,
    JaxprEqn,
    Var,
    build_closed_jaxpr,
    new_var,
    open_jaxpr,
    rewire,
)
from .._typing import Path
from .hidden_group import HiddenGroup
from .module_info import ModuleInfo, extract_module_info

__all__ = [
    'HiddenPerturbation',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_module',
    'single_equation',
]


class HiddenPerturbation(NamedTuple):
    r"""The step with a perturbation added to every new hidden state.

    .. math::

        h^t = f(x) \;\Rightarrow\; h^t = f(x) + p, \qquad
        \frac{\partial L^t}{\partial h^t} = \frac{\partial L^t}{\partial p}

    Attributes
    ----------
    perturb_vars : sequence of Var
        The perturbations.
    perturb_hidden_paths : sequence of Path
        The hidden states that they are added to.
    perturb_hidden_states : sequence of brainstate.HiddenState
        The same states.
    perturb_jaxpr : ClosedJaxpr
        The step; its inputs are those of the original, then the perturbations.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> perturbation = braintrace.add_hidden_perturbation_in_module(gru, jnp.ones(3))
    >>> perturbation.perturb_hidden_paths
    [('h',)]
    """

    perturb_vars: Sequence[Var]
    perturb_hidden_paths: Sequence[Path]
    perturb_hidden_states: Sequence[brainstate.HiddenState]
    perturb_jaxpr: ClosedJaxpr

    def eval_jaxpr(
        self, inputs: Sequence[jax.Array], perturb_data: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Run the perturbed step.

        Parameters
        ----------
        inputs : sequence of jax.Array
            The flat inputs of the original step.
        perturb_data : sequence of jax.Array
            One value per perturbation.

        Returns
        -------
        sequence of jax.Array
            The flat outputs.
        """
        jaxpr, consts = open_jaxpr(self.perturb_jaxpr)
        return jax.core.eval_jaxpr(jaxpr, consts, *inputs, *perturb_data)

    def init_perturb_data(self) -> Sequence[jax.Array]:
        """A zero for every perturbation."""
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.perturb_vars]

    def perturb_data_to_hidden_group_data(
        self, perturb_data: Sequence[jax.Array], hidden_groups: Sequence[HiddenGroup]
    ) -> Sequence[jax.Array]:
        """Collect values, one per perturbation, into one array per group.

        Parameters
        ----------
        perturb_data : sequence of jax.Array
            One value per perturbation, such as cotangents.
        hidden_groups : sequence of HiddenGroup
            The groups.

        Returns
        -------
        sequence of jax.Array
            Per group, an array of shape ``(*varshape, num_state)``.

        Raises
        ------
        ValueError
            If there are more or fewer values than perturbations.
        """
        if len(perturb_data) != len(self.perturb_vars):
            raise ValueError(
                f'Found {len(perturb_data)} perturbation values, expected '
                f'{len(self.perturb_vars)}: one for each of {list(self.perturb_hidden_paths)}.'
            )
        by_path = dict(zip(self.perturb_hidden_paths, perturb_data, strict=True))
        return [
            group.concat_hidden([u.get_mantissa(by_path[path]) for path in group.hidden_paths])
            for group in hidden_groups
        ]

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        return repr(
            brainstate.util.PrettyMapping(self._asdict(), type_name=self.__class__.__name__)
        )


def add_hidden_perturbation_from_minfo(minfo: ModuleInfo) -> HiddenPerturbation:
    """Add a perturbation to every new hidden state of a traced model.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.

    Returns
    -------
    HiddenPerturbation
    """
    jaxpr, consts = open_jaxpr(minfo.closed_jaxpr)
    perturbs = {new: new_var(new.aval) for new in minfo.hidden_outvar_to_invar}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if perturbs.keys().isdisjoint(eqn.outvars):
            eqns.append(eqn)
            continue
        plain = {v: new_var(v.aval) for v in eqn.outvars if v in perturbs}
        eqns.append(rewire(eqn, eqn.invars, [plain.get(v, v) for v in eqn.outvars]))
        eqns.extend(single_equation(lax.add, [plain[v], perturbs[v]], v) for v in plain)
    paths = [minfo.outvar_to_hidden_path[new] for new in perturbs]
    return HiddenPerturbation(
        perturb_vars=list(perturbs.values()),
        perturb_hidden_paths=paths,
        perturb_hidden_states=[minfo.state_of(path) for path in paths],
        perturb_jaxpr=build_closed_jaxpr(
            jaxpr.constvars, consts, [*jaxpr.invars, *perturbs.values()], jaxpr.outvars, eqns
        ),
    )


def add_hidden_perturbation_in_module(
    model: brainstate.nn.Module, *model_args: Any, **model_kwargs: Any
) -> HiddenPerturbation:
    """Add a perturbation to every new hidden state of a model.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model with initialised states.
    *model_args, **model_kwargs
        Example inputs of one step.

    Returns
    -------
    HiddenPerturbation
    """
    return add_hidden_perturbation_from_minfo(
        extract_module_info(model, *model_args, **model_kwargs)
    )


def single_equation(fun: Any, operands: Sequence[Var], result: Var) -> JaxprEqn:
    """The equation of a one-primitive function, such as ``lax.add``, on variables."""
    return _template(fun, len(operands)).replace(invars=list(operands), outvars=[result])


@functools.lru_cache(maxsize=16)
def _template(fun: Any, num_operands: int) -> JaxprEqn:
    (eqn,) = open_jaxpr(jax.make_jaxpr(fun)(*[0.0] * num_operands))[0].eqns
    return eqn
