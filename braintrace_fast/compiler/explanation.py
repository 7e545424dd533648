"""Why a weight is traced, traced in part or not at all: the records that the user reads.

:mod:`.find_relations` decides; nothing here has a say in what is traced.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import brainstate

from .._compat import UNKNOWN_LINE, JaxprEqn, Var, source_line
from .._typing import Path
from ..op import ETPPrimitive
from .carried import CarriedStates
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .flow import Flow
from .liveness import variables
from .module_info import ModuleInfo
from .primitives import is_product
from .relation import HiddenParamOpRelation
from .weight_way import WeightWay

__all__ = ['Explainer']

_KEPT = 'It gets the gradient of the step, and none from the past.'
_MAKE_HIDDEN = 'To have it traced, make the state a brainstate.HiddenState.'


class _Reason(NamedTuple):
    kind: DiagnosticKind
    level: DiagnosticLevel
    text: str


class Explainer:
    """Emits records about the weights of a step, and remembers whose story has been told.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.
    flow : Flow
        Its flow.
    carried : CarriedStates
        Its states that carry influence from step to step without being traced.
    """

    def __init__(self, minfo: ModuleInfo, flow: Flow, carried: CarriedStates) -> None:
        self.minfo, self.flow, self.carried = minfo, flow, carried
        self.outputs = variables(minfo.jaxpr.outvars[: minfo.num_var_out])
        self.op_outputs = {
            v for eqn in flow.eqns if isinstance(eqn.primitive, ETPPrimitive) for v in eqn.outvars
        }
        self.explained: set[Path] = set()
        self.warned: set[Path] = set()

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
        """Add a record, with the line of the user's code that an equation comes from."""
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

    def varying(self, eqn: JaxprEqn, key: str, way: WeightWay) -> None:
        """A trainable input that is made from values of the step, and not element by element."""
        self.explained.update(way.paths)
        self.emit(
            DiagnosticKind.WEIGHT_VARIES_IN_TIME,
            DiagnosticLevel.WARNING,
            eqn,
            f"the '{key}' of {eqn.primitive} is made from {list(way.paths)} and values that change "
            'from step to step, and not element by element, so it is not traced: it gets the '
            'gradient of the step, and none from the past. Apply the varying factor after the op, '
            'or make it element-wise.',
            weight_path=way.paths[way.main],
        )

    def untrained(self, eqn: JaxprEqn, key: str, is_only_input: bool) -> None:
        """A trainable input that no parameter leads to."""
        self.emit(
            DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE
            if is_only_input
            else DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
            DiagnosticLevel.INFO,
            eqn,
            f"the '{key}' of {eqn.primitive} comes from no ParamState, so it is not trained. Make "
            'it a brainstate.ParamState if it should be.',
            key=key,
        )

    def included(self, relation: HiddenParamOpRelation, cuts: Mapping[Var, Sequence[int]]) -> None:
        """A traced op, and the part of its influence that is not traced."""
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
            self._partly_cut(relation.path, self.flow.mixer(cut), fields)
        self._untraced_states(relation, eqn, cuts)
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

    def _partly_cut(self, path: Path, mixer: JaxprEqn, fields: dict[str, Any]) -> None:
        """A traced weight that reaches its states through an equation that mixes as well."""
        product = is_product(mixer)
        self.emit(
            DiagnosticKind.RELATION_PARTIAL_PATH
            if product
            else DiagnosticKind.TAIL_NOT_POSITION_WISE,
            DiagnosticLevel.INFO if product else DiagnosticLevel.WARNING,
            mixer,
            f'a part of the influence of {path} on its hidden states passes through '
            f'{mixer.primitive.name}, which mixes positions; that part counts within the step, '
            'but is not traced from step to step.'
            + ('' if product else ' To have it traced, apply it before the op.'),
            **fields,
        )

    def _untraced_states(
        self, relation: HiddenParamOpRelation, eqn: JaxprEqn, traced: Mapping[Var, Any]
    ) -> None:
        """The states that a traced op reaches as well, but not position by position."""
        y = relation.y_var
        for new, path in self.minfo.outvar_to_hidden_path.items():
            if new in traced or y not in self.flow.of(new):
                continue
            mixers = [self.flow.mixer(cut) for cut in self.flow.of(new)[y].cut_by]
            unfit = self._is_unfit(y, new, mixers)
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

    def excluded(self, eqn: JaxprEqn, y: Var, ways: Mapping[str, WeightWay]) -> None:
        """An op with trained weights that reaches no hidden state position by position."""
        hidden = [new for new in self.minfo.hidden_outvar_to_invar if y in self.flow.of(new)]
        kind, level, why = self._temporal_reason(y, hidden) or self._mixing_reason(y, hidden)
        # Each of several parameters behind one weight gets a record.
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

    def _temporal_reason(self, y: Var, hidden: Sequence[Var]) -> _Reason | None:
        """Why an op that reaches no hidden state is not traced."""
        if hidden:
            return None
        lasting = self.carried.lasting([y])
        if lasting:
            return _Reason(
                DiagnosticKind.CARRIED_STATE_NOT_TRACED,
                DiagnosticLevel.WARNING,
                f'it reaches later steps only through {lasting}. {_KEPT} {_MAKE_HIDDEN}',
            )
        return _Reason(
            DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
            DiagnosticLevel.INFO,
            f'it reaches no hidden state: its gradient needs no trace. {_KEPT}',
        )

    def _mixing_reason(self, y: Var, hidden: Sequence[Var]) -> _Reason:
        """Why an op that reaches hidden states, but not position by position, is not traced."""
        cuts = dict.fromkeys(cut for new in hidden for cut in self.flow.of(new)[y].cut_by)
        mixers = [self.flow.mixer(cut) for cut in cuts]
        shapes = {new.aval.shape for new in hidden if self._is_unfit(y, new, mixers)}
        by = _names(mixers)
        if shapes:
            return _Reason(
                DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
                DiagnosticLevel.WARNING,
                f'its output has shape {y.aval.shape}, the hidden states {sorted(shapes)}; they '
                f'must be equal, but for leading axes that the op may lack. {_KEPT} To have it '
                + (
                    'traced, pass a single number to the op: w.reshape(()).'
                    if y.aval.size == 1
                    else 'traced, use an op of its own for each part of the output that feeds a '
                    'state.'
                ),
            )
        if all(isinstance(mixer.primitive, ETPPrimitive) for mixer in mixers):
            # A diagonal trace is meant to end there, as for a GRU's reset gate.
            return _Reason(
                DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
                DiagnosticLevel.INFO,
                f'it reaches hidden states only through another ETP op ({by}). {_KEPT} To have it '
                'traced, let its output flow into a hidden state directly.',
            )
        return _Reason(
            DiagnosticKind.RELATION_EXCLUDED_POSITION_MIXING,
            DiagnosticLevel.WARNING,
            f'it reaches hidden states only through operations that mix positions ({by}). '
            f'{_KEPT} To have it traced, apply the op after them.',
        )

    def _is_unfit(self, y: Var, new: Var, mixers: Sequence[JaxprEqn]) -> bool:
        """Whether an op's output does not reach a state because of its shape: fused gates."""
        shape = self.flow.sources[new].shape
        fits = shape[max(len(shape) - y.aval.ndim, 0) :] == y.aval.shape
        return (y, new) in self.flow.unfit or not (fits or any(map(is_product, mixers)))

    def remaining_weights(self) -> None:
        """The weights about which no op has said anything."""
        for path, state in self.minfo.retrieved_model_states.items():
            if isinstance(state, brainstate.ParamState):
                leaves = self.minfo.weight_path_to_invars.get(path, [])
                if path in self.explained:
                    self._plain_use(path, leaves)
                else:
                    self._without_op(path, leaves)

    def _without_op(self, path: Path, leaves: Sequence[Var]) -> None:
        """A weight that passes through no op."""
        reached = self.carried.reached_from(leaves)
        lasting = self.carried.lasting(leaves)
        hidden = not reached.isdisjoint(self.flow.targets)
        past_ops = self._reaches_past_ops(leaves)
        if not (hidden or lasting or any(v in reached for v in self.outputs)):
            emit(
                DiagnosticKind.WEIGHT_NOT_USED,
                DiagnosticLevel.INFO,
                f'{path} is not used by the step, or no derivative by it flows into a result '
                '(a stop_gradient, an integer); its gradient is zero.',
                weight_path=path,
            )
            return
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
        readers = (e for e in self.flow.eqns if any(v in leaves for v in variables(e.invars)))
        self.emit(
            DiagnosticKind.WEIGHT_WITHOUT_ETP_OP,
            DiagnosticLevel.WARNING if past_ops or lasting else DiagnosticLevel.INFO,
            next(readers, None),
            f'{path} passes through no ETP op: it gets the gradient of the step, and none from '
            f'the past. {advice}',
            weight_path=path,
        )

    def _plain_use(self, path: Path, leaves: Sequence[Var]) -> None:
        """A weight that an op uses, if it reaches hidden states without an op as well."""
        if path in self.warned or not self._reaches_past_ops(leaves):
            return
        readers = (
            eqn
            for eqn in self.flow.eqns
            if any(v in leaves for v in variables(eqn.invars))
            and self._reaches_past_ops([v for v in eqn.outvars if v not in self.op_outputs])
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

    def _reaches_past_ops(self, sources: Sequence[Var]) -> bool:
        """Whether variables reach a hidden state along a path without an ETP op."""
        reached = self.carried.reached_from(sources, stop=self.op_outputs)
        return not reached.isdisjoint(self.flow.targets)

    def carried_states(self) -> None:
        """The states, other than hidden ones, that carry influence untraced."""
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
                f'not a HiddenState: that influence is not traced. {_MAKE_HIDDEN}',
                hidden_paths=tuple(drivers),
                context={'state': path},
            )


def _names(mixers: Sequence[JaxprEqn]) -> str:
    return ', '.join(dict.fromkeys(f'{m.primitive.name} at {source_line(m)}' for m in mixers))
