"""The executor that solves for Jacobians and residuals, in the reference's layout.

Derivatives have shapes ``(*varshape, S)`` and ``(*varshape, S, S)``; the engines work on the planes
of :class:`~braintrace_fast.runtime.StepRunner` instead.
"""

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_pytree_node_class

from .._compat import Jaxpr, open_jaxpr
from .._typing import PyTree
from ..compiler import CompilationReport, ControlFlowPolicy, HiddenGroup, Scope
from ..errors import ArgumentError
from ..kernels.planes import Plane
from ..runtime.executor import ETraceGraphExecutor
from ..runtime.factors import Factors, Values
from ..runtime.input_data import has_multi_step_data, single_step, split_chunk

__all__ = ['ETraceVjpGraphExecutor', 'VjpResiduals']

Hid2Weight = tuple[dict[int, jax.Array], dict[tuple[int, int], jax.Array]]


@register_pytree_node_class
class VjpResiduals:
    """A backward pass, kept until the cotangents are known.

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
        """The inverse of :meth:`tree_flatten`."""
        jaxpr, in_tree, out_tree = aux
        return cls(jaxpr, in_tree, out_tree, consts)


class ETraceVjpGraphExecutor(ETraceGraphExecutor):
    r"""An executor that also solves for Jacobians of steps and for learning signals.

    Parameters
    ----------
    model, control_flow, backend, couple_layers, scope, leak
        As for :class:`ETraceGraphExecutor`.
    vjp_method : {'single-step', 'multi-step'}
        Whether the learning signal reaches back one step, or through a chunk of steps.

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
        scope: Scope | None = None,
        leak: float | None = None,
    ) -> None:
        super().__init__(model, control_flow, backend, couple_layers, scope, leak)
        if vjp_method not in ('single-step', 'multi-step'):
            raise ArgumentError(
                f"vjp_method is {vjp_method!r}; choose 'single-step' or 'multi-step'."
            )
        self.vjp_method = vjp_method

    @property
    def is_single_step_vjp(self) -> bool:
        """Whether the learning signal reaches back one step."""
        return self.vjp_method == 'single-step'

    @property
    def is_multi_step_vjp(self) -> bool:
        """Whether the learning signal reaches back through a chunk of steps."""
        return self.vjp_method == 'multi-step'

    def solve_h2w_h2h_jacobian(
        self, *args: Any
    ) -> tuple[PyTree, Values, Values, Hid2Weight, list[jax.Array]]:
        """Run a step or a chunk of steps, and give its Jacobians; the model's states do not change.

        Parameters
        ----------
        *args
            Inputs of one step, or of a chunk of steps in :class:`MultiStepData`.

        Returns
        -------
        tuple
            The results, the new hidden states, the new other states, the hidden-to-weight factors
            ``({relation: x}, {(relation, group): f})`` with ``f`` of shape ``(*varshape, S)``, and
            per group the Jacobian ``(*varshape, S, S)``. For a chunk, results and Jacobians have a
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
            If a chunk is given under ``'single-step'``.
        """
        if self.is_single_step_vjp and has_multi_step_data(args):
            raise NotImplementedError(
                "A chunk of steps (MultiStepData) needs vjp_method='multi-step'; with "
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
        """Run a step, or scan it over a chunk."""
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


def _stack(group: HiddenGroup, planes: tuple[Plane, ...]) -> jax.Array:
    """Planes along a last axis, with zeros for those that are absent."""
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
