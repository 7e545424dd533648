"""Imports point downward only, and only `_compat.py` knows JAX versions: read off the sources."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = 'braintrace_fast'
TOP = '__init__'  # the package itself: public names, imported by users only
BASE = ('_compat', '_deprecation', '_typing', 'config', 'errors')
STACK = ('op', 'compiler', 'runtime', 'driver', 'reference_api', 'algorithm', 'learner')


def _allowed_imports() -> dict[str, frozenset[str]]:
    floor = frozenset({'kernels', *BASE})
    everything = floor | {*STACK, 'nn', 'deprecated'}
    allowed = {
        'kernels': frozenset(),
        **{layer: floor for layer in BASE},
        **{layer: floor | set(STACK[:height]) for height, layer in enumerate(STACK)},
        'nn': floor | {'op'},
        'deprecated': floor | {'op', 'nn'},
        'testing': everything | {TOP},
        'benchmarking': everything | {TOP},
        TOP: everything,
    }
    # Methods that must stay delegate to it, by imports inside functions.
    allowed['compiler'] |= {'reference_api'}
    return allowed


ALLOWED = _allowed_imports()


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of each import, imported names included."""
    package = module.split('.') if is_package else module.split('.')[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield node.lineno, '.'.join([*anchor, *filter(None, [node.module]), alias.name])


def _layer(dotted: str) -> str:
    parts = dotted.split('.')
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else TOP


def upward_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    if module.split('.')[0] != LIBRARY:
        return
    own = TOP if module == LIBRARY else module.split('.')[1]
    if own not in ALLOWED:
        yield 1, f'{module} has no layer: give it one in this test and in CONTRIBUTING.md'
        return
    for line, target in _imports(tree, module, is_package):
        if target.split('.')[0] != LIBRARY:
            continue
        layer = _layer(target)
        if layer not in ALLOWED[own] | ({own} - {TOP}):
            yield line, f'layer {own} imports {target}, of layer {layer}'


def imports_of_kernels_folder(
    tree: ast.AST, module: str, is_package: bool
) -> Iterator[tuple[int, str]]:
    for line, target in _imports(tree, module, is_package):
        if target.split('.')[0] == 'kernels':
            yield line, f'imports {target}: say {LIBRARY}.{target}'


VERSIONED = re.compile(r'jax(lib)?\.(_src|version|__version__|__version_info__)\b')


def jax_versions(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    if module == f'{LIBRARY}._compat' or module.split('.')[0] != LIBRARY:
        return
    named = list(_imports(tree, module, is_package))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                named.append((node.lineno, ast.unparse(node)))
            case ast.Call(
                func=ast.Name('version') | ast.Attribute(attr='version'),
                args=[ast.Constant('jax' | 'jaxlib' as name)],
            ):
                named.append((node.lineno, f'{name}.version'))
    found = {(line, match[0]) for line, name in named if (match := VERSIONED.match(name))}
    for line, name in sorted(found):
        yield line, f'mentions {name}: put that into {LIBRARY}/_compat.py'


Check = Callable[[ast.AST, str, bool], Iterator[tuple[int, str]]]
CHECKS: list[Check] = [upward_imports, imports_of_kernels_folder, jax_versions]


def _module(path: Path) -> tuple[str, bool]:
    """Dotted name by which a file is imported, and whether it is a package."""
    parts = list(path.relative_to(ROOT).with_suffix('').parts)
    if parts[0] == 'kernels':
        parts.insert(0, LIBRARY)
    is_package = parts[-1] == '__init__'
    return '.'.join(parts[:-1] if is_package else parts), is_package


SOURCES = sorted(
    path
    for folder in (LIBRARY, 'kernels', 'tests', 'benchmarks', 'examples')
    for path in (ROOT / folder).rglob('*.py')
    if not path.is_relative_to(ROOT / LIBRARY / 'kernels')
)


@pytest.mark.parametrize('check', CHECKS)
def test_sources_keep_the_rule(check: Check):
    found = [
        f'{path.relative_to(ROOT)}:{line}: {problem}'
        for path in SOURCES
        for line, problem in check(ast.parse(path.read_text('utf-8')), *_module(path))
    ]
    assert not found, '\n'.join(found)


def test_every_source_is_read():
    modules = {_module(path)[0] for path in SOURCES}
    assert {LIBRARY, f'{LIBRARY}.kernels', f'{LIBRARY}.op', 'tests.test_layers'} <= modules


BROKEN = [
    (upward_imports, 'op.matmul', 'from braintrace_fast.compiler import graph'),
    (upward_imports, 'op.matmul', 'from ..compiler.graph import ETraceGraph'),
    (upward_imports, 'op.matmul', 'from .. import nn'),
    (upward_imports, 'op.matmul', 'import braintrace_fast'),
    (upward_imports, 'op.matmul', 'from braintrace_fast import CompilationReport'),
    (upward_imports, 'compiler.graph', 'def f():\n    import braintrace_fast.runtime.window'),
    (upward_imports, 'runtime.window', 'from ..algorithm import D_RTRL'),
    (upward_imports, 'runtime.window', 'from ..reference_api import executor'),
    (upward_imports, 'algorithm.presets', 'from ..learner import compile'),
    (upward_imports, 'learner', 'from . import testing'),
    (upward_imports, 'nn.cells', 'from ..compiler import graph'),
    (upward_imports, 'errors', 'from .op import matmul'),
    (upward_imports, 'config', 'import braintrace_fast.compiler'),
    (upward_imports, 'kernels.dispatch', 'from .. import errors'),
    (upward_imports, 'kernels.dispatch', 'import braintrace_fast._compat'),
    (upward_imports, 'new_folder.file', 'import jax'),
    (imports_of_kernels_folder, 'runtime.window', 'import kernels'),
    (imports_of_kernels_folder, 'runtime.window', 'from kernels.dispatch import choose'),
    (imports_of_kernels_folder, 'kernels.dispatch', 'import kernels.expand as expand'),
    (jax_versions, 'op.matmul', 'from jax._src import core'),
    (jax_versions, 'op.matmul', 'import jax._src.core'),
    (jax_versions, 'op.matmul', 'import jax\njax._src.core.Var'),
    (jax_versions, 'op.matmul', "import jax\nnew = jax.__version__ > '0.11'"),
    (jax_versions, 'op.matmul', 'from jax import __version_info__'),
    (jax_versions, 'kernels.dispatch', 'from jaxlib.version import __version__'),
    (jax_versions, 'op.matmul', "from importlib.metadata import version\nversion('jax')"),
]


@pytest.mark.parametrize(('check', 'module', 'source'), BROKEN)
def test_broken_source_is_found(check: Check, module: str, source: str):
    problems = list(check(ast.parse(source), f'{LIBRARY}.{module}', False))
    assert len(problems) == 1, problems


SOUND = [
    ('op.matmul', 'from .._compat import Primitive\nfrom . import base\nfrom .. import errors'),
    ('compiler.graph', 'from braintrace_fast.op import matmul\nfrom .report import Report'),
    ('runtime.window', 'from braintrace_fast import kernels\nfrom ..kernels import dispatch'),
    ('kernels.trace_step.api', 'from ..dispatch import choose\nimport braintrace_fast.kernels'),
    ('testing', 'import braintrace_fast as braintrace\nfrom .learner import compile'),
    ('_compat', 'import jax\nfrom jax._src import core\nprint(jax.__version__)'),
    ('nn.cells', 'import jax\nfrom ..op import matmul\njax.numpy.ones(3).version_like'),
]


@pytest.mark.parametrize(('module', 'source'), SOUND)
def test_sound_source_passes(module: str, source: str):
    for check in CHECKS:
        assert list(check(ast.parse(source), f'{LIBRARY}.{module}', False)) == []
