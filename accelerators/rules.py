"""Trace rules that kernels are tried with."""

from dataclasses import replace
from functools import partial
from typing import Any

from braintrace_fast.op.outer import outer_rules
from braintrace_fast.op.primitive import TraceRules

__all__ = ['matmul_rules']


def matmul_rules(groups: int = 0, **params: Any) -> TraceRules:
    """The trace rules of a dense op, or one of groups, with given parameters."""
    names, rules = ('outer', 'outer_sum', 'decay', 'contract'), outer_rules(groups)
    return replace(rules, **{name: partial(getattr(rules, name), **params) for name in names})
