"""The compiler's part of the reference API: perturbed hidden states, Jacobians, helpers."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from jax import lax

from .._compat import ClosedJaxpr, JaxprEqn, Var, build_closed_jaxpr, new_var, open_jaxpr, rewire
from .._typing import Path, PyTree
from ..compiler.diagnostics import diagnostic_context
from ..compiler.equations import single_equation
from ..compiler.find_groups import find_hidden_groups_from_minfo, merge
from ..compiler.graph import ETraceGraph
from ..compiler.hidden_group import HiddenGroup
from ..compiler.module_info import ModuleInfo, StepOutputs, extract_module_info
from ..compiler.pretty import pretty
from ..compiler.relation import HiddenParamOpRelation
from ..compiler.transition import is_forward_only, position_wise_jvp

__all__ = [
    'HiddenPerturbation',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_module',
    'call_hidden_perturb',
    'diagonal_jacobian',
    'full_jacobian',
    'group_merging',
    'jacrev_last_dim',
    'order_hidden_group_index',
    'y_to_hidden_groups',
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
    >>> import brainstate, braintrace_fast as braintrace, jax.numpy as jnp
    >>> gru, x = braintrace.nn.GRUCell(3, 4), jnp.ones(3)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> braintrace.add_hidden_perturbation_in_module(gru, x).perturb_hidden_paths
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
            If there are more or fewer values than perturbations, or a state of a group has none.
        """
        paths = list(self.perturb_hidden_paths)
        if len(perturb_data) != len(self.perturb_vars):
            raise ValueError(
                f'The perturb data has {len(perturb_data)} values, expected '
                f'{len(self.perturb_vars)}: one for each of {paths}.'
            )
        missing = [p for group in hidden_groups for p in group.hidden_paths if p not in paths]
        if missing:
            raise ValueError(
                f'There is no perturbation of {missing}, only of {paths}. Give the groups of the '
                'model that the perturbation was made for.'
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
        return pretty(self)


def add_hidden_perturbation_from_minfo(minfo: ModuleInfo) -> HiddenPerturbation:
    """Add a perturbation to every new hidden state of a traced model.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.

    Returns
    -------
    HiddenPerturbation

    Raises
    ------
    NotImplementedError
        If a state passes through a ``while`` that the policy forbids.
    """
    if minfo.control_flow.while_hidden == 'error':
        with diagnostic_context():
            find_hidden_groups_from_minfo(minfo)  # which refuses such a loop
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
    """The same for a model, traced by :func:`extract_module_info`."""
    return add_hidden_perturbation_from_minfo(
        extract_module_info(model, *model_args, **model_kwargs)
    )


def call_hidden_perturb(
    graph: ETraceGraph,
    args: Sequence[Any],
    perturb_data: Sequence[jax.Array],
    old_state_vals: Sequence[Any] | None = None,
) -> StepOutputs:
    """The body of :meth:`ETraceGraph.call_hidden_perturb`."""
    if graph.hidden_perturb is None:
        raise ValueError(
            'This graph has no hidden perturbation. Compile it with '
            'compile_etrace_graph(..., include_hidden_perturb=True).'
        )
    flat = graph.module_info.flat_inputs(args, old_state_vals)
    outs = graph.hidden_perturb.eval_jaxpr(flat, perturb_data)
    return graph.module_info.sort_outputs(outs)


def y_to_hidden_groups(
    relation: HiddenParamOpRelation,
    y_val: jax.Array,
    const_vals: Mapping[Var, jax.Array],
    concat_hidden_vals: bool,
) -> list[Any]:
    """The body of :meth:`HiddenParamOpRelation.y_to_hidden_groups`."""
    results = []
    for group, jaxpr, constvars in zip(
        relation.hidden_groups,
        relation.y_to_hidden_group_jaxprs,
        relation.y_to_hidden_group_constvars,
        strict=True,
    ):
        states = jax.core.eval_jaxpr(jaxpr, [const_vals[v] for v in constvars], y_val)
        results.append(group.concat_hidden(states) if concat_hidden_vals else states)
    return results


def diagonal_jacobian(
    group: HiddenGroup, hidden_vals: Sequence[jax.Array], input_vals: PyTree
) -> jax.Array:
    """The body of :meth:`HiddenGroup.diagonal_jacobian`."""
    if not group.is_diagonal_recurrence:
        return _blocks(group, full_jacobian(group, hidden_vals, input_vals))
    if is_forward_only(group.transition_jaxpr):
        return _forward_jacobian(group, hidden_vals, input_vals)
    return jacrev_last_dim(
        _joined_transition(group, hidden_vals, input_vals), group.concat_hidden(hidden_vals)
    )


def full_jacobian(
    group: HiddenGroup, hidden_vals: Sequence[jax.Array], input_vals: PyTree
) -> jax.Array:
    """The body of :meth:`HiddenGroup.full_jacobian`."""
    jacobian = jax.jacfwd if is_forward_only(group.transition_jaxpr) else jax.jacrev
    function = _joined_transition(group, hidden_vals, input_vals)
    return jacobian(function)(group.concat_hidden(hidden_vals))


def _joined_transition(
    group: HiddenGroup, hidden_vals: Sequence[jax.Array], input_vals: PyTree
) -> Callable[[jax.Array], jax.Array]:
    """The transition as a function of one array, as :meth:`HiddenGroup.concat_hidden` makes it."""
    return lambda planes: group.concat_hidden(
        group.transition(_split_like(group, hidden_vals, planes), input_vals)
    )


def _blocks(group: HiddenGroup, full: jax.Array) -> jax.Array:
    """Of a Jacobian of all positions by all others, per position that between its neighbours."""
    size, width = math.prod(group.varshape), group.trace_state_width
    own = np.arange(size)[:, None]
    at = own if group.snap is None else group.snap.neighbours
    kept = np.ones_like(own, bool) if group.snap is None else group.snap.valid
    flat = full.reshape(size, group.num_state, size, group.num_state)
    pairs = flat[at[:, :, None], :, at[:, None, :], :]  # position, neighbour, neighbour, a, b
    pairs = jnp.where((kept[:, :, None] & kept[:, None, :])[..., None, None], pairs, 0)
    return pairs.swapaxes(2, 3).reshape(*group.varshape, width, width)


def _forward_jacobian(
    group: HiddenGroup, hidden_vals: Sequence[jax.Array], input_vals: Sequence[jax.Array]
) -> jax.Array:
    eye = jnp.eye(group.num_state)
    columns = []
    for unit in eye:
        planes = jnp.broadcast_to(unit, (*group.varshape, group.num_state))
        tangents = _split_like(group, hidden_vals, planes)
        news, moved = position_wise_jvp(group.transition_jaxpr, input_vals, hidden_vals, tangents)
        filled = [
            jnp.zeros_like(new) if m is None else m for new, m in zip(news, moved, strict=True)
        ]
        columns.append(group.concat_hidden(filled))
    return jnp.stack(columns, axis=-1)


def _split_like(
    group: HiddenGroup, hidden_vals: Sequence[Any], planes: jax.Array
) -> list[jax.Array]:
    """The planes, each of its own state's type: joining may have widened them."""
    split = zip(group.split_hidden(planes), hidden_vals, strict=True)
    return [plane.astype(jnp.result_type(value)) for plane, value in split]


def jacrev_last_dim(fn: Callable[[jax.Array], jax.Array], hid_vals: jax.Array) -> jax.Array:
    """The Jacobian over the last axis of a function that is position-wise over all others.

    Parameters
    ----------
    fn : Callable
        From ``(*varshape, S)`` to ``(*varshape, S)``.
    hid_vals : jax.Array
        Where to take the Jacobian.

    Returns
    -------
    jax.Array
        Shape ``(*varshape, S, S)``, result before input.

    Raises
    ------
    ValueError
        If the result has another number of states than the input.
    """
    new, pull_back = jax.vjp(fn, hid_vals)
    if new.shape[-1] != hid_vals.shape[-1]:
        raise ValueError(
            f'The function maps {hid_vals.shape[-1]} states to {new.shape[-1]}; a transition must '
            'return as many states as it takes.'
        )
    rows = [pull_back(jnp.zeros_like(new).at[..., row].set(1))[0] for row in range(new.shape[-1])]
    return jnp.stack(rows, axis=-2)


def group_merging(
    groups: Iterable[Iterable[Hashable]], version: int = 1
) -> list[frozenset[Hashable]]:
    """Join sets that share a member, until none do.

    Parameters
    ----------
    groups : iterable of iterable
        The sets.
    version : {0, 1}
        Kept for compatibility; both give the same, in the order of the first member's appearance.

    Returns
    -------
    list of frozenset

    Examples
    --------
    >>> from braintrace_fast.compiler import group_merging
    >>> [sorted(group) for group in group_merging([(1, 2), (4, 5), (2, 3)])]
    [[1, 2, 3], [4, 5]]
    """
    if version not in (0, 1):
        raise ValueError(f'group_merging knows versions 0 and 1, not {version!r}.')
    return [frozenset(group) for group in merge(groups)]


def order_hidden_group_index(hidden_groups: Sequence[HiddenGroup]) -> None:
    """Check that every group's index is its position.

    Raises
    ------
    AssertionError
        If one is not.
    """
    for position, group in enumerate(hidden_groups):
        if group.index != position:
            raise AssertionError(
                f'The hidden group at position {position} has index {group.index}; they must agree.'
            )
