"""One step of a model as a flat jaxpr, with the tables that tell what each variable is."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from brainstate.random import RandomState

from .._compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    build_closed_jaxpr,
    new_var,
    open_jaxpr,
    rewire,
    source_line,
    struct,
)
from .._typing import Path, PyTree
from ..errors import CompilationError, NotSupportedError
from ..op import ETPPrimitive
from .alignment import is_inexact
from .control_flow import ControlFlowPolicy, flatten
from .diagnostics import DiagnosticKind, DiagnosticLevel, emit
from .environment import CHANGING, Environment, EnvironmentValues, bind_environment, trace_reads
from .liveness import reached_variables, variables

__all__ = ['ModuleInfo', 'extract_module_info']


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

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> info = braintrace.extract_module_info(gru, jnp.ones(3))
    >>> info.num_var_out, list(info.hidden_path_to_invar)
    (1, [('h',)])
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
    control_flow: ControlFlowPolicy = ControlFlowPolicy()
    in_tree: Any = None
    out_tree: Any = None
    environment: Environment = Environment()

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
    ) -> tuple[PyTree, dict[Path, Any], dict[Path, Any], dict[Var, jax.Array]]:
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

    def sort_outputs(
        self, jaxpr_outs: Sequence[jax.Array]
    ) -> tuple[PyTree, dict[Path, Any], dict[Path, Any], dict[Var, jax.Array]]:
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
        return repr(
            brainstate.util.PrettyMapping(self._asdict(), type_name=self.__class__.__name__)
        )


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
    policy = ControlFlowPolicy() if control_flow is None else control_flow
    owner = model.module if isinstance(model, brainstate.nn.Vmap) else model
    retrieved: Any = owner.states()

    def trace(given: EnvironmentValues | None) -> Any:
        step = model if given is None else bind_environment(model)
        args = model_args if given is None else (given, *model_args)
        with _kept_flags(retrieved.values()), _told_to_initialise(model):
            return *_traced(step, args, model_kwargs), args

    (stateful, key, args), environment = trace_reads(trace, environ_inputs)
    states = tuple(stateful.get_states_by_cache(key))
    retrieved = _with_external_states(retrieved, states)
    id_to_path = {id(state): path for path, state in retrieved.items()}
    _check_states(states, stateful.get_write_states_by_cache(key), id_to_path)

    shapes: Any = stateful.get_out_shapes_by_cache(key)
    out_shapes, state_shapes = shapes
    num_out = len(jax.tree.leaves(out_shapes))
    num_state = len(jax.tree.leaves(state_shapes))
    closed = flatten(stateful.get_jaxpr_by_cache(key), policy)
    invars = open_jaxpr(closed)[0].invars
    state_invars = _unflatten_each(state_shapes, invars[len(invars) - num_state :])

    def by_path(kind: type, trees: list[PyTree]) -> dict[Path, list[Var]]:
        found = {
            id_to_path[id(state)]: jax.tree.leaves(tree)
            for state, tree in zip(states, trees, strict=True)
            if isinstance(state, kind)
        }
        return {path: found[path] for path in retrieved if path in found}

    hidden_invars = {p: v for p, (v,) in by_path(brainstate.HiddenState, state_invars).items()}
    written = _unflatten_each(state_shapes, open_jaxpr(closed)[0].outvars[num_out:])
    news: Any = {p: v for p, (v,) in by_path(brainstate.HiddenState, written).items()}
    _note_old_values(hidden_invars, news, open_jaxpr(closed)[0].eqns)
    is_hidden = [isinstance(s, brainstate.HiddenState) for s in states]
    closed = _own_equations(closed, num_out, state_invars, is_hidden)
    state_outvars = _unflatten_each(state_shapes, open_jaxpr(closed)[0].outvars[num_out:])
    hidden_outvars = {p: v for p, (v,) in by_path(brainstate.HiddenState, state_outvars).items()}
    _check_same_types(hidden_invars, hidden_outvars)
    weights = by_path(brainstate.ParamState, state_invars)
    return ModuleInfo(
        stateful_model=stateful,
        closed_jaxpr=closed,
        retrieved_model_states=retrieved,
        compiled_model_states=states,
        state_id_to_path=id_to_path,
        state_tree_invars=state_invars,
        state_tree_outvars=state_outvars,
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
        num_var_out=num_out,
        num_var_state=num_state,
        control_flow=policy,
        in_tree=jax.tree.structure((args, model_kwargs, tuple(s.value for s in states))),
        out_tree=jax.tree.structure(shapes),
        environment=environment,
    )


def _traced(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[brainstate.transform.StatefulFunction, Any]:
    """A traced step and its key in the cache.

    A random state without a seed holds plain numbers until it is first read, and a key from then
    on. If the step draws from such a state, it is traced once more, for the key.
    """

    def trace() -> tuple[brainstate.transform.StatefulFunction, Any]:
        stateful = brainstate.transform.StatefulFunction(step, return_only_write=False)
        stateful.make_jaxpr(*args, **kwargs)
        return stateful, stateful.get_arg_cache_key(*args, **kwargs)

    stateful, key = trace()
    drawn = [s for s in stateful.get_states_by_cache(key) if isinstance(s, RandomState)]
    unread = [state for state in drawn if isinstance(state._value, np.ndarray)]
    for state in unread:
        state.check_if_deleted()  # as every read does
    return trace() if unread else (stateful, key)


@contextmanager
def _kept_flags(states: Iterable[brainstate.State]) -> Iterator[None]:
    """Tracing marks the states that the step writes as written, which they are not."""
    flags = [(state, state._been_writen) for state in states]
    try:
        yield
    finally:
        for state, written in flags:
            state._been_writen = written


@contextmanager
def _told_to_initialise(model: brainstate.nn.Module) -> Iterator[None]:
    """A state that is not there yet is an attribute that is missing from a module."""
    try:
        yield
    except AttributeError as error:
        if not isinstance(error.obj, brainstate.nn.Module):
            raise
        found = list(model.states(brainstate.HiddenState)) or 'none'
        raise CompilationError(
            f'The step reads the attribute {error.name!r} of a {type(error.obj).__name__}, which '
            f'has none of that name. Hidden states found in the model: {found}. Initialise the '
            'states before compiling: brainstate.nn.init_all_states(model, batch_size=...).'
        ) from error


def _with_external_states(
    retrieved: Any, states: Sequence[brainstate.State]
) -> brainstate.util.FlattedDict:
    """The model's states, and those that the step uses without their being part of the model."""
    known = {id(state) for state in retrieved.values()}
    external = [state for state in states if id(state) not in known]
    for state in external:
        carried = not isinstance(state, brainstate.ParamState | brainstate.HiddenState)
        emit(
            DiagnosticKind.STATE_MISMATCH,
            DiagnosticLevel.INFO if carried else DiagnosticLevel.WARNING,
            f'The step uses a {type(state).__name__} that is not part of the model; it is carried. '
            'Make it an attribute of the module to give it a path.',
        )
    # Not by integers, which would make each a layer of its own.
    paths = {('_external', str(index)): state for index, state in enumerate(external)}
    return brainstate.util.FlattedDict({**retrieved, **paths})


def _check_states(
    states: Sequence[brainstate.State],
    written: Sequence[brainstate.State],
    id_to_path: dict[int, Path],
) -> None:
    if not any(isinstance(state, brainstate.HiddenState) for state in states):
        raise CompilationError(
            'The step uses no brainstate.HiddenState, so there is nothing to trace. Make what '
            'carries over from step to step a HiddenState, and initialise it '
            '(brainstate.nn.init_all_states) before compiling.'
        )
    for state in states:
        if not isinstance(state, brainstate.HiddenState):
            continue
        types = [str(leaf.dtype) for leaf in jax.tree.leaves(state.value)]
        if any('complex' in name for name in types):
            raise NotSupportedError(
                f'The hidden state at {id_to_path[id(state)]} is {types[0]}. Traces are of real '
                'states: keep its real and its imaginary part as two hidden states, and join them '
                'inside the step by jax.lax.complex.'
            )
    for state in written:
        if isinstance(state, brainstate.ParamState):
            raise NotSupportedError(
                f'The step writes the ParamState at {id_to_path[id(state)]}. Weights must be fixed '
                'within a step: update them after it, or make the value a ShortTermState.'
            )


def _check_same_types(old: dict[Path, Var], new: dict[Path, Var]) -> None:
    for path, before in old.items():
        found, expected = new[path].aval, before.aval
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise CompilationError(
                f'The step changes the hidden state at {path} from {expected.dtype} of shape '
                f'{expected.shape} to {found.dtype} of shape {found.shape}. A hidden state must '
                'keep its shape and type from step to step; initialise it as the step leaves it.'
            )


def _note_old_values(old: dict[Path, Var], new: dict[Path, Atom], eqns: Sequence[JaxprEqn]) -> None:
    """Say which states are left as they are, or set to the old value of another one."""
    for path, value in new.items():
        source = next((p for p, v in old.items() if v is value), None)
        if source == path:
            emit(
                DiagnosticKind.HIDDEN_STATE_READ_ONLY,
                DiagnosticLevel.INFO,
                f'The hidden state at {path} is read but not written by the step; it is '
                'carried as it is.',
                hidden_paths=(path,),
            )
        elif source is not None and (product := _product_of(old[source], eqns)) is not None:
            line = source_line(product)
            emit(
                DiagnosticKind.HIDDEN_COUPLING_NOT_TRACED,
                DiagnosticLevel.WARNING,
                f'{line}: the hidden state at {path} is set to the old value of the one at '
                f'{source}, so that a product which reads the new {path} cannot be told from one '
                f'that reads the old {source}. It is taken for the latter, and not traced from '
                'step to step. If the former is meant, set the state to a copy, '
                'jnp.array(value, copy=True), and read that.',
                hidden_paths=(path, source),
                context={'source': line},
            )


def _product_of(value: Var, eqns: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """The first product that reads a value, or what is made of it."""
    made = reached_variables(eqns, [value])
    products = (
        eqn
        for eqn in eqns
        if isinstance(eqn.primitive, ETPPrimitive) or eqn.primitive.name == 'dot_general'
    )
    return next((eqn for eqn in products if not made.isdisjoint(variables(eqn.invars))), None)


def _unflatten_each(shapes: Sequence[PyTree], flat: Sequence[Any]) -> list[PyTree]:
    return list(jax.tree.unflatten(jax.tree.structure(tuple(shapes)), flat))


def _own_equations(
    closed: ClosedJaxpr, num_out: int, state_invars: list[PyTree], is_hidden: list[bool]
) -> ClosedJaxpr:
    """Give every new hidden state a variable of its own, defined by an ordinary equation.

    A state that is not written, or set to an input, to a literal, to the output of an ETP op or to
    the same value as another state gets a copy. Whoever reads the output of an op that a state is
    set to reads the copy, as with any other value that a state is set to.
    """
    jaxpr, consts = open_jaxpr(closed)
    leaves = [jax.tree.leaves(tree) for tree in state_invars]
    are_hidden = [hidden for own, hidden in zip(leaves, is_hidden, strict=True) for _ in own]
    places = [num_out + k for k, hidden in enumerate(are_hidden) if hidden]
    outvars = list(jaxpr.outvars)
    eqns = _copied_ops(jaxpr.eqns, [outvars[place] for place in places])
    ordinary = {
        v for eqn in eqns if not isinstance(eqn.primitive, ETPPrimitive) for v in eqn.outvars
    }
    for place in places:
        new = outvars[place]
        if isinstance(new, Literal) or new not in ordinary:
            outvars[place] = new_var(new.aval)
            eqns.append(_copy_equation(new, outvars[place]))
        else:
            ordinary.remove(new)
    return build_closed_jaxpr(jaxpr.constvars, consts, jaxpr.invars, outvars, eqns)


def _copied_ops(eqns: Iterable[JaxprEqn], states: Sequence[Atom]) -> list[JaxprEqn]:
    """Put a copy between ETP ops whose output is a new state and all who read it."""
    found: list[JaxprEqn] = []
    for eqn in eqns:
        if isinstance(eqn.primitive, ETPPrimitive) and any(v is eqn.outvars[0] for v in states):
            (state,) = eqn.outvars
            output = new_var(state.aval)
            found += [rewire(eqn, eqn.invars, [output]), _copy_equation(output, state)]
        else:
            found.append(eqn)
    return found


def _copy_equation(atom: Atom, result: Var) -> JaxprEqn:
    (eqn,) = open_jaxpr(jax.make_jaxpr(lambda x: jnp.array(x, copy=True))(struct(atom)))[0].eqns
    return eqn.replace(invars=[atom], outvars=[result])
