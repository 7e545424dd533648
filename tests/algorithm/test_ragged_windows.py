"""Windows of two lengths give the gradient of the recurrence, whatever their number."""

import functools
import itertools

import jax
import pytest

from tests.algorithm.learning import ALGORITHMS, begin, check, learning
from tests.algorithm.test_signals import KAPPA, RULES
from tests.models import MODELS
from tests.oracles.recurrence import recurrence_of, step_loss
from tests.oracles.signals import as_parameters, gradients_per_step

LENGTH = 7
"""A prime, so that all but windows of one step, or of all, are of two lengths."""
QUICK = {
    ('lif_expon', 'd_rtrl', 'carry', 2),
    ('lif_expon', 'd_rtrl', 'carry', 4),
    ('lif_expon', 'd_rtrl', 'fresh', 4),
    ('alif_expon', 'filter', 'carry', 4),
    ('gru', 'pp_prop', 'carry', 4),
}


@functools.cache
def truth(name, algorithm):
    case = MODELS[name]
    if algorithm == 'filter':
        steps = gradients_per_step(case, KAPPA, steps=LENGTH)
        return as_parameters(case, sum(steps))
    return recurrence_of(case, algorithm, steps=LENGTH)


@pytest.mark.parametrize(
    ('name', 'algorithm', 'trace', 'every'),
    [
        pytest.param(*case, every, marks=() if (*case, every) in QUICK else pytest.mark.slow)
        for case in itertools.product(
            ('lif_expon', 'gru', 'alif_expon'), ('d_rtrl', 'pp_prop', 'filter'), ('carry', 'fresh')
        )
        for every in range(1, LENGTH + 1)
    ],
)
def test_windows_of_two_lengths(name, algorithm, trace, every, x64, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, 'filter', RULES['filter'])
    learned = learning(MODELS[name], algorithm, steps=LENGTH)
    step = functools.partial(step_loss(learned.model), learned.learner)
    begin(learned)
    found = learned.learner.etrace_grad(
        learned.xs, step_fn=step, reduction='sum', trace=trace, trace_every=every
    )
    check(found, truth(name, algorithm), rtol=1e-10)
    windows = learned.learner.plan.windows
    assert sum(count * steps for count, steps in windows) == LENGTH
    assert len(windows) == (1 if every in (1, LENGTH) else 2)


def test_a_second_plane_is_whole(x64):
    """So that the model above with two whole planes has them."""
    trace = learning(MODELS['alif_expon'], 'd_rtrl', steps=LENGTH).learner.trace.value
    widths = [a.shape[-1] for a in jax.tree.leaves(trace)]
    assert sum(width > 1 for width in widths) >= 2
