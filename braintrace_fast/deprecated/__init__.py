"""Names of braintrace 0.1, which the package serves with a warning: ops and parameters as objects.

An op object holds how a weight is processed before an op of :mod:`braintrace_fast.op`, a parameter
object a weight and its op object. Gradients are those of the op in plain form, exactly.
"""

from .._deprecation import Superseded

__all__ = ['DEPRECATED']

_OPS = {
    'ConvOp': 'braintrace_fast.conv',
    'ETraceOp': 'the function of an op (braintrace_fast.matmul)',
    'ElemWiseOp': 'braintrace_fast.element_wise',
    'LoraOp': 'braintrace_fast.lora_matmul',
    'MatMulOp': 'braintrace_fast.matmul',
    'SpMatMulOp': 'braintrace_fast.sparse_matmul',
}
_PARAMS = {
    'ETraceParam': 'brainstate.ParamState with the function of an op (braintrace_fast.matmul)',
    'ElemWiseParam': 'brainstate.ParamState with braintrace_fast.element_wise',
    'FakeETraceParam': 'an array, in plain JAX',
    'FakeElemWiseParam': 'an array, in plain JAX',
    'NonTempParam': 'brainstate.ParamState in plain JAX',
}

DEPRECATED = {
    name: Superseded(f'{__name__}.{file}', successor, since='braintrace 0.2.0')
    for file, names in (('ops', _OPS), ('params', _PARAMS))
    for name, successor in names.items()
}
"""By name, where it is and what to use instead."""
