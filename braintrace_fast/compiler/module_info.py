"""One step of a model as a flat jaxpr, with the tables that tell what each variable is."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._compat import ClosedJaxpr, Jaxpr, Literal, Var, build_closed_jaxpr, open_jaxpr
from .._typing import Path, PyTree
from .control_flow import DEFAULT_CONTROL_FLOW_POLICY, ControlFlowPolicy, flatten_step
from .environment import CHANGING, Environment, EnvironmentValues
from .own_variables import check_same_types, give_own_variables, note_old_values
from .pretty import pretty
from .primitives import is_inexact
from .tracing import TracedStep, trace_step

__all__ = ['ModuleInfo', 'StepOutputs', 'extract_module_info']

StepOutputs = tuple[PyTree, dict[Path, Any], dict[Path, Any], dict[Var, jax.Array]]
"""Results, new hidden states by path, other new states by path, and values of output variables."""


class ModuleInfo(NamedTuple):
    """A model's step: its jaxpr, its states, and which variable belongs to which state.

    Attributes
    ----------
    stateful_model : brainstate.transform.StatefulFunction
        The traced model.
    closed_jaxpr : ClosedJaxpr
        The flattened step: inputs are those of the environment, the arguments, then the states;
        outputs are the results, then the new states, then whatever :meth:`add_jaxpr_outs` appended.
    retrieved_model_states : brainstate.util.FlattedDict
        ``model.states()``, by path.
    compiled_model_states : sequence of brainstate.State
        The states that the step touches, in the order of the jaxpr.
    state_id_to_path : dict
        The path of each state, by ``id``.
    state_tree_invars, state_tree_outvars : list of PyTree of Var
        The variables of each compiled state before and after the step.
    hidden_path_to_invar, hidden_path_to_outvar : dict
        The variable of each hidden state before and after the step, by path.
    invar_to_hidden_path, outvar_to_hidden_path : dict
        The inverse tables.
    hidden_outvar_to_invar : dict
        From new to old, in the order of the model, for the states that carry derivatives.
    weight_invars : list of Var
        The variables of the trainable weights.
    weight_path_to_invars, invar_to_weight_path : dict
        The same by path, and back.
    num_var_out, num_var_state : int
        How many outputs are results, and how many are states.
    control_flow : ControlFlowPolicy
        The policy used.
    in_tree, out_tree : PyTreeDef
        The structure (units included) of the arguments and states that the step was traced with,
        and of its results and states.
    environment : Environment
        What the step reads of brainstate's environment. Its inputs come before the arguments.
    substeps : dict
        The outputs of ops that all substeps of a scan share, with the number of substeps.

    Examples
    --------
    >>> import brainstate, braintrace_fast as braintrace, jax.numpy as jnp
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> list(braintrace.extract_module_info(gru, jnp.ones(3)).hidden_path_to_invar)
    [('h',)]
    """

    stateful_model: brainstate.transform.StatefulFunction
    closed_jaxpr: ClosedJaxpr
    retrieved_model_states: brainstate.util.FlattedDict
    compiled_model_states: Sequence[brainstate.State]
    state_id_to_path: dict[int, Path]
    state_tree_invars: list[PyTree]
    state_tree_outvars: list[PyTree]
    hidden_path_to_invar: dict[Path, Var]
    hidden_path_to_outvar: dict[Path, Var]
    invar_to_hidden_path: dict[Var, Path]
    outvar_to_hidden_path: dict[Var, Path]
    hidden_outvar_to_invar: dict[Var, Var]
    weight_invars: list[Var]
    weight_path_to_invars: dict[Path, list[Var]]
    invar_to_weight_path: dict[Var, Path]
    num_var_out: int
    num_var_state: int
    control_flow: ControlFlowPolicy = DEFAULT_CONTROL_FLOW_POLICY
    in_tree: Any = None
    out_tree: Any = None
    environment: Environment = Environment()
    substeps: dict[Var, int] = {}

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr without its constants."""
        return open_jaxpr(self.closed_jaxpr)[0]

    @property
    def consts(self) -> Sequence[Any]:
        """The values of the jaxpr's constvars."""
        return open_jaxpr(self.closed_jaxpr)[1]

    def state_of(self, path: Path) -> Any:
        """The state at a path."""
        return self.retrieved_model_states[path]

    def add_jaxpr_outs(self, jax_vars: Sequence[Var]) -> 'ModuleInfo':
        """The same step with more variables among its outputs.

        Parameters
        ----------
        jax_vars : sequence of Var
            Variables of the jaxpr, whose values :meth:`jaxpr_call` then returns as well.

        Returns
        -------
        ModuleInfo
        """
        jaxpr = self.jaxpr
        closed = build_closed_jaxpr(
            jaxpr.constvars, self.consts, jaxpr.invars, [*jaxpr.outvars, *jax_vars], jaxpr.eqns
        )
        return self._replace(closed_jaxpr=closed)

    def split_state_outvars(self) -> tuple[PyTree, PyTree, PyTree]:
        """The new states' variables as (weights, hidden states, other states), each by path."""
        return self._split(self.state_tree_outvars)

    def with_environment(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments after the environment's present values, if the step has such inputs."""
        args = tuple(args)
        if not self.environment.inputs or (args and isinstance(args[0], EnvironmentValues)):
            return args
        return self.environment.values(), *args

    def flat_inputs(
        self,
        args: Sequence[Any],
        old_state_vals: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[jax.Array]:
        """The values of the jaxpr's invars, checked against what the step was traced with."""
        if old_state_vals is None:
            old_state_vals = [state.value for state in self.compiled_model_states]
        args = self.with_environment(args)
        leaves, tree = jax.tree.flatten((args, dict(kwargs or {}), tuple(old_state_vals)))
        if tree != self.in_tree:
            raise ValueError(
                'The inputs or states differ in structure or unit from those that the step was '
                f'compiled with.\nFound    {tree}\nexpected {self.in_tree}\n'
                'Convert them, or compile again with inputs like these.'
            )
        for leaf, var in zip(leaves, self.jaxpr.invars, strict=True):
            if jnp.shape(leaf) != var.aval.shape:
                raise ValueError(
                    f'An input or state has shape {jnp.shape(leaf)}, but the step was compiled '
                    f'for {var.aval.shape}. Compile again with inputs of the new shape.'
                )
            if hasattr(leaf, 'dtype') and jax.typeof(leaf).dtype != var.aval.dtype:
                raise TypeError(
                    f'An input or state has type {jax.typeof(leaf).dtype}, but the step was '
                    f'compiled for {var.aval.dtype}. Convert it, or compile again with such inputs.'
                )
        return leaves

    def jaxpr_call(
        self, *args: Any, old_state_vals: Sequence[Any] | None = None, **kwargs: Any
    ) -> StepOutputs:
        """Run one step, without touching the model's states.

        Parameters
        ----------
        *args, **kwargs
            The inputs of the step, passed as when it was traced.
        old_state_vals : sequence, optional
            The values of ``compiled_model_states``; by default their present ones.

        Returns
        -------
        tuple
            The results, the new hidden states by path, the new other states by path, and the
            values of all output variables, the appended ones included.
        """
        flat = self.flat_inputs(args, old_state_vals, kwargs)
        outs = jax.core.eval_jaxpr(self.jaxpr, self.consts, *flat)
        return self.sort_outputs(outs)

    def sort_outputs(self, jaxpr_outs: Sequence[jax.Array]) -> StepOutputs:
        """Sort the outputs of the jaxpr, or of a rewritten one with the same outputs."""
        num_main = self.num_var_out + self.num_var_state
        out, states = jax.tree.unflatten(self.out_tree, jaxpr_outs[:num_main])
        _, hidden, others = self._split(list(states))
        outvars = self.jaxpr.outvars
        temps = {
            v: value
            for v, value in zip(outvars, jaxpr_outs, strict=True)
            if not isinstance(v, Literal)
        }
        return out, hidden, others, temps

    def _split(self, values: list[Any]) -> tuple[dict, dict, dict]:
        weights: dict[Path, Any] = {}
        hidden: dict[Path, Any] = {}
        others: dict[Path, Any] = {}
        for state, value in zip(self.compiled_model_states, values, strict=True):
            if isinstance(state, brainstate.ParamState):
                table = weights
            elif isinstance(state, brainstate.HiddenState):
                table = hidden
            else:
                table = others
            table[self.state_id_to_path[id(state)]] = value
        return weights, hidden, others

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        return pretty(self)


def extract_module_info(
    model: brainstate.nn.Module,
    *model_args: Any,
    control_flow: ControlFlowPolicy | None = None,
    environ_inputs: Collection[str] = CHANGING,
    **model_kwargs: Any,
) -> ModuleInfo:
    """Trace one step of a model and flatten it.

    The model's states are left as they are.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model with initialised states whose ``update`` is one time step. States of a model inside
        ``brainstate.nn.Vmap`` keep the paths that they have in the model.
    *model_args, **model_kwargs
        Example inputs of one step.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    environ_inputs : collection of str
        Keys of brainstate's environment whose values are inputs of the step, if it reads them.

    Returns
    -------
    ModuleInfo

    Raises
    ------
    CompilationError
        If the states are not initialised, or the step uses no hidden state, or changes the shape or
        type of one.
    NotSupportedError
        If the step writes a ``ParamState``, or a hidden state is complex.
    """
    policy = DEFAULT_CONTROL_FLOW_POLICY if control_flow is None else control_flow
    traced = trace_step(model, model_args, model_kwargs, environ_inputs)
    closed, substeps = flatten_step(traced.closed_jaxpr, policy)
    jaxpr = open_jaxpr(closed)[0]
    old, new = traced.hidden_by_path(jaxpr.invars), traced.hidden_by_path(jaxpr.outvars)
    note_old_values(old, new, jaxpr.eqns)
    info = _with_tables(traced, give_own_variables(closed, traced.hidden_places), policy)
    return info._replace(substeps=substeps)


def _with_tables(traced: TracedStep, closed: ClosedJaxpr, policy: ControlFlowPolicy) -> ModuleInfo:
    """The step with the tables that tell what its variables are."""
    jaxpr = open_jaxpr(closed)[0]
    hidden_invars = traced.hidden_by_path(jaxpr.invars)
    hidden_outvars = traced.hidden_by_path(jaxpr.outvars)
    check_same_types(hidden_invars, hidden_outvars)
    weights = traced.leaves_by_path(brainstate.ParamState, jaxpr.invars)
    return ModuleInfo(
        stateful_model=traced.stateful,
        closed_jaxpr=closed,
        retrieved_model_states=traced.retrieved,
        compiled_model_states=traced.states,
        state_id_to_path=traced.id_to_path,
        state_tree_invars=traced.state_trees(jaxpr.invars),
        state_tree_outvars=traced.state_trees(jaxpr.outvars),
        hidden_path_to_invar=hidden_invars,
        hidden_path_to_outvar=hidden_outvars,
        invar_to_hidden_path={v: path for path, v in hidden_invars.items()},
        outvar_to_hidden_path={v: path for path, v in hidden_outvars.items()},
        hidden_outvar_to_invar={
            new: hidden_invars[path] for path, new in hidden_outvars.items() if is_inexact(new.aval)
        },
        weight_invars=[v for leaves in weights.values() for v in leaves],
        weight_path_to_invars=weights,
        invar_to_weight_path={v: path for path, leaves in weights.items() for v in leaves},
        num_var_out=traced.num_out,
        num_var_state=traced.num_state,
        control_flow=policy,
        in_tree=traced.in_tree,
        out_tree=jax.tree.structure((traced.out_shapes, traced.state_shapes)),
        environment=traced.environment,
    )
