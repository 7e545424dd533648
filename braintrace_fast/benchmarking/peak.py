"""Run a compiled program once and print the bytes by which that made the process grow.

A script of its own, started in a fresh process: ``python peak.py FILE``. It imports JAX alone and
compiles nothing, so that only the program is counted. Where the peak of a process cannot be reset
(on Linux it can), memory that was freed before the run may hide some of it.
"""

import contextlib
import ctypes
import gc
import pickle
import sys
from pathlib import Path

__all__ = ['main']

STATUS = Path('/proc/self/status')


def main(path: Path) -> int:
    """The growth of the process while the program runs, in bytes."""
    import jax
    from jax.experimental.serialize_executable import deserialize_and_load

    compiled, arguments = pickle.loads(path.read_bytes())
    run = deserialize_and_load(*compiled)
    arguments = jax.block_until_ready(jax.device_put(arguments))
    gc.collect()
    before = _settled()
    results = jax.block_until_ready(run(*arguments))
    after = _high_water()
    del results
    return max(after - before, 0)


def _settled() -> int:
    """What the process holds now; its peak is reset to it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')
    return _status('VmRSS') if STATUS.exists() else _high_water()


def _high_water() -> int:
    if STATUS.exists():
        return _status('VmHWM')
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == '__main__':
    print(main(Path(sys.argv[1])))
