"""The Triton programs of a function, as Pallas emits them; no GPU and no CUDA are needed."""

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

__all__ = ['Block', 'Launch', 'Operation', 'launches', 'parse']

DTYPES = {
    'i1': np.dtype(np.bool_),
    'i8': np.dtype(np.int8),
    'i16': np.dtype(np.int16),
    'i32': np.dtype(np.int32),
    'i64': np.dtype(np.int64),
    'f16': np.dtype(np.float16),
    'bf16': np.dtype(jnp.bfloat16),
    'f32': np.dtype(np.float32),
    'f64': np.dtype(np.float64),
}

GPU = jax.sharding.AbstractDevice('NVIDIA H100 80GB HBM3', 132, 'gpu')
TARGET = '__gpu$xla.gpu.triton'


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes
    ----------
    name : str
        That of the kernel.
    program : bytes
        Its Triton IR.
    grid : tuple of int
        How many programs run, along three axes.
    aliases : dict
        Which operand the results with these numbers overwrite.
    """

    name: str
    program: bytes
    grid: tuple[int, int, int]
    aliases: dict[int, int]


def launches(f: Callable[..., Any], *operands: Any) -> list[Launch]:
    """What a function of arrays launches on a GPU, in order."""
    mesh = jax.sharding.AbstractMesh(
        (1,), ('device',), (jax.sharding.AxisType.Auto,), abstract_device=GPU
    )
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # jax 0.12 announces the end of Pallas for Triton, and ships it.
        warnings.filterwarnings('ignore', 'The Pallas Triton backend', DeprecationWarning)
        traced = jax.jit(f).trace(*operands)
        module = traced.lower(lowering_platforms=('cuda',)).compiler_ir('stablehlo')
    launches: list[Launch] = []

    def visit(operation: Any) -> Any:
        if operation.name == 'stablehlo.custom_call':
            target = ir.StringAttr(operation.attributes['call_target_name']).value
            if target == TARGET:
                launches.append(_launch(operation))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return launches


def _launch(operation: Any) -> Launch:
    config = ir.DictAttr(operation.attributes['mhlo.backend_config'])
    x, y, z = (ir.IntegerAttr(config[f'grid_{axis}']).value for axis in 'xyz')
    attributes = str(operation.attributes['output_operand_aliases'])
    pairs = re.findall(r'output_tuple_indices = \[(\d*)\], operand_index = (\d+)', attributes)
    return Launch(
        ir.StringAttr(config['name']).value,
        ir.StringAttr(config['ir']).value_bytes,
        (x, y, z),
        {int(result or 0): int(operand) for result, operand in pairs},
    )


class Operation(NamedTuple):
    """An operation of a program, with values as numbers.

    Attributes
    ----------
    name : str
        What it does, such as ``'arith.addf'``.
    operands, results : tuple of int
        The values that it takes and makes.
    shape, dtype
        Of its first result; the dtype is None for pointers.
    used : bool
        Whether anything takes a result.
    attributes : dict
        What else it was told.
    blocks : list of Block
        What it runs, if it is a loop or a branch.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype | None
    used: bool
    attributes: dict[str, Any]
    blocks: list['Block']


class Block(NamedTuple):
    """Operations in order, and the values that they are given."""

    arguments: tuple[int, ...]
    operations: list[Operation]


def parse(program: bytes) -> Block:
    """The body of a Triton program, which this verifies."""
    context = mlir.make_ir_context()
    triton_dialect.register_dialect(context)
    context.load_all_available_dialects()
    with context:
        module = ir.Module.parse(program)
        (function,) = module.body.operations
        return _block(function.regions[0].blocks[0], {})


def _block(block: Any, numbers: dict[Any, int]) -> Block:
    def number(values: Any) -> tuple[int, ...]:
        return tuple(numbers.setdefault(value, len(numbers)) for value in values)

    def decode(operation: Any) -> Operation:
        results = list(operation.results)
        return Operation(
            operation.name,
            number(operation.operands),
            number(results),
            *(_type(results[0].type) if results else ((), None)),
            any(next(iter(result.uses), None) is not None for result in results),
            {name: _plain(operation.attributes[name]) for name in operation.attributes},
            [
                _block(region.blocks[0], numbers)
                for region in operation.regions
                if len(region.blocks)
            ],
        )

    return Block(
        number(block.arguments), [decode(wrapper.operation) for wrapper in block.operations]
    )


def _type(kind: Any) -> tuple[tuple[int, ...], np.dtype | None]:
    shape: tuple[int, ...] = ()
    if isinstance(kind, ir.RankedTensorType):
        kind, shape = kind.element_type, tuple(kind.shape)
    return shape, DTYPES.get(str(kind))


def _plain(attribute: Any) -> Any:
    """The number, text or list of numbers of an attribute; itself if it is another."""
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        attribute = attribute.get_splat_value()
    if isinstance(attribute, ir.DenseI32ArrayAttr):
        return list(attribute)
    return getattr(attribute, 'value', attribute)
