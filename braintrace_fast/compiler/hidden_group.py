"""Hidden states that drive each other position by position, found from the step's jaxpr."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from brainstate import HiddenGroupState

from .._compat import Jaxpr, JaxprEqn, Var, source_line
from .._typing import Path, PyTree
from ..errors import NotSupportedError
from ..op import ETPPrimitive
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .flow import Flow, Source
from .module_info import ModuleInfo, extract_module_info
from .primitives import is_product
from .scope import Scope
from .transition import is_forward_only, position_wise_jvp

__all__ = [
    'HiddenGroup',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'group_merging',
    'jacrev_last_dim',
    'step_flow',
]


class HiddenGroup(NamedTuple):
    r"""Hidden states over a common shape that drive each other position by position.

    .. math::

        h_1^t, h_2^t, \ldots = f(h_1^{t-1}, h_2^{t-1}, \ldots, x^t)

    Attributes
    ----------
    index : int
        The position of this group in the graph.
    hidden_paths : list of Path
        Where the states live.
    hidden_states : list of brainstate.HiddenState
        The states.
    hidden_invars, hidden_outvars : list of Var
        Their variables before and after the step.
    transition_jaxpr : Jaxpr
        The transition, with everything that mixes positions cut out: it takes the values of
        ``transition_jaxpr_constvars``, then the old states.
    transition_jaxpr_constvars : list of Var
        The other variables of the step that the transition reads.
    pattern : tuple of tuple of bool
        ``pattern[s][q]`` is False where ``d h_s(t) / d h_q(t-1)`` is zero by structure.
    is_position_wise : bool
        False if states of the group also reach each other through an operation other than a matrix
        product that mixes positions (a reduction, a permutation); that influence is not traced.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> lstm = braintrace.nn.LSTMCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(lstm)
    >>> (group,), _ = braintrace.find_hidden_groups_from_module(lstm, jnp.ones(3))
    >>> group.hidden_paths, group.pattern
    ([('c',), ('h',)], ((True, False), (True, False)))
    """

    index: int  # type: ignore[assignment]  # a field by the reference's name, hides tuple.index
    hidden_paths: list[Path]
    hidden_states: list[brainstate.HiddenState]
    hidden_invars: list[Var]
    hidden_outvars: list[Var]
    transition_jaxpr: Jaxpr
    transition_jaxpr_constvars: list[Var]
    pattern: tuple[tuple[bool, ...], ...] = ()
    is_position_wise: bool = True

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of one state plane, in the step that was compiled.

        The states themselves may since have got an axis more, over which a learner is mapped.
        """
        state = self.hidden_states[0]
        if not self.hidden_invars:
            return tuple(state.varshape)
        shape = tuple(self.hidden_invars[0].aval.shape)
        return shape[:-1] if isinstance(state, HiddenGroupState) else shape

    @property
    def num_state(self) -> int:
        """The number of state planes."""
        return sum(state.num_state for state in self.hidden_states)

    @property
    def widths(self) -> tuple[int, ...]:
        """Per state, the length of its own state axis; 0 for a state without one."""
        return tuple(
            state.num_state if isinstance(state, HiddenGroupState) else 0
            for state in self.hidden_states
        )

    def check_consistent_varshape(self) -> None:
        """Check that all states have one shape.

        Raises
        ------
        NotSupportedError
            If they have not.
        """
        shapes = {
            path: tuple(state.varshape)
            for path, state in zip(self.hidden_paths, self.hidden_states, strict=True)
        }
        if len(set(shapes.values())) > 1:
            raise NotSupportedError(
                f'The hidden states of group {self.index} have different shapes: {shapes}. States '
                'of a group are coupled position by position and must have the same shape; give '
                'them the same shape, or keep them in groups of their own.'
            )

    def transition(self, hidden_vals: Sequence[jax.Array], input_vals: PyTree) -> list[jax.Array]:
        """The new states.

        Parameters
        ----------
        hidden_vals : sequence of jax.Array
            The old states.
        input_vals : sequence of jax.Array
            The values of ``transition_jaxpr_constvars``.
        """
        return jax.core.eval_jaxpr(self.transition_jaxpr, input_vals, *hidden_vals)

    def diagonal_jacobian(self, hidden_vals: Sequence[jax.Array], input_vals: PyTree) -> jax.Array:
        """``[..., a, b] = d h_a(t) / d h_b(t-1)`` per position, of shape ``(*varshape, S, S)``.

        Parameters
        ----------
        hidden_vals : sequence of jax.Array
            The old states.
        input_vals : sequence of jax.Array
            The values of ``transition_jaxpr_constvars``.
        """
        if is_forward_only(self.transition_jaxpr):
            return self._forward_jacobian(hidden_vals, input_vals)
        return jacrev_last_dim(
            lambda planes: self.concat_hidden(
                self.transition(self._split_like(hidden_vals, planes), input_vals)
            ),
            self.concat_hidden(hidden_vals),
        )

    def _forward_jacobian(
        self, hidden_vals: Sequence[jax.Array], input_vals: Sequence[jax.Array]
    ) -> jax.Array:
        eye = jnp.eye(self.num_state)
        columns = []
        for unit in eye:
            planes = jnp.broadcast_to(unit, (*self.varshape, self.num_state))
            tangents = self._split_like(hidden_vals, planes)
            news, moved = position_wise_jvp(
                self.transition_jaxpr, input_vals, hidden_vals, tangents
            )
            filled = [
                jnp.zeros_like(new) if m is None else m for new, m in zip(news, moved, strict=True)
            ]
            columns.append(self.concat_hidden(filled))
        return jnp.stack(columns, axis=-1)

    def concat_hidden(self, splitted_hid_vals: Sequence[jax.Array]) -> jax.Array:
        """Join the states along a last axis of planes.

        Parameters
        ----------
        splitted_hid_vals : sequence of jax.Array
            One array per state; that of a ``HiddenGroupState`` has its own axis of planes.

        Returns
        -------
        jax.Array
            Shape ``(*varshape, num_state)``.
        """
        planes = [
            value if width else u.math.expand_dims(value, axis=-1)
            for value, width in zip(splitted_hid_vals, self.widths, strict=True)
        ]
        return u.math.concatenate(planes, axis=-1)

    def split_hidden(self, concat_hid_vals: jax.Array) -> list[jax.Array]:
        """Undo :meth:`concat_hidden`."""
        ends = np.cumsum([state.num_state for state in self.hidden_states])[:-1]
        planes = u.math.split(concat_hid_vals, ends, axis=-1)
        return [
            value if width else u.math.squeeze(value, axis=-1)
            for value, width in zip(planes, self.widths, strict=True)
        ]

    def _split_like(self, hidden_vals: Sequence[Any], planes: jax.Array) -> list[jax.Array]:
        """The planes, each of its own state's type: joining may have widened them."""
        split = zip(self.split_hidden(planes), hidden_vals, strict=True)
        return [plane.astype(jnp.result_type(value)) for plane, value in split]

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        return repr(
            brainstate.util.PrettyMapping(self._asdict(), type_name=self.__class__.__name__)
        )


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
            sources[y] = Source(y.aval.shape, may_be_shared=True)
    return Flow(minfo.jaxpr.eqns, sources, minfo.hidden_outvar_to_invar, scope)


def find_hidden_groups_from_minfo(
    minfo: ModuleInfo, flow: Flow | None = None, couple_layers: bool = False
) -> tuple[list[HiddenGroup], brainstate.util.PrettyDict]:
    """Find the hidden groups of a traced model.

    States are in one group if one reaches another within a step, position by position, directly or
    through others. Groups, and the states in them, come in the order of the model's states. Modules
    in a list are layers, and states of two layers share a group only if ``couple_layers`` says so.

    Parameters
    ----------
    minfo : ModuleInfo
        The traced model.
    flow : Flow, optional
        ``step_flow(minfo)``, where it is at hand.
    couple_layers : bool
        Whether states of two layers that drive each other position by position are one group.

    Returns
    -------
    hidden_groups : list of HiddenGroup
    hid_path_to_group : brainstate.util.PrettyDict
        The group of each hidden state that the step uses.
    """
    flow = step_flow(minfo) if flow is None else flow
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
    for members in _merge(linked):
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
    _note_untraced_couplings(minfo, flow, groups)
    by_path = {path: group for group in groups for path in group.hidden_paths}
    return groups, brainstate.util.PrettyDict(by_path)


def find_hidden_groups_from_module(
    model: brainstate.nn.Module, *model_args: Any, **model_kwargs: Any
) -> tuple[list[HiddenGroup], brainstate.util.PrettyDict]:
    """Find the hidden groups of a model.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model with initialised states.
    *model_args, **model_kwargs
        Example inputs of one step.

    Returns
    -------
    hidden_groups : list of HiddenGroup
    hid_path_to_group : brainstate.util.PrettyDict

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> groups, by_path = braintrace.find_hidden_groups_from_module(gru, jnp.ones(3))
    >>> len(groups), list(by_path)
    (1, [('h',)])
    """
    return find_hidden_groups_from_minfo(extract_module_info(model, *model_args, **model_kwargs))


def _drives(minfo: ModuleInfo, flow: Flow, new: Var, target: Var, couple_layers: bool) -> bool:
    """Whether the old value of one state reaches the new value of another one in its scope."""
    path_of = minfo.outvar_to_hidden_path
    return minfo.hidden_outvar_to_invar[new] in flow.aligned(target) and (
        couple_layers or flow.scope.couples(path_of[new], path_of[target])
    )


def _make_group(index: int, minfo: ModuleInfo, flow: Flow, news: list[Var]) -> HiddenGroup:
    olds = [minfo.hidden_outvar_to_invar[new] for new in news]
    paths = [minfo.outvar_to_hidden_path[new] for new in news]
    part = flow.slice(olds, news)
    group = HiddenGroup(
        index=index,
        hidden_paths=paths,
        hidden_states=[minfo.state_of(path) for path in paths],
        hidden_invars=olds,
        hidden_outvars=news,
        transition_jaxpr=part.jaxpr,
        transition_jaxpr_constvars=part.constvars,
        is_position_wise=not _note_mixing(minfo, flow, olds, news),
    )
    group.check_consistent_varshape()
    pattern = _pattern(flow, olds, news, group.widths)
    if part.forward_only:
        _note_forward_only(minfo, flow, tuple(paths))
    return group._replace(pattern=pattern)


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


def _note_mixing(minfo: ModuleInfo, flow: Flow, olds: list[Var], news: list[Var]) -> bool:
    """Whether states reach each other through mixing other than by a product; with a record."""
    cuts = dict.fromkeys(
        cut
        for new in news
        for old in olds
        if old in flow.of(new)
        for cut in flow.of(new)[old].cut_by
        if not is_product(flow.mixer(cut))
    )
    for cut in cuts:
        eqn = flow.mixer(cut)
        paths = tuple(minfo.outvar_to_hidden_path[new] for new in news)
        emit(
            DiagnosticKind.TRANSITION_NOT_POSITION_WISE,
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
    for group in groups:
        for other in groups:
            pairs = [
                (place, new)
                for place, old in enumerate(group.hidden_invars)
                for new in other.hidden_outvars
                if group is not other and old in flow.of(new)
            ]
            in_place = [
                (place, new)
                for place, new in pairs
                if group.hidden_invars[place] in flow.aligned(new)
            ]
            if pairs:
                found = in_place or pairs
                drivers = tuple(dict.fromkeys(group.hidden_paths[place] for place, _ in found))
                driven = dict.fromkeys(minfo.outvar_to_hidden_path[new] for _, new in found)
                dependences = [flow.of(new)[group.hidden_invars[place]] for place, new in found]
                cuts = dict.fromkeys(cut for found in dependences for cut in found.cut_by)
                mixers = [] if in_place else [flow.mixer(cut) for cut in cuts]
                _note_coupling(flow, drivers, tuple(driven), mixers)


def _note_coupling(
    flow: Flow, drivers: tuple[Path, ...], driven: tuple[Path, ...], mixers: list[JaxprEqn]
) -> None:
    """Say that states drive others through equations that mix positions, or, with none, in place.

    A coupling by products is cut by design of a diagonal trace.
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
    return [frozenset(group) for group in _merge(groups)]


def _merge(groups: Iterable[Iterable[Hashable]]) -> list[list[Any]]:
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
