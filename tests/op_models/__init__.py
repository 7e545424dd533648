"""Models of every op for ``tests/algorithm/test_ops.py``, one module per op."""

from tests.op_models import grouped_matmul, matmul, sparse_matmul
from tests.op_models.model import OpModel

OP_MODELS: dict[str, OpModel] = {
    model.name: model
    for module in (grouped_matmul, matmul, sparse_matmul)
    for model in module.MODELS
}
