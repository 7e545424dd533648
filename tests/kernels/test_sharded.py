"""The kernels on shards of batch and neurons: programs that run on eight devices, interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize('program', ['jacobians', 'scans', 'traces'])
def test_kernels_run_on_shards(program):
    flags = '--xla_force_host_platform_device_count=8'
    environment = {**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, '-m', f'tests.kernels.sharded_{program}']
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == 'same\n', done.stderr
