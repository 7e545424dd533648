"""Trace rules that kernels are tried with."""

from dataclasses import replace
from functools import partial
from typing import Any

from braintrace_fast.op.matmul import matmul_p
from braintrace_fast.op.primitive import TraceRules

__all__ = ['matmul_rules']


def matmul_rules(**params: Any) -> TraceRules:
    """The trace rules of a dense op with given parameters."""
    names = ('outer', 'outer_sum', 'decay', 'contract')
    rules = {name: partial(getattr(matmul_p.trace_rules, name), **params) for name in names}
    return replace(matmul_p.trace_rules, **rules)
