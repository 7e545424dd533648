"""What every test relies on: CPU, a fixed seed, a time step, and float64 on request."""

import gc
import os
import warnings
import zlib
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Tests compile thousands of small programs: XLA's newer code generator takes twice as long for
# each, and a program in several parts holds twice as many memory maps.
os.environ['XLA_FLAGS'] = ' '.join(
    [
        '--xla_cpu_use_fusion_emitters=false',
        '--xla_cpu_parallel_codegen_split_count=1',
        os.environ.get('XLA_FLAGS', ''),
    ]
)

import brainstate
import hypothesis
import jax
import pytest
import saiunit as u

from braintrace_fast import UntracedWarning

# Tests compile thousands of small programs and run each a few times.
jax.config.update('jax_disable_most_optimizations', True)

# The first example of a property compiles; the context of `x64` is meant to span all examples.
hypothesis.settings.register_profile(
    'suite',
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile('suite')


@pytest.fixture(autouse=True)
def _environment():
    # Many tests are of models that should give it; those of models that must not ask for `silent`.
    with brainstate.environ.context(dt=0.1 * u.ms), warnings.catch_warnings():
        warnings.simplefilter('ignore', UntracedWarning)
        brainstate.random.seed(0)
        yield


@pytest.fixture
def silent(_environment):
    """Make it an error to warn of weights that are not traced."""
    warnings.simplefilter('error', UntracedWarning)


@pytest.fixture
def x64(_environment):
    """Run the test in float64: JAX's default type and brainstate's."""
    with brainstate.environ.context(precision=64):
        yield


def pytest_addoption(parser):
    parser.addoption('--part', help='run one part of the tests: 2/3 is the second of three')


def pytest_collection_modifyitems(config, items):
    """Leave the tests of one part; those of the same model, by their parameters, go together."""
    if config.getoption('--part') is None:
        return
    part, parts = map(int, config.getoption('--part').split('/'))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f'--part {part}/{parts}: expected 1/{parts} to {parts}/{parts}')

    def is_in(item):
        name = item.nodeid.partition('[')[2] or item.nodeid
        return zlib.crc32(name.encode()) % parts == part - 1

    config.hook.pytest_deselected(items=[item for item in items if not is_in(item)])
    items[:] = filter(is_in, items)


MAPS = Path('/proc/self/maps')


def pytest_runtest_teardown():
    """Drop compiled programs before their memory maps run out, which would crash the process."""
    if MAPS.exists() and MAPS.read_bytes().count(b'\n') > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimized():
    """What users run: the memory of a program depends on how XLA fuses it."""
    jax.config.update('jax_disable_most_optimizations', False)
    yield
    jax.config.update('jax_disable_most_optimizations', True)
