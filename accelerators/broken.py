"""Kernels that are wrong on purpose, and what must be said of them.

A check that finds nothing here could not find anything elsewhere.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.sparse import triton as sparse
from braintrace_fast.kernels.sparse_step.triton import sparse_step

from .cases import Case
from .checks import measure
from .rules import sparse_rules

__all__ = ['BROKEN', 'Broken', 'decay', 'escaped']

TRACE = jax.ShapeDtypeStruct((256, 512, 512), jnp.float32)  # more than any VMEM


def decay(
    trace: jax.Array, planes: int = 1, *, tile: tuple[int, int, int], params: Any, grid: Any = None
) -> jax.Array:
    """Halve a trace in place, tile by tile; the sum of ``planes`` powers keeps registers busy."""
    if grid is None:
        grid = tuple(pl.cdiv(size, block) for size, block in zip(trace.shape, tile, strict=True))

    def kernel(old: Any, new: Any) -> None:
        powers = [old[...]]
        for _ in range(planes - 1):
            powers.append(powers[-1] * old[...] + 1)
        new[...] = 0.5 * sum(p * q for p, q in zip(powers, powers[::-1], strict=True))

    block = pl.BlockSpec(tile, lambda b, i, o: (b, i, o))
    return pl.pallas_call(
        kernel,
        name='decay',
        grid=grid,
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(trace.shape, trace.dtype),
        input_output_aliases={0: 0},
        compiler_params=params,
    )(trace)


def _triton(warps: int = 4) -> Any:
    return plgpu.CompilerParams(num_warps=warps, num_stages=1)


def _mosaic() -> Any:
    return pltpu.CompilerParams(dimension_semantics=('parallel',) * 3)


def _twice(trace: jax.Array, **options: Any) -> jax.Array:
    """Another pass over the trace, which then needs a place of its own."""
    other = lax.optimization_barrier(trace[::-1] + 1)
    return decay(other, **options) + trace


def _entries(trace: jax.Array, first: bool = False, tile: sparse.Tile | None = None) -> Any:
    """Decay a trace as that of a sparse weight, by a plane, and read it.

    The plane may be gathered ``first``, for all examples and entries.
    """
    number = lax.iota(jnp.int32, trace[0].size)
    rows, cols = number // trace.shape[1], number % trace.shape[2]
    old, plane = trace.reshape(len(trace), -1), trace[:, 0]
    if first:
        plane, cols = lax.optimization_barrier(jnp.take(plane, cols, 1)), number
    rules = sparse_rules(rows, cols, has_bias=False)
    given = TraceOperands(rules, trace[:, 1], [[plane]], [None], [{'weight': old}], [plane])
    chosen = sparse.choose_tile if tile is None else lambda todo: tile
    with mock.patch.object(sparse, 'choose_tile', chosen):
        (new,), read = sparse_step(given)
    return new['weight'].reshape(trace.shape), read['weight']


class Broken(NamedTuple):
    """A kernel, the targets to try it on, what must be said; if a trace is donated to it."""

    name: str
    f: Callable[..., Any]
    targets: tuple[str, ...]
    fault: str
    donate: bool = True


ON_GPU = dict(tile=(1, 16, 64), params=_triton())
ON_TPU = dict(tile=(1, 128, 128), params=_mosaic())

BROKEN = [
    Broken(
        'a tile that registers do not hold',
        partial(decay, planes=12, tile=(1, 64, 128), params=_triton(warps=1)),
        ('sm_80', 'sm_90', 'sm_100'),
        'spills',
    ),
    Broken('a trace that is kept', partial(decay, **ON_GPU), ('sm_90',), 'copies', donate=False),
    Broken('a trace that is kept', partial(decay, **ON_TPU), ('v5e',), 'copies', donate=False),
    Broken('a second trace', partial(_twice, **ON_GPU), ('sm_90',), 'beside a trace'),
    Broken('a second trace', partial(_twice, **ON_TPU), ('v5e',), 'beside a trace'),
    Broken('two passes', partial(_twice, **ON_GPU), ('sm_90',), 'it moves'),
    Broken('two passes', partial(_twice, **ON_TPU), ('v5e',), 'it moves'),
    Broken('a plane gathered first', partial(_entries, first=True), ('sm_90',), 'beside a trace'),
    Broken(
        'a block of entries that registers do not hold',
        partial(_entries, tile=sparse.Tile(512, 16, 1, 1)),
        ('sm_80', 'sm_90', 'sm_100'),
        'spills',
    ),
    Broken(
        'a tile that VMEM does not hold',
        partial(decay, tile=(8, 512, 512), params=_mosaic()),
        ('v4', 'v5e', 'v5p', 'v6e', 'tpu7x'),
        'vmem',
    ),
    Broken(
        'a tile that is no power of two',
        partial(decay, tile=(1, 24, 64), params=_triton()),
        ('sm_90',),
        'does not compile: .*power of 2',
    ),
    Broken(
        'a tile that is narrower than the lanes',
        partial(decay, tile=(1, 128, 64), params=_mosaic()),
        ('v5e',),
        'does not compile: .*divisible by',
    ),
]


def escaped(target: str) -> list[str]:
    """The kernels that are broken on a target and of which the expected fault is not found."""
    missed = []
    for broken in BROKEN:
        if target in broken.targets:
            case = Case(
                'trace_step',
                'float32',
                broken.name,
                (TRACE,),
                tuple,
                trace=(0,),
                bounded=True,
                instead=broken.f,
            )
            faults = measure(case, target, donate=broken.donate).faults
            if not any(re.search(broken.fault, fault, re.IGNORECASE) for fault in faults):
                missed.append(
                    f'{broken.name}, {target}: expected {broken.fault!r}, found {list(faults)}'
                )
    return missed
