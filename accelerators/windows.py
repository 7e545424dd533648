"""What a whole window of D-RTRL launches on a GPU, after its forward scan."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import brainpy.state as bp
import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

import braintrace_fast as braintrace
from benchmarks.workloads import lif, normal, zeros

from .gpu import launched_on_gpu

__all__ = ['MOST', 'WindowRow', 'check_windows', 'escaped_windows', 'launches', 'measure_window']

MOST = 6
"""Launches after the forward scan, per relation."""

STEPS = 64, 16
BATCH, INPUTS, SIZE, OUTPUTS = 16, 128, 512, 10
MODELS = {
    'LIF': (1, False),
    'LIF, input and spikes put together': (1, True),
    'LIF, exponential synapses': (2, False),
    'LIF, exponential synapses, put together': (2, True),
}
"""Recurrent layers: their state planes, and whether they have one relation or two."""

THUNK = re.compile(r'^( *)\d+: (k\w+) +\[[^]]*\] *(\S*)', re.MULTILINE)
LOOP = re.compile(r' while\(.*"known_trip_count":\{"n":"(\d+)"', re.MULTILINE)
CONTAINERS = frozenset('kCommandBuffer kConditional kDynamicSliceFusion kSequential kWhile'.split())
"""Thunks that launch only what is listed under them."""


class Layer(brainstate.nn.Module):
    """Recurrent LIF neurons; a current acts at once (one state), or decays (two).

    Input and spikes have a weight each or, put together, one.
    """

    def __init__(self, states: int, together: bool, readout: bool) -> None:
        super().__init__()
        self.neurons = lif(SIZE)
        self.together = together
        self.weights = [
            braintrace.nn.Linear(n, SIZE, w_init=normal(0.2, u.mA), b_init=None)
            for n in ([INPUTS + SIZE] if together else [INPUTS, SIZE])
        ]
        self.synapse = None
        if states == 2:
            self.synapse = bp.AlignPostProj(
                comm=lambda current: current,
                syn=bp.Expon(SIZE, tau=10 * u.ms, g_initializer=zeros(u.mA)),
                out=bp.CUBA(scale=1.0),
                post=self.neurons,
            )
        self.readout = brainstate.nn.Linear(SIZE, OUTPUTS) if readout else None

    def update(self, x: jax.Array) -> jax.Array:
        """One step: spikes in, spikes or what is read out of them out."""
        spikes = self.neurons.get_spike()
        inputs = [jnp.concatenate([x, spikes], -1)] if self.together else [x, spikes]
        first, *rest = (weight(a) for weight, a in zip(self.weights, inputs, strict=True))
        current = sum(rest, first)
        if self.synapse is not None:
            self.synapse(current)
            current = 0 * u.mA
        spikes = self.neurons(current)
        return spikes if self.readout is None else self.readout(spikes)


class WindowRow(NamedTuple):
    """A window of a model on a GPU.

    Attributes
    ----------
    model, target : str
        Which.
    relations : int
        How many there are.
    launched : dict
        By number of steps, what is launched, once per launch.
    with_readout : int
        The number of launches of the longest window if the model has a readout too.
    """

    model: str
    target: str
    relations: int
    launched: dict[int, list[str]]
    with_readout: int = 0

    @property
    def faults(self) -> list[str]:
        """What is wrong."""
        counts = {steps: len(names) for steps, names in self.launched.items()}
        faults = [
            f'a window of {steps} steps launches {count}, more than {MOST} per relation'
            for steps, count in counts.items()
            if count > MOST * self.relations
        ]
        if len(set(counts.values())) > 1:
            faults.append(f'the launches depend on the number of steps: {counts}')
        return faults


def check_windows(target: str) -> list[WindowRow]:
    """Windows of all models on a GPU."""
    return [measure_window(model, target) for model in MODELS]


def escaped_windows(target: str) -> list[str]:
    """What is not found of plain JAX, which walks back by a loop of launches."""
    faults = measure_window('LIF', target, 'jax').faults
    missed = [text for text in ('more than', 'depend on') if not any(text in f for f in faults)]
    return [f'a loop of launches, {target}: expected {text!r}, found {faults}' for text in missed]


def measure_window(model: str, target: str, backend: str = 'pallas') -> WindowRow:
    """Compile windows of a model, and see what they launch."""
    relations, launched = 0, {}
    states, together = MODELS[model]
    for steps in STEPS:
        layer = Layer(states, together, readout=False)
        relations, launched[steps] = _launched(layer, steps, target, backend)
    _, more = _launched(Layer(states, together, readout=True), STEPS[0], target, backend)
    return WindowRow(model, target, relations, launched, len(more))


def _launched(layer: Layer, steps: int, target: str, backend: str) -> tuple[int, list[str]]:
    with brainstate.environ.context(dt=1.0 * u.ms):
        xs = jnp.zeros((steps, BATCH, INPUTS))
        learner = braintrace.compile(layer, 'd_rtrl', xs[0], batch_size=BATCH, backend=backend)

        def run(xs: jax.Array) -> Any:
            loss = lambda x: jnp.mean(learner(x) ** 2)  # noqa: E731
            return learner.etrace_grad(xs, step_fn=loss, trace_every=steps)

        function = brainstate.transform.StatefulFunction(run, return_only_write=False)
        function.make_jaxpr(xs)
        values = [state.value for state in function.get_state_trace(xs).states]
        thunks, hlo = launched_on_gpu(target, function.jaxpr_call, (values, xs), (0,))
    return len(learner.graph.hidden_param_op_relations), list(launches(thunks, hlo))


def launches(thunks: str, hlo: str) -> Iterator[str]:
    """The names of what a program launches after its first loop, as often as it does.

    Parameters
    ----------
    thunks : str
        The sequence of thunks that XLA dumps; what a thunk contains is indented.
    hlo : str
        The compiled program, which knows how often its loops run.
    """
    trips = map(int, LOOP.findall(hlo[hlo.index('\nENTRY ') :]))
    is_after = False
    for thunk in _by_thunk(THUNK.findall(thunks)):
        loops = [kind for _, kind, _ in thunk].count('kWhile')
        if loops > 1:
            raise ValueError(f'there is a loop inside a loop: {thunk}')
        times = next(trips) if loops else 1
        if is_after:
            yield from [name for _, kind, name in thunk if kind not in CONTAINERS] * times
        is_after = is_after or loops == 1
    if not is_after:
        raise ValueError('there is no loop, so no forward scan')


def _by_thunk(lines: list[tuple[str, str, str]]) -> Iterator[list[tuple[str, str, str]]]:
    """Lines that are not indented, each with those under it."""
    count = 0

    def number(line: tuple[str, str, str]) -> int:
        nonlocal count
        count += not line[0]
        return count

    return (list(lines) for _, lines in groupby(lines, number))
