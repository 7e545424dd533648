"""What users install: a wheel built from the source distribution, apart from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ('braintrace_fast', 'kernels', '*.py', '*.toml', 'MANIFEST.in', '*.md', 'LICENSE')


def _run(*command: str | Path, cwd: Path) -> str:
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    environment.pop('PYTHONPATH', None)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `python -m build` makes from the source distribution."""
    pytest.importorskip('build', reason='needs the test extra')
    pytest.importorskip('setuptools', minversion='77', reason='needs the test extra')
    work = tmp_path_factory.mktemp('build')
    copy = work / 'checkout'
    copy.mkdir()
    for source in (path for pattern in BUILT_FROM for path in ROOT.glob(pattern)):
        if source.is_dir():
            ignored = shutil.ignore_patterns('__pycache__')
            shutil.copytree(source, copy / source.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, copy)
    command = (sys.executable, '-m', 'build', '--no-isolation', '--outdir', work / 'dist', copy)
    _run(*command, cwd=work)
    (built,) = (work / 'dist').glob('*.whl')
    return built


def test_kernels_is_a_relative_link_to_the_top_level_folder():
    link = ROOT / 'braintrace_fast' / 'kernels'
    assert link.is_symlink()
    assert link.readlink() == Path('../kernels')
    assert (link / '__init__.py').is_file()


def test_readme_examples_run_without_a_warning(silent):
    examples = re.findall(
        r'```python\n(.*?)```', (ROOT / 'README.md').read_text('utf-8'), re.DOTALL
    )
    assert examples
    for example in examples:
        exec(compile(example, 'README.md', 'exec'), {'__name__': 'readme'})


@pytest.mark.slow
def test_wheel_holds_the_library_and_its_plugin_and_nothing_beside_them(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    installed = {name.split('/')[0] for name in names}
    described = '-'.join(wheel.name.split('-')[:2]) + '.dist-info'
    assert installed == {'braintrace_fast', 'pytest_braintrace_fast.py', described}
    points = zipfile.ZipFile(wheel).read(f'{described}/entry_points.txt').decode()
    assert '[pytest11]\npytest_braintrace_fast = pytest_braintrace_fast' in points
    library = [path.relative_to(ROOT) for path in (ROOT / 'braintrace_fast').rglob('*.py')]
    kernels = [path.relative_to(ROOT) for path in (ROOT / 'kernels').rglob('*.py')]
    sources = {
        path.as_posix() for path in [*library, *(Path('braintrace_fast', k) for k in kernels)]
    }
    assert {'braintrace_fast/py.typed', 'braintrace_fast/kernels/__init__.py', *sources} <= names


@pytest.mark.slow
def test_wheel_installs_and_imports_in_a_clean_environment(wheel: Path, tmp_path: Path):
    clean = tmp_path / 'clean'
    venv.create(clean, system_site_packages=False, with_pip=False, symlinks=os.name != 'nt')
    paths = sysconfig.get_paths('venv', vars={'base': str(clean), 'platbase': str(clean)})
    python = Path(paths['scripts'], 'python')
    site_packages = Path(paths['purelib'])
    # Dependencies come from the running environment; a path file does not read those found there,
    # so that an editable install of this checkout stays out of sight.
    dependencies = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
    (site_packages / 'dependencies.pth').write_text('\n'.join(dependencies))

    pip = (sys.executable, '-m', 'pip', '--python', python)
    _run(*pip, 'install', '--no-deps', '--no-index', wheel, cwd=tmp_path)
    code = (
        'import braintrace_fast, braintrace_fast.kernels as kernels;'
        "print(braintrace_fast.__file__, kernels.__file__, braintrace_fast.__version__, sep='\\n')"
    )
    library, kernels, version = _run(python, '-I', '-c', code, cwd=tmp_path).splitlines()
    assert Path(library) == site_packages / 'braintrace_fast' / '__init__.py'
    assert Path(kernels) == site_packages / 'braintrace_fast' / 'kernels' / '__init__.py'
    assert version == wheel.name.split('-')[1]
