"""Compile for GPUs that are described, not present."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

__all__ = ['GPUS', 'Kernel', 'compile_for_gpu', 'launched_on_gpu']


class Gpu(NamedTuple):
    """What the compiler asks of a GPU."""

    name: str
    capability: tuple[int, int]
    extension: str
    processors: int
    shared_per_block: int
    shared_per_processor: int
    cache: int
    bandwidth: int
    memory: int
    lanes: int
    gigahertz: float


GPUS = {
    'sm_80': Gpu(
        'NVIDIA A100-SXM4-80GB',
        (8, 0),
        'NONE',
        108,
        166_912,
        167_936,
        41_943_040,
        2_039_000_000_000,
        85_000_000_000,
        64,
        1.41,
    ),
    'sm_90': Gpu(
        'NVIDIA H100 80GB HBM3',
        (9, 0),
        'ACCELERATED_FEATURES',
        132,
        232_448,
        233_472,
        52_428_800,
        3_352_000_000_000,
        85_000_000_000,
        128,
        1.98,
    ),
    'sm_100': Gpu(
        'NVIDIA B200',
        (10, 0),
        'ACCELERATED_FEATURES',
        148,
        232_448,
        233_472,
        132_644_864,
        7_672_000_000_000,
        191_000_000_000,
        128,
        1.965,
    ),
}


class Kernel(NamedTuple):
    """A kernel as assembled: registers per thread, bytes spilled, bytes of shared memory."""

    name: str
    registers: int
    spilled: int
    shared: int


def compile_for_gpu(
    target: str, f: Callable[..., Any], operands: Sequence[Any], donated: Sequence[int] = ()
) -> tuple[Any, list[Kernel]]:
    """What XLA makes of a function for a GPU, and its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        return _compile(target, f, operands, donated, folder), _kernels(Path(folder))


def launched_on_gpu(
    target: str, f: Callable[..., Any], operands: Sequence[Any], donated: Sequence[int] = ()
) -> tuple[str, str]:
    """The sequence of thunks that a function launches on a GPU, and its compiled program."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = _compile(target, f, operands, donated, folder)
        return _thunks(Path(folder)), compiled.as_text()


def _compile(
    target: str, f: Callable[..., Any], operands: Sequence[Any], donated: Sequence[int], folder: str
) -> Any:
    """Compile, and dump what comes of it."""
    _assembler()
    mesh = _mesh(target)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tuple(operands)
    )
    traced = jax.jit(f, donate_argnums=tuple(donated)).trace(*placed)
    with jax.set_mesh(mesh):
        return traced.lower().compile(compiler_options={'xla_dump_to': folder})


def _thunks(folder: Path) -> str:
    return ''.join(path.read_text() for path in folder.glob('*thunk_sequence.txt'))


@lru_cache(maxsize=16)
def _mesh(target: str) -> jax.sharding.Mesh:
    topology = topologies.get_topology_desc(
        platform='cuda', target_config=_describe(GPUS[target]), topology='1x1x1'
    )
    return jax.sharding.Mesh(np.array(topology.devices), ('device',))


def _describe(gpu: Gpu) -> str:
    """A GpuTargetConfigProto, as text."""
    major, minor = gpu.capability
    return f"""
        platform_name: "CUDA"
        device_description_str: "{gpu.name}"
        gpu_device_info {{
            block_dim_limit_x: 2147483647
            block_dim_limit_y: 65535
            block_dim_limit_z: 65535
            clock_rate_ghz: {gpu.gigahertz}
            core_count: {gpu.processors}
            cuda_compute_capability {{
                major: {major} minor: {minor} feature_extension: {gpu.extension}
            }}
            device_memory_size: {gpu.memory}
            fpus_per_core: {gpu.lanes}
            l2_cache_size: {gpu.cache}
            memory_bandwidth: {gpu.bandwidth}
            registers_per_block_limit: 65536
            registers_per_core_limit: 65536
            shared_memory_per_block: 49152
            shared_memory_per_block_optin: {gpu.shared_per_block}
            shared_memory_per_core: {gpu.shared_per_processor}
            threads_per_block_limit: 1024
            threads_per_core_limit: 2048
            threads_per_warp: 32
        }}
    """


@lru_cache(maxsize=16)
def _assembler() -> Path:
    """The ``ptxas`` of the environment, which XLA then finds too."""
    spec = find_spec('nvidia.cuda_nvcc')
    if spec is None or not spec.submodule_search_locations:
        raise ImportError('there is no ptxas: install nvidia-cuda-nvcc-cu12 (make accelerators)')
    folder = Path(next(iter(spec.submodule_search_locations))) / 'bin'
    os.environ['PATH'] = f'{folder}{os.pathsep}{os.environ["PATH"]}'
    return folder / 'ptxas'


def _kernels(folder: Path) -> list[Kernel]:
    """Assemble what the compiler has dumped."""
    dynamic = re.findall(r'\]\s+(\w+) grid.*shared_memory: (\d+)', _thunks(folder))
    shared = {name: int(size) for name, size in dynamic}
    kernels = []
    for path in sorted(folder.glob('*.ptx')):
        source = path.read_text()
        entry = re.search(r'\.entry (\w+)', source)
        if entry:
            told = _assemble(path, re.search(r'\.target (\w+)', source)[1])
            static = sum(map(int, re.findall(r'(\d+) bytes smem', told)))
            kernels.append(
                Kernel(
                    entry[1],
                    max(map(int, re.findall(r'Used (\d+) registers', told))),
                    sum(map(int, re.findall(r'(\d+) bytes spill', told))),
                    static + shared.get(entry[1], 0),
                )
            )
    return kernels


def _assemble(path: Path, target: str) -> str:
    command = [_assembler(), '--verbose', f'--gpu-name={target}', path, '--output-file=/dev/null']
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'ptxas refuses {path.name}: {done.stderr.strip()}')
    return done.stderr
