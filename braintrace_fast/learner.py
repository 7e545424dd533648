"""From a model to a learner in one call."""

import contextlib
import copy
import difflib
from typing import Any

import brainstate

from .algorithm import (
    D_RTRL,
    DNI,
    UORO,
    EProp,
    ETraceConfig,
    ETraceVjpAlgorithm,
    IODimVjpAlgorithm,
    OSTLFeedforward,
    OSTLRecurrent,
    ParamDimVjpAlgorithm,
    RandomProjectionVjpAlgorithm,
    ThreeFactor,
    pp_prop,
)
from .compiler import check_traced

__all__ = ['ETraceVmap', 'compile']

ALGORITHMS: dict[str, type[ETraceVjpAlgorithm]] = {
    'd_rtrl': D_RTRL,
    'pp_prop': pp_prop,
    'es_d_rtrl': pp_prop,
    'esd_rtrl': pp_prop,
    'eprop': EProp,
    'e_prop': EProp,
    'ostl_feedforward': OSTLFeedforward,
    'ostl_recurrent': OSTLRecurrent,
    'three_factor': ThreeFactor,
    'uoro': UORO,
    'dni': DNI,
}
ENGINES: dict[str, type[ETraceVjpAlgorithm]] = {
    'per_param': ParamDimVjpAlgorithm,
    'io_factorized': IODimVjpAlgorithm,
    'random_projection': RandomProjectionVjpAlgorithm,
}
"""By the factorisation of the trace, what learns by any configuration with it."""


def compile(
    model: brainstate.nn.Module,
    algorithm: str | ETraceConfig | type[ETraceVjpAlgorithm],
    *example_inputs: Any,
    batch_size: int | None = None,
    seed: int | None = None,
    verbose: int = 0,
    vmap: bool = False,
    **options: Any,
) -> 'ETraceVjpAlgorithm | ETraceVmap':
    """Make an online learner out of a model, whose states are initialised anew.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model whose ``update`` is one time step.
    algorithm : str, ETraceConfig or type
        ``'d_rtrl'``, ``'pp_prop'`` (``'es_d_rtrl'``), ``'eprop'``, ``'three_factor'``,
        ``'ostl_recurrent'``, ``'ostl_feedforward'``, ``'uoro'``, ``'dni'``, a configuration, or a
        class. In a name only letters and digits count, of either case: ``'D-RTRL'`` is
        ``'d_rtrl'``.
    *example_inputs
        Inputs of one step, or of a chunk of steps, as the learner will be called with.
    batch_size : int, optional
        The batch size of the states, the same as that of the inputs.
    seed : int, optional
        A seed for the initialisation of the states.
    verbose : {0, 1, 2}
        Whether to print the compilation report (1), and warnings with it (2).
    vmap : bool
        Whether to map a model of one example over the leading axis of the inputs.
    **options
        Arguments of the learning rule.

    Returns
    -------
    ETraceVjpAlgorithm or ETraceVmap
        The learner, ready to be called; with ``vmap``, its wrapper.

    Raises
    ------
    CompilationError
        If no weight can be traced; a learning rule that is constructed by itself takes such a model
        too, and gives every weight the gradient of the step or chunk.

    Warns
    -----
    UntracedWarning
        If weights are left out, or counted only in part, and changing the model would help.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.ones(3))
    >>> grads = learner.etrace_grad(jnp.ones((10, 3)), step_fn=lambda x: learner(x).sum())
    >>> sorted(grads)[0]
    ('Wh', 'weight')
    """
    rule = _rule(algorithm)
    if isinstance(algorithm, ETraceConfig):
        if 'config' in options:
            raise TypeError(
                'There are two configurations. Pass it once: as the algorithm, or as config=...'
            )
        options['config'] = algorithm
    if not example_inputs:
        raise ValueError('Give at least one example input: compile(model, algorithm, x, ...).')
    if verbose not in (0, 1, 2):
        raise ValueError(f'verbose is {verbose!r}; it must be 0, 1 or 2.')
    learner = rule(_initialize(model, batch_size, seed, vmap), **options)
    learner.compile_graph(*example_inputs)
    check_traced(learner.graph)
    if verbose:
        learner.report.show(verbose)
    return ETraceVmap(learner) if vmap else learner


def _rule(algorithm: str | ETraceConfig | type[ETraceVjpAlgorithm]) -> type[ETraceVjpAlgorithm]:
    """A learning rule, from its name, its configuration or itself."""
    if isinstance(algorithm, ETraceConfig):
        return ENGINES[algorithm.trace_factorization]
    if isinstance(algorithm, str):
        return _rule_named(algorithm)
    if not (isinstance(algorithm, type) and issubclass(algorithm, ETraceVjpAlgorithm)):
        raise TypeError(
            f'The algorithm is {algorithm!r}; expected a name, an ETraceConfig '
            'or a subclass of ETraceVjpAlgorithm.'
        )
    return algorithm


def _rule_named(algorithm: str) -> type[ETraceVjpAlgorithm]:
    """A learning rule by its name, of which only letters and digits count."""
    names = {_letters(name): name for name in ALGORITHMS}
    if _letters(algorithm) in names:
        return ALGORITHMS[names[_letters(algorithm)]]
    near = difflib.get_close_matches(_letters(algorithm), names, n=1)
    meant = f'; did you mean {names[near[0]]!r}?' if near else '.'
    raise ValueError(
        f'The algorithm {algorithm!r} is not known{meant} Choose one of {sorted(ALGORITHMS)}, or '
        'pass a class.'
    )


def _letters(name: str) -> str:
    return ''.join(filter(str.isalnum, name.lower()))


def _initialize(
    model: brainstate.nn.Module, batch_size: int | None, seed: int | None, vmap: bool
) -> brainstate.nn.Module:
    """The model with new states; with ``vmap``, mapped over a batch."""
    if vmap and batch_size is None:
        raise ValueError('vmap=True needs batch_size=..., the size of the mapped axis.')
    with contextlib.ExitStack() as stack:
        if seed is not None:
            stack.enter_context(brainstate.random.seed_context(seed))
        if vmap:
            return _mapped(model, batch_size)
        brainstate.nn.init_all_states(model, batch_size=batch_size)
        return model


def _mapped(model: brainstate.nn.Module, batch_size: int | None) -> brainstate.nn.Module:
    """The model mapped over a batch, with states for each example."""

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=batch_size)
    def init_states() -> None:
        brainstate.nn.init_all_states(model)

    init_states()
    return _MappedModel(model, vmap_states='new')


class _MappedModel(brainstate.nn.Vmap):
    """A model mapped over a batch; its states keep the paths that they have in the model."""

    def states(self, *filters: Any, **options: Any) -> Any:
        return self.module.states(*filters, **options)


class ETraceVmap(brainstate.nn.Vmap):
    """What ``compile(..., vmap=True)`` returns: a learner of a mapped model.

    It is called and driven like any learner, in chunks too, and has all of the learner's
    attributes. Traces and gradients run on the mapped model, so that no example gets weight
    gradients of its own.

    Parameters
    ----------
    module : ETraceVjpAlgorithm
        The learner. Its model is the mapped one, so that it takes and returns batches as well.
    """

    module: ETraceVjpAlgorithm

    def __init__(self, module: ETraceVjpAlgorithm) -> None:
        super().__init__(module)
        self.vmapped_fn = module.__call__  # the model inside is mapped already

    @property
    def modulator(self) -> Any:
        """The standing modulator of the learner."""
        return self.module.modulator

    @modulator.setter
    def modulator(self, value: Any) -> None:
        self.module.modulator = value

    def __deepcopy__(self, memo: Any = None) -> Any:
        return type(self)(copy.deepcopy(self.module, memo))  # which says why it cannot be

    def __getattr__(self, name: str) -> Any:
        if name == 'module':  # not set yet: copying and unpickling ask before they set it
            raise AttributeError(name)
        return getattr(self.module, name)
