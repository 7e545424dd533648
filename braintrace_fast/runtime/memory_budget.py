"""The bytes that a window may take: what the user says, or a share of what the machine has free."""

import math
import os
import re
from pathlib import Path as FilePath
from typing import Any

import jax

__all__ = ['default_budget', 'on_cpu', 'parse_bytes', 'show_bytes', 'trace_room']

SHARE = 4
"""By default, a window may take one part in so many of the free memory."""

UNKNOWN = 2**30
"""The default budget where the machine does not say how much memory is free."""

UNITS = ' kMGT'


def parse_bytes(budget: int | str) -> int:
    """A number of bytes, from itself or from text.

    Examples
    --------
    >>> from braintrace_fast.runtime.memory_budget import parse_bytes
    >>> parse_bytes(1000), parse_bytes('256MB'), parse_bytes('1.5 GiB')
    (1000, 256000000, 1610612736)
    """
    if isinstance(budget, str):
        text = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*', budget, re.IGNORECASE)
        if text is None:
            raise ValueError(
                f"memory_budget is {budget!r}; give bytes, or text such as '256MB' or '2GiB'."
            )
        number, prefix, binary = text.groups()
        power = UNITS.lower().index(prefix.lower()) if prefix else 0
        budget = int(float(number) * (1024 if binary else 1000) ** power)
    elif isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(
            f"memory_budget is {budget!r}; it must be None, a Python int or text such as '256MB'."
        )
    if budget < 1:
        raise ValueError(f'memory_budget is {budget}; it must be at least one byte.')
    return budget


def show_bytes(number: int) -> str:
    """A number of bytes as text for people.

    Examples
    --------
    >>> from braintrace_fast.runtime.memory_budget import show_bytes
    >>> show_bytes(512), show_bytes(21004288)
    ('512 B', '21.0 MB')
    """
    if number < 1000:
        return f'{number} B'
    power = min(int(math.log(number, 1000)), len(UNITS) - 1)
    return f'{number / 1000**power:.1f} {UNITS[power]}B'


def default_budget() -> int:
    """A share of the memory that is free now.

    It is rounded down to a power of two, so that the same machine mostly plans the same windows,
    and results do not differ in rounding from run to run.
    """
    free = _free_bytes()
    return UNKNOWN if free is None else 2 ** max(20, int(math.log2(max(free, 1) / SHARE)))


def trace_room(budget: int | None) -> int | None:
    """The most bytes that a carried trace may take; None if nobody knows.

    That is half of the memory that is free now, as there is an old trace and a new one; or more,
    if the user gives windows a larger budget.
    """
    free = _free_bytes()
    return None if free is None else max(budget or 0, free // 2)


def on_cpu() -> bool:
    """Whether programs run on a CPU unless told otherwise."""
    device = _device()
    return (device if isinstance(device, str) else device.platform) == 'cpu'


def _device() -> Any:
    return getattr(jax.config, 'jax_default_device', None) or jax.local_devices()[0]


def _free_bytes() -> int | None:
    device = _device()
    stats = None if isinstance(device, str) else device.memory_stats()
    if stats and 'bytes_limit' in stats:
        return stats['bytes_limit'] - stats.get('bytes_in_use', 0)
    if not isinstance(device, str) and device.platform != 'cpu':
        return None
    answers = (_free_in_system(), _free_in_container())
    return min((free for free in answers if free is not None), default=None)


def _free_in_system() -> int | None:
    try:
        text = FilePath('/proc/meminfo').read_text('utf-8')
        kilobytes = re.search(r'MemAvailable:\s+(\d+) kB', text)
        if kilobytes:
            return int(kilobytes[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2
    except (AttributeError, OSError, ValueError):
        return None


def _free_in_container() -> int | None:
    """What a control group leaves, where there is one with a limit."""
    folder = FilePath('/sys/fs/cgroup')
    for limit, usage in (
        ('memory.max', 'memory.current'),
        ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes'),
    ):
        try:
            most = int((folder / limit).read_text('utf-8'))
            now = int((folder / usage).read_text('utf-8'))
        except (OSError, ValueError):
            continue
        return max(most - now, 0)
    return None
