"""The benchmark checks gradients before it times, and all its contenders run."""

import brainstate
import jax
import numpy as np
import pytest
import saiunit as u

from benchmarks import speed
from benchmarks.contenders import CONTENDERS


@pytest.fixture(autouse=True)
def _step():
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


@pytest.mark.parametrize('states', [1, 2])
def test_gradients_are_checked_first(states):
    speed.check_gradients(states)


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    exact = speed.testing.recurrence
    doubled = lambda *args, **options: jax.tree.map(lambda g: 2 * g, exact(*args, **options))  # noqa: E731
    monkeypatch.setattr(speed.testing, 'recurrence', doubled)
    with pytest.raises(AssertionError):
        speed.check_gradients(1)


@pytest.mark.parametrize('name', [n for n in CONTENDERS if 'braintrace' not in n])
def test_contenders_run_by_turns(name):
    run = CONTENDERS[name](3, 2, states=2, **speed.SMALL)
    seconds = speed.timed_by_turns({name: run}, rounds=2)
    assert len(seconds[name]) == 2
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(run()))
