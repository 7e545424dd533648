"""Programs that tests run in processes of their own, each a module, and how to start one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EIGHT_DEVICES = '--xla_force_host_platform_device_count=8'


def start(name: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start ``tests/programs/<name>.py`` at the root of the checkout."""
    return subprocess.Popen(
        [sys.executable, '-m', f'tests.programs.{name}', *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str], timeout: float = 600) -> str:
    """What a program printed, once it has ended well."""
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return output


def run_on_eight_devices(name: str, *arguments: object) -> None:
    """Run a program that compares results on eight devices and says ``same``."""
    flags = {'XLA_FLAGS': EIGHT_DEVICES, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    assert output_of(start(name, *arguments, **flags)) == 'same\n'
