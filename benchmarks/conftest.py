"""What the suites share: options, the time step, programs that are built once."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import numpy as np
import pytest
import saiunit as u

from benchmarks.contenders import build, gradient_errors
from benchmarks.workloads import WORKLOADS
from braintrace_fast.benchmarking import Program


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup('braintrace_fast')
    group.addoption('--full', action='store_true', help='run workloads at their full size')
    group.addoption('--seconds', type=float, default=3.0, help='how long to time a contender')
    group.addoption('--no-peak', action='store_true', help='start no process for each peak')


@pytest.fixture(autouse=True)
def _step():
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


@pytest.fixture
def etrace_benchmark(request, etrace_benchmark):
    etrace_benchmark.peak = not request.config.getoption('--no-peak')
    return etrace_benchmark


_errors = functools.lru_cache(maxsize=256)(gradient_errors)


@functools.lru_cache(maxsize=1)
def _baseline(workload: str, sizes: tuple[tuple[str, Any], ...]) -> Program:
    program = build(workload, 'bptt', dict(sizes))
    for path, gradient in program().items():
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
        if not all(np.isfinite(leaf).all() and np.mean(leaf != 0) > 0.1 for leaf in leaves):
            raise AssertionError(f'{workload}: most of the gradient of {path} is 0 or not finite.')
    return program


@dataclass(frozen=True)
class Suite:
    """Programs at the sizes that were asked for, and how to measure them."""

    full: bool
    seconds: float

    def sizes(self, workload: str, **others: Any) -> dict[str, Any]:
        return WORKLOADS[workload].sized(self.full, **others)

    def errors(self, workload: str, contender: str, update: float = 0.0) -> dict[str, float]:
        """Errors against the oracle; a wrong gradient of this library raises."""
        return _errors(workload, contender, update)

    def baseline(self, workload: str, sizes: Mapping[str, Any]) -> Program:
        """BPTT, whose gradient must be live: one of zeros would be nothing to compare with."""
        return _baseline(workload, tuple(sizes.items()))


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Suite:
    option = request.config.getoption
    return Suite(option('--full'), option('--seconds'))
