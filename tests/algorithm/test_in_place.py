"""Compiled programs hold no second trace: it is overwritten where it is."""

import brainstate
import jax.numpy as jnp
import pytest

import braintrace_fast as braintrace
from braintrace_fast import benchmarking
from braintrace_fast.kernels.trace_carry import blocked, reference

BATCH, INPUTS, SIZE = 8, 96, 128
pytestmark = pytest.mark.usefixtures('optimized')

TRACE = 4 * BATCH * (INPUTS + SIZE) * SIZE


class TwoPlanes(brainstate.nn.Module):
    """A leaky current that drives a leaky voltage: ``V`` reads ``I``, and both are traced.

    With one decay for all neurons, the trace of ``I`` is the same for all, and is kept once.
    """

    def __init__(self, narrow=False):
        super().__init__()
        self.decay = 0.5 if narrow else jnp.linspace(0.3, 0.7, SIZE)[None]
        self.current = braintrace.nn.Linear(INPUTS + SIZE, SIZE)

    def init_state(self, batch_size=None, **_):
        self.I = brainstate.HiddenState(jnp.zeros((batch_size, SIZE)))
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, SIZE)))

    def update(self, x):
        drive = self.current(jnp.concatenate([x, jnp.tanh(self.V.value)], -1))
        self.I.value = self.decay * self.I.value + drive
        self.V.value = 0.9 * self.V.value + jnp.tanh(self.I.value)
        return self.V.value


def loss(run, x):
    return jnp.mean(run(x) ** 2)


def temporaries(build, narrow=False, **options):
    """Bytes of the compiled program besides its arguments and results, in planes of the trace."""
    learner = braintrace.D_RTRL(model := TwoPlanes(narrow))
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    learner.compile_graph(jnp.ones((BATCH, INPUTS)))
    widths = [plane['weight'].shape[-1] for plane in learner.trace.value[0]]
    assert widths == [1 if narrow else SIZE, SIZE]
    program = build(learner, jnp.ones((8, BATCH, INPUTS)), step_fn=loss, **options)
    return program.memory['temp_bytes'] / TRACE


@pytest.mark.parametrize('narrow', [False, True], ids=['two whole planes', 'one narrow plane'])
@pytest.mark.parametrize(
    ('build', 'options'),
    [
        (benchmarking.updating, {}),
        (benchmarking.online, dict(trace_every=1)),
        (benchmarking.online, dict(trace_every=4)),
        (benchmarking.online, {}),
    ],
    ids=['updates in every step', 'windows of one step', 'windows', 'one window'],
)
def test_no_temporary_is_as_large_as_a_plane_of_the_trace(build, options, narrow):
    assert temporaries(build, narrow, **options) < 1


@pytest.mark.parametrize('narrow', [False, True], ids=['two whole planes', 'one narrow plane'])
def test_the_plain_formula_takes_one(narrow, monkeypatch):
    """So that the test above can fail."""

    def plain(*operands, overwrite):
        return reference.trace_carry(*operands)

    monkeypatch.setattr(blocked, 'trace_carry', plain)
    assert temporaries(benchmarking.online, narrow, trace_every=4) > 1
