"""Ops as objects, which hold all but the input and the weights.

Masks and functions act on the weight before the op, in plain JAX, so that gradients are those of
the raw weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ..nn.factors import as_factor
from ..op import conv, element_wise, lora_matmul, matmul, sparse_matmul

__all__ = ['ConvOp', 'ETraceOp', 'ElemWiseOp', 'LoraOp', 'MatMulOp', 'SpMatMulOp']

Hook = Callable[[Any], Any]


def identity(weight: Any) -> Any:
    """The weight as it is."""
    return weight


class ETraceOp:
    """The base of op objects; one of your own has an ``xw_to_y`` that calls a traced op.

    Parameters
    ----------
    is_diagonal : bool
        Whether the op acts position by position. Kept for its readers; nothing depends on it.
    name : str, optional
        A name.
    """

    def __init__(self, is_diagonal: bool | None = False, name: str | None = None) -> None:
        self.is_diagonal = is_diagonal
        self.name = name

    def __call__(self, inputs: Any, weights: Any) -> Any:
        """The output, by :meth:`xw_to_y`."""
        return self.xw_to_y(inputs, weights)

    def xw_to_y(self, inputs: Any, weights: Any) -> Any:
        """The output, by an op whose weights are traced."""
        raise NotImplementedError(
            f'{type(self).__name__} has no xw_to_y(inputs, weights): define it in the subclass.'
        )

    def raw_xw_to_y(self, inputs: Any, weights: Any) -> Any:
        """The output in plain JAX, which is not traced."""
        # Mapping a weight replaces its op by plain JAX, here over a single example.
        mapped = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), weights)
        outputs = jax.vmap(lambda weights: self.xw_to_y(inputs, weights))(mapped)
        return jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), outputs)

    def dt_to_t(self, hidden_dim_arr: Any, weight_dim_tree: Any) -> Any:
        """How a trace decays: a rule of the op itself, which no op object has."""
        raise NotImplementedError(
            f'{type(self).__name__} has no dt_to_t: traces decay by the TraceRules of the op that '
            'xw_to_y calls. For an op of your own, see braintrace_fast.register_primitive.'
        )

    def xy_to_dw(self, input_dim_arr: Any, hidden_dim_arr: Any, weights: Any) -> Any:
        """A cotangent of the output, pulled back to the weights; units of outputs are left out."""

        def output(weights: Any) -> Any:
            return u.get_mantissa(self.xw_to_y(input_dim_arr, weights))

        y, pull_back = jax.vjp(output, weights)
        cotangent = u.get_mantissa(hidden_dim_arr)
        if cotangent.shape != y.shape:
            raise ValueError(
                f'{type(self).__name__}.xy_to_dw: found a cotangent of shape {cotangent.shape}, '
                f'expected {y.shape}, that of the output.'
            )
        return pull_back(cotangent)[0]


def check_callable(name: str, function: Any, argument: str) -> Any:
    """The function, unless it is none."""
    if not callable(function):
        raise TypeError(f'{name}: found {argument}={function!r}, expected a function. Pass one.')
    return function


def _check_mask(name: str, mask: Any) -> Any:
    if mask is not None and not isinstance(mask, jax.Array | np.ndarray | u.Quantity):
        raise TypeError(
            f'{name}: found a weight_mask of type {type(mask).__name__}, expected an array. '
            'Convert it: jnp.asarray(weight_mask).'
        )
    return mask


def _entries(name: str, weights: Any, *keys: str) -> Mapping[str, Any]:
    """The weights of an op, if they are a dictionary that has the keys."""
    expected = f"a dictionary with {', '.join(map(repr, keys))} and, if there is one, 'bias'"
    if not isinstance(weights, Mapping):
        raise TypeError(
            f'{name}: found weights of type {type(weights).__name__}, expected {expected}. '
            'Wrap them.'
        )
    if missing := [key for key in keys if key not in weights]:
        raise ValueError(
            f'{name}: found weights with the keys {list(weights)}, expected {expected}. '
            f'Add {", ".join(map(repr, missing))}.'
        )
    return weights


def _masked(weight: Any, mask: Any) -> Any:
    return weight if mask is None else weight * as_factor(mask, weight)


class MatMulOp(ETraceOp):
    """``x @ weight_fn(weight * weight_mask) + bias``, by :func:`braintrace_fast.matmul`.

    Its weights are a dictionary with ``weight`` and, if there is one, ``bias``.

    Parameters
    ----------
    weight_mask : jax.Array, optional
        Multiplies the weight.
    weight_fn : Callable
        Applied to the masked weight. Default the identity.
    apply_weight_fn_before_mask : bool
        Whether to mask what ``weight_fn`` returns instead. Default False.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> x, weight, mask = jnp.ones(2), jnp.ones((2, 3)), jnp.array([[1, 0, 1], [0, 0, 1]])
    >>> braintrace.matmul(x, weight * mask).tolist()  # in place of a MatMulOp(mask)
    [1.0, 0.0, 2.0]
    """

    def __init__(
        self,
        weight_mask: Any = None,
        weight_fn: Hook = identity,
        apply_weight_fn_before_mask: bool = False,
    ) -> None:
        super().__init__()
        self.weight_mask = _check_mask('MatMulOp', weight_mask)
        self.weight_fn = check_callable('MatMulOp', weight_fn, 'weight_fn')
        if not isinstance(apply_weight_fn_before_mask, bool):
            raise TypeError(
                f'MatMulOp: found apply_weight_fn_before_mask={apply_weight_fn_before_mask!r}, '
                'expected True or False.'
            )
        self.apply_weight_fn_before_mask = apply_weight_fn_before_mask

    def xw_to_y(self, inputs: Any, weights: Any) -> Any:
        """The output, traced."""
        entries = _entries('MatMulOp', weights, 'weight')
        if self.apply_weight_fn_before_mask:
            weight = _masked(self.weight_fn(entries['weight']), self.weight_mask)
        else:
            weight = self.weight_fn(_masked(entries['weight'], self.weight_mask))
        return matmul(inputs, weight, entries.get('bias'))


class ElemWiseOp(ETraceOp):
    """``fn(weight)``, by :func:`braintrace_fast.element_wise`; called with the weight alone.

    Parameters
    ----------
    fn : Callable
        Applied to the numbers of the weight, or to a dictionary of weights as it is. Default the
        identity.
    """

    def __init__(self, fn: Hook = identity) -> None:
        super().__init__(is_diagonal=True)
        if isinstance(fn, ETraceOp):
            raise TypeError(
                f'ElemWiseOp: found a {type(fn).__name__}, expected a function of the weight alone '
                'or an ElemWiseOp. Use ETraceParam for an op that has an input.'
            )
        self.fn = check_callable('ElemWiseOp', fn, 'fn')

    def __call__(self, weights: Any) -> Any:  # type: ignore[override]
        """The processed weight, by :meth:`xw_to_y`."""
        return self.xw_to_y(None, weights)

    def xw_to_y(self, inputs: Any, weights: Any) -> Any:
        """The processed weight, traced; there is no input."""
        if isinstance(weights, Mapping):
            return element_wise(self.fn(weights))
        return element_wise(weights, weight_fn=self.fn)


class ConvOp(ETraceOp):
    """A convolution with ``weight_fn(weight * weight_mask)``, by :func:`braintrace_fast.conv`.

    Its weights are a dictionary with ``weight``, the kernel, and, if there is one, ``bias``.

    Parameters
    ----------
    xinfo : jax.ShapeDtypeStruct
        The shape and the type of inputs. Kept for its readers; nothing depends on it.
    window_strides : sequence of int
        The ``strides`` of :func:`braintrace_fast.conv`.
    padding, lhs_dilation, rhs_dilation, feature_group_count, batch_group_count, dimension_numbers
        As :func:`braintrace_fast.conv` takes them.
    weight_mask : jax.Array, optional
        Multiplies the kernel.
    weight_fn : Callable
        Applied to the masked kernel. Default the identity.
    """

    def __init__(
        self,
        xinfo: Any,
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        dimension_numbers: Any = None,
        weight_mask: Any = None,
        weight_fn: Hook = identity,
    ) -> None:
        super().__init__()
        self.xinfo = xinfo
        self.window_strides = window_strides
        self.padding = padding
        self.lhs_dilation = lhs_dilation
        self.rhs_dilation = rhs_dilation
        self.feature_group_count = feature_group_count
        self.batch_group_count = batch_group_count
        self.dimension_numbers = dimension_numbers
        self.weight_mask = _check_mask('ConvOp', weight_mask)
        self.weight_fn = check_callable('ConvOp', weight_fn, 'weight_fn')

    def xw_to_y(self, inputs: Any, weights: Any) -> Any:
        """The output, traced."""
        entries = _entries('ConvOp', weights, 'weight')
        return conv(
            inputs,
            self.weight_fn(_masked(entries['weight'], self.weight_mask)),
            entries.get('bias'),
            strides=self.window_strides,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            feature_group_count=self.feature_group_count,
            batch_group_count=self.batch_group_count,
            dimension_numbers=self.dimension_numbers,
        )


class SpMatMulOp(ETraceOp):
    """``x @ sparse_mat.with_data(weight_fn(weight)) + bias``, by ``braintrace_fast.sparse_matmul``.

    Its weights are a dictionary with ``weight``, the values of the entries, and, if there is one,
    ``bias``.

    Parameters
    ----------
    sparse_mat : saiunit.sparse.SparseMatrix
        Says where the entries are; the matrices of brainevent are such.
    weight_fn : Callable
        Applied to the values of the entries. Default the identity.
    """

    def __init__(self, sparse_mat: Any, weight_fn: Hook = identity) -> None:
        super().__init__()
        if not isinstance(sparse_mat, u.sparse.SparseMatrix):
            raise TypeError(
                f'SpMatMulOp: found a sparse_mat of type {type(sparse_mat).__name__}, expected a '
                'matrix of saiunit.sparse or of brainevent. braintrace_fast.sparse_matmul takes '
                'others, too.'
            )
        self.sparse_mat = sparse_mat
        self.weight_fn = check_callable('SpMatMulOp', weight_fn, 'weight_fn')

    def xw_to_y(self, inputs: Any, weights: Any) -> Any:
        """The output, traced."""
        entries = _entries('SpMatMulOp', weights, 'weight')
        values = self.weight_fn(entries['weight'])
        return sparse_matmul(inputs, values, sparse_mat=self.sparse_mat, bias=entries.get('bias'))


class LoraOp(ETraceOp):
    """``alpha * x @ B @ A + bias``, by :func:`braintrace_fast.lora_matmul`.

    Its weights are a dictionary with ``B``, ``A`` and, if there is one, ``bias``.

    Parameters
    ----------
    alpha : ArrayLike, optional
        Scales the product: a number, or one per output. Default one.
    """

    def __init__(self, alpha: Any = None) -> None:
        super().__init__()
        self.alpha = None if alpha is None else u.math.asarray(alpha)

    def xw_to_y(self, inputs: Any, weights: Any) -> Any:
        """The output, traced."""
        entries = _entries('LoraOp', weights, 'B', 'A')
        a = entries['A']
        if self.alpha is not None:
            # not the op's own alpha, which must be a number when the step is compiled
            a = a * as_factor(self.alpha, a)
        return lora_matmul(inputs, entries['B'], a, bias=entries.get('bias'))
