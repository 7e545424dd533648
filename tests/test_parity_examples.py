"""Examples of the reference are run with their imports changed and nothing else."""

import json
from pathlib import Path

import pytest

from parity.example_sources import read_example, with_import
from parity.examples import _ran_out


@pytest.mark.parametrize(
    ('line', 'changed'),
    [
        ('import braintrace', 'import braintrace_fast as braintrace'),
        ('import braintrace as bt', 'import braintrace_fast as bt'),
        ('import braintrace.nn as nn', 'import braintrace_fast.nn as nn'),
        ('import jax, braintrace', 'import jax; import braintrace_fast as braintrace'),
        ('from braintrace import compile', 'from braintrace_fast import compile as compile'),
        ('from braintrace.nn import GRUCell as C', 'from braintrace_fast.nn import GRUCell as C'),
        ('import braintracer', 'import braintracer'),
        ('from .braintrace import compile', 'from .braintrace import compile'),
    ],
)
def test_imports_of_the_reference_become_ours(line: str, changed: str) -> None:
    assert with_import(line) == changed + '\n'


def test_lines_stay_where_they_were() -> None:
    imports = '    from braintrace import (\n        D_RTRL,\n        EProp,\n    )\n'
    source = f'def f():\n{imports}    return 1\n'
    lines = with_import(source).splitlines()
    assert lines[1].startswith('    from braintrace_fast import D_RTRL')
    assert 'import EProp' in lines[1]
    assert lines[5] == '    return 1'


def test_public_objects_are_found_whichever_private_module_they_are_taken_from() -> None:
    space: dict[str, object] = {}
    exec(with_import('from braintrace._algorithm.d_rtrl import D_RTRL as Rule'), space)
    import braintrace_fast

    assert space['Rule'] is braintrace_fast.D_RTRL


def test_a_script_is_shortened_by_the_arguments_that_its_main_takes(tmp_path: Path) -> None:
    file = tmp_path / 'example.py'
    main = 'def main(*, n_epochs=1000, plot=True):\n    pass\n'
    file.write_text(f'{main}\n\nif __name__ == "__main__":\n    main()\n')
    script = read_example(file, here=True)
    assert script.text.strip().endswith('    main()')
    assert script.short is not None
    assert script.short.strip().splitlines()[-1] == 'main(n_epochs=1)'
    assert '__main__' not in script.short


def test_only_cells_that_need_a_private_name_without_counterpart_are_left_out(
    tmp_path: Path,
) -> None:
    file = tmp_path / 'notebook.ipynb'
    cells = [
        '%matplotlib inline\nimport braintrace',
        'from braintrace._op import no_such_name\nvalue = no_such_name(1)',
        'print(value)',
        'value = 2',
        'print(value)',
    ]
    written = [{'cell_type': 'code', 'source': cell.splitlines(True)} for cell in cells]
    file.write_text(json.dumps({'cells': [*written, {'cell_type': 'markdown', 'source': []}]}))
    script = read_example(file, here=True)
    assert script.cells == (2, 5)
    assert script.missing == ('braintrace._op.no_such_name',)
    assert script.text.count('print(value)') == 1
    assert '%' not in script.text


def test_what_ended_at_a_limit_is_run_again_with_a_longer_one() -> None:
    known = {'there': 'still running after 100 s'}
    assert _ran_out(known, 240)
    assert not _ran_out(known, 100)
    assert not _ran_out({'there': 'passed'}, 240)
