"""Trace rules that kernels are tried with."""

from dataclasses import replace
from functools import partial
from typing import Any

from braintrace_fast.op.outer import outer_rules
from braintrace_fast.op.primitive import TraceRules
from braintrace_fast.op.sparse_matmul import sparse_matmul_p

__all__ = ['matmul_rules', 'sparse_rules']

NAMES = ('outer', 'outer_sum', 'decay', 'contract')


def matmul_rules(groups: int = 0, **params: Any) -> TraceRules:
    """The trace rules of a dense op, or one of groups, with given parameters."""
    return _bound(outer_rules(groups), NAMES, params)


def sparse_rules(rows: Any, cols: Any, **params: Any) -> TraceRules:
    """The trace rules of an op with entries in some rows and columns."""
    rules, params = sparse_matmul_p.trace_rules, dict(rows=rows, cols=cols, **params)
    return _bound(rules, (*NAMES, 'entries'), params)


def _bound(rules: TraceRules, names: tuple[str, ...], params: dict[str, Any]) -> TraceRules:
    return replace(rules, **{name: partial(getattr(rules, name), **params) for name in names})
