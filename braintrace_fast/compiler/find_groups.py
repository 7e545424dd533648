"""Which hidden states form a group, and which influence between states is not traced."""

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import brainstate
from brainstate import HiddenGroupState

from .._compat import JaxprEqn, Var, source_line
from .._typing import Path
from ..op import ETPPrimitive
from .alignment import fixpoint_limit
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .flow import Flow, Source
from .hidden_group import HiddenGroup
from .mixing import cut_out
from .module_info import ModuleInfo, extract_module_info
from .neighbours import MOST_ELEMENTS, check_size, snap_pattern
from .primitives import is_product
from .scope import Neighbourhood, Scope, requested_scope

__all__ = [
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'merge',
    'step_flow',
]

CONTROL_FLOW = ('cond', 'scan', 'while')


def step_flow(minfo: ModuleInfo, scope: Scope | None = None) -> Flow:
    """The flow of a step from its hidden states, old and new, and from its ETP ops' outputs."""
    sources: dict[Var, Source] = {}
    for new, old in minfo.hidden_outvar_to_invar.items():
        state = minfo.state_of(minfo.outvar_to_hidden_path[new])
        ndim = old.aval.ndim - isinstance(state, HiddenGroupState)
        sources[old] = sources[new] = Source(old.aval.shape[:ndim])
    for eqn in minfo.jaxpr.eqns:
        if isinstance(eqn.primitive, ETPPrimitive):
            y = eqn.outvars[eqn.primitive.y_outvar_index]
            front = int(y in minfo.substeps)
            sources[y] = Source(y.aval.shape[front:], may_be_shared=True, front=front)
    with fixpoint_limit(minfo.control_flow.fixpoint_iteration_limit):
        return Flow(minfo.jaxpr.eqns, sources, minfo.hidden_outvar_to_invar, scope)


def find_hidden_groups_from_minfo(
    minfo: ModuleInfo,
    include_recurrent_mixing: bool = False,
    sparse_n: int | None = None,
    snap_max_jacobian_elements: int = MOST_ELEMENTS,
    *,
    flow: Flow | None = None,
    couple_layers: bool = False,
) -> tuple[list[HiddenGroup], brainstate.util.PrettyDict]:
    """Find the hidden groups of a traced model.

    States are in one group if one reaches another within a step, position by position, directly or
    through others. Groups, and the states in them, come in the order of the model's states. Modules
    in a list are layers, and states of two layers share a group only if ``couple_layers`` says so.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.
    include_recurrent_mixing, sparse_n, snap_max_jacobian_elements
        As for :func:`compile_etrace_graph`.
    flow : Flow, optional
        ``step_flow(minfo, scope)``, where it is at hand; it has the scope then.
    couple_layers : bool
        Whether states of two layers that drive each other position by position are one group.

    Returns
    -------
    hidden_groups : list of HiddenGroup
    hid_path_to_group : brainstate.util.PrettyDict
        The group of each hidden state that the step uses.
    """
    if flow is None:
        scope = requested_scope(include_recurrent_mixing, sparse_n, couple_layers)
        flow = step_flow(minfo, scope)
    news = list(minfo.hidden_outvar_to_invar)
    path_of = minfo.outvar_to_hidden_path
    linked = [
        [
            new,
            *(target for target in news if _drives(minfo, flow, new, target, couple_layers)),
        ]
        for new in news
    ]
    groups: list[HiddenGroup] = []
    for members in merge(linked):
        ordered = [new for new in news if new in members]
        groups.append(_make_group(len(groups), minfo, flow, ordered))
        if len(ordered) > 1:
            paths = tuple(path_of[new] for new in ordered)
            emit(
                DiagnosticKind.HIDDEN_GROUP_MERGED,
                DiagnosticLevel.INFO,
                f'{list(paths)} drive each other position by position and form one group.',
                hidden_paths=paths,
            )
    if sparse_n is not None:
        check_size(groups, snap_max_jacobian_elements)
    _note_untraced_couplings(minfo, flow, groups)
    by_path = {path: group for group in groups for path in group.hidden_paths}
    return groups, brainstate.util.PrettyDict(by_path)


def find_hidden_groups_from_module(
    model: brainstate.nn.Module,
    *model_args: Any,
    include_recurrent_mixing: bool = False,
    sparse_n: int | None = None,
    snap_max_jacobian_elements: int = MOST_ELEMENTS,
    **model_kwargs: Any,
) -> tuple[list[HiddenGroup], brainstate.util.PrettyDict]:
    """:func:`find_hidden_groups_from_minfo` of a model, traced by :func:`extract_module_info`.

    Examples
    --------
    >>> import brainstate, braintrace_fast as braintrace, jax.numpy as jnp
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> groups, by_path = braintrace.find_hidden_groups_from_module(gru, jnp.ones(3))
    >>> len(groups), list(by_path)
    (1, [('h',)])
    """
    return find_hidden_groups_from_minfo(
        extract_module_info(model, *model_args, **model_kwargs),
        include_recurrent_mixing,
        sparse_n,
        snap_max_jacobian_elements,
    )


def _drives(minfo: ModuleInfo, flow: Flow, new: Var, target: Var, couple_layers: bool) -> bool:
    """Whether the old value of one state reaches the new value of another one in its scope."""
    path_of = minfo.outvar_to_hidden_path
    return minfo.hidden_outvar_to_invar[new] in flow.aligned(target) and (
        couple_layers or flow.scope.couples(path_of[new], path_of[target])
    )


def _make_group(index: int, minfo: ModuleInfo, flow: Flow, news: list[Var]) -> HiddenGroup:
    olds = [minfo.hidden_outvar_to_invar[new] for new in news]
    paths = [minfo.outvar_to_hidden_path[new] for new in news]
    mixes = flow.scope.mixes
    part = cut_out(flow, olds, news) if mixes else flow.slice(olds, news)
    group = HiddenGroup(
        index=index,
        hidden_paths=paths,
        hidden_states=[minfo.state_of(path) for path in paths],
        hidden_invars=olds,
        hidden_outvars=news,
        transition_jaxpr=part.jaxpr,
        transition_jaxpr_constvars=part.constvars,
        is_diagonal_recurrence=not mixes,
        is_position_wise=not _note_mixing(minfo, flow, olds, news),
    )
    group.check_consistent_varshape()
    pattern = _pattern(flow, olds, news, group.widths)
    if mixes:
        pattern = _mixed_pattern(flow, olds, news, group.widths, pattern)
    if part.forward_only:
        _note_forward_only(minfo, flow, tuple(paths))
    n = flow.scope.n if isinstance(flow.scope, Neighbourhood) else None
    snap = None if n is None else snap_pattern(minfo, flow, group, n)
    return group._replace(pattern=pattern, snap=snap)


def _pattern(
    flow: Flow, olds: list[Var], news: list[Var], widths: tuple[int, ...]
) -> tuple[tuple[bool, ...], ...]:
    """``D``'s structure, plane by plane; each plane of a wide state is a source of its own."""
    columns = []
    for old, width in zip(olds, widths, strict=True):
        for plane in range(width or 1):
            by_plane = flow
            if width:
                sources = {v: flow.sources[v] for v in flow.targets}
                sources[old] = flow.sources[old]._replace(plane=plane)
                by_plane = Flow(flow.eqns, sources, flow.targets, flow.scope)
            rows = zip(news, widths, strict=True)
            columns.append([r for new, w in rows for r in by_plane.reaches(old, new, w)])
    return tuple(zip(*columns, strict=True))


def _mixed_pattern(
    flow: Flow,
    olds: list[Var],
    news: list[Var],
    widths: tuple[int, ...],
    pattern: tuple[tuple[bool, ...], ...],
) -> tuple[tuple[bool, ...], ...]:
    """A pattern with what passes through mixed positions, which reaches all planes of a state."""
    rows = [new for new, width in zip(news, widths, strict=True) for _ in range(width or 1)]
    columns = [old for old, width in zip(olds, widths, strict=True) for _ in range(width or 1)]
    return tuple(
        tuple(
            aligned or (old in flow.of(new) and bool(flow.of(new)[old].cut_by))
            for aligned, old in zip(row, columns, strict=True)
        )
        for row, new in zip(pattern, rows, strict=True)
    )


def _note_mixing(minfo: ModuleInfo, flow: Flow, olds: list[Var], news: list[Var]) -> bool:
    """Whether states reach each other through mixing other than products; emits records."""
    cuts = dict.fromkeys(
        cut
        for new in news
        for old in olds
        if old in flow.of(new)
        for cut in flow.of(new)[old].cut_by
        if not is_product(flow.mixer(cut))
    )
    if flow.scope.mixes:  # it is traced
        return bool(cuts)
    for cut in cuts:
        eqn = flow.mixer(cut)
        paths = tuple(minfo.outvar_to_hidden_path[new] for new in news)
        emit(
            DiagnosticKind.CONTROL_FLOW_RECURRENT_MIXING
            if eqn.primitive.name in CONTROL_FLOW
            else DiagnosticKind.TRANSITION_NOT_POSITION_WISE,
            DiagnosticLevel.WARNING,
            f'{source_line(eqn)}: {list(paths)} reach each other through {eqn.primitive.name}, '
            'which mixes positions. That influence counts within the step, but is not traced from '
            'step to step. Nothing need be changed if it is meant to be weak; to trace it, write '
            'the coupling position by position.',
            primitive=eqn.primitive,
            hidden_paths=paths,
            context={'source': source_line(eqn)},
        )
    return bool(cuts)


def _note_forward_only(minfo: ModuleInfo, flow: Flow, paths: tuple[Path, ...]) -> None:
    loops = [eqn for eqn in flow.eqns if eqn.primitive.name == 'while']
    where = ', '.join(source_line(eqn) for eqn in loops) or 'inside a nested loop'
    if minfo.control_flow.while_hidden == 'error':
        raise NotImplementedError(
            f'{where}: {list(paths)} pass through a while loop, which the policy '
            "while_hidden='error' forbids. Use lax.scan or lax.fori_loop with a fixed number of "
            "steps, or ControlFlowPolicy(while_hidden='opaque-fwd')."
        )
    emit(
        DiagnosticKind.CONTROL_FLOW_OPAQUE_FWD,
        DiagnosticLevel.INFO,
        f'{where}: {list(paths)} pass through a while loop; their Jacobian is taken in forward '
        'mode.',
        hidden_paths=paths,
        context={'source': where},
    )


def _note_untraced_couplings(minfo: ModuleInfo, flow: Flow, groups: list[HiddenGroup]) -> None:
    """Say where one group drives another: that is not traced from step to step."""
    path_of = minfo.outvar_to_hidden_path
    for group, other in itertools.permutations(groups, 2):
        pairs = [
            (path, old, new)
            for path, old in zip(group.hidden_paths, group.hidden_invars, strict=True)
            for new in other.hidden_outvars
            if old in flow.of(new)
        ]
        in_place = [pair for pair in pairs if pair[1] in flow.aligned(pair[2])]
        if pairs:
            told = in_place or pairs
            drivers = tuple(dict.fromkeys(path for path, _, _ in told))
            driven = tuple(dict.fromkeys(path_of[new] for _, _, new in told))
            cuts = dict.fromkeys(cut for _, old, new in told for cut in flow.of(new)[old].cut_by)
            mixers = [] if in_place else [flow.mixer(cut) for cut in cuts]
            _note_coupling(drivers, driven, mixers)


def _note_coupling(
    drivers: tuple[Path, ...], driven: tuple[Path, ...], mixers: list[JaxprEqn]
) -> None:
    """Say that states drive others through equations that mix positions, or, with none, in place.

    A diagonal trace leaves couplings by products out by design.
    """
    lines = list(dict.fromkeys(map(source_line, mixers)))
    names = dict.fromkeys(f'{m.primitive.name} at {source_line(m)}' for m in mixers)
    if mixers:
        how = f'by other positions or in another shape ({", ".join(names)})'
        advice = 'To have it traced, write it position by position, between states of one shape.'
    else:
        how = 'position by position, but are modules of a list, which are layers of their own'
        advice = 'To have it traced, compile with couple_layers=True, or make them attributes.'
    by_products = bool(mixers) and all(map(is_product, mixers))
    emit(
        DiagnosticKind.HIDDEN_COUPLING_NOT_TRACED,
        DiagnosticLevel.INFO if by_products else DiagnosticLevel.WARNING,
        f'{list(drivers)} drive {list(driven)} {how}: the coupling counts within the step only, '
        f'and is not traced from step to step. {"" if by_products else advice}'.rstrip(),
        hidden_paths=(*drivers, *driven),
        context={'drivers': drivers, **({'source': lines[0]} if lines else {})},
    )


def merge(groups: Iterable[Iterable[Hashable]]) -> list[list[Any]]:
    """Merged groups; they and their members are in order of appearance."""
    groups = [tuple(members) for members in groups]
    order = {m: n for n, m in enumerate(dict.fromkeys(m for members in groups for m in members))}
    merged: list[set[Hashable]] = []
    for members in groups:
        joined, apart = set(members), []
        for group in merged:
            if joined.isdisjoint(group):
                apart.append(group)
            else:
                joined |= group
        merged = [*apart, joined]
    ordered = [sorted(group, key=order.__getitem__) for group in merged if group]
    return sorted(ordered, key=lambda group: order[group[0]])
