"""A learner that is killed again and again ends where one ends that never was."""

import random
import sys

import pytest

from tests.soak.__main__ import RULES, soak


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='memory is read from /proc')
@pytest.mark.parametrize('rule', RULES)
def test_kills_leave_no_mark(rule, tmp_path, monkeypatch):
    monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')  # most of the time goes to compiling
    seed = random.SystemRandom().randrange(10**6)
    print(f'python -m tests.soak --steps 1500 --kills 2 --seed {seed}')  # shown if it fails
    soak(rule, 1500, 2, seed, tmp_path)
