"""The examples run and draw what they say; the demo's task cannot be solved without memory."""

import importlib
import re
import runpy
from pathlib import Path

import brainstate
import jax
import numpy as np
import pytest
import saiunit as u

pytestmark = pytest.mark.usefixtures('promotes')  # they read as users would write them

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'
PNG = b'\x89PNG\r\n\x1a\n'


@pytest.fixture(autouse=True)
def _as_from_the_command_line(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv('MPLBACKEND', 'agg')
    # The examples set this time step for the process, but the suite's own would go first.
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


@pytest.fixture
def fast_compilation():
    before = jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', before)


RUNS = [
    ('delayed_match', 'd_rtrl', 'jax'),
    ('copying_gru', 'pp_prop', 'auto'),
    ('fly_brain', 'd_rtrl', 'auto'),
    ('spike_classifier', 'pp_prop', 'jax'),
    ('moving_bars', 'd_rtrl', 'jax'),
]


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation', 'silent')
@pytest.mark.parametrize(('name', 'algorithm', 'backend'), RUNS)
def test_example_runs_and_draws(name, algorithm, backend, tmp_path, monkeypatch, capsys):
    picture = tmp_path / 'new_folder' / 'picture.png'
    options = ['--updates=2', '--batch-size=8', '--test-trials=8', f'--plot={picture}']
    choices = [f'--algorithm={algorithm}', f'--backend={backend}']
    monkeypatch.setattr('sys.argv', [name, *options, *choices])
    runpy.run_path(str(EXAMPLES / f'{name}.py'), run_name='__main__')
    printed = capsys.readouterr().out
    assert f'Compiled for {algorithm}, backend {backend}' in printed
    for title in ('Hidden groups', 'Traced weights'):
        assert title in printed
    if name == 'delayed_match':
        assert 'Weights without a trace' in printed
        assert re.search(r'cosine.*\n +readout.weight +1\.000 +1\.000\n +synapses', printed)
    assert 'before training' in printed and 'after training' in printed
    assert picture.read_bytes().startswith(PNG)


def decoding_accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Share of the second half of the trials that a linear fit to the first half gets right."""
    features = np.column_stack([features, np.ones(len(labels))])
    half = len(labels) // 2
    fit, *_ = np.linalg.lstsq(features[:half], 2.0 * labels[:half] - 1, rcond=None)
    return np.mean((features[half:] @ fit > 0) == labels[half:])


def test_delayed_match_cannot_be_solved_without_memory():
    task = importlib.import_module('delayed_match')
    spikes, labels = map(np.asarray, task.make_trials(jax.random.key(0), 4000))
    counts = {
        phase: spikes[begin : begin + task.PHASES[phase]].sum(axis=0)
        for phase, begin in task.BEGINS.items()
    }
    assert abs(labels.mean() - 0.5) < 0.03
    for phase, count in counts.items():
        assert abs(decoding_accuracy(count, labels) - 0.5) < 0.06, phase
    # Sample and test together do tell, so the task can be solved.
    populations = {
        phase: count.reshape(len(labels), 3, -1).sum(-1) for phase, count in counts.items()
    }
    sample, test = (
        populations[p][:, task.A] - populations[p][:, task.B] for p in ('sample', 'test')
    )
    assert decoding_accuracy(sample * test, labels) > 0.99


def test_moving_bars_cannot_be_told_from_the_events_of_one_time():
    task = importlib.import_module('moving_bars')
    events, labels = map(np.asarray, task.make_trials(jax.random.key(0), 4000))
    assert events.shape == (task.NUM_STEPS, 4000, task.SIDE, task.SIDE, 1)
    rows, columns = events[1].sum((2, 3)) > 8, events[1].sum((1, 3)) > 8  # the edges of a bar
    lies = rows.sum(1) > columns.sum(1)
    np.testing.assert_array_equal(lies, labels >= 2)
    # Each bar is there as often for either way to go.
    for way in (0, 2):
        for edges in (rows, columns):
            shares = [edges[labels == way + k].mean(0) for k in (0, 1)]
            np.testing.assert_allclose(*shares, atol=0.06)
    # Two times do tell.
    later = (events[1 + task.STEPS_PER_PIXEL].sum((1, 3)) > 8)[labels < 2]
    moved_right = (later == np.roll(columns[labels < 2], 1, 1)).all(1)
    np.testing.assert_array_equal(moved_right, labels[labels < 2] == 0)
