"""The registry of workloads: models in the source of either library, their sizes, their data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import brainpy.state as bp
import brainstate
import braintools
import jax
import jax.numpy as jnp
import saiunit as u

from .fly import FlyBrain
from .neurons import alif, lif, own

__all__ = ['WORKLOADS', 'Workload', 'step_loss']

Model = brainstate.nn.Module
Sizes = Mapping[str, Any]


def normal(scale: float, unit: u.Unit = u.UNITLESS) -> Callable[[Any], Any]:
    return lambda shape: brainstate.random.normal(0.0, scale, shape) * unit


def zeros(unit: u.Unit) -> Callable[[Any], Any]:
    return lambda shape: u.math.zeros(shape) * unit


class LIFLayer(brainstate.nn.Module):
    """Recurrent LIF neurons; a current acts at once (one state), or decays (two).

    Thresholds may adapt (three). With ``differ``, every neuron has time constants of its own, so
    that nothing of the trace is the same for two of them.
    """

    def __init__(
        self,
        library: Any,
        states: int,
        inputs: int,
        size: int,
        active: float,
        differ: bool = False,
    ) -> None:
        super().__init__()
        self.num_states = states
        tau = own(size, 15.0, 25.0) * u.ms if differ else 20 * u.ms
        self.neurons = (
            alif(size, tau, own(size, 80.0, 120.0) * u.ms) if states == 3 else lif(size, tau)
        )
        variance = {1: 120.0, 2: 2.4, 3: 2.4}[states] / (active + 0.2 * size)
        weights = normal(variance**0.5, u.mA)
        self.current = library.nn.Linear(inputs + size, size, w_init=weights, b_init=None)
        if states > 1:
            tau = own(size, 8.0, 12.0) * u.ms if differ else 10 * u.ms
            self.current = bp.AlignPostProj(
                comm=self.current,
                syn=bp.Expon(size, tau=tau, g_initializer=zeros(u.mA)),
                out=bp.CUBA(scale=1.0),
                post=self.neurons,
            )

    def update(self, x: jax.Array) -> jax.Array:
        current = self.current(u.math.concatenate([x, self.neurons.get_spike()], -1))
        return self.neurons(current if self.num_states == 1 else 0 * u.mA)


class AdaptiveLayer(brainstate.nn.Module):
    """Recurrent neurons with any number of adaptation currents, which the voltage may drive too.

    GIF without and RadLIF with ``coupling``, in plain numbers; a spike takes 1, the threshold, off.
    """

    def __init__(
        self,
        library: Any,
        states: int,
        inputs: int,
        size: int,
        active: float,
        coupling: float = 0.0,
    ) -> None:
        super().__init__()
        self.size, self.coupling = size, coupling
        self.spike = braintools.surrogate.ReluGrad()
        self.decays = {f'I{k}': 0.9 ** (k + 1) for k in range(states - 1)}
        weights = normal(0.8 / (active + 0.1 * size) ** 0.5)
        self.current = library.nn.Linear(inputs + size, size, w_init=weights)

    def init_state(self, batch_size: int | None = None, **options: Any) -> None:
        shape = (self.size,) if batch_size is None else (batch_size, self.size)
        self.V = brainstate.HiddenState(brainstate.random.uniform(0.0, 1.2, shape))
        for name in self.decays:
            setattr(self, name, brainstate.HiddenState(jnp.zeros(shape, self.V.value.dtype)))

    def get_spike(self) -> jax.Array:
        return self.spike(self.V.value - 1.0)

    def update(self, x: jax.Array) -> jax.Array:
        V, fired = self.V.value, self.get_spike()
        drive = self.current(u.math.concatenate([x, fired], -1))
        for name, decay in self.decays.items():
            current = getattr(self, name)
            current.value = decay * current.value + self.coupling * V + 0.1 * fired
            drive = drive - current.value
        self.V.value = 0.9 * V + drive - fired
        return self.get_spike()


class SmoothLayer(brainstate.nn.Module):
    """Recurrent rate neurons of two states without spikes, each with time constants of its own."""

    def __init__(self, library: Any, inputs: int, size: int, active: float) -> None:
        super().__init__()
        self.size = size
        self.keep, self.leak = own(size, 0.7, 0.9), own(size, 0.95, 0.8)
        weights = normal((active + 0.5 * size) ** -0.5)
        self.current = library.nn.Linear(inputs + size, size, w_init=weights)

    def init_state(self, batch_size: int | None = None, **options: Any) -> None:
        shape = (self.size,) if batch_size is None else (batch_size, self.size)
        self.v, self.w = (brainstate.HiddenState(jnp.zeros(shape)) for _ in range(2))

    def update(self, x: jax.Array) -> jax.Array:
        drive = self.current(u.math.concatenate([x, jnp.tanh(self.v.value)], -1))
        w = self.leak * self.w.value + 0.2 * jnp.tanh(self.v.value)
        self.v.value = self.keep * self.v.value + jnp.tanh(drive) - w
        self.w.value = w
        return jnp.tanh(self.v.value)


class Recurrent(brainstate.nn.Module):
    """Recurrent layers in a row, and a plain readout."""

    def __init__(
        self,
        library: Any,
        layer: Callable[..., Model],
        inputs: int,
        size: int,
        outputs: int,
        rate: float,
        layers: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        # How many inputs of a layer are active: the layer's weights are scaled by it.
        active = [inputs * rate, *(size * 0.1 for _ in range(layers - 1))]
        self.layers = [
            layer(library, inputs=size if i else inputs, size=size, active=a, **options)
            for i, a in enumerate(active)
        ]
        self.readout = brainstate.nn.Linear(size, outputs)

    def update(self, x: jax.Array) -> jax.Array:
        """One step: spikes in, logits out."""
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


class ConvNet(brainstate.nn.Module):
    """Two layers of LIF neurons behind convolutions, and a plain readout.

    ``inputs`` are the pixels of a square of that side, times channels; ``size`` the channels of a
    layer.
    """

    def __init__(
        self, library: Any, inputs: int, size: int, outputs: int, rate: float, side: int
    ) -> None:
        super().__init__()
        self.pixels = (side, side, inputs // side**2)
        self.layers = []
        shape, active = self.pixels, rate
        for _ in range(2):
            weights = normal((120.0 / (9 * shape[-1] * active)) ** 0.5, u.mA)
            conv = library.nn.Conv2d(shape, size, 3, w_init=weights)
            self.layers.append([conv, lif(conv.out_size)])
            shape, active = conv.out_size, 0.1
        self.readout = brainstate.nn.Linear(math.prod(shape), outputs)

    def update(self, x: jax.Array) -> jax.Array:
        """One step: spikes in, logits out."""
        x = x.reshape(-1, *self.pixels)
        for conv, neurons in self.layers:
            x = neurons(conv(x))
        return self.readout(x.reshape(len(x), -1))


class EvidenceAccumulator(brainstate.nn.Module):
    """Excitatory and inhibitory neurons, four to one, with conductance synapses of fixed sign."""

    def __init__(self, library: Any, inputs: int, size: int, outputs: int, rate: float) -> None:
        super().__init__()
        self.excitatory = size - max(size // 5, 1)
        self.neurons = lif(size)
        inhibitory = size - self.excitatory

        def project(scales: list[tuple[int, float]], reversal: u.Quantity) -> Model:
            """From populations of some sizes, with weights that make up for their number."""
            rows = jnp.concatenate([jnp.full((n, 1), scale / n) for n, scale in scales])
            weights = lambda shape: brainstate.random.normal(0.0, 1.0, shape) * rows * u.siemens  # noqa: E731
            return bp.AlignPostProj(
                comm=library.nn.SignedWLinear(len(rows), size, w_init=weights),
                syn=bp.Expon(size, tau=5 * u.ms, g_initializer=zeros(u.siemens)),
                out=bp.COBA(E=reversal),
                post=self.neurons,
            )

        self.excite = project([(inputs, 0.12 / rate), (self.excitatory, 0.5)], 5.0 * u.mV)
        self.inhibit = project([(inhibitory, 2.5)], -2.0 * u.mV)
        self.readout = brainstate.nn.Linear(size, outputs)

    def update(self, x: jax.Array) -> jax.Array:
        """One step: spikes of the cues in, logits out."""
        spikes = self.neurons.get_spike()
        self.excite(u.math.concatenate([x, spikes[..., : self.excitatory]], -1))
        self.inhibit(spikes[..., self.excitatory :])
        return self.readout(self.neurons(0 * u.mA))


class CopyingGRU(brainstate.nn.Module):
    """A GRU and a readout."""

    def __init__(self, library: Any, inputs: int, size: int, outputs: int) -> None:
        super().__init__()
        self.cell = library.nn.GRUCell(inputs, size)
        self.readout = brainstate.nn.Linear(size, outputs)

    def update(self, x: jax.Array) -> jax.Array:
        """One step: a symbol in, logits out."""
        return self.readout(self.cell(x))


@dataclass(frozen=True)
class Workload:
    """A model with its data, at two sizes, and as a small copy.

    Attributes
    ----------
    model : callable
        ``(library, **sizes)``.
    sizes : dict
        What fits two cores: arguments of the model, and ``steps`` and ``batch``.
    full : dict
        What differs at full size.
    one_hot : bool
        Whether an input is one symbol, not a set of spikes.
    contenders : sequence of str, optional
        Those that can run it, if not all can.
    few : dict
        What differs in the small copy from that of others.
    """

    model: Callable[..., Model]
    sizes: Sizes
    full: Sizes = field(default_factory=dict)
    one_hot: bool = False
    contenders: Sequence[str] | None = None
    few: Sizes = field(default_factory=dict)

    def takes(self, contender: str) -> bool:
        """Whether a contender can run it."""
        return self.contenders is None or contender in self.contenders

    def sized(self, full: bool = False, **others: Any) -> dict[str, Any]:
        """The sizes to run with."""
        return {**self.sizes, **(self.full if full else {}), **others}

    def small_copy(self) -> dict[str, Any]:
        """The sizes of the copy for the oracle."""
        steps = 8 + 4 * self.sizes.get('layers', 1)  # until spikes arrive in the last layer
        few = dict(inputs=6, size=10, outputs=3, steps=steps, batch=2)
        denser = {} if self.one_hot else {'rate': 0.4}
        return {**self.sizes, **denser, **few, **self.few}

    def make(self, library: Any, sizes: Sizes) -> Model:
        """The model, with the same weights in either library."""
        brainstate.random.seed(0)
        arguments = {k: v for k, v in sizes.items() if k not in ('steps', 'batch')}
        return self.model(library, **arguments)

    def sequences(self, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
        """Random inputs, and a random class for every step."""
        seen, named = jax.random.split(jax.random.key(0))
        shape = (sizes['steps'], sizes['batch'])
        if self.one_hot:
            symbols = jax.random.randint(seen, shape, 0, sizes['inputs'])
            xs = jax.nn.one_hot(symbols, sizes['inputs'])
        else:
            xs = jax.random.bernoulli(seen, sizes['rate'], (*shape, sizes['inputs']))
        classes = jax.random.randint(named, shape, 0, sizes['outputs'])
        return xs.astype(brainstate.environ.dftype()), classes


def step_loss(run: Callable[[jax.Array], jax.Array], x: jax.Array, target: jax.Array) -> jax.Array:
    """The loss of one step of a model, or of a learner of it: the cross-entropy."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(run(x)), target[:, None], -1)
    return -chosen.mean()


BASIC = dict(inputs=128, size=512, outputs=10, steps=50, batch=16, rate=0.2)

WIDE = dict(
    layer=LIFLayer, layers=3, inputs=4096, size=128, outputs=10, steps=20, batch=8, rate=0.01
)
WIDE_FULL = dict(inputs=32768, size=512, steps=50, batch=16)

OWN = BASIC | dict(layer=LIFLayer, differ=True)

MATCH = dict(inputs=24, outputs=2, steps=40, batch=32, rate=0.1)
SHD = dict(inputs=700, outputs=20, steps=50, batch=8, rate=0.03)

WORKLOADS: dict[str, Workload] = {
    'lif': Workload(Recurrent, BASIC | dict(layer=LIFLayer, states=1)),
    'lif_expon': Workload(Recurrent, BASIC | dict(layer=LIFLayer, states=2)),
    # Neurons that differ, as those of real models do.
    'lif own': Workload(Recurrent, OWN | dict(states=1)),
    'lif_expon own': Workload(Recurrent, OWN | dict(states=2)),
    'alif_expon own': Workload(Recurrent, OWN | dict(states=3)),
    'layers own': Workload(Recurrent, OWN | dict(states=2, layers=3, size=256, batch=32)),
    'batch own': Workload(Recurrent, OWN | dict(states=2, size=256, batch=64)),
    'smooth own': Workload(Recurrent, BASIC | dict(layer=SmoothLayer, size=256)),
    # A wide sparse input in front of three recurrent layers.
    'wide': Workload(Recurrent, WIDE | dict(states=1), full=WIDE_FULL),
    'wide_expon': Workload(Recurrent, WIDE | dict(states=2), full=WIDE_FULL),
    # Delayed match-to-sample.
    'gif': Workload(
        Recurrent,
        MATCH | dict(layer=AdaptiveLayer, states=3, size=200),
        full=dict(steps=160, batch=128),
    ),
    # Evidence accumulation.
    'coba': Workload(
        EvidenceAccumulator,
        dict(inputs=100, size=200, outputs=2, steps=40, batch=8, rate=0.1),
        full=dict(size=800, steps=100, batch=16),
    ),
    # The shape of a RadLIF network on SHD.
    'radlif': Workload(
        Recurrent,
        SHD | dict(layer=AdaptiveLayer, states=2, layers=2, size=128, coupling=0.02),
        full=dict(size=1024, steps=100, batch=16),
    ),
    # Images of events, of two polarities.
    'conv': Workload(
        ConvNet,
        dict(inputs=512, side=16, size=32, outputs=10, steps=50, batch=16, rate=0.2),
        full=dict(inputs=2048, side=32, size=32, steps=100),
        few=dict(inputs=32, side=4, size=3),
    ),
    'gru': Workload(
        CopyingGRU,
        dict(inputs=10, size=128, outputs=8, steps=50, batch=16),
        full=dict(size=512, steps=200, batch=64),
        one_hot=True,
    ),
    'gru dense': Workload(
        CopyingGRU, dict(inputs=128, size=256, outputs=8, steps=50, batch=16), one_hot=True
    ),
    # A whole brain. The carried trace of its low-rank correction would be that of a dense matrix.
    'fly': Workload(
        FlyBrain,
        dict(inputs=512, size=8192, outputs=10, steps=50, batch=8, rate=0.1, density=1e-3, rank=4),
        full=dict(inputs=2048, size=138_639, density=7.8e-4, steps=20),
        contenders=('bptt', 'd_rtrl fresh', 'pp_prop'),
        few=dict(density=0.3),
    ),
}
