"""A compiled model: groups, relations, transitions, perturbed steps."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .._typing import Path
from .diagnostics import CompilationRecord, DiagnosticKind
from .exit_perturbation import ExitPerturbation
from .hidden_group import HiddenGroup
from .module_info import ModuleInfo, StepOutputs
from .pretty import pretty
from .relation import HiddenParamOpRelation
from .transition import Transition

if TYPE_CHECKING:
    from ..reference_api.compiler import HiddenPerturbation

__all__ = ['ETraceGraph']


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
    transitions : tuple of Transition
        Per group, the functions from which ``D`` and ``f`` are computed.
    build_exit_perturb : callable or None
        Makes :attr:`exit_perturb`, once.

    Examples
    --------
    >>> import brainstate, braintrace_fast as braintrace, jax.numpy as jnp
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
    hidden_perturb: 'HiddenPerturbation | None'
    diagnostics: tuple[CompilationRecord, ...] = ()
    transitions: tuple[Transition, ...] = ()
    build_exit_perturb: Callable[[], ExitPerturbation] | None = None

    @property
    def exit_perturb(self) -> ExitPerturbation | None:
        """The step from which ``c``, ``L`` and ``R`` are read, built on first use."""
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
    ) -> StepOutputs:
        """Run the step with perturbations added to the new hidden states.

        ``perturb_data`` has one for each, as ``hidden_perturb.init_perturb_data()`` gives; the
        other arguments and the results are those of :meth:`call_exit_perturb`.
        """
        from ..reference_api.compiler import call_hidden_perturb  # it imports this class

        return call_hidden_perturb(self, args, perturb_data, old_state_vals)

    def call_exit_perturb(
        self,
        args: Sequence[Any],
        y_perturb: Sequence[jax.Array],
        exit_perturb: Sequence[jax.Array],
        bypass_perturb: Sequence[jax.Array],
        old_state_vals: Sequence[Any] | None = None,
    ) -> StepOutputs:
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
        return pretty(self)
