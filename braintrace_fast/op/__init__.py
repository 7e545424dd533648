"""ETP ops: the operations whose weights an online learner can trace. One file per op."""

from .conv import conv
from .einsum import einsum
from .element_wise import element_wise
from .embedding import embedding
from .grouped_matmul import grouped_matmul
from .lora_matmul import lora_matmul
from .matmul import matmul
from .primitive import ETPPrimitive, TraceRules, register_primitive
from .sparse_matmul import sparse_matmul

__all__ = [
    'ETPPrimitive',
    'TraceRules',
    'conv',
    'einsum',
    'element_wise',
    'embedding',
    'grouped_matmul',
    'lora_matmul',
    'matmul',
    'register_primitive',
    'sparse_matmul',
]
