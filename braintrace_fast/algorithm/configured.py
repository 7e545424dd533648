"""What a learner's configuration decides: scope, recursion and learning signal."""

from typing import Any, ClassVar

import brainstate
import jax

from ..compiler import Coupled, ETraceGraph, Neighbourhood, Scope
from ..compiler.scope import Whole
from ..kernels.promotion import product
from ..runtime.executor import ETraceGraphExecutor
from ..runtime.factors import Factors, GroupPlanes, Signals
from .axes import ETraceConfig
from .base import ETraceAlgorithm
from .signals import RandomFeedback, check_modulator, modulated

__all__ = ['ConfiguredAlgorithm', 'leak_of', 'scope_of']

NONE = ()
"""The value of a state without one; brainstate refuses None."""


def scope_of(config: ETraceConfig, couple_layers: bool) -> Scope | None:
    """The scope of a configuration; None if it is the usual one."""
    if config.trace_factorization == 'random_projection':
        return Whole(couple_layers)
    if config.sparse_n is not None:
        return Neighbourhood(couple_layers, config.sparse_n)
    return Coupled(couple_layers) if config.include_recurrent_mixing else None


def leak_of(config: ETraceConfig) -> float | None:
    """The number that takes the place of ``D``; None if nothing does."""
    recursion: Any = config.temporal_recursion
    decay: Any = config.decay
    if config.is_factorized:  # whose engine multiplies by the decay itself
        recursion, decay = config.recursion_f, 1.0
    return {'jacobian': None, 'scalar_leak': decay, 'none': 0.0}[recursion]


class ConfiguredAlgorithm(ETraceAlgorithm):
    """A learner whose learning signal is chosen by its configuration.

    Parameters
    ----------
    model, graph_executor, name
        As for :class:`ETraceAlgorithm`.
    config : ETraceConfig
        The configuration.
    random_feedback_key : jax.Array, optional
        The random key of the matrices of random feedback.
    """

    default_config: ClassVar[ETraceConfig] = ETraceConfig()
    """That of a learner which is given none."""
    trace_factorization: ClassVar[str | None] = None
    """That of all configurations of the class; None if any will do."""

    def __init__(
        self,
        model: brainstate.nn.Module,
        graph_executor: ETraceGraphExecutor,
        name: str | None,
        config: ETraceConfig,
        random_feedback_key: Any,
    ) -> None:
        super().__init__(model, graph_executor, name)
        self.config = config
        self.random_feedback_key = random_feedback_key
        self.random_feedback: RandomFeedback | None = None
        if config.learning_signal == 'modulatory':
            self._modulator = brainstate.ShortTermState(NONE)

    @classmethod
    def check_config(cls, config: Any, vjp_method: str, random_feedback_key: Any) -> None:
        """Refuse a configuration that a learner of this class cannot have."""
        if not isinstance(config, ETraceConfig):
            raise TypeError(f'config is a {type(config).__name__}; expected an ETraceConfig.')
        if config.trace_factorization != (cls.trace_factorization or config.trace_factorization):
            raise ValueError(
                f'{cls.__name__} keeps traces {cls.trace_factorization!r}, and the config has '
                f'trace_factorization={config.trace_factorization!r}. Use compile(model, config, '
                '...), which chooses the class.'
            )
        signal = config.learning_signal
        if signal == 'random_feedback' and random_feedback_key is None:
            raise ValueError(
                "learning_signal='random_feedback' needs random_feedback_key=..., such as "
                'brainstate.random.split_key().'
            )
        if signal == 'modulatory' and vjp_method != 'single-step':
            raise ValueError(
                f"vjp_method is {vjp_method!r}; learning_signal='modulatory' needs 'single-step', "
                'because within a chunk the loss alone would count, and not the modulator.'
            )
        if signal == 'bootstrapped' and cls.exit_signals is ConfiguredAlgorithm.exit_signals:
            raise NotImplementedError(
                f"learning_signal='bootstrapped' needs an estimate of the future, and "
                f'{cls.__name__} has none.'
            )

    @property
    def step_weight(self) -> jax.Array | None:
        """The weight of the step that ``etrace_grad`` runs with a mask."""
        raise NotImplementedError

    @property
    def own_states(self) -> list[brainstate.State]:
        """The states that belong to the learner and not to the model."""
        return [self._modulator] if self._is_modulated else []

    @property
    def modulator(self) -> Any:
        """The standing modulator, or None. It is kept in a state, so that jit sees a new one."""
        value = self._modulator.value if self._is_modulated else NONE
        return None if isinstance(value, tuple) else value

    @modulator.setter
    def modulator(self, value: Any) -> None:
        if not self._is_modulated:
            self._refuse_modulator(value)
            return
        groups = self.graph.hidden_groups if self.is_compiled else ()
        self._modulator.value = NONE if value is None else check_modulator(value, groups)

    def prepare_signals(self, graph: ETraceGraph) -> None:
        """Draw the matrices of random feedback, for a graph that was compiled."""
        if self.config.learning_signal == 'random_feedback':
            with jax.ensure_compile_time_eval():  # it may be made while a loop is traced
                self.random_feedback = RandomFeedback(graph, self.random_feedback_key)

    def learning_signals(self, factors: Factors, signals: Signals, modulator: Any) -> Signals:
        """The signals of a step that the rule learns from, as its configuration says.

        ``modulator`` is what :meth:`modulator_of` returned. While ``etrace_grad`` runs a step with
        a mask, ``step_weight`` is its weight there; it is in the loss's signals already.

        A rule that overrides this must change ``c`` together with ``L``: where an op reaches the
        loss by hidden states alone, ``c`` is ``sum_s f[s] L[s]``, and either may be used.
        """
        if self.random_feedback is not None:
            return self.random_feedback(factors, signals, modulator)
        if not self._is_modulated:
            return signals
        if modulator is None:
            raise RuntimeError(
                f'There is no modulator, which is the learning signal of {type(self).__name__}. '
                'Give it in the call, learner(x, modulator=m), or set learner.modulator = m.'
            )
        return modulated(self.graph, factors, signals, modulator)

    def replaces_signals(self) -> bool:
        """Whether the rule learns from other signals than those of the loss."""
        own = type(self).learning_signals is not ConfiguredAlgorithm.learning_signals
        return own or self.config.learning_signal in ('random_feedback', 'modulatory')

    def entry_signals(self, planes: GroupPlanes) -> GroupPlanes:
        """The same at the start of a chunk that is differentiated in full."""
        return planes if self.random_feedback is None else self.random_feedback.project(planes)

    def exit_signals(self, planes: GroupPlanes, modulator: Any) -> GroupPlanes | None:
        """What the future says of the states at the end of such a chunk; by default nothing.

        It reaches the inputs of the chunk, and parameters that are not traced.
        """
        return None

    def modulator_of(self, given: Any) -> Any:
        """What :meth:`learning_signals` is given of a call.

        That is the modulator, weighed by a mask: what was given, or else what stands; or with
        random feedback, the weight that a mask gives to the step.
        """
        if not self._is_modulated:
            self._refuse_modulator(given)
            return None if self.random_feedback is None else self.step_weight
        modulator = self.modulator if given is None else given
        if modulator is None:
            return None
        checked = check_modulator(modulator, self.graph.hidden_groups)
        return checked if self.step_weight is None else product(checked, self.step_weight)

    @property
    def _is_modulated(self) -> bool:
        return self.config.learning_signal == 'modulatory'

    def _refuse_modulator(self, given: Any) -> None:
        if given is not None:
            raise TypeError(
                f'{type(self).__name__} takes no modulator; use ThreeFactor, or a config with '
                "learning_signal='modulatory'."
            )
