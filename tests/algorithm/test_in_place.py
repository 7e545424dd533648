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
    """A leaky current that drives a leaky voltage: ``V`` reads ``I``, and both are traced."""

    def __init__(self):
        super().__init__()
        self.current = braintrace.nn.Linear(INPUTS + SIZE, SIZE)

    def init_state(self, batch_size=None, **_):
        self.I = brainstate.HiddenState(jnp.zeros((batch_size, SIZE)))
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, SIZE)))

    def update(self, x):
        drive = self.current(jnp.concatenate([x, jnp.tanh(self.V.value)], -1))
        self.I.value = 0.5 * self.I.value + drive
        self.V.value = 0.9 * self.V.value + jnp.tanh(self.I.value)
        return self.V.value


def loss(run, x):
    return jnp.mean(run(x) ** 2)


def temporaries(build, **options):
    """Bytes of the compiled program besides its arguments and results, in planes of the trace."""
    learner = braintrace.D_RTRL(model := TwoPlanes())
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    learner.compile_graph(jnp.ones((BATCH, INPUTS)))
    program = build(learner, jnp.ones((8, BATCH, INPUTS)), step_fn=loss, **options)
    return program.memory['temp_bytes'] / TRACE


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
def test_no_temporary_is_as_large_as_a_plane_of_the_trace(build, options):
    assert temporaries(build, **options) < 1


def test_the_plain_formula_takes_one(monkeypatch):
    """So that the test above can fail."""

    def plain(*operands, overwrite):
        return reference.trace_carry(*operands)

    monkeypatch.setattr(blocked, 'trace_carry', plain)
    assert temporaries(benchmarking.online, trace_every=4) > 1
