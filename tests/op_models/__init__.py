"""Models of every op for ``tests/algorithm/test_ops.py``, one module per op."""

from tests.op_models import (
    conv,
    einsum,
    embedding,
    grouped_matmul,
    lora_matmul,
    matmul,
    registered,
    sparse_matmul,
)
from tests.op_models.model import OpModel

MODULES = conv, einsum, embedding, grouped_matmul, lora_matmul, matmul, registered, sparse_matmul
OP_MODELS: dict[str, OpModel] = {model.name: model for module in MODULES for model in module.MODELS}
