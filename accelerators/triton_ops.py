"""What the operations of a Triton program do to arrays of numbers.

Integers are signed here; the few operations that take them as unsigned view them so.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .triton_ir import Operation

__all__ = ['apply']

IEEE = 2  # of the precisions of a dot


def _unsigned(a: Any) -> np.ndarray:
    a = np.asarray(a)
    return a if a.dtype == np.bool_ else a.view(a.dtype.str.replace('i', 'u'))


def _on_unsigned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(*map(_unsigned, operands))


def _toward_zero(a: Any, b: Any) -> np.ndarray:
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.asarray(a).dtype)


def _unordered(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    'addf': np.add,
    'addi': np.add,
    'andi': np.bitwise_and,
    'divf': np.divide,
    'divsi': _toward_zero,
    'divui': _on_unsigned(np.floor_divide),
    'maximumf': np.maximum,
    'maxnumf': np.fmax,
    'maxsi': np.maximum,
    'maxui': _on_unsigned(np.maximum),
    'minimumf': np.minimum,
    'minnumf': np.fmin,
    'minsi': np.minimum,
    'minui': _on_unsigned(np.minimum),
    'mulf': np.multiply,
    'muli': np.multiply,
    'negf': np.negative,
    'ori': np.bitwise_or,
    'remf': np.fmod,
    'remsi': np.fmod,
    'remui': _on_unsigned(np.fmod),
    'select': np.where,
    'shli': np.left_shift,
    'shrsi': np.right_shift,
    'shrui': _on_unsigned(np.right_shift),
    'subf': np.subtract,
    'subi': np.subtract,
    'xori': np.bitwise_xor,
    # conversions, to the type of the result
    'extf': np.asarray,
    'extsi': np.asarray,
    'extui': _unsigned,
    'fptosi': np.asarray,
    'fptoui': np.asarray,
    'sitofp': np.asarray,
    'truncf': np.asarray,
    'trunci': np.asarray,
    'uitofp': _unsigned,
}

COMPARE_INTEGERS = [
    np.equal,
    np.not_equal,
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
    *map(_on_unsigned, (np.less, np.less_equal, np.greater, np.greater_equal)),
]
_ORDERED = [np.equal, np.greater, np.greater_equal, np.less, np.less_equal]
COMPARE_FLOATS = [
    lambda a, b: np.zeros(np.shape(a), bool),
    *_ORDERED,
    lambda a, b: (a < b) | (a > b),
    lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    *map(_unordered, _ORDERED),
    np.not_equal,
    lambda a, b: np.isnan(a) | np.isnan(b),
    lambda a, b: np.ones(np.shape(a), bool),
]
"""By the number of the predicate."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    'acos': np.arccos,
    'acosh': np.arccosh,
    'asin': np.arcsin,
    'asinh': np.arcsinh,
    'atan': np.arctan,
    'atan2': np.arctan2,
    'atanh': np.arctanh,
    'cbrt': np.cbrt,
    'ceil': np.ceil,
    'copysign': np.copysign,
    'cos': np.cos,
    'cosh': np.cosh,
    'exp': np.exp,
    'exp2': np.exp2,
    'expm1': np.expm1,
    'fabs': np.fabs,
    'floor': np.floor,
    'fmod': np.fmod,
    'log': np.log,
    'log1p': np.log1p,
    'pow': np.power,
    'powi': np.power,
    'rint': np.rint,
    'rsqrt': lambda a: 1 / np.sqrt(a),
    'sin': np.sin,
    'sinh': np.sinh,
    'sqrt': np.sqrt,
    'tan': np.tan,
    'tanh': np.tanh,
}
"""Of CUDA's library, by name without the prefix ``__nv_`` and the ``f`` of float32."""


def _dot(a: np.ndarray, b: np.ndarray, c: np.ndarray, exact: bool) -> np.ndarray:
    if a.dtype == np.float32 and not exact:
        a, b = _to_tf32(a), _to_tf32(b)
    return a.astype(c.dtype) @ b.astype(c.dtype) + c


def _to_tf32(a: np.ndarray) -> np.ndarray:
    """What a tensor core reads of float32: ten bits of the mantissa."""
    rounded = a.view(np.uint32) + np.uint32(0x1000)
    return (rounded & np.uint32(0xFFFFE000)).view(np.float32)


def _library_function(symbol: str) -> Callable[..., Any]:
    name = symbol.removeprefix('__nv_')
    function = FUNCTIONS.get(name) or FUNCTIONS.get(name.removesuffix('f'))
    if function is None:
        raise NotImplementedError(f'the emulator has no {symbol}: add it to FUNCTIONS')
    return function


def apply(operation: Operation, operands: list[Any]) -> np.ndarray:
    """The result of an operation that computes: no memory, no control flow."""
    dialect, _, name = operation.name.partition('.')
    told = operation.attributes
    if dialect == 'arith' and name in ARITHMETIC:
        result = ARITHMETIC[name](*operands)
    elif dialect == 'math' and name in FUNCTIONS:
        result = FUNCTIONS[name](*operands)
    else:
        match operation.name:
            case 'arith.constant':
                result = np.broadcast_to(told['value'], operation.shape)
            case 'arith.cmpi':
                result = COMPARE_INTEGERS[told['predicate']](*operands)
            case 'arith.cmpf':
                result = COMPARE_FLOATS[told['predicate']](*operands)
            case 'arith.bitcast' | 'tt.bitcast':
                result = np.asarray(operands[0]).view(operation.dtype)
            case 'tt.extern_elementwise':
                result = _library_function(told['symbol'])(*operands)
            case 'tt.make_range':
                result = np.arange(told['start'], told['end'])
            case 'tt.expand_dims':
                result = np.expand_dims(operands[0], told['axis'])
            case 'tt.splat' | 'tt.broadcast':
                result = np.broadcast_to(operands[0], operation.shape)
            case 'tt.reshape':
                result = np.reshape(operands[0], operation.shape)
            case 'tt.trans':
                result = np.transpose(operands[0], told['order'])
            case 'tt.dot':
                result = _dot(*operands, exact=told['inputPrecision'] == IEEE)
            case _:
                raise NotImplementedError(f'the emulator has no {operation.name}: add it to apply')
    return np.asarray(result).astype(operation.dtype or 'int64', copy=False)
