"""Run an exported program once and print the bytes by which that made the process grow.

A script of its own, started in a fresh process: ``python peak.py FOLDER``. It imports JAX alone, so
that nothing but the program is counted. Where the system keeps no peak that can be set back (it is
Linux that does), memory that compiling has left over may hide some of it.
"""

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

__all__ = ['main']

STATUS = Path('/proc/self/status')


def main(folder: Path) -> int:
    """The growth of the process while the program runs, in bytes."""
    import jax
    import numpy as np

    exported = jax.export.deserialize(bytearray((folder / 'program.bin').read_bytes()))
    with np.load(folder / 'arguments.npz') as file:
        arguments = [jax.device_put(file[f'a{i}']) for i in range(len(file.files))]
    compiled = jax.jit(exported.call).lower(*arguments).compile()
    jax.block_until_ready(arguments)
    gc.collect()
    before = _settled()
    results = jax.block_until_ready(compiled(*arguments))
    after = _high_water()
    del results
    return max(after - before, 0)


def _settled() -> int:
    """What the process holds now; its peak starts anew from here."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')
    return _status('VmRSS') if STATUS.exists() else _high_water()


def _high_water() -> int:
    if STATUS.exists():
        return _status('VmHWM')
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == '__main__':
    print(main(Path(sys.argv[1])))
