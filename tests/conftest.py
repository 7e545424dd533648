"""What every test relies on: CPU, a fixed seed, a time step, and float64 on request."""

import ctypes
import gc
import os
import shutil
import warnings
import zlib
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import brainstate
import hypothesis
import jax
import pytest
import saiunit as u

from braintrace_fast import UntracedWarning
from tests.promotion import promoting

# Tests compile thousands of small programs: XLA's newer code generator takes twice as long for
# each, and a program in several parts holds twice as many memory maps. jaxlib 0.12 has the newer
# one only, and ends the process if a flag is unknown to it.
OLDER = ('--xla_cpu_use_fusion_emitters=false',) if jax.__version_info__ < (0, 12) else ()
FLAGS = (*OLDER, '--xla_cpu_parallel_codegen_split_count=1')
os.environ['XLA_FLAGS'] = ' '.join([*FLAGS, os.environ.get('XLA_FLAGS', '')])

# Programs are run a few times each.
jax.config.update('jax_disable_most_optimizations', True)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)

# The first example of a property compiles; the context of `x64` is meant to span all examples.
hypothesis.settings.register_profile(
    'suite',
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile('suite')


@pytest.fixture(autouse=True)
def _promotion():
    """The library promotes types and ranks explicitly; see also `tests/promotion.py`."""
    with promoting(False):
        yield


@pytest.fixture
def promotes(_promotion):
    """Let a test's models promote, as those of users may."""
    with promoting():
        yield


@pytest.fixture(autouse=True)
def _environment():
    # Many tests are of models that should give it; those of models that must not ask for `silent`.
    with brainstate.environ.context(dt=0.1 * u.ms), warnings.catch_warnings():
        warnings.simplefilter('ignore', UntracedWarning)
        brainstate.random.seed(0)
        yield


@pytest.fixture(scope='session')
def reference():
    """braintrace: 0.2.6 on Python 3.11, and 0.2.8 on later ones."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return pytest.importorskip('braintrace', reason='needs the test extra')


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


CACHE_BYTES = 300e6
OF_THE_REFERENCE = pytest.mark.filterwarnings(
    'ignore:core.Jaxpr is missing a DebugInfo:DeprecationWarning'
)


def pytest_configure(config):
    """Keep compiled programs for the next run, those of each worker apart: JAX locks no files."""
    worker = os.environ.get('PYTEST_XDIST_WORKER', 'alone')
    folder = config.rootpath / '.pytest_cache' / 'jax' / worker
    if folder.exists() and sum(file.stat().st_size for file in folder.iterdir()) > CACHE_BYTES:
        shutil.rmtree(folder)
    jax.config.update('jax_compilation_cache_dir', str(folder))


def pytest_collection_modifyitems(config, items):
    """Leave the tests of one part, those that share programs in a row and on one worker."""
    if config.getoption('--part') is not None:
        _leave_part(config, items)
    groups = {}
    for item in items:
        if 'reference' in item.fixturenames:
            item.add_marker(OF_THE_REFERENCE)
        groups.setdefault(_group_of(item), []).append(item)
    # Models last: their groups are short, so that all workers end at about the same time.
    ordered = sorted(groups, key=_models().__contains__)
    items[:] = [item for name in ordered for item in groups[name]]
    for name, members in groups.items():
        for item in members:
            item.add_marker(pytest.mark.xdist_group(name))


def _models():
    from tests.models import MODELS  # which makes arrays: XLA reads its flags then

    return MODELS


def _group_of(item):
    """The model of the table that a test is given, or else its file."""
    models = _models()
    if hasattr(item, 'callspec') and getattr(item.module, 'MODELS', None) is models:
        for value in map(str, item.callspec.params.values()):
            if value in models:
                return value
    return item.nodeid.partition('::')[0]


def _leave_part(config, items):
    part, parts = map(int, config.getoption('--part').split('/'))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f'--part {part}/{parts}: expected 1/{parts} to {parts}/{parts}')

    def is_in(item):
        name = item.nodeid.partition('[')[2] or item.nodeid
        return zlib.crc32(name.encode()) % parts == part - 1

    config.hook.pytest_deselected(items=[item for item in items if not is_in(item)])
    items[:] = filter(is_in, items)


MEMORY = Path('/proc/self/statm')
MAPS = Path('/proc/self/maps')
MAX_BYTES, MAX_MAPS = 1.6e9, 20_000


def pytest_runtest_teardown():
    """Drop compiled programs before they fill the memory or the process runs out of maps."""
    if not MEMORY.exists():
        return
    resident = int(MEMORY.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    if resident > MAX_BYTES or MAPS.read_bytes().count(b'\n') > MAX_MAPS:
        jax.clear_caches()
        gc.collect()
        # Without it, glibc keeps what was freed: hundreds of megabytes.
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def optimized():
    """What users run: the memory of a program depends on how XLA fuses it."""
    jax.config.update('jax_disable_most_optimizations', False)
    yield
    jax.config.update('jax_disable_most_optimizations', True)
