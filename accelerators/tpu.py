"""Compile for TPUs that are named, not present."""

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

__all__ = ['TPUS', 'VMEM', 'compile_for_tpu', 'device_kind']

TPUS = {
    'v4': ('v4:2x2x1', {'chip_config_name': 'megacore'}),
    'v5e': ('v5e:2x2', {}),
    'v5p': ('v5p:2x2x1', {}),
    'v6e': ('v6e:2x2', {}),
    'tpu7x': ('tpu7x:2x2x1', {}),
}

VMEM = 16 * 2**20
"""What a kernel gets by default on the smallest of them."""

QUIET = {
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'TPU_LOG_DIR': 'disabled',
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
}
"""Spares libtpu the search for a TPU."""


def compile_for_tpu(
    target: str, f: Callable[..., Any], operands: Sequence[Any], donated: Sequence[int] = ()
) -> tuple[Any, int]:
    """What XLA makes of a function for a TPU, and the bytes of VMEM that its kernels use."""
    mesh = _mesh(target)
    given, results = jax.tree.map(
        partial(_row_major, mesh), (tuple(operands), jax.eval_shape(f, *operands))
    )
    jitted = jax.jit(f, donate_argnums=tuple(donated), in_shardings=given, out_shardings=results)
    traced = jitted.trace(*operands)  # not on the mesh: what is known while tracing is computed
    with jax.set_mesh(mesh):
        compiled = traced.lower().compile()
    return compiled, _vmem(compiled.as_text())


def device_kind(target: str) -> str:
    """What a TPU is called by JAX."""
    return str(_mesh(target).devices.item().device_kind)


def _row_major(mesh: jax.sharding.Mesh, array: Any) -> Format:
    """Where an array is kept; left to itself, XLA transposes small ones at the call."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return Format(Layout(tuple(range(array.ndim))), sharding)


@lru_cache(maxsize=16)
def _mesh(target: str) -> jax.sharding.Mesh:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    topology, options = TPUS[target]
    described = topologies.get_topology_desc(platform='tpu', topology_name=topology, **options)
    return jax.sharding.Mesh(np.array(described.devices[:1]), ('device',))


def _vmem(text: str) -> int:
    """The most that a kernel was given."""
    used = [
        int(size)
        for line in text.splitlines()
        if 'custom_call_target="tpu_custom_call"' in line
        for size in re.findall(
            r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"',
            line,
        )
    ]
    return max(used, default=0)
