"""Weights and ops inside equations that were not opened: loops, branches, custom derivatives."""

from collections.abc import Iterable
from typing import Any, NoReturn

from .._compat import DropVar, JaxprEqn, jaxprs_in_params, open_jaxpr, source_line
from .._typing import Path
from .control_flow import contains_etp_op, has_while
from .diagnostics import DiagnosticKind, DiagnosticLevel
from .explanation import Explainer
from .primitives import CUSTOM_RULES
from .weight_way import WeightWays
from .while_loop import follows

__all__ = ['check_nested']

_FIXED_LENGTH = 'Use lax.scan, or lax.fori_loop with a fixed number of steps, '


def check_nested(explainer: Explainer, ways: WeightWays, index: int) -> None:
    """Refuse, or explain, the ops and weights inside an equation that was not opened.

    Raises
    ------
    NotImplementedError
        If a weight is used inside a ``while``, or what it drives is mixed there; or if an op is
        inside control flow and the policy does not exclude it.
    """
    eqn = explainer.flow.eqns[index]
    if index in explainer.flow.loops:
        _check_while(explainer, ways, eqn)
    _check_ops(explainer, ways, eqn)


def _check_ops(explainer: Explainer, ways: WeightWays, eqn: JaxprEqn) -> None:
    """An ETP op that is still inside another equation is not traced."""
    if not any(ways.is_trained(v) for v in eqn.invars) or not contains_etp_op(eqn):
        return
    name, paths = eqn.primitive.name, _paths_into(ways, eqn.invars)
    if name in CUSTOM_RULES:
        kind = DiagnosticKind.PRIMITIVE_INSIDE_CUSTOM_RULE
        advice = 'Move the op out of the function with the custom derivative.'
    else:
        kind = DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW
        advice = 'Move the op out of it' + {
            'scan': ", keep ControlFlowPolicy(scan_descent='auto'), or raise scan_unroll_limit.",
            'cond': ", or keep ControlFlowPolicy(cond='convert').",
        }.get(name, '.')
        if explainer.minfo.control_flow.etp_in_control_flow == 'error':
            raise NotImplementedError(
                f'{source_line(eqn)}: an ETP op on {paths} is inside a {name} that is not '
                f'opened, so it cannot be traced. {advice} To train these weights without a '
                "trace, use ControlFlowPolicy(etp_in_control_flow='exclude')."
            )
    for path in paths:
        explainer.explained.add(path)
        explainer.emit(
            kind,
            DiagnosticLevel.WARNING,
            eqn,
            f'{path} is used by an ETP op inside a {name} and is not traced there; it gets the '
            f'gradient of the step, and none from the past. {advice}',
            weight_path=path,
        )


def _check_while(explainer: Explainer, ways: WeightWays, eqn: JaxprEqn) -> None:
    """Refuse a loop through which the gradient of a weight would be lost.

    A ``while`` has forward mode only, which is enough for values that move through it position by
    position.
    """
    for place, v in enumerate(eqn.invars):
        how = follows(eqn, place)
        if how is not None and ways.is_weight(v):
            _refuse_while(
                explainer,
                eqn,
                _paths_into(ways, [v]),
                'the weights at {} are used inside a while loop, which has no reverse mode. '
                f'{_FIXED_LENGTH}or move the weights out of the loop.',
            )
        if how is False and ways.is_trained(v):
            _refuse_while(
                explainer,
                eqn,
                _paths_into(ways, [v]),
                'values computed from the weights at {} enter a while loop that mixes their '
                'positions; it has no reverse mode, so their gradient would be lost. '
                f'{_FIXED_LENGTH}or keep the loop position by position.',
            )
        if how is False:
            _note_lost_output(explainer, eqn, v)


def _note_lost_output(explainer: Explainer, eqn: JaxprEqn, operand: Any) -> None:
    """Say that an output reads a hidden state through a loop that mixes its positions."""
    path_of = explainer.minfo.invar_to_hidden_path
    paths = [path_of[old] for old in explainer.flow.aligned(operand) if old in path_of]
    if paths and _is_read_by_output(explainer, eqn):
        explainer.emit(
            DiagnosticKind.CONTROL_FLOW_OPAQUE_FWD,
            DiagnosticLevel.WARNING,
            eqn,
            f'an output reads {paths} through a while loop that mixes their positions; '
            'what would be learned from the past that way is lost. Use lax.scan, or '
            'lax.fori_loop with a fixed number of steps.',
            hidden_paths=tuple(paths),
        )


def _refuse_while(explainer: Explainer, eqn: JaxprEqn, paths: list[Path], message: str) -> NoReturn:
    loop = _first_while(eqn)
    text = message.format(paths)
    for path in paths:
        explainer.emit(
            DiagnosticKind.WEIGHT_IN_WHILE, DiagnosticLevel.ERROR, loop, text, weight_path=path
        )
    raise NotImplementedError(f'{source_line(loop)}: {text}')


def _is_read_by_output(explainer: Explainer, eqn: JaxprEqn) -> bool:
    """Whether a result of an equation reaches an output of the step past all new states."""
    results = [v for v in eqn.outvars if not isinstance(v, DropVar)]
    reached = explainer.carried.reached_from(results, stop=explainer.flow.targets)
    return any(v in reached for v in explainer.outputs)


def _paths_into(ways: WeightWays, operands: Iterable[Any]) -> list[Path]:
    """The parameters that lead to some operands."""
    leading = [way for v in operands for way in [ways.find(v)] if way is not None]
    return list(dict.fromkeys(path for way in leading for path in way.paths))


def _first_while(eqn: JaxprEqn) -> JaxprEqn:
    """The while loop in an equation that has one."""
    if eqn.primitive.name == 'while':
        return eqn
    inner = (e for sub in jaxprs_in_params(eqn.params) for e in open_jaxpr(sub)[0].eqns)
    return _first_while(next(e for e in inner if has_while(e)))
