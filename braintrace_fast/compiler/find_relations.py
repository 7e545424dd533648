"""Which weights reach which hidden groups, and through which ops.

What is decided here is put into words by :mod:`.explanation`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax.numpy as jnp

from .._compat import JaxprEqn, Var, source_line
from .._typing import Path
from ..errors import NotSupportedError
from ..op import ETPPrimitive
from .auxiliary import aux_values
from .carried import CarriedStates
from .explanation import Explainer
from .find_groups import find_hidden_groups_from_minfo, step_flow
from .flow import Flow
from .hidden_group import HiddenGroup
from .liveness import variables
from .module_info import ModuleInfo, extract_module_info
from .nested import check_nested
from .primitives import is_product
from .relation import HiddenParamOpRelation
from .weight_way import WeightWay, WeightWays

__all__ = [
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
]

Cuts = Mapping[Var, Sequence[int]]
"""By new hidden state that an op reaches position by position: the equations that cut other paths
to it."""


def find_hidden_param_op_relations_from_minfo(
    minfo: ModuleInfo,
    hid_path_to_group: Mapping[Path, HiddenGroup],
    flow: Flow | None = None,
) -> list[HiddenParamOpRelation]:
    """Find the relations of a traced model, in the order of the step.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.
    hid_path_to_group : mapping
        The group of each hidden state.
    flow : Flow, optional
        ``step_flow(minfo)``, where it is at hand.

    Returns
    -------
    list of HiddenParamOpRelation

    Raises
    ------
    NotImplementedError
        If a weight is used inside a ``while`` or what it drives is mixed there, or an op is inside
        control flow that was not opened.
    NotSupportedError
        If the output of an op is complex, or one of its auxiliary operands may change.
    """
    flow = step_flow(minfo) if flow is None else flow
    ways, explainer = WeightWays(minfo, flow), Explainer(minfo, flow, CarriedStates(minfo))
    groups = list({group.index: group for group in hid_path_to_group.values()}.values())
    finder = _Finder(minfo, flow, groups, ways, explainer)
    nested = frozenset(flow.nested)
    relations: list[HiddenParamOpRelation] = []
    for index, eqn in enumerate(flow.eqns):
        if isinstance(eqn.primitive, ETPPrimitive):
            relations += finder.relations_of(eqn)
        elif index in nested:
            check_nested(explainer, ways, index)
    explainer.remaining_weights()
    explainer.carried_states()
    return relations


def find_hidden_param_op_relations_from_module(
    model: brainstate.nn.Module, *model_args: Any, **model_kwargs: Any
) -> list[HiddenParamOpRelation]:
    """Find the relations of a model, traced by :func:`extract_module_info`.

    Examples
    --------
    >>> import brainstate, braintrace_fast as braintrace, jax.numpy as jnp
    >>> x, gru = jnp.ones(3), braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> relations = braintrace.find_hidden_param_op_relations_from_module(gru, x)
    >>> [relation.path for relation in relations]
    [('Wz', 'weight'), ('Wh', 'weight')]
    """
    minfo = extract_module_info(model, *model_args, **model_kwargs)
    flow = step_flow(minfo)
    _, hid_path_to_group = find_hidden_groups_from_minfo(minfo, flow=flow)
    return find_hidden_param_op_relations_from_minfo(minfo, hid_path_to_group, flow)


@dataclass(frozen=True, eq=False)
class _Finder:
    minfo: ModuleInfo
    flow: Flow
    groups: Sequence[HiddenGroup]
    ways: WeightWays
    explainer: Explainer

    def relations_of(self, eqn: JaxprEqn) -> list[HiddenParamOpRelation]:
        """The relation of one op, if its weights are trained and reach a hidden state."""
        ways = self.find_ways(eqn)
        if not ways:
            return []
        y = eqn.outvars[eqn.primitive.y_outvar_index]
        cuts: Cuts = {
            new: self.flow.of(new)[y].cut_by
            for group in self.groups
            for new in group.hidden_outvars
            if y in self.flow.aligned(new)
        }
        if not cuts:
            if not self.is_part_of_a_weight(y):
                self.explainer.excluded(eqn, y, ways)
            return []
        _check_real(eqn, y, ways)
        relation = self.relation(eqn, y, ways, cuts)
        if relation.substeps and not relation.is_static:
            raise NotSupportedError(
                f'{relation.source}: the weight {relation.path} varies in time, and is used inside '
                f'a scan of {relation.substeps} iterations. Raise '
                'ControlFlowPolicy(scan_unroll_limit=...) to as many, or keep the weight fixed.'
            )
        self.explainer.included(relation, cuts)
        return [relation]

    def find_ways(self, eqn: JaxprEqn) -> dict[str, WeightWay]:
        """The ways to the op's trainable inputs that come from parameters."""
        positions = eqn.primitive.trainable_invars(eqn.params)
        leading = {key: self.ways.find(eqn.invars[place]) for key, place in positions.items()}
        ways = {key: way for key, way in leading.items() if way is not None and way.traced}
        for key, way in leading.items():
            if way is None:
                self.explainer.untrained(eqn, key, is_only_input=not ways)
            elif not way.traced:
                self.explainer.varying(eqn, key, way)
        return ways if self.has_all_it_needs(eqn, ways) else {}

    def has_all_it_needs(self, eqn: JaxprEqn, ways: Mapping[str, WeightWay]) -> bool:
        """Whether the weights are fixed within a window, for an op that needs their values."""
        if not eqn.primitive.needs_weights or not ways:
            return True
        fixed = self.fixed_ways(eqn, ways)
        missing = [key for key, way in fixed.items() if way is None]
        missing += [key for key, way in ways.items() if not way.is_static]
        for way in ways.values():
            if missing:
                self.explainer.varying(eqn, missing[0], way)
        return not missing

    def fixed_ways(
        self, eqn: JaxprEqn, ways: Mapping[str, WeightWay]
    ) -> dict[str, WeightWay | None]:
        """The ways to inputs that are not trained, for an op that needs their values."""
        if not eqn.primitive.needs_weights:
            return {}
        positions = eqn.primitive.trainable_invars(eqn.params)
        return {
            key: self.ways.find_fixed(eqn.invars[place])
            for key, place in positions.items()
            if key not in ways
        }

    def relation(
        self, eqn: JaxprEqn, y: Var, ways: dict[str, WeightWay], cuts: Cuts
    ) -> HiddenParamOpRelation:
        groups = [g for g in self.groups if any(new in cuts for new in g.hidden_outvars)]
        tails = [self.flow.slice([y], group.hidden_outvars) for group in groups]
        x_index = eqn.primitive.x_invar_index
        path_of = self.minfo.outvar_to_hidden_path
        mixers = [self.flow.mixer(cut) for by in cuts.values() for cut in by]
        return HiddenParamOpRelation(
            primitive=eqn.primitive,
            x_var=None if x_index is None else eqn.invars[x_index],
            y_var=y,
            hidden_groups=groups,
            y_to_hidden_group_jaxprs=[tail.jaxpr for tail in tails],
            connected_hidden_paths=[path_of[new] for new in cuts],
            eqn_params=dict(eqn.params),
            path_classification={
                path_of[new]: 'mixed' if by else 'all_direct' for new, by in cuts.items()
            },
            y_to_hidden_group_constvars=[tail.constvars for tail in tails],
            f_patterns=[self.f_pattern(y, group) for group in groups],
            is_position_wise=all(map(is_product, mixers)),
            is_shared=y.aval.ndim - (y in self.minfo.substeps) < len(groups[0].varshape),
            weight_ways=ways,
            source=source_line(eqn),
            aux=aux_values(self.minfo, eqn),
            substeps=self.minfo.substeps.get(y, 0),
            fixed_ways={k: way for k, way in self.fixed_ways(eqn, ways).items() if way is not None},
            **self.trainable_fields(eqn, ways),
        )

    def f_pattern(self, y: Var, group: HiddenGroup) -> tuple[bool, ...]:
        """Per plane of a group, whether an op's output reaches it."""
        planes = zip(group.hidden_outvars, group.widths, strict=True)
        return tuple(is_live for new, w in planes for is_live in self.flow.reaches(y, new, w))

    def trainable_fields(self, eqn: JaxprEqn, ways: Mapping[str, WeightWay]) -> dict[str, Any]:
        """The fields that tell of the main parameter behind each trainable input."""
        positions = eqn.primitive.trainable_invars(eqn.params)
        paths = {key: way.paths[way.main] for key, way in ways.items()}
        return {
            'trainable_vars': {key: eqn.invars[positions[key]] for key in ways},
            'trainable_paths': paths,
            'trainable_leaf_indices': {k: way.leaf_indices[way.main] for k, way in ways.items()},
            'trainable_param_states': {k: self.minfo.state_of(path) for k, path in paths.items()},
            'trainable_processing_chains': {key: way.chain for key, way in ways.items()},
        }

    def is_part_of_a_weight(self, y: Var) -> bool:
        """Whether an op's output is only a part of the weights of others, as in ``w + a @ b``."""
        if not self.ways.is_weight(y):
            return False
        reached = self.explainer.carried.reached_from([y])
        readers = [
            (eqn, [v for v in variables(eqn.invars) if v in reached])
            for eqn in self.flow.eqns
            if isinstance(eqn.primitive, ETPPrimitive)
        ]
        weights = [
            {eqn.invars[p] for p in eqn.primitive.trainable_invars(eqn.params).values()}
            >= set(operands)
            for eqn, operands in readers
            if any(self.ways.is_weight(v) for v in operands)
        ]
        return bool(weights) and all(weights)


def _check_real(eqn: JaxprEqn, y: Var, ways: Mapping[str, WeightWay]) -> None:
    if jnp.issubdtype(y.aval.dtype, jnp.complexfloating):
        path = next(way.paths[way.main] for way in ways.values())
        raise NotSupportedError(
            f'{source_line(eqn)}: the output of {eqn.primitive} on {path} is {y.aval.dtype}. '
            'Traces are of real values: give the real and imaginary part of the weight an op '
            'each, and join their outputs by jax.lax.complex.'
        )
