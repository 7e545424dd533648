"""What makes a learning rule, axis by axis."""

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ['ETraceConfig']

PER_PARAM, IO_FACTORIZED = 'per_param', 'io_factorized'
VALUES = {
    'trace_factorization': (PER_PARAM, IO_FACTORIZED, 'random_projection'),
    'temporal_recursion': ('jacobian', 'scalar_leak', 'none'),
    'recurrence_scope': ('diagonal', 'coupled', 'sparse_n'),
    'learning_signal': ('symmetric', 'random_feedback', 'modulatory', 'bootstrapped'),
    'trace_filter': ('none', 'kappa'),
    'update_schedule': ('per_step', 'window', 'sequence_end'),
}
"""By axis, its values; the first is the default."""

UNBUILT = {'update_schedule': ('window', 'sequence_end')}
COEFFICIENTS = (
    ('kappa', 'trace_filter', 'kappa'),
    ('sparse_n', 'recurrence_scope', 'sparse_n'),
    ('window_size', 'update_schedule', 'window'),
)
"""Coefficients that belong to one value of one axis."""

SIDES = ('x-side', 'f-side')


@dataclasses.dataclass(frozen=True)
class ETraceConfig:
    r"""A learning rule as a point on six axes, with its coefficients.

    The rule is :math:`e_t = D_t e_{t-1} + f_t \otimes x_t` and :math:`g_t = L_t e_t`; the axes say
    how ``e`` is kept, and what is taken for ``D`` and ``L``. Equal rules are equal configurations:
    what was given is brought into one form first, and refused if it makes no rule.

    Parameters
    ----------
    trace_factorization : {'per_param', 'io_factorized', 'random_projection'}
        The trace as one array per weight (:class:`ParamDimVjpAlgorithm`), as a product of an input
        side and an output side (:class:`IODimVjpAlgorithm`), or as a random projection.
    temporal_recursion : {'jacobian', 'scalar_leak', 'none'} or pair of them
        What carries the trace from step to step: the hidden states' own ``D``, the number
        ``decay``, or nothing. A factorised trace has a pair, for its input and output side, of
        which the first cannot be ``'jacobian'``.
    recurrence_scope : {'diagonal', 'coupled', 'sparse_n'}
        Which influence is in ``D``: that of each position on itself past the ops, through them as
        well, or that on a neighbourhood of ``sparse_n - 1`` steps.
    learning_signal : {'symmetric', 'random_feedback', 'modulatory', 'bootstrapped'}
        The loss's own signal; its direction through a random matrix; what the user gives in its
        place; or the loss's own with an estimate of the future.
    trace_filter : {'none', 'kappa'}
        Whether the trace is smoothed, as in :class:`EProp`.
    update_schedule : {'per_step'}
        When gradients are taken.
    decay : float or pair of float, optional
        How much of the trace is kept from step to step, in ``[0, 1)``; for each side of a
        factorised trace, or for both.
    kappa : float, optional
        How much of the filtered trace is kept, in ``[0, 1)``.
    sparse_n : int, optional
        The order of the neighbourhood; 1 is ``'coupled'``.
    window_size : int, optional
        Belongs to a schedule that does not exist yet.

    Raises
    ------
    ValueError
        If a value is not known, a coefficient is out of range, or they make no rule together.
    TypeError
        If a coefficient is no number.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> leaky = braintrace.ETraceConfig(temporal_recursion='scalar_leak', decay=0.9)
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), leaky, jnp.ones(3))
    >>> learner.config.describe()
    "trace_factorization='per_param', temporal_recursion='scalar_leak', decay=0.9"
    >>> leaky.replace(decay=0.0).temporal_recursion
    'none'
    """

    trace_factorization: str = PER_PARAM
    temporal_recursion: str | tuple[str, str] = 'jacobian'
    recurrence_scope: str = 'diagonal'
    learning_signal: str = 'symmetric'
    trace_filter: str = 'none'
    update_schedule: str = 'per_step'
    decay: float | tuple[float, float] | None = None
    kappa: float | None = None
    sparse_n: int | None = None
    window_size: int | None = None

    def __post_init__(self) -> None:
        for axis in VALUES:
            _check_value(self, axis)
        self._set(
            decay=_each(_fraction, 'decay', self.decay),
            kappa=_fraction('kappa', self.kappa),
            sparse_n=_order(self.sparse_n),
        )
        self._bring_into_form()
        _check_coefficients(self)
        _check_recursion(self)
        _check_axes(self)

    @property
    def is_factorized(self) -> bool:
        """Whether the trace has an input side and an output side."""
        return self.trace_factorization == IO_FACTORIZED

    @property
    def recursion_x(self) -> str:
        """The recursion of the input side."""
        return self._side('temporal_recursion', 0)

    @property
    def recursion_f(self) -> str:
        """The recursion of the output side."""
        return self._side('temporal_recursion', 1)

    @property
    def decay_x(self) -> float:
        """The decay of the input side."""
        return self._side('decay', 0)

    @property
    def decay_f(self) -> float:
        """The decay of the output side."""
        return self._side('decay', 1)

    @property
    def include_recurrent_mixing(self) -> bool:
        """Whether influence through the ops of a group is in ``D``."""
        return self.recurrence_scope != 'diagonal'

    def replace(self, **changes: Any) -> 'ETraceConfig':
        """A configuration with other values of some fields."""
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """The factorisation, and all that is not by default, in one line."""
        first, *others = dataclasses.fields(self)
        shown = [first, *(f for f in others if getattr(self, f.name) != f.default)]
        return ', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)

    def _bring_into_form(self) -> None:
        if self.is_factorized:
            self._set(**_two_sided(self.temporal_recursion, self.decay))
        elif isinstance(self.temporal_recursion, str) and not isinstance(self.decay, tuple):
            recursion, decay = self.temporal_recursion, self.decay
            if recursion == 'scalar_leak' and decay == 0:
                recursion = 'none'
            if recursion == 'none' and decay is None:
                decay = 0.0
            self._set(temporal_recursion=recursion, decay=decay)
        if (self.trace_filter, self.kappa) == ('kappa', 0):
            self._set(trace_filter='none', kappa=None)
        if (self.recurrence_scope, self.sparse_n) == ('sparse_n', 1):
            self._set(recurrence_scope='coupled', sparse_n=None)

    def _side(self, name: str, place: int) -> Any:
        if not self.is_factorized:
            raise AttributeError(
                f"{name} has two sides only with trace_factorization='io_factorized', and here it "
                f'is {self.trace_factorization!r}. Read config.{name}.'
            )
        return getattr(self, name)[place]

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _check_value(config: ETraceConfig, axis: str) -> None:
    """Refuse what an axis does not know; a sequence of recursions becomes a tuple."""
    value = getattr(config, axis)
    values: tuple[Any, ...] = (value,)
    if axis == 'temporal_recursion' and isinstance(value, list | tuple):
        values = _pair(axis, value)
        config._set(temporal_recursion=values)
    for one in values:
        if not isinstance(one, str) or one not in VALUES[axis]:
            raise ValueError(
                f'{one!r} is not a known value of {axis}; choose one of {_listed(VALUES[axis])}.'
            )
        if one in UNBUILT.get(axis, ()):
            built = [v for v in VALUES[axis] if v not in UNBUILT[axis]]
            raise ValueError(
                f'{axis}={one!r} is known, but not implemented yet, and there is no phase yet in '
                f'which it will be; use {_listed(built)}. How often to update is up to the loop '
                'around etrace_grad.'
            )


def _two_sided(recursion: Any, decay: Any) -> dict[str, Any]:
    """Recursions and decays of a factorised trace, for both sides."""
    if isinstance(recursion, str):
        recursion = ('scalar_leak' if recursion == 'jacobian' else recursion, recursion)
    decays = decay if isinstance(decay, tuple) else (decay,) * 2
    kinds = tuple('none' if a == 0 else kind for kind, a in zip(recursion, decays, strict=True))
    decays = tuple(
        0.0 if kind == 'none' and a is None else a for kind, a in zip(kinds, decays, strict=True)
    )
    return {'temporal_recursion': kinds, 'decay': decays}


def _check_coefficients(config: ETraceConfig) -> None:
    for name, axis, value in COEFFICIENTS:
        given, chosen = getattr(config, name), getattr(config, axis)
        if given is not None and chosen != value:
            raise ValueError(
                f'{name}={given!r} has no category to act on: it belongs to {axis}={value!r}, and '
                f'{axis} is {chosen!r}. Set {axis}={value!r}, or leave {name} out.'
            )
        if given is None and chosen == value:
            raise ValueError(f'With {axis}={value!r}, `{name}` is required.')


def _check_recursion(config: ETraceConfig) -> None:
    """Refuse decays that a recursion does not have, or lacks."""
    recursion: Any = config.temporal_recursion
    decay: Any = config.decay
    if config.is_factorized:
        if recursion[0] == 'jacobian':
            raise ValueError(
                "The temporal_recursion of the x-side may not be 'jacobian', since inputs have no "
                "hidden states: use ('scalar_leak', 'jacobian')."
            )
        sides = [*zip(recursion, decay, SIDES, strict=True)]
        missing = [side for _, a, side in sides if a is None]
        if missing:
            raise ValueError(
                f"With trace_factorization='io_factorized', the {missing[0]} decay is required: "
                'give decay=a, or decay=(a_x, a_f).'
            )
    else:
        for name, value in (('temporal_recursion', recursion), ('decay', decay)):
            if isinstance(value, tuple):
                raise ValueError(
                    f"{name} may only be a pair with trace_factorization='io_factorized'; here it "
                    f'is {value}, and trace_factorization={config.trace_factorization!r} has one '
                    'trace.'
                )
        sides = [(recursion, decay, 'trace')]
        if recursion == 'jacobian' and decay is not None:
            raise ValueError(
                f'decay={decay} would be silently ignored: D alone carries the trace. Leave it '
                "out, or set temporal_recursion='scalar_leak'."
            )
        if recursion == 'scalar_leak' and decay is None:
            raise ValueError(
                "With temporal_recursion='scalar_leak', a decay is required: decay=..."
            )
    for kind, a, side in sides:
        if kind == 'none' and a:
            raise ValueError(
                f"temporal_recursion='none' keeps nothing of the {side}, so that decay={a} would "
                "have no effect. Leave it out, or set temporal_recursion='scalar_leak'."
            )


def _check_axes(config: ETraceConfig) -> None:
    """Refuse values of several axes that do not go together."""
    factorization, scope = config.trace_factorization, config.recurrence_scope
    if config.trace_filter == 'kappa' and factorization != PER_PARAM:
        raise ValueError(
            f"trace_filter='kappa' requires trace_factorization='per_param', not "
            f'{factorization!r}: a smoothed sum of outer products is not rank-1.'
        )
    side, consumed = 'temporal_recursion', config.temporal_recursion
    if config.is_factorized:
        side, consumed = f'{side} of the f-side', config.recursion_f
    if config.include_recurrent_mixing and consumed != 'jacobian':
        raise ValueError(
            f'recurrence_scope={scope!r} chooses a Jacobian D, and a trace carried by '
            f"{consumed!r} never consumes one. It needs the {side} to be 'jacobian'; or use "
            "recurrence_scope='diagonal'."
        )
    if factorization == 'random_projection' and scope != 'coupled':
        raise ValueError(
            "trace_factorization='random_projection' requires recurrence_scope='coupled', not "
            f'{scope!r}: it projects all influence within a group.'
        )
    if scope == 'sparse_n' and factorization != PER_PARAM:
        raise ValueError(
            "recurrence_scope='sparse_n' requires trace_factorization='per_param', not "
            f"{factorization!r}: it keeps more states per weight. Or use 'coupled'."
        )


def _each(check: Any, name: str, value: Any) -> Any:
    """A checked value, or a pair of them."""
    if not isinstance(value, list | tuple):
        return check(name, value)
    return tuple(check(name, one) for one in _pair(name, value))


def _pair(name: str, value: Sequence[Any]) -> tuple[Any, ...]:
    if len(value) != 2:
        raise ValueError(
            f'{name} is {value!r}; a pair has exactly two entries, ({", ".join(SIDES)}).'
        )
    return tuple(value)


def _fraction(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'{name} is {value!r}; it must be a float in [0, 1).')
    if not 0 <= value < 1:
        hint = ' A rank is given to a learner, as decay_or_rank.' if name == 'decay' else ''
        raise ValueError(f'{name} is {value}; it must be in [0, 1).{hint}')
    return float(value)


def _order(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, '__index__'):
        raise TypeError(f'sparse_n is {value!r}; it must be an integer.')
    if value < 1:
        raise ValueError(f"sparse_n is {value}; it must be at least 1, which is 'coupled'.")
    return int(value)


def _listed(values: Sequence[str]) -> str:
    return ', '.join(map(repr, values))
