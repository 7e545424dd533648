"""ETP ops: the operations whose weights an online learner can trace. One file per op."""

from .element_wise import element_wise
from .grouped_matmul import grouped_matmul
from .matmul import matmul
from .primitive import ETPPrimitive, TraceRules, register_primitive
from .sparse_matmul import sparse_matmul

__all__ = [
    'ETPPrimitive',
    'TraceRules',
    'element_wise',
    'grouped_matmul',
    'matmul',
    'register_primitive',
    'sparse_matmul',
]
