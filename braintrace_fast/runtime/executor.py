"""The public executors: a compiled model, its Jacobians and its residuals.

They return derivatives in the reference's layout, ``(*varshape, S)`` and ``(*varshape, S, S)``; the
engines work on the planes of :class:`StepRunner`.
"""

from collections.abc import Callable, Collection
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_pytree_node_class

from .._compat import Jaxpr, open_jaxpr
from .._typing import Path, PyTree
from ..compiler import (
    CompilationReport,
    ControlFlowPolicy,
    ETraceGraph,
    HiddenGroup,
    compile_etrace_graph,
)
from ..compiler.environment import CHANGING
from ..compiler.transition import Plane
from ..config import check_backend, resolve_backend
from ..errors import NotSupportedError
from ..kernels.dispatch import Backend
from .factors import Factors, StepRunner, Values
from .input_data import has_multi_step_data, single_step, split_chunk

__all__ = ['ETraceGraphExecutor', 'ETraceVjpGraphExecutor', 'VjpResiduals']

MOST_VARIANTS = 16
"""How often a step is compiled for other values of the same keys of the environment."""

Hid2Weight = tuple[dict[int, jax.Array], dict[tuple[int, int], jax.Array]]


@register_pytree_node_class
class VjpResiduals:
    """A backward pass, kept to be run when the cotangents are there.

    Parameters
    ----------
    jaxpr : Jaxpr
        From residuals and flat cotangents to flat cotangents of the inputs.
    in_tree, out_tree : PyTreeDef
        The structures of the inputs' cotangents and of the results.
    consts : sequence of jax.Array
        The residuals.
    """

    def __init__(self, jaxpr: Jaxpr, in_tree: Any, out_tree: Any, consts: Any) -> None:
        self.jaxpr = jaxpr
        self.in_tree = in_tree
        self.out_tree = out_tree
        self.consts = consts

    def __iter__(self) -> Any:
        return iter((self.jaxpr, self.in_tree, self.out_tree, self.consts))

    def __call__(self, cotangents: PyTree) -> PyTree:
        """The cotangents of the inputs, from those of the results."""
        flat = jax.tree.leaves(cotangents)
        return jax.tree.unflatten(self.in_tree, jax.core.eval_jaxpr(self.jaxpr, self.consts, *flat))

    def tree_flatten(self) -> tuple[Any, Any]:
        """The residuals, and the rest."""
        return tuple(self.consts), (self.jaxpr, self.in_tree, self.out_tree)

    @classmethod
    def tree_unflatten(cls, aux: Any, consts: Any) -> 'VjpResiduals':
        """Undo :meth:`tree_flatten`."""
        jaxpr, in_tree, out_tree = aux
        return cls(jaxpr, in_tree, out_tree, consts)


class ETraceGraphExecutor:
    """A model and its compiled graph.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    backend : {'auto', 'jax', 'pallas', 'interpret'}
        The implementation asked for; see :func:`braintrace_fast.use_backend`.
    couple_layers : bool
        Whether to trace what states of modules in a list do to each other.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        control_flow: ControlFlowPolicy | None = None,
        backend: str = 'auto',
        couple_layers: bool = False,
    ) -> None:
        if not isinstance(model, brainstate.nn.Module):
            raise TypeError(
                f'The model is a {type(model).__name__}, expected a brainstate.nn.Module.'
            )
        self.model = model
        self.control_flow = control_flow
        self.couple_layers = couple_layers
        self.backend = check_backend(backend)
        self.resolved_backend = Backend()
        self._graph: ETraceGraph | None = None
        self._graphs: tuple[ETraceGraph, ...] = ()
        self._example: tuple[Any, ...] = ()
        self._environ_inputs = set(CHANGING)
        self._runner: StepRunner | None = None

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        if self._graph is None:
            raise ValueError('The graph is not compiled yet; call compile_graph(*inputs) first.')
        return self._graph

    @property
    def runner(self) -> StepRunner:
        """The compiled step as pure functions."""
        if self._runner is None:
            self._runner = StepRunner(self.graph, self.resolved_backend)
        return self._runner

    @property
    def states(self) -> brainstate.util.FlattedDict:
        """The states of the model that the step uses, by path."""
        return _used_states(self.graph)

    @property
    def first_states(self) -> brainstate.util.FlattedDict:
        """Those that it used in the environment in which it was compiled at first."""
        return _used_states(self._graphs[0])

    @property
    def path_to_states(self) -> brainstate.util.FlattedDict:
        """The same as :attr:`states`."""
        return self.states

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        """The path of each state, by ``id``."""
        return self.graph.module_info.state_id_to_path

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for inputs like these; windows count as their first step."""
        self._example = jax.tree.map(_shape_if_traced, single_step(args))
        self._graph = self._compile()
        self._graphs = (self._graph,)
        self.choose_backend(self.backend)

    def _compile(self) -> ETraceGraph:
        return compile_etrace_graph(
            self.model,
            *self._example,
            control_flow=self.control_flow,
            environ_inputs=self._environ_inputs,
            couple_layers=self.couple_layers,
        )

    def follow_environment(self) -> bool:
        """Take the graph for brainstate's present environment, compiled now if there is none yet.

        Numbers that change become inputs of the step. For other values, flags for one, there is a
        graph each.

        Returns
        -------
        bool
            Whether it is another one than before.

        Raises
        ------
        NotSupportedError
            If there are too many values to keep a graph for each.
        """
        environment = self.graph.module_info.environment
        if environment.fits():
            return False
        self._runner = None
        for graph in self._graphs:
            if graph.module_info.environment.fits():
                self._graph = graph
                return True
        if len(self._graphs) == MOST_VARIANTS:
            raise NotSupportedError(
                f'The step was compiled for {MOST_VARIANTS} values of the environment, and they '
                f'changed again: {", ".join(environment.changes())}. The model uses them to decide '
                'what to compute (a branch of Python, a shape), so that each value is another '
                'program. Pass what changes often as an input of the model, and use jax.lax.cond '
                'or jax.numpy.where to decide.'
            )
        self._environ_inputs = self._environ_inputs | environment.moved()
        with jax.ensure_compile_time_eval():  # nothing of a surrounding transformation is kept
            self._graph = self._compile()
        self._graphs += (self._graph,)
        return True

    def with_environment(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a step, after what it reads of the environment, if it reads anything."""
        return self.graph.module_info.with_environment(args)

    def choose_backend(self, backend: str, strict: bool | Collection[str] = False) -> None:
        """Decide now what the kernels of this graph run with."""
        self.backend = check_backend(backend)
        self.resolved_backend, self._runner = resolve_backend(backend, strict), None

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the compilation report, or return it as text."""
        report = CompilationReport(self.graph)
        if verbose:
            report.show()
        return report.to_str() if return_msg else None

    def values(self) -> tuple[Values, Values, Values]:
        """The present values of parameters, hidden states and other states, by path."""
        params: Values = {}
        hidden: Values = {}
        others: Values = {}
        for path, state in self.states.items():
            if isinstance(state, brainstate.ParamState):
                params[path] = state.value
            elif isinstance(state, brainstate.HiddenState):
                hidden[path] = state.value
            else:
                others[path] = state.value
        return params, hidden, others


class ETraceVjpGraphExecutor(ETraceGraphExecutor):
    r"""Solves for the Jacobians of steps, and for what the loss says of the hidden states.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    vjp_method : {'single-step', 'multi-step'}
        Whether the learning signal reaches back one step, or through the window of inputs.
    control_flow : ControlFlowPolicy, optional
        What to do with control flow inside the step.
    backend : {'auto', 'jax', 'pallas', 'interpret'}
        The implementation asked for.
    couple_layers : bool
        Whether to trace what states of modules in a list do to each other.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> lstm = braintrace.nn.LSTMCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(lstm)
    >>> executor = braintrace.ETraceVjpGraphExecutor(lstm)
    >>> executor.compile_graph(jnp.ones(3))
    >>> out, hidden, others, h2w, h2h = executor.solve_h2w_h2h_jacobian(jnp.ones(3))
    >>> h2h[0].shape
    (4, 2, 2)
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        vjp_method: str = 'single-step',
        control_flow: ControlFlowPolicy | None = None,
        backend: str = 'auto',
        couple_layers: bool = False,
    ) -> None:
        super().__init__(model, control_flow, backend, couple_layers)
        if vjp_method not in ('single-step', 'multi-step'):
            raise ValueError(f"vjp_method is {vjp_method!r}; choose 'single-step' or 'multi-step'.")
        self.vjp_method = vjp_method

    @property
    def is_single_step_vjp(self) -> bool:
        """Whether the learning signal reaches back one step."""
        return self.vjp_method == 'single-step'

    @property
    def is_multi_step_vjp(self) -> bool:
        """Whether the learning signal reaches back through the window of inputs."""
        return self.vjp_method == 'multi-step'

    def solve_h2w_h2h_jacobian(
        self, *args: Any
    ) -> tuple[PyTree, Values, Values, Hid2Weight, list[jax.Array]]:
        """Run a step or a window, and give its Jacobians. The model's states stay as they are.

        Parameters
        ----------
        *args
            Inputs of one step, or windows in :class:`MultiStepData`.

        Returns
        -------
        tuple
            The results, the new hidden states, the new other states, the hidden-to-weight factors
            ``({relation: x}, {(relation, group): f})`` with ``f`` of shape ``(*varshape, S)``, and
            per group the Jacobian ``(*varshape, S, S)``. For windows, results and Jacobians have a
            leading time axis.
        """
        self.follow_environment()
        params, hidden, others = self.values()

        def step(hidden: Values, others: Values, step_args: tuple[Any, ...]) -> Any:
            out, hidden, others, factors = self.runner.run(step_args, params, hidden, others)
            return hidden, others, (out, *self._reference_layout(factors))

        return self._over(step, args, hidden, others)

    def solve_h2w_h2h_l2h_jacobian(
        self, *args: Any
    ) -> tuple[PyTree, Values, Values, Hid2Weight, list[jax.Array], VjpResiduals]:
        """As :meth:`solve_h2w_h2h_jacobian`, with the backward pass as residuals.

        The residuals map cotangents of (results, hidden states, other states) to those of (inputs,
        hidden states, untraced parameters, traced parameters, other states, perturbations); with
        ``'single-step'`` the traced parameters have none, and the perturbations' are
        ``dloss / dp`` at every hidden state.

        Raises
        ------
        NotImplementedError
            If a window is given under ``'single-step'``.
        """
        if self.is_single_step_vjp and has_multi_step_data(args):
            raise NotImplementedError(
                "A window of steps (MultiStepData) needs vjp_method='multi-step'; with "
                "'single-step' give the inputs of one step at a time."
            )
        self.follow_environment()
        params, hidden, others = self.values()
        traced_paths = {p for p, _ in CompilationReport(self.graph).etrace_weights}
        traced = {path: v for path, v in params.items() if path in traced_paths}
        untraced = {path: v for path, v in params.items() if path not in traced_paths}
        perturbs: list[jax.Array] = []
        if self.is_single_step_vjp and self.graph.hidden_perturb is not None:
            perturbs = list(self.graph.hidden_perturb.init_perturb_data())
        differentiated = {} if self.is_single_step_vjp else traced

        def run(
            args: Any,
            hidden: Values,
            untraced: Values,
            differentiated: Values,
            others: Values,
            perturbs: list[jax.Array],
        ) -> Any:
            values = {**traced, **untraced, **differentiated}

            def step(hidden: Values, others: Values, step_args: tuple[Any, ...]) -> Any:
                out, hidden, others, factors = self._perturbed(
                    step_args, values, hidden, others, perturbs
                )
                return hidden, others, (out, *self._reference_layout(factors))

            out, hidden, others, h2w, h2h = self._over(step, args, hidden, others)
            return (out, hidden, others), (h2w, h2h)

        results, vjp, (h2w, h2h) = jax.vjp(
            run, args, hidden, untraced, differentiated, others, perturbs, has_aux=True
        )
        return (*results, h2w, h2h, _residuals(vjp, results))

    def _perturbed(
        self,
        args: tuple[Any, ...],
        params: Values,
        hidden: Values,
        others: Values,
        perturbs: list[jax.Array],
    ) -> tuple[PyTree, Values, Values, Factors]:
        if not perturbs:
            return self.runner.run(args, params, hidden, others)
        states = self.runner.flat_states(params, hidden, others)
        out, hidden, others, temps = self.graph.call_hidden_perturb(args, perturbs, states)
        return out, hidden, others, self.runner.factors(temps)

    def _over(
        self,
        step: Callable[[Values, Values, tuple[Any, ...]], Any],
        args: tuple[Any, ...],
        hidden: Values,
        others: Values,
    ) -> Any:
        """Run a step, or scan it over a window."""
        if not has_multi_step_data(args):
            hidden, others, (out, h2w, h2h) = step(hidden, others, single_step(args))
            return out, hidden, others, h2w, h2h
        sequences, at_step = split_chunk(args)

        def body(carry: Any, slices: Any) -> Any:
            hidden, others = carry
            hidden, others, results = step(hidden, others, at_step(slices))
            return (hidden, others), results

        (hidden, others), (out, h2w, h2h) = lax.scan(body, (hidden, others), sequences)
        return out, hidden, others, h2w, h2h

    def _reference_layout(self, factors: Factors) -> tuple[Hid2Weight, list[jax.Array]]:
        xs = {r: x for r, x in enumerate(factors.x) if x is not None}
        dfs = {
            (link.op, link.group.index): _stack(link.group, f)
            for link, f in zip(self.runner.links, factors.f, strict=True)
        }
        h2h = [
            jnp.stack([_stack(group, row) for row in D], axis=-2)
            for group, D in zip(self.graph.hidden_groups, factors.D, strict=True)
        ]
        return (xs, dfs), h2h


def _shape_if_traced(a: Any) -> Any:
    return jax.ShapeDtypeStruct(a.shape, a.dtype) if isinstance(a, jax.core.Tracer) else a


def _used_states(graph: ETraceGraph) -> brainstate.util.FlattedDict:
    info = graph.module_info
    used = {id(state) for state in info.compiled_model_states}
    states = info.retrieved_model_states
    return brainstate.util.FlattedDict({p: s for p, s in states.items() if id(s) in used})


def _stack(group: HiddenGroup, planes: tuple[Plane, ...]) -> jax.Array:
    """Planes along a last axis, zeros where there is none."""
    zero = jnp.zeros(group.varshape, group.hidden_invars[0].aval.dtype)
    return jnp.stack([zero if plane is None else plane for plane in planes], axis=-1)


def _residuals(vjp: Any, results: PyTree) -> VjpResiduals:
    """A VJP function as data."""
    cotangents, out_tree = jax.tree.flatten(results)
    shapes = [_cotangent_shape(leaf) for leaf in cotangents]
    closed, shape = jax.make_jaxpr(
        lambda *flat: vjp(jax.tree.unflatten(out_tree, flat)), return_shape=True
    )(*shapes)
    jaxpr, consts = open_jaxpr(closed)
    return VjpResiduals(jaxpr, jax.tree.structure(shape), out_tree, consts)


def _cotangent_shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if inexact else jax.dtypes.float0)
