"""Weights with the op that uses them, as one object."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import brainstate

from .ops import ElemWiseOp, ETraceOp, check_callable, identity

__all__ = [
    'ETraceParam',
    'ElemWiseParam',
    'FakeETraceParam',
    'FakeElemWiseParam',
    'NonTempParam',
]


OfInput = ETraceOp | Callable[[Any, Any], Any]
OfWeight = ElemWiseOp | Callable[[Any], Any]
"""What a parameter may have for an op: of an input and the weights, or of the weight alone."""


class ETraceGrad(enum.StrEnum):
    """Kinds of gradients that braintrace 0.1 distinguished. Learners give the same for all."""

    full = 'full'
    approx = 'approx'
    adaptive = 'adaptive'


def _gradient(grad: Any) -> ETraceGrad:
    if grad is None:
        return ETraceGrad.adaptive
    kinds = [str(kind) for kind in ETraceGrad]
    if grad not in kinds:
        raise ValueError(
            f'ETraceParam: found grad={grad!r}, expected one of {kinds}. '
            'It has no effect: leave it out.'
        )
    return ETraceGrad(grad)


class _WithOp:
    """A value and an op that uses it."""

    value: Any
    op: Any

    def execute(self, x: Any) -> Any:
        """The output of the op for an input."""
        return self.op(x, self.value)


class ETraceParam(_WithOp, brainstate.ParamState):
    """A parameter with the op that uses it, traced.

    Parameters
    ----------
    weight : PyTree
        The value of the parameter, as ``op`` takes it: a dictionary for most.
    op : ETraceOp
        The op.
    grad : {'full', 'approx', 'adaptive'}, optional
        Kept as ``gradient``, without any effect: the learner decides. Default ``'adaptive'``.
    name : str, optional
        The name of the state.

    Attributes
    ----------
    is_etrace : bool
        True.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> param = brainstate.ParamState({'weight': jnp.ones((2, 3)), 'bias': jnp.ones(3)})
    >>> value = param.value  # and, in place of an ETraceParam's execute(x):
    >>> braintrace.matmul(jnp.ones(2), value['weight'], value['bias']).tolist()
    [3.0, 3.0, 3.0]
    """

    def __init__(
        self, weight: Any, op: ETraceOp, grad: Any = None, name: str | None = None
    ) -> None:
        super().__init__(weight, name=name)
        if not isinstance(op, ETraceOp):
            raise TypeError(
                f'{type(self).__name__}: found an op of type {type(op).__name__}, expected an '
                'ETraceOp, such as MatMulOp(). For a function use NonTempParam, which is not '
                'traced.'
            )
        self.op = op
        self.gradient = _gradient(grad)
        self.is_etrace = True


def _element_wise_op(op: Any) -> ElemWiseOp:
    return op if isinstance(op, ElemWiseOp) else ElemWiseOp(op)


class ElemWiseParam(ETraceParam):
    """A parameter that acts position by position, traced.

    Parameters
    ----------
    weight : ArrayLike
        The value of the parameter.
    op : ElemWiseOp or Callable
        What is applied to it. Default the identity.
    name : str, optional
        The name of the state.
    """

    op: ElemWiseOp

    def __init__(self, weight: Any, op: OfWeight = identity, name: str | None = None) -> None:
        super().__init__(weight, _element_wise_op(op), ETraceGrad.full, name)

    def execute(self) -> Any:  # type: ignore[override]
        """The processed value."""
        return self.op(self.value)


def _plain(name: str, op: Any) -> Callable[[Any, Any], Any]:
    """A function of an input and weights that no learner traces."""
    return op.raw_xw_to_y if isinstance(op, ETraceOp) else check_callable(name, op, 'op')


class NonTempParam(_WithOp, brainstate.ParamState):
    """A parameter that is not traced: it gets the gradient of each step, without the past.

    Parameters
    ----------
    value : PyTree
        The value of the parameter, as ``op`` takes it.
    op : ETraceOp or Callable
        An op, which is run in plain JAX, or ``(x, value) -> y``.
    name : str, optional
        The name of the state.
    """

    def __init__(self, value: Any, op: OfInput, name: str | None = None) -> None:
        super().__init__(value, name=name)
        self.op = _plain('NonTempParam', op)


class FakeETraceParam(_WithOp):
    """A constant with the op that uses it: no state, and no gradient.

    Parameters
    ----------
    value : PyTree
        The constant, as ``op`` takes it.
    op : ETraceOp or Callable
        An op, which is run in plain JAX, or ``(x, value) -> y``.
    """

    def __init__(self, value: Any, op: OfInput) -> None:
        self.value = value
        self.op = _plain('FakeETraceParam', op)


class FakeElemWiseParam:
    """A constant that acts position by position: no state, and no gradient.

    Parameters
    ----------
    weight : PyTree
        The constant.
    op : ElemWiseOp or Callable
        What is applied to it. Default the identity.
    name : str, optional
        A name.
    """

    def __init__(self, weight: Any, op: OfWeight = identity, name: str | None = None) -> None:
        self.value = weight
        if isinstance(op, ETraceOp):
            op = functools.partial(_element_wise_op(op).raw_xw_to_y, None)
        self.op = check_callable('FakeElemWiseParam', op, 'op')
        self.name = name

    def execute(self) -> Any:
        """The processed constant."""
        return self.op(self.value)
