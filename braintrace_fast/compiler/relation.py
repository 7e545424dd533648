"""Which weights reach which hidden groups, through which ops, and why others do not."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import brainstate
import jax
import jax.numpy as jnp

from .._compat import (
    UNKNOWN_LINE,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxprs_in_params,
    open_jaxpr,
    source_line,
)
from .._typing import Path
from ..errors import NotSupportedError
from ..op import ETPPrimitive
from .carried import CarriedStates
from .control_flow import CUSTOM_RULES, contains_etp_op, has_while
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .flow import Flow
from .hidden_group import HiddenGroup, find_hidden_groups_from_minfo, is_product, step_flow
from .module_info import ModuleInfo, extract_module_info
from .weight_way import WeightWay, WeightWays
from .while_loop import follows

__all__ = [
    'HiddenParamOpRelation',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
]


_MAKE_HIDDEN = 'To have it traced, make the state a brainstate.HiddenState.'


class HiddenParamOpRelation(NamedTuple):
    r"""One occurrence of an op, :math:`y = \mathrm{op}(x, \theta)`, and the groups it reaches.

    Attributes
    ----------
    primitive : Primitive
        The op.
    x_var : Var or None
        Its input; None for an op of weights alone.
    y_var : Var
        Its output.
    hidden_groups : list of HiddenGroup
        The groups that ``y`` reaches position by position.
    y_to_hidden_group_jaxprs : list of Jaxpr
        Per group, from (the values of ``y_to_hidden_group_constvars``, ``y``) to its new states.
    connected_hidden_paths : list of Path
        The states that ``y`` reaches.
    eqn_params : dict
        The parameters of the op's equation.
    path_classification : dict
        Per state, ``'all_direct'``, or ``'mixed'`` if a part of the influence passes through
        something that mixes positions and is not traced.
    trainable_vars : dict
        Per trainable input of the op (``'weight'``, ``'bias'``), its variable.
    trainable_paths, trainable_leaf_indices, trainable_param_states : dict
        The parameter that it comes from: path, leaf, state.
    trainable_processing_chains : dict
        The primitives between the parameter and the op.
    y_to_hidden_group_constvars : list of list of Var
        The other variables that ``y_to_hidden_group_jaxprs`` read.
    f_patterns : list of tuple of bool
        Per group, ``[s]`` is False where ``d h_s(t) / d y(t)`` is zero by structure.
    is_position_wise : bool
        False if some influence of ``y`` on a reached state passes through an operation other than a
        matrix product that mixes positions.
    is_shared : bool
        Whether ``y`` has fewer axes than the states, so that the batch shares it.
    weight_ways : dict
        Per trainable input, its :class:`WeightWay` from the parameters.
    source : str
        The line of the user's code.
    """

    primitive: Primitive
    x_var: Var | None
    y_var: Var
    hidden_groups: list[HiddenGroup]
    y_to_hidden_group_jaxprs: list[Jaxpr]
    connected_hidden_paths: list[Path]
    eqn_params: dict[str, Any]
    path_classification: dict[Path, str] = {}
    trainable_vars: dict[str, Var] = {}
    trainable_paths: dict[str, Path] = {}
    trainable_leaf_indices: dict[str, int] = {}
    trainable_param_states: dict[str, brainstate.ParamState] = {}
    trainable_processing_chains: dict[str, tuple[Primitive, ...]] = {}
    y_to_hidden_group_constvars: list[list[Var]] = []
    f_patterns: list[tuple[bool, ...]] = []
    is_position_wise: bool = True
    is_shared: bool = False
    weight_ways: dict[str, WeightWay] = {}
    source: str = ''

    @property
    def x(self) -> Var | None:
        """The same as ``x_var``."""
        return self.x_var

    @property
    def y(self) -> Var:
        """The same as ``y_var``."""
        return self.y_var

    @property
    def path(self) -> Path:
        """The path of the weight."""
        return next(iter(self.trainable_paths.values()))

    @property
    def is_static(self) -> bool:
        """Whether the weights are functions of parameters and constants only."""
        return all(way.is_static for way in self.weight_ways.values())

    def y_to_hidden_groups(
        self,
        y_val: jax.Array,
        const_vals: Mapping[Var, jax.Array],
        concat_hidden_vals: bool = True,
    ) -> list[Any]:
        """The new states of every reached group as functions of ``y``.

        Parameters
        ----------
        y_val : jax.Array
            The op's output.
        const_vals : mapping of Var to jax.Array
            The values of the other variables.
        concat_hidden_vals : bool
            Whether to join the states of a group along a last axis.

        Returns
        -------
        list
            Per group, one array, or one per state.
        """
        results = []
        for group, jaxpr, constvars in zip(
            self.hidden_groups,
            self.y_to_hidden_group_jaxprs,
            self.y_to_hidden_group_constvars,
            strict=True,
        ):
            states = jax.core.eval_jaxpr(jaxpr, [const_vals[v] for v in constvars], y_val)
            results.append(group.concat_hidden(states) if concat_hidden_vals else states)
        return results

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        return repr(
            brainstate.util.PrettyMapping(self._asdict(), type_name=self.__class__.__name__)
        )


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
    """
    finder = _Finder(minfo, hid_path_to_group, step_flow(minfo) if flow is None else flow)
    relations = finder.relations()
    finder.note_other_weights()
    finder.note_carried_states()
    return relations


def find_hidden_param_op_relations_from_module(
    model: brainstate.nn.Module, *model_args: Any, **model_kwargs: Any
) -> list[HiddenParamOpRelation]:
    """Find the relations of a model.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model with initialised states.
    *model_args, **model_kwargs
        Example inputs of one step.

    Returns
    -------
    list of HiddenParamOpRelation

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> relations = braintrace.find_hidden_param_op_relations_from_module(gru, jnp.ones(3))
    >>> [relation.path for relation in relations]
    [('Wz', 'weight'), ('Wh', 'weight')]
    """
    minfo = extract_module_info(model, *model_args, **model_kwargs)
    flow = step_flow(minfo)
    _, hid_path_to_group = find_hidden_groups_from_minfo(minfo, flow)
    return find_hidden_param_op_relations_from_minfo(minfo, hid_path_to_group, flow)


class _Finder:
    def __init__(
        self, minfo: ModuleInfo, hid_path_to_group: Mapping[Path, HiddenGroup], flow: Flow
    ) -> None:
        self.minfo = minfo
        self.flow = flow
        self.ways = WeightWays(minfo, flow)
        self.carried = CarriedStates(minfo)
        self.groups = list({group.index: group for group in hid_path_to_group.values()}.values())
        self.outputs = _variables(minfo.jaxpr.outvars[: minfo.num_var_out])
        self.op_outputs = {
            v for eqn in flow.eqns if isinstance(eqn.primitive, ETPPrimitive) for v in eqn.outvars
        }
        self.explained: set[Path] = set()
        self.warned: set[Path] = set()

    def relations(self) -> list[HiddenParamOpRelation]:
        nested = frozenset(self.flow.nested)
        found = []
        for index, eqn in enumerate(self.flow.eqns):
            if isinstance(eqn.primitive, ETPPrimitive):
                found.append(self.relation(eqn))
            elif index in nested:
                self.look_inside(eqn, is_loop=index in self.flow.loops)
        return [relation for relation in found if relation is not None]

    def relation(self, eqn: JaxprEqn) -> HiddenParamOpRelation | None:
        ways = self.find_ways(eqn)
        if not ways:
            return None
        y = eqn.outvars[eqn.primitive.y_outvar_index]
        path = _first_path(ways)
        cuts = {
            new: self.flow.of(new)[y].cut_by
            for group in self.groups
            for new in group.hidden_outvars
            if y in self.flow.aligned(new)
        }
        groups = [g for g in self.groups if any(new in cuts for new in g.hidden_outvars)]
        if not groups:
            if not self.is_part_of_a_weight(y):
                self.exclude(eqn, y, ways)
            return None
        if jnp.issubdtype(y.aval.dtype, jnp.complexfloating):
            raise NotSupportedError(
                f'{source_line(eqn)}: the output of {eqn.primitive} on {path} is {y.aval.dtype}. '
                'Traces are of real values: give the real and imaginary part of the weight an op '
                'each, and join their outputs by jax.lax.complex.'
            )
        slices = [self.flow.slice([y], group.hidden_outvars) for group in groups]
        x_index = eqn.primitive.x_invar_index
        positions = eqn.primitive.trainable_invars(eqn.params)
        relation = HiddenParamOpRelation(
            primitive=eqn.primitive,
            x_var=None if x_index is None else eqn.invars[x_index],
            y_var=y,
            hidden_groups=groups,
            y_to_hidden_group_jaxprs=[part.jaxpr for part in slices],
            connected_hidden_paths=[self.minfo.outvar_to_hidden_path[new] for new in cuts],
            eqn_params=dict(eqn.params),
            path_classification={
                self.minfo.outvar_to_hidden_path[new]: 'mixed' if by else 'all_direct'
                for new, by in cuts.items()
            },
            trainable_vars={key: eqn.invars[positions[key]] for key in ways},
            trainable_paths={key: way.paths[way.main] for key, way in ways.items()},
            trainable_leaf_indices={key: way.leaf_indices[way.main] for key, way in ways.items()},
            trainable_param_states={
                key: self.minfo.state_of(way.paths[way.main]) for key, way in ways.items()
            },
            trainable_processing_chains={key: way.chain for key, way in ways.items()},
            y_to_hidden_group_constvars=[part.constvars for part in slices],
            f_patterns=[
                tuple(
                    reached
                    for new, width in zip(group.hidden_outvars, group.widths, strict=True)
                    for reached in self.flow.reaches(y, new, width)
                )
                for group in groups
            ],
            is_position_wise=all(
                is_product(self.flow.mixer(cut)) for by in cuts.values() for cut in by
            ),
            is_shared=y.aval.ndim < len(groups[0].varshape),
            weight_ways=ways,
            source=source_line(eqn),
        )
        self.include(relation, cuts)
        return relation

    def find_ways(self, eqn: JaxprEqn) -> dict[str, WeightWay]:
        """The ways to the op's trainable inputs that come from parameters."""
        positions = eqn.primitive.trainable_invars(eqn.params)
        found = {key: self.ways.find(eqn.invars[place]) for key, place in positions.items()}
        ways = {key: way for key, way in found.items() if way is not None and way.traced}
        for key in positions:
            way = found[key]
            if way is not None and not way.traced:
                self.explained.update(way.paths)
                self.emit(
                    DiagnosticKind.WEIGHT_VARIES_IN_TIME,
                    DiagnosticLevel.WARNING,
                    eqn,
                    f"the '{key}' of {eqn.primitive} is made from {list(way.paths)} and values "
                    'that change from step to step, and not element by element, so it is not '
                    'traced: it gets the gradient of the step, and none from the past. Apply the '
                    'varying factor after the op, or make it element-wise.',
                    weight_path=way.paths[way.main],
                )
            elif way is None:
                self.emit(
                    DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE
                    if ways
                    else DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE,
                    DiagnosticLevel.INFO,
                    eqn,
                    f"the '{key}' of {eqn.primitive} comes from no ParamState, so it is not "
                    'trained. Make it a brainstate.ParamState if it should be.',
                )
        return ways

    def include(self, relation: HiddenParamOpRelation, cuts: Mapping[Var, Sequence[int]]) -> None:
        self.explained.update(
            way.paths[place] for way in relation.weight_ways.values() for place in way.traced
        )
        eqn = self.flow.eqns[self.flow.producer[relation.y_var]]
        fields: dict[str, Any] = dict(
            weight_path=relation.path, hidden_paths=tuple(relation.connected_hidden_paths)
        )
        self.emit(
            DiagnosticKind.RELATION_INCLUDED,
            DiagnosticLevel.INFO,
            eqn,
            f'{relation.path} is traced through {relation.primitive} to '
            f'{relation.connected_hidden_paths}.',
            hidden_group_indices=tuple(group.index for group in relation.hidden_groups),
            **fields,
        )
        for cut in dict.fromkeys(cut for by in cuts.values() for cut in by):
            mixer = self.flow.mixer(cut)
            product = is_product(mixer)
            self.emit(
                DiagnosticKind.RELATION_PARTIAL_PATH
                if product
                else DiagnosticKind.TAIL_NOT_POSITION_WISE,
                DiagnosticLevel.INFO if product else DiagnosticLevel.WARNING,
                mixer,
                f'a part of the influence of {relation.path} on its hidden states passes through '
                f'{mixer.primitive.name}, which mixes positions; that part counts within the step, '
                'but is not traced from step to step.'
                + ('' if product else ' To have it traced, apply it before the op.'),
                **fields,
            )
        self.note_untraced_states(relation, eqn, cuts)
        if not relation.is_static:
            self.emit(
                DiagnosticKind.WEIGHT_VARIES_IN_TIME,
                DiagnosticLevel.INFO,
                eqn,
                f'{relation.path} is combined with values that change from step to step before the '
                'op; its trace is kept in the coordinates of the parameter, which takes longer. '
                'Apply the varying factor after the op, if the model allows it.',
                **fields,
            )

    def note_untraced_states(
        self, relation: HiddenParamOpRelation, eqn: JaxprEqn, traced: Mapping[Var, Any]
    ) -> None:
        """Say which states the op reaches as well, but not position by position."""
        y = relation.y_var
        for new, path in self.minfo.outvar_to_hidden_path.items():
            if new in traced or y not in self.flow.of(new):
                continue
            mixers = [self.flow.mixer(cut) for cut in self.flow.of(new)[y].cut_by]
            unfit = self.is_unfit(y, new, mixers)
            why = (
                f'its output has shape {y.aval.shape}, the state {new.aval.shape}'
                if unfit
                else f'it passes through operations that mix positions ({_names(mixers)})'
            )
            self.emit(
                DiagnosticKind.RELATION_PARTIAL_PATH,
                DiagnosticLevel.WARNING
                if unfit or not all(map(is_product, mixers))
                else DiagnosticLevel.INFO,
                eqn,
                f'the influence of {relation.path} on {path} is not traced, because {why}: it '
                'counts within the step, and not from step to step. To have it traced, use an op '
                'of its own for what feeds that state.',
                weight_path=relation.path,
                hidden_paths=(path,),
            )

    def is_part_of_a_weight(self, y: Var) -> bool:
        """Whether an op's output is but a part of the weights of others, as in ``w + a @ b``."""
        if not self.ways.is_weight(y):
            return False
        reached = self.carried.reached_from([y])
        readers = [
            (eqn, [v for v in eqn.invars if not isinstance(v, Literal) and v in reached])
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

    def exclude(self, eqn: JaxprEqn, y: Var, ways: Mapping[str, WeightWay]) -> None:
        """Say why an op with trained weights reaches no hidden state position by position."""
        hidden = [new for new in self.minfo.hidden_outvar_to_invar if y in self.flow.of(new)]
        cuts = dict.fromkeys(cut for new in hidden for cut in self.flow.of(new)[y].cut_by)
        mixers = [self.flow.mixer(cut) for cut in cuts]
        shapes = {new.aval.shape for new in hidden if self.is_unfit(y, new, mixers)}
        by = _names(mixers)
        kept = 'It gets the gradient of the step, and none from the past.'
        lasting = self.carried.lasting([y])
        if not hidden and lasting:
            kind, level = DiagnosticKind.CARRIED_STATE_NOT_TRACED, DiagnosticLevel.WARNING
            why = f'it reaches later steps only through {lasting}. {kept} {_MAKE_HIDDEN}'
        elif not hidden:
            kind, level = DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL, DiagnosticLevel.INFO
            why = f'it reaches no hidden state: its gradient needs no trace. {kept}'
        elif shapes:
            kind, level = DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH, DiagnosticLevel.WARNING
            why = (
                f'its output has shape {y.aval.shape}, the hidden states {sorted(shapes)}; they '
                f'must be equal, but for leading axes that the op may lack. {kept} To have it '
                + (
                    'traced, pass a single number to the op: w.reshape(()).'
                    if y.aval.size == 1
                    else 'traced, use an op of its own for each part of the output that feeds a '
                    'state.'
                )
            )
        elif all(isinstance(mixer.primitive, ETPPrimitive) for mixer in mixers):
            # A diagonal trace is meant to end there, as for a GRU's reset gate.
            kind, level = DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT, DiagnosticLevel.INFO
            why = (
                f'it reaches hidden states only through another ETP op ({by}). {kept} To have it '
                'traced, let its output flow into a hidden state directly.'
            )
        else:
            kind, level = DiagnosticKind.RELATION_EXCLUDED_POSITION_MIXING, DiagnosticLevel.WARNING
            why = (
                f'it reaches hidden states only through operations that mix positions ({by}). '
                f'{kept} To have it traced, apply the op after them.'
            )
        # Of several parameters behind one weight each gets its record.
        for path in dict.fromkeys(way.paths[p] for way in ways.values() for p in way.traced):
            self.explained.add(path)
            self.emit(
                kind,
                level,
                eqn,
                f'{path} is not traced: {why}',
                weight_path=path,
                hidden_paths=tuple(self.minfo.outvar_to_hidden_path[new] for new in hidden),
            )

    def is_unfit(self, y: Var, new: Var, mixers: Sequence[JaxprEqn]) -> bool:
        """Whether it is for its shape that an op's output does not reach a state: fused gates."""
        shape = self.flow.sources[new].shape
        fits = shape[max(len(shape) - y.aval.ndim, 0) :] == y.aval.shape
        return (y, new) in self.flow.unfit or not (fits or any(map(is_product, mixers)))

    def look_inside(self, eqn: JaxprEqn, is_loop: bool) -> None:
        """Refuse, or explain, an op or a weight inside an equation that was not opened."""
        if is_loop:
            self.check_while(eqn)
        if not any(self.ways.is_trained(v) for v in eqn.invars) or not contains_etp_op(eqn):
            return
        name, paths = eqn.primitive.name, self.paths_into(*eqn.invars)
        if name in CUSTOM_RULES:
            kind = DiagnosticKind.PRIMITIVE_INSIDE_CUSTOM_RULE
            advice = 'Move the op out of the function with the custom derivative.'
        else:
            kind = DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW
            advice = 'Move the op out of it' + {
                'scan': ', or raise ControlFlowPolicy(scan_unroll_limit=...).',
                'cond': ", or keep ControlFlowPolicy(cond='convert').",
            }.get(name, '.')
            if self.minfo.control_flow.etp_in_control_flow == 'error':
                raise NotImplementedError(
                    f'{source_line(eqn)}: an ETP op on {paths} is inside a {name} that is not '
                    f'opened, so it cannot be traced. {advice} To train these weights without a '
                    "trace, use ControlFlowPolicy(etp_in_control_flow='exclude')."
                )
        for path in paths:
            self.explained.add(path)
            self.emit(
                kind,
                DiagnosticLevel.WARNING,
                eqn,
                f'{path} is used by an ETP op inside a {name} and is not traced there; it gets the '
                f'gradient of the step, and none from the past. {advice}',
                weight_path=path,
            )

    def check_while(self, eqn: JaxprEqn) -> None:
        """Refuse a loop through which the gradient of a weight would be lost.

        A ``while`` has forward mode only; for values that move through it position by position,
        that is enough.
        """
        advice = 'Use lax.scan, or lax.fori_loop with a fixed number of steps, '
        for place, v in enumerate(eqn.invars):
            how = follows(eqn, place)
            if how is not None and self.ways.is_weight(v):
                self.refuse_while(
                    eqn,
                    self.paths_into(v),
                    'the weights at {} are used inside a while loop, which has no reverse mode. '
                    f'{advice}or move the weights out of the loop.',
                )
            if how is False and self.ways.is_trained(v):
                self.refuse_while(
                    eqn,
                    self.paths_into(v),
                    'values computed from the weights at {} enter a while loop that mixes their '
                    'positions; it has no reverse mode, so their gradient would be lost. '
                    f'{advice}or keep the loop position by position.',
                )
            paths = [
                self.minfo.invar_to_hidden_path[old]
                for old in self.flow.aligned(v)
                if old in self.minfo.invar_to_hidden_path
            ]
            if how is False and paths and self.is_read_by_output(eqn):
                self.emit(
                    DiagnosticKind.CONTROL_FLOW_OPAQUE_FWD,
                    DiagnosticLevel.WARNING,
                    eqn,
                    f'an output reads {paths} through a while loop that mixes their positions; '
                    'what it learns from the past by that way is lost. Use lax.scan, or '
                    'lax.fori_loop with a fixed number of steps.',
                    hidden_paths=tuple(paths),
                )

    def refuse_while(self, eqn: JaxprEqn, paths: list[Path], message: str) -> NoReturn:
        loop = _first_while(eqn)
        text = message.format(paths)
        for path in paths:
            self.emit(
                DiagnosticKind.WEIGHT_IN_WHILE, DiagnosticLevel.ERROR, loop, text, weight_path=path
            )
        raise NotImplementedError(f'{source_line(loop)}: {text}')

    def is_read_by_output(self, eqn: JaxprEqn) -> bool:
        """Whether a result of an equation reaches an output of the step past all new states."""
        results = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        reached = self.carried.reached_from(results, stop=self.flow.targets)
        return any(v in reached for v in self.outputs)

    def paths_into(self, *operands: Any) -> list[Path]:
        ways = [way for v in operands for way in [self.ways.find(v)] if way is not None]
        return list(dict.fromkeys(path for way in ways for path in way.paths))

    def note_other_weights(self) -> None:
        """Explain the weights of which no op has said anything."""
        for path, state in self.minfo.retrieved_model_states.items():
            if not isinstance(state, brainstate.ParamState):
                continue
            leaves = self.minfo.weight_path_to_invars.get(path, [])
            if path in self.explained:
                self.note_plain_use(path, leaves)
                continue
            reached = self.carried.reached_from(leaves)
            lasting = self.carried.lasting(leaves)
            hidden = not reached.isdisjoint(self.flow.targets)
            past_ops = self.reaches_past_ops(leaves)
            if not (hidden or lasting or any(v in reached for v in self.outputs)):
                emit(
                    DiagnosticKind.WEIGHT_NOT_USED,
                    DiagnosticLevel.INFO,
                    f'{path} is not used by the step, or no derivative by it flows into a result '
                    '(a stop_gradient, an integer); its gradient is zero.',
                    weight_path=path,
                )
                continue
            advice = 'It reaches no later step, so nothing is missing.'
            if lasting:
                advice = f'It reaches later steps through {lasting}. {_MAKE_HIDDEN}'
            elif hidden and not past_ops:
                advice = 'It reaches hidden states only through ETP ops, where traces end.'
            elif hidden:
                advice = (
                    'To have its influence over time traced, pass it through an op of this library '
                    '(matmul, element_wise, ...); an op that is vmapped over its weight is a plain '
                    'operation.'
                )
            readers = (e for e in self.flow.eqns if any(v in leaves for v in _variables(e.invars)))
            self.emit(
                DiagnosticKind.WEIGHT_WITHOUT_ETP_OP,
                DiagnosticLevel.WARNING if past_ops or lasting else DiagnosticLevel.INFO,
                next(readers, None),
                f'{path} passes through no ETP op: it gets the gradient of the step, and none from '
                f'the past. {advice}',
                weight_path=path,
            )

    def reaches_past_ops(self, variables: Sequence[Var]) -> bool:
        """Whether variables reach a hidden state by a way without an ETP op."""
        reached = self.carried.reached_from(variables, stop=self.op_outputs)
        return not reached.isdisjoint(self.flow.targets)

    def note_plain_use(self, path: Path, leaves: Sequence[Var]) -> None:
        """Say that a weight of which an op has told reaches hidden states by plain ways too."""
        if path in self.warned or not self.reaches_past_ops(leaves):
            return
        readers = (
            eqn
            for eqn in self.flow.eqns
            if any(v in leaves for v in _variables(eqn.invars))
            and self.reaches_past_ops([v for v in eqn.outvars if v not in self.op_outputs])
        )
        self.emit(
            DiagnosticKind.RELATION_PARTIAL_PATH,
            DiagnosticLevel.WARNING,
            next(readers, None),
            f'{path} also reaches hidden states through no ETP op: that use of it gets the '
            'gradient of the step, and none from the past. To have it traced, pass it through an '
            'op of this library (matmul, element_wise, ...) there too.',
            weight_path=path,
        )

    def note_carried_states(self) -> None:
        """Say by which states other than hidden ones influence lasts without being traced."""
        olds = list(self.minfo.hidden_outvar_to_invar.values())
        for path in self.carried.lasting([*olds, *self.minfo.weight_invars]):
            drivers = [
                self.minfo.invar_to_hidden_path[old]
                for old in olds
                if path in self.carried.lasting([old])
            ]
            emit(
                DiagnosticKind.CARRIED_STATE_NOT_TRACED,
                DiagnosticLevel.WARNING,
                f'{path} carries the influence of {drivers or "weights"} to later steps, and is '
                f'no HiddenState: that influence is not traced. {_MAKE_HIDDEN}',
                hidden_paths=tuple(drivers),
                context={'state': path},
            )

    def emit(
        self,
        kind: DiagnosticKind,
        level: DiagnosticLevel,
        eqn: JaxprEqn | None,
        message: str,
        weight_path: Path | None = None,
        hidden_paths: tuple[Path, ...] = (),
        **context: Any,
    ) -> None:
        line = UNKNOWN_LINE if eqn is None else source_line(eqn)
        if weight_path is not None and level is DiagnosticLevel.WARNING:
            self.warned.add(weight_path)
        emit(
            kind,
            level,
            f'{line}: {message}',
            primitive=None if eqn is None else eqn.primitive,
            weight_path=weight_path,
            hidden_paths=hidden_paths,
            context={'source': line, **context},
        )


def _first_path(ways: Mapping[str, WeightWay]) -> Path:
    return next(way.paths[way.main] for way in ways.values())


def _names(mixers: Sequence[JaxprEqn]) -> str:
    return ', '.join(dict.fromkeys(f'{m.primitive.name} at {source_line(m)}' for m in mixers))


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _first_while(eqn: JaxprEqn) -> JaxprEqn:
    """The while loop in an equation that has one."""
    if eqn.primitive.name == 'while':
        return eqn
    inner = (e for sub in jaxprs_in_params(eqn.params) for e in open_jaxpr(sub)[0].eqns)
    return _first_while(next(e for e in inner if has_while(e)))
