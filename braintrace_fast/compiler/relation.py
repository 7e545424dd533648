"""One occurrence of an op whose weight is traced, and the hidden groups that it reaches."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import brainstate
import jax

from .._compat import Jaxpr, Primitive, Var
from .._typing import Path
from .hidden_group import HiddenGroup
from .pretty import pretty
from .weight_way import WeightWay

__all__ = ['HiddenParamOpRelation']


class HiddenParamOpRelation(NamedTuple):
    r"""One occurrence of an op, :math:`y = \mathrm{op}(x, \theta)`, and the groups it reaches.

    Attributes
    ----------
    primitive : Primitive
        The op.
    x_var : Var or None
        Its input; None for an op of weights alone.
    y_var : Var
        Its output.
    hidden_groups : list of HiddenGroup
        The groups that ``y`` reaches position by position.
    y_to_hidden_group_jaxprs : list of Jaxpr
        Per group, from (the values of ``y_to_hidden_group_constvars``, ``y``) to its new states.
    connected_hidden_paths : list of Path
        The states that ``y`` reaches.
    eqn_params : dict
        The parameters of the op's equation.
    path_classification : dict
        Per state, ``'all_direct'``, or ``'mixed'`` if a part of the influence passes through
        something that mixes positions and is not traced.
    trainable_vars : dict
        Per trainable input of the op (``'weight'``, ``'bias'``), its variable.
    trainable_paths, trainable_leaf_indices, trainable_param_states : dict
        The parameter that it comes from: path, leaf, state.
    trainable_processing_chains : dict
        The primitives between the parameter and the op.
    y_to_hidden_group_constvars : list of list of Var
        The other variables that ``y_to_hidden_group_jaxprs`` read.
    f_patterns : list of tuple of bool
        Per group, ``[s]`` is False where ``d h_s(t) / d y(t)`` is zero by structure.
    is_position_wise : bool
        False if some influence of ``y`` on a reached state passes through an operation other than a
        matrix product that mixes positions.
    is_shared : bool
        Whether ``y`` has fewer axes than the states, so that the batch shares it.
    weight_ways : dict
        Per trainable input, its :class:`WeightWay` from the parameters.
    source : str
        The line of the user's code.
    aux : dict
        The values of the op's auxiliary inputs, by name.
    fixed_ways : dict
        As ``weight_ways``, of inputs that are not trained, if the op's rules need their values.
    substeps : int
        How many substeps of a scan share the op, whose ``x`` and ``y`` then have an axis of them in
        front; 0 outside of scans.
    """

    primitive: Primitive
    x_var: Var | None
    y_var: Var
    hidden_groups: list[HiddenGroup]
    y_to_hidden_group_jaxprs: list[Jaxpr]
    connected_hidden_paths: list[Path]
    eqn_params: dict[str, Any]
    path_classification: dict[Path, str] = {}
    trainable_vars: dict[str, Var] = {}
    trainable_paths: dict[str, Path] = {}
    trainable_leaf_indices: dict[str, int] = {}
    trainable_param_states: dict[str, brainstate.ParamState] = {}
    trainable_processing_chains: dict[str, tuple[Primitive, ...]] = {}
    y_to_hidden_group_constvars: list[list[Var]] = []
    f_patterns: list[tuple[bool, ...]] = []
    is_position_wise: bool = True
    is_shared: bool = False
    weight_ways: dict[str, WeightWay] = {}
    source: str = ''
    aux: dict[str, jax.Array] = {}
    fixed_ways: dict[str, WeightWay] = {}
    substeps: int = 0

    @property
    def x(self) -> Var | None:
        """The same as ``x_var``."""
        return self.x_var

    @property
    def y(self) -> Var:
        """The same as ``y_var``."""
        return self.y_var

    @property
    def control_flow_context(self) -> int | None:
        """The number of substeps, if the op is inside a scan that is not unrolled."""
        return self.substeps or None

    @property
    def path(self) -> Path:
        """The path of the weight."""
        return next(iter(self.trainable_paths.values()))

    @property
    def rule_params(self) -> dict[str, Any]:
        """What the op's rules take as keywords: ``eqn_params`` and ``aux``."""
        return {**self.eqn_params, **self.aux}

    @property
    def is_static(self) -> bool:
        """Whether the weights are functions of parameters and constants only."""
        return all(way.is_static for way in self.weight_ways.values())

    def y_to_hidden_groups(
        self,
        y_val: jax.Array,
        const_vals: Mapping[Var, jax.Array],
        concat_hidden_vals: bool = True,
    ) -> list[Any]:
        """The new states of every reached group as functions of ``y``.

        Parameters
        ----------
        y_val : jax.Array
            The op's output.
        const_vals : mapping of Var to jax.Array
            The values of the other variables.
        concat_hidden_vals : bool
            Whether to join the states of a group along a last axis.

        Returns
        -------
        list
            Per group, one array, or one per state.
        """
        from ..reference_api.compiler import y_to_hidden_groups  # it imports this class

        return y_to_hidden_groups(self, y_val, const_vals, concat_hidden_vals)

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        return pretty(self)
