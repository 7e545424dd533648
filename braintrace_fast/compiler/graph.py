"""From a model to all that the learners need: groups, relations, transitions, perturbed steps."""

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import brainstate
import jax

from .._compat import Literal, Var
from .._typing import Path, PyTree
from ..errors import CompilationError
from .control_flow import ControlFlowPolicy
from .diagnostics import CompilationRecord, DiagnosticKind, diagnostic_context
from .environment import CHANGING
from .exit_perturbation import ExitPerturbation, add_exit_perturbation
from .find_relations import find_hidden_param_op_relations_from_minfo
from .flow import Flow
from .hidden_group import HiddenGroup, find_hidden_groups_from_minfo, step_flow
from .module_info import ModuleInfo, extract_module_info
from .perturbation import HiddenPerturbation, add_hidden_perturbation_from_minfo
from .relation import HiddenParamOpRelation
from .scope import Scope
from .transition import GroupTransition, build_transition

__all__ = ['ETraceGraph', 'compile_etrace_graph', 'compiler_context', 'order_hidden_group_index']


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


class ETraceGraph(NamedTuple):
    """A compiled model.

    Attributes
    ----------
    module_info : ModuleInfo
        The step. It also outputs the variables from which the factors are computed.
    hidden_groups : sequence of HiddenGroup
        The groups of hidden states.
    hid_path_to_group : dict
        The group of each hidden state.
    hidden_param_op_relations : sequence of HiddenParamOpRelation
        The traced ops.
    hidden_perturb : HiddenPerturbation or None
        The step with a perturbation at every hidden state.
    diagnostics : tuple of CompilationRecord
        What was decided, in order.
    transitions : tuple of GroupTransition
        Per group, the functions from which ``D`` and ``f`` are computed.
    build_exit_perturb : callable or None
        Makes :attr:`exit_perturb`, once.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> graph = braintrace.compile_etrace_graph(gru, jnp.ones(3))
    >>> [record.kind.value for record in graph.explain(weight_path=('Wr', 'weight'))]
    ['relation_excluded_weight_to_weight']
    """

    module_info: ModuleInfo
    hidden_groups: Sequence[HiddenGroup]
    hid_path_to_group: dict[Path, HiddenGroup]
    hidden_param_op_relations: Sequence[HiddenParamOpRelation]
    hidden_perturb: HiddenPerturbation | None
    diagnostics: tuple[CompilationRecord, ...] = ()
    transitions: tuple[GroupTransition, ...] = ()
    build_exit_perturb: Callable[[], ExitPerturbation] | None = None

    @property
    def exit_perturb(self) -> ExitPerturbation | None:
        """The step from which ``c``, ``L`` and ``R`` are read; made when it is first asked for."""
        return None if self.build_exit_perturb is None else self.build_exit_perturb()

    def explain(
        self,
        *,
        weight_path: Path | None = None,
        hidden_path: Path | None = None,
        kind: DiagnosticKind | None = None,
    ) -> tuple[CompilationRecord, ...]:
        """The records that match all the given filters, in order of emission.

        Parameters
        ----------
        weight_path : Path, optional
            The weight that a record must concern.
        hidden_path : Path, optional
            A hidden state that it must concern.
        kind : DiagnosticKind, optional
            The kind that it must have.

        Returns
        -------
        tuple of CompilationRecord
        """
        return tuple(
            record
            for record in self.diagnostics
            if (weight_path is None or record.weight_path == weight_path)
            and (hidden_path is None or hidden_path in record.hidden_paths)
            and (kind is None or record.kind is kind)
        )

    def call_hidden_perturb(
        self,
        args: Sequence[Any],
        perturb_data: Sequence[jax.Array],
        old_state_vals: Sequence[Any] | None = None,
    ) -> tuple[PyTree, dict[Path, Any], dict[Path, Any], dict[Var, jax.Array]]:
        """Run the step with perturbations added to the new hidden states.

        Parameters
        ----------
        args : sequence
            The inputs of the step.
        perturb_data : sequence of jax.Array
            One perturbation per hidden state, as ``hidden_perturb.init_perturb_data()`` gives.
        old_state_vals : sequence, optional
            The values of the compiled states; by default their present ones.

        Returns
        -------
        tuple
            As :meth:`ModuleInfo.jaxpr_call`.
        """
        if self.hidden_perturb is None:
            raise ValueError(
                'This graph has no hidden perturbation. Compile it with '
                'compile_etrace_graph(..., include_hidden_perturb=True).'
            )
        flat = self.module_info.flat_inputs(args, old_state_vals)
        outs = self.hidden_perturb.eval_jaxpr(flat, perturb_data)
        return self.module_info.sort_outputs(outs)

    def call_exit_perturb(
        self,
        args: Sequence[Any],
        y_perturb: Sequence[jax.Array],
        exit_perturb: Sequence[jax.Array],
        bypass_perturb: Sequence[jax.Array],
        old_state_vals: Sequence[Any] | None = None,
    ) -> tuple[PyTree, dict[Path, Any], dict[Path, Any], dict[Var, jax.Array]]:
        """Run the step with zeros at the ops' outputs and at the exits of groups.

        Parameters
        ----------
        args : sequence
            The inputs of the step.
        y_perturb, exit_perturb, bypass_perturb : sequence of jax.Array
            The zeros, as ``exit_perturb.zeros()`` gives; their cotangents are ``c``, ``L``, ``R``.
        old_state_vals : sequence, optional
            The values of the compiled states; by default their present ones.

        Returns
        -------
        tuple
            As :meth:`ModuleInfo.jaxpr_call`.
        """
        if self.exit_perturb is None:
            raise ValueError(
                'This graph has no exit perturbation. Compile it with '
                'compile_etrace_graph(..., include_hidden_perturb=True).'
            )
        flat = self.module_info.flat_inputs(args, old_state_vals)
        outs = self.exit_perturb.eval_jaxpr(flat, y_perturb, exit_perturb, bypass_perturb)
        return self.module_info.sort_outputs(outs)

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        return repr(
            brainstate.util.PrettyMapping(self._asdict(), type_name=self.__class__.__name__)
        )


class _Context(threading.local):
    def __init__(self) -> None:
        self.compilers: list[str] = []


context = _Context()


@contextmanager
def compiler_context(name: str) -> Iterator[None]:
    """Mark this thread as compiling.

    Raises
    ------
    NotImplementedError
        If it is compiling already.
    """
    context.compilers.append(name)
    try:
        if len(context.compilers) > 1:
            raise NotImplementedError(
                f'"{name}" was called while "{context.compilers[0]}" is compiling a model. A model '
                'cannot compile a model inside its own step; compile it before.'
            )
        yield
    finally:
        context.compilers.pop()


def compile_etrace_graph(
    model: brainstate.nn.Module,
    *model_args: Any,
    include_hidden_perturb: bool = True,
    control_flow: ControlFlowPolicy | None = None,
    environ_inputs: Collection[str] = CHANGING,
    couple_layers: bool = False,
    scope: Scope | None = None,
) -> ETraceGraph:
    """Compile one step of a model into hidden groups, relations and perturbed steps.

    The model is traced, not run: its states stay as they are.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model with initialised states whose ``update`` is one time step.
    *model_args
        Example inputs of one step.
    include_hidden_perturb : bool
        Whether to build the perturbed steps, which single-step learning needs.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    environ_inputs : collection of str
        Keys of brainstate's environment whose values are inputs of the step, if it reads them.
    couple_layers : bool
        Whether hidden states of modules in a list that drive each other position by position form
        one group, so that their coupling is traced. The shapes of their states must be equal.
    scope : Scope, optional
        Which influence is traced; ``Scope(couple_layers)`` by default.

    Returns
    -------
    ETraceGraph

    Raises
    ------
    CompilationError
        If the model has no hidden state, or no weight that could be traced.
    NotSupportedError
        If the step writes a ``ParamState``.
    NotImplementedError
        If a weight is inside a ``while``, an op inside control flow that cannot be opened, or the
        call comes from inside another compilation.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> graph = braintrace.compile_etrace_graph(gru, jnp.ones(3))
    >>> len(graph.hidden_groups), len(graph.hidden_param_op_relations)
    (1, 2)
    """
    with compiler_context('compile_graph'), diagnostic_context() as records:
        minfo = extract_module_info(
            model, *model_args, control_flow=control_flow, environ_inputs=environ_inputs
        )
        flow = step_flow(minfo, Scope(couple_layers) if scope is None else scope)
        groups, by_path = find_hidden_groups_from_minfo(minfo, flow, couple_layers)
        order_hidden_group_index(groups)
        relations = find_hidden_param_op_relations_from_minfo(minfo, by_path, flow)
        if not relations:
            raise CompilationError(_no_relations(records))
        transitions = tuple(_transition(flow, group, relations) for group in groups)
        minfo = minfo.add_jaxpr_outs(_hoisted(minfo, groups, relations, transitions))
        hidden_perturb = build_exit_perturb = None
        if include_hidden_perturb:
            hidden_perturb = add_hidden_perturbation_from_minfo(minfo)
            build_exit_perturb = functools.cache(
                functools.partial(add_exit_perturbation, minfo, flow, groups, relations)
            )
        return ETraceGraph(
            module_info=minfo,
            hidden_groups=groups,
            hid_path_to_group=by_path,
            hidden_param_op_relations=relations,
            hidden_perturb=hidden_perturb,
            diagnostics=tuple(records),
            transitions=transitions,
            build_exit_perturb=build_exit_perturb,
        )


def _transition(
    flow: Flow, group: HiddenGroup, relations: Sequence[HiddenParamOpRelation]
) -> GroupTransition:
    feeding = [
        (relation, f_pattern)
        for relation in relations
        for reached, f_pattern in zip(relation.hidden_groups, relation.f_patterns, strict=True)
        if reached.index == group.index
    ]
    f_columns = [f_pattern for _, f_pattern in feeding]
    return build_transition(
        flow,
        group.hidden_invars,
        group.hidden_outvars,
        [relation.y_var for relation, _ in feeding],
        group.widths,
        [(*row, *(f[s] for f in f_columns)) for s, row in enumerate(group.pattern)],
        [relation.y_var.aval.ndim < len(group.varshape) for relation, _ in feeding],
    )


def _hoisted(
    minfo: ModuleInfo,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
    transitions: Sequence[GroupTransition],
) -> list[Var]:
    """What the step must output besides its results: x, then y -> h, then h -> h variables."""
    inputs = [relation.x_var for relation in relations if relation.x_var is not None]
    tails = [
        v
        for relation in relations
        for constvars in relation.y_to_hidden_group_constvars
        for v in (relation.y_var, *constvars)
    ]
    ways = [
        v
        for relation in relations
        for way in relation.weight_ways.values()
        for v in way.varying_vars
    ]
    moves = [
        v for group in groups for v in (*group.hidden_invars, *group.transition_jaxpr_constvars)
    ]
    rows = [v for transition in transitions for v in transition.variables]
    present = {v for v in minfo.jaxpr.outvars if not isinstance(v, Literal)}
    wanted = dict.fromkeys([*inputs, *tails, *ways, *moves, *rows])
    return [v for v in wanted if v not in present]


def _no_relations(records: Sequence[CompilationRecord]) -> str:
    reasons = [f'  - {record.message}' for record in records if record.weight_path is not None]
    found = '\n'.join(reasons) or '  - The step uses no ParamState at all.'
    return (
        'No weight of the model can be traced, so there is nothing to learn online. Pass the '
        'weights whose influence lasts through an op of this library (matmul, element_wise, or a '
        f'layer of braintrace_fast.nn). What was found:\n{found}'
    )
