"""From a model to all that the learners need, pass by pass."""

import functools
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import brainstate

from .._compat import Var
from .chained import transition_of
from .control_flow import ControlFlowPolicy
from .coupled import coupled_transition
from .diagnostics import CompilationRecord, diagnostic_context
from .environment import CHANGING
from .exit_perturbation import add_exit_perturbation
from .find_groups import find_hidden_groups_from_minfo, step_flow
from .find_relations import find_hidden_param_op_relations_from_minfo
from .flow import Flow
from .graph import ETraceGraph
from .hidden_group import HiddenGroup
from .liveness import variables
from .module_info import ModuleInfo, extract_module_info
from .neighbours import MOST_ELEMENTS, check_size
from .relation import HiddenParamOpRelation
from .scope import Scope, requested_scope
from .transition import Transition

__all__ = ['compile_etrace_graph', 'compiler_context']


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
    include_recurrent_mixing: bool = False,
    sparse_n: int | None = None,
    snap_max_jacobian_elements: int = MOST_ELEMENTS,
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
    include_recurrent_mixing : bool
        Whether the transition of a group keeps recurrent ops: the scope :class:`Coupled`.
    sparse_n : int, optional
        The order of SnAp: the scope ``Neighbourhood(n=sparse_n)``. It takes recurrent mixing.
    snap_max_jacobian_elements : int
        The most elements that the Jacobians of a group between neighbours may have, per position
        the square of neighbours times states.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    environ_inputs : collection of str
        Keys of brainstate's environment whose values are inputs of the step, if it reads them.
    couple_layers : bool
        Whether hidden states of modules in a list that drive each other position by position form
        one group, so that their coupling is traced. The shapes of their states must be equal.
    scope : Scope, optional
        Which influence is traced, where the arguments above do not say it.

    Returns
    -------
    ETraceGraph

    Raises
    ------
    CompilationError
        If the model has no hidden state.
    NotSupportedError
        If the step writes a ``ParamState``, or Jacobians between neighbours have too many elements.
    NotImplementedError
        If a weight is inside a ``while``, an op inside control flow that cannot be opened, or the
        call comes from inside another compilation.
    """
    if scope is None:
        scope = requested_scope(include_recurrent_mixing, sparse_n, couple_layers)
    elif include_recurrent_mixing or sparse_n is not None:
        raise ValueError('Give a scope, or include_recurrent_mixing and sparse_n, but not both.')
    with compiler_context('compile_graph'), diagnostic_context() as records:
        minfo = extract_module_info(
            model, *model_args, control_flow=control_flow, environ_inputs=environ_inputs
        )
        flow = step_flow(minfo, scope)
        graph = _graph_of(minfo, flow, records, couple_layers)
        if sparse_n is not None:
            check_size(graph.hidden_groups, snap_max_jacobian_elements)
        return _with_perturbations(graph, flow) if include_hidden_perturb else graph


def _graph_of(
    minfo: ModuleInfo, flow: Flow, records: list[CompilationRecord], couple_layers: bool
) -> ETraceGraph:
    """The graph of a traced model, without perturbed steps."""
    groups, by_path = find_hidden_groups_from_minfo(minfo, flow=flow, couple_layers=couple_layers)
    relations = find_hidden_param_op_relations_from_minfo(minfo, by_path, flow)
    make = coupled_transition if flow.scope.mixes else transition_of
    transitions = tuple(make(flow, group, relations) for group in groups)
    return ETraceGraph(
        module_info=minfo.add_jaxpr_outs(_hoisted(minfo, groups, relations, transitions)),
        hidden_groups=groups,
        hid_path_to_group=by_path,
        hidden_param_op_relations=relations,
        hidden_perturb=None,
        diagnostics=tuple(records),
        transitions=transitions,
    )


def _with_perturbations(graph: ETraceGraph, flow: Flow) -> ETraceGraph:
    from ..reference_api.compiler import add_hidden_perturbation_from_minfo  # it imports the graph

    build = functools.partial(
        add_exit_perturbation,
        graph.module_info,
        flow,
        graph.hidden_groups,
        graph.hidden_param_op_relations,
    )
    return graph._replace(
        hidden_perturb=add_hidden_perturbation_from_minfo(graph.module_info),
        build_exit_perturb=functools.lru_cache(maxsize=1)(build),
    )


def _hoisted(
    minfo: ModuleInfo,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
    transitions: Sequence[Transition],
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
    present = set(variables(minfo.jaxpr.outvars))
    wanted = dict.fromkeys([*inputs, *tails, *ways, *moves, *rows])
    return [v for v in wanted if v not in present]
