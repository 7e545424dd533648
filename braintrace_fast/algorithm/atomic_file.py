"""Files that are there in full or not at all, whenever the process ends."""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

__all__ = ['write']

STALE_SECONDS = 3600
"""After so long without a change, a file that a process of another machine left is taken for dead:
on some shared file systems, locks of other machines are not seen."""


def write(path: str | os.PathLike, content: Callable[[IO[bytes]], object]) -> None:
    """Replace a file by what a function writes.

    A symbolic link stays, and the file that it points to is replaced. What writers that were killed
    left beside it is removed.

    Raises
    ------
    OSError
        If the file cannot be written; the old one is there then, and nothing else.
    """
    target = Path(os.path.realpath(path))
    _check(target)
    _remove_leftovers(target)
    file, temporary = _open_beside(target)
    try:
        with file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows renames no file that is open
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not all systems let a directory be synchronised
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _check(target: Path) -> None:
    """Refuse at once what would fail after all was written, or lose a file that is protected."""
    if target.is_dir():
        raise IsADirectoryError(f'{target} is a directory; give the path of a file.')
    if not target.parent.is_dir():
        raise FileNotFoundError(f'There is no directory {target.parent}; make it first.')
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(
            f'{target} may not be written; make it writable, or choose another path.'
        )


def _open_beside(target: Path) -> tuple[IO[bytes], Path]:
    """A new file, locked as long as it is open, so that others see that its writer lives."""
    while True:
        temporary = target.with_name(f'.{target.name}.{_machine()}.{uuid.uuid4().hex}.tmp')
        file = open(temporary, 'xb')
        if fcntl is None:
            return file, temporary
        with contextlib.suppress(OSError):  # not all file systems have locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # not taken for a leftover before it was locked
            return file, temporary
        file.close()


def _remove_leftovers(target: Path) -> None:
    name = re.compile(rf'\.{re.escape(target.name)}\.(?:([0-9a-f]{{12}})\.)?[0-9a-f]{{32}}\.tmp')
    with os.scandir(target.parent) as entries:
        found = [(Path(e.path), m[1]) for e in entries if (m := name.fullmatch(e.name))]
    for leftover, machine in found:
        with contextlib.suppress(OSError):  # its writer lives, or it is gone or not ours
            age = time.time() - leftover.stat().st_mtime
            if machine == _machine() or age > STALE_SECONDS:
                _remove_if_dead(leftover)


def _remove_if_dead(leftover: Path) -> None:
    if fcntl is None:
        leftover.unlink()
        return
    with open(leftover, 'r+b') as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftover.unlink()


def _machine() -> str:
    return f'{uuid.getnode():012x}'
