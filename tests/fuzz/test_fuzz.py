"""Random programs, for a bounded time; and that a broken gradient would be found."""

from pathlib import Path

import pytest

from braintrace_fast.runtime.factors import StepRunner
from tests.fuzz.check import show
from tests.fuzz.programs import program
from tests.fuzz.run import run, todays_seed

PLAIN = 156  # the seed of a small program without special features


@pytest.mark.slow
@pytest.mark.usefixtures('promotes')  # programs as users write them: masks of booleans, and more
def test_random_programs_learn_as_the_oracle_says(tmp_path):
    result = run(todays_seed(), 75, tmp_path)
    assert not result.failures, '\n\n'.join([*result.failures, str(result)])
    assert result.programs > result.vacuous


def test_a_program_is_the_same_whenever_it_is_made():
    texts = [program(seed) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_a_broken_gradient_is_found_and_printed_as_a_program(tmp_path, monkeypatch, capsys):
    as_signals = StepRunner.as_signals

    def broken(self, cotangents):
        signals = as_signals(self, cotangents)
        L = tuple(tuple(1.001 * plane for plane in planes) for planes in signals.L)
        return signals._replace(L=L)

    def shown(path: Path) -> str:
        with pytest.raises(SystemExit) as end:
            show(str(path))
        return f'{end.value.code} {capsys.readouterr().out}'

    monkeypatch.setattr(StepRunner, 'as_signals', broken)
    result = run(PLAIN, 600, tmp_path, count=1, features=())
    (failure,) = result.failures
    assert 'gradient of' in failure
    pasted = tmp_path / 'pasted.py'
    pasted.write_text(failure[failure.index('"""Seed') :])
    assert pasted.read_text() == program(PLAIN, features=())
    monkeypatch.undo()
    assert 'All ways of learning agree' in shown(pasted)
