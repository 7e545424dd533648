"""The table of ``benchmarks.migration``: right gradients before times, and a row for each way."""

import pytest

from benchmarks import contenders, migration

pytestmark = pytest.mark.usefixtures('promotes')  # brainstate's readouts broadcast their biases
TINY = ['--rounds', '1', '--set', 'steps=3', 'size=4', 'inputs=3', 'batch=2']


@pytest.mark.filterwarnings('ignore:ETP primitive:UserWarning')  # of the reference
def test_a_row_for_each_way_with_the_error_of_its_gradient(reference, capsys):
    migration.main(['gru', *TINY])
    head, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(f'braintrace {reference.__version__}, ')
    cells = [row.strip('| ').split(' | ') for row in rows]
    assert [row[1] for row in cells] == list(migration.WAYS)
    assert cells[0][3] == '1 (1 to 1)'
    assert float(cells[0][4]) > 0.1  # the reset gate, in all versions
    assert all(float(row[4]) < 1e-9 for row in cells[1:])


def test_a_way_of_ours_that_is_wrong_is_not_timed(monkeypatch):
    # The oracle of another rule stands for a gradient that is off.
    other = contenders.truth('gru', 'pp_prop')
    monkeypatch.setattr(migration, 'truth', lambda *_: other)
    with pytest.raises(AssertionError, match='relative error'):
        migration.check('gru', '`etrace_grad`')
