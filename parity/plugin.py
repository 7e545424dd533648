"""The pytest plugin: takes tests about internals out, and writes down how each other one ends.

It is told by environment variables where the source distribution lies, where to write, and which
tests to leave out because an earlier process ended while, or after, it ran them.
"""

import json
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from .alias import NAME, Internal, install
from .internals import internal_names

SOURCES = Path(os.environ['PARITY_SOURCES'])
OUTCOMES = Path(os.environ['PARITY_OUTCOMES'])
SECONDS = int(os.environ.get('PARITY_SECONDS', '120'))
ONLY = os.environ.get('PARITY_ONLY')

if os.environ.get('PARITY_TARGET') != 'reference':
    install(SOURCES)


class TookTooLong(BaseException):
    """Not an `Exception`, so that no test catches it."""


def _write(**row: Any) -> None:
    with OUTCOMES.open('a', encoding='utf-8') as file:
        file.write(json.dumps(row) + '\n')


def _known() -> dict[str, str]:
    if not OUTCOMES.exists():
        return {}
    rows = [json.loads(line) for line in OUTCOMES.read_text('utf-8').splitlines()]
    return {row['test']: row['outcome'] for row in rows}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that ask for public behaviour and were not run yet."""
    known, kept = _known(), []
    only = None if ONLY is None else set(json.loads(Path(ONLY).read_text('utf-8')))
    for item in items:
        assert isinstance(item, pytest.Function)
        names = _internals(item)
        if names:
            if item.nodeid not in known:
                _write(test=item.nodeid, outcome='internal', why=', '.join(names))
        elif item.nodeid not in known and (only is None or item.nodeid in only):
            kept.append(item)
    items[:] = kept


def _internals(item: pytest.Function) -> list[str]:
    path = item.path.relative_to(SOURCES).with_suffix('')
    module = '.'.join(path.parts)
    assert module.split('.')[0] == NAME
    classes = tuple(node.name for node in item.listchain() if isinstance(node, pytest.Class))
    return internal_names(SOURCES, module, classes, item.originalname or item.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Limit the time of a test; write `crashed` first, so that this stands if the process ends."""

    def late(number: int, frame: FrameType | None) -> NoReturn:
        raise TookTooLong(f'still running after {SECONDS} s')

    _write(test=item.nodeid, outcome='crashed', why='the process ended')
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    Internal.in_test = True
    try:
        return (yield)
    finally:
        Internal.in_test = False
        signal.alarm(0)


def pytest_exception_interact(call: Any, report: Any) -> None:
    """Write down a file that cannot be imported."""
    if isinstance(report, pytest.CollectReport):
        _write(test=report.nodeid, outcome='failed', why=f'collection: {call.excinfo.value!r}')


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test ended."""
    if report.when == 'call' or report.outcome != 'passed':
        _write(test=report.nodeid, outcome=_outcome(report), why=_why(report))


def _outcome(report: pytest.TestReport) -> str:
    if report.skipped and not hasattr(report, 'wasxfail'):
        return 'internal' if 'internal: ' in str(report.longrepr) else 'skipped'
    return 'failed' if report.failed else 'passed'


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, 'reprcrash', None)
    return '' if crash is None else crash.message[:600]
