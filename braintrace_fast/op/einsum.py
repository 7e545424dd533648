"""``y = einsum(equation, x, weight)``: a product of arrays with named axes.

By the letters of the equation, an axis is one of the canonical form's (:mod:`.outer`)::

    in x, weight and y    g    each place has a weight of its own
    in x and weight       i    summed over by the product
    in weight and y       o    an output
    in x and y            a    shares the weight: the batch, and what else there is
    in x alone                 summed over before the product

Transposed to ``X[a, g, i]`` and ``W[g, i, o]``, the trace of the weight is ``(a, g, i, o)``: it
keeps the axes that share the weight, because the states behind them decay each in its own way.
"""

import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import saiunit as u

from .operands import as_floats, check_floats, matmul_precision, numbers_of
from .outer import outer_rules, outer_total
from .primitive import Weights, register_primitive

__all__ = ['einsum', 'einsum_p']


class _Letters(NamedTuple):
    """The letters of an equation: of its three arrays, and of the axes of the canonical form."""

    x: str
    w: str
    y: str
    a: str
    g: str
    i: str
    o: str


@functools.lru_cache(maxsize=1024)
def _letters(equation: str) -> _Letters:
    arrays, y = equation.split('->')
    x, w = arrays.split(',')
    return _Letters(
        x,
        w,
        y,
        a=''.join(k for k in y if k in x and k not in w),
        g=''.join(k for k in w if k in x and k in y),
        i=''.join(k for k in w if k in x and k not in y),
        o=''.join(k for k in w if k in y and k not in x),
    )


def _forward(
    x: jax.Array, weight: jax.Array, *, equation: str, precision: str | None, **_: Any
) -> jax.Array:
    of = _letters(equation)
    return jnp.einsum(f'...{of.x},{of.w}->...{of.y}', x, weight, precision=precision)


def _view(array: jax.Array, letters: str, kept: str, folded: Sequence[str]) -> jax.Array:
    """An array with some axes kept, and others folded, behind any leading ones; the rest summed."""
    array = jnp.einsum(f'...{letters}->...{kept}{"".join(folded)}', array)
    lead = array.shape[: array.ndim - sum(map(len, folded))]
    sizes = iter(array.shape[len(lead) :])
    return array.reshape(*lead, *(math.prod(next(sizes) for _ in group) for group in folded))


def _operand(x: jax.Array, *, equation: str, **_: Any) -> jax.Array:
    of = _letters(equation)
    return _view(x, of.x, of.a, (of.g, of.i))


def _plane_view(plane: jax.Array, *, equation: str, **_: Any) -> jax.Array:
    of = _letters(equation)
    return _view(plane, of.y, of.a, (of.g, of.o))


def _weight_view(weights: Weights, *, equation: str, **_: Any) -> Weights:
    of = _letters(equation)
    return {'weight': _view(weights['weight'], of.w, '', (of.g, of.i, of.o))}


def _weight_vjp(
    x: jax.Array, cotangent: jax.Array, weights: Weights, *, equation: str, precision: str | None
) -> Weights:
    view = functools.partial(_weight_view, equation=equation)
    X, plane = _operand(x, equation=equation), _plane_view(cotangent, equation=equation)
    total = outer_total(X, plane, 1, precision=precision).astype(weights['weight'].dtype)
    return jax.linear_transpose(view, weights)({'weight': total})[0]


einsum_p = register_primitive(
    'etp_einsum',
    _forward,
    batched=True,
    weight_vjp=_weight_vjp,
    linear_in_x=('weight',),
    trace_rules=outer_rules(1, operand=_operand, plane_view=_plane_view, weight_view=_weight_view),
)


def einsum(
    equation: str, x: Any, weight: Any, *, weight_fn: Callable[[Any], Any] | None = None
) -> Any:
    """Multiply by a weight of any rank, whose influence on hidden states is to be traced.

    Computes ``jnp.einsum(equation, x, weight_fn(weight))``.

    Parameters
    ----------
    equation : str
        Two operands and a result, in lower-case letters: ``'bgk,gkn->bgn'``. ``x`` and the result
        begin with the same letter, the batch, which the weight does not have. Every letter of the
        weight is in ``x`` or in the result. Spaces do not count.
    x : ArrayLike
        An axis for every letter of its operand, or for all but the batch. Integers and booleans
        (spikes) are taken as the weight's dtype.
    weight : ArrayLike
        Likewise.
    weight_fn : Callable, optional
        Applied to the weight before the op: to its numbers, without the unit, which is put back
        after. Gradients are those of the raw weight.

    Returns
    -------
    ArrayLike
        The result, in the unit of ``x * weight``.

    Raises
    ------
    ValueError
        If the equation is not of that form, or the arrays do not fit it.
    TypeError
        If the weight does not consist of floating-point numbers.

    Notes
    -----
    The trace of an axis that is in ``x`` and in the result, but not in the weight, has the size of
    that axis times the weight, for every example.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> weight = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> braintrace.einsum('bk,kn->bn', jnp.ones((1, 2)), weight).tolist()
    [[4.0, 6.0]]
    """
    equation = _checked_equation(equation)
    weight, weight_unit = numbers_of(weight, weight_fn)
    numbers, x_unit = u.split_mantissa_unit(x)
    numbers = as_floats(numbers, weight.dtype)
    x_letters, y_letters = equation.split(',')[0], equation.split('->')[1]
    if numbers.ndim == len(x_letters) - 1:  # an example by itself
        equation = f'{equation[1:].split("->")[0]}->{y_letters[1:]}'
    _check_shapes(equation, numbers, weight)
    check_floats('einsum', weight=weight)
    y = einsum_p.bind(numbers, weight, equation=equation, precision=matmul_precision())
    return u.maybe_decimal(y * (x_unit * weight_unit))


def _checked_equation(equation: str) -> str:
    """An equation without spaces; refuses those that are not of the op's form."""
    found = equation.replace(' ', '')
    arrays, arrow, y = found.partition('->')
    x, comma, w = arrays.partition(',')
    letters = set(string.ascii_lowercase)

    def refuse(what: str) -> None:
        raise ValueError(
            f'einsum: found the equation {equation!r}: {what}. Expected two operands and a result '
            "in lower-case letters, such as 'bk,kn->bn', with the batch first in x and y."
        )

    if not (arrow and comma) or not set(x + w + y) <= letters:
        refuse("not of the form 'letters,letters->letters'")
    for name, own in (('x', x), ('the weight', w), ('y', y)):
        if len(set(own)) < len(own):
            refuse(f'{name} has a letter twice')
    if x[:1] != y[:1] or not x or x[0] in w:
        refuse('x and y do not begin with a batch letter that the weight lacks')
    if lost := ''.join(k for k in w if k not in x + y):
        refuse(f'the weight alone has {lost!r}')
    if new := ''.join(k for k in y if k not in x + w):
        refuse(f'neither operand has {new!r}')
    return found


def _check_shapes(equation: str, x: jax.Array, weight: jax.Array) -> None:
    of, sizes = _letters(equation), dict[str, int]()
    for name, letters, array in (('x', of.x, x), ('weight', of.w, weight)):
        if array.ndim != len(letters):
            raise ValueError(
                f'einsum: found {name} of shape {array.shape}, expected {len(letters)} axes '
                f'({letters}) by the equation {equation!r}. Reshape it, or change the equation.'
            )
        for letter, size in zip(letters, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f'einsum: found x of shape {x.shape} and a weight of shape {weight.shape}, '
                    f'which give {letter!r} the sizes {sizes[letter]} and {size} in {equation!r}. '
                    'Check the sizes of the layer.'
                )
