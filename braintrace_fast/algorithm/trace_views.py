"""A learner's traces as braintrace shows them: states by op and group."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import brainstate
import jax.numpy as jnp

from .._typing import Path
from ..kernels.planes import if_live
from ..runtime.links import links_of
from .base import EligibilityTrace

if TYPE_CHECKING:
    from .vjp import ETraceVjpAlgorithm as Learner

__all__ = ['TraceView', 'ops_of', 'shown', 'views']


class TraceView(EligibilityTrace):
    """A part of a learner's trace in braintrace's layout.

    It holds nothing: what is read or written is the learner's state ``trace``.

    Parameters
    ----------
    learner : ETraceVjpAlgorithm
        The learner.
    op : int
        Which op it belongs to.
    key : hashable
        The key of the part.
    side : int, optional
        The side of a factorised trace.
    """

    _learner: 'Learner'
    _op: int
    _key: Any
    _side: int | None

    def __init__(self, learner: 'Learner', op: int, key: Any, side: int | None = None) -> None:
        super().__init__(())
        vars(self).update(_learner=learner, _op=op, _key=key, _side=side)

    @property
    def value(self) -> Any:
        """The present values."""
        found = shown(self._learner, {self._op})
        return (found if self._side is None else found[self._side])[self._key]

    @value.setter
    def value(self, value: Any) -> None:
        learner = self._learner
        engine: Any = learner.engine
        entry, _ = learner.carried
        trace = if_live(entry.live, entry.trace)  # a dead one may hold anything
        learner.trace.value = engine.with_trace_of(trace, self._key, value)
        learner.trace_is_live.value = jnp.ones((), bool)

    def __pretty_repr_item__(self, k: str, v: Any) -> Any:
        return (k, v) if k in ('_key', '_side') else None


def views(
    learner: 'Learner', key_of: Callable[[Any], Any], side: int | None = None
) -> dict[Any, EligibilityTrace]:
    """All parts of a learner's trace, by keys of its links; by None for those without."""
    learner._check_compiled()
    links = [(key_of(link), link.op) for link in links_of(learner.graph)]
    return {key: TraceView(learner, op, key, side) for key, op in links if key is not None}


def shown(learner: 'Learner', ops: set[int]) -> Any:
    """The present traces of some ops."""
    params, _, _ = learner.graph_executor.values()
    entry, _ = learner.carried
    return learner.engine.trace_of(entry, params, ops)


def ops_of(learner: 'Learner', weight: brainstate.State | Path) -> set[int]:
    """The ops that a weight reaches, or an error that names those that are traced."""
    path: Any = weight
    if isinstance(weight, brainstate.State):
        path = learner.state_id_to_path.get(id(weight), ())
    ops = {
        op
        for op, relation in enumerate(learner.graph.hidden_param_op_relations)
        if any(path in way.paths for way in relation.weight_ways.values())
    }
    if not ops:
        traced = [p for p, _ in learner.report.etrace_weights]
        raise ValueError(f'There is no trace of {path}; the traced weights are {traced}.')
    return ops
