"""The table of models that every engine and backend must pass, with what a reader sees in each.

``Expected`` is written down by hand from the models below and the sources of their layers:

- ``groups`` and their states are in the order of ``model.states(brainstate.HiddenState)``;
- ``patterns[group][s][q]`` is 1 where plane ``s`` of the new state depends on plane ``q`` of the
  old one at the same position, with ETP matmuls, plain dot products and all other mixing of
  positions cut out (a ``HiddenGroupState`` has a plane per entry of its last axis);
- ``relations`` are in the order of the step: an entry per use of a weight and group that it
  reaches, with 1 for each plane that the op's output reaches in the same step.

All models work in float32 and float64, with and without a batch axis, at ``dt = 0.1 ms``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import brainpy.state as bp
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace_fast as btf

Path = tuple[str | int, ...]
Inputs = Callable[[int, int], Any]
Pattern = tuple[tuple[int, ...], ...]
Reason = Literal['plain', 'weight_to_weight', 'readout', 'mixing']

N_IN, N, N_OUT = 3, 5, 2


@dataclass(frozen=True)
class Expected:
    groups: tuple[tuple[Path, ...], ...]
    patterns: tuple[Pattern, ...]
    relations: tuple[tuple[Path, int, tuple[int, ...]], ...]
    untraced: dict[Path, Reason] = field(default_factory=dict)
    biases: dict[int, Path] = field(default_factory=dict)
    """Relations, by index, whose op also takes a bias from a state of its own."""
    mixing_transitions: frozenset[int] = frozenset()
    """Groups, by index, whose transition mixes positions beside its matmuls and dot products."""
    mixing_tails: frozenset[int] = frozenset()
    """Relations, by index, whose ``y -> h`` tail mixes positions."""


@dataclass(frozen=True)
class ModelCase:
    """A model, and what the compiler must find in it.

    ``build(batch)`` gives the model with its states initialised, and ``inputs(seed, steps)`` of
    shape ``(steps, *batch, n_in)``.
    """

    name: str
    build: Callable[[int | None], tuple[brainstate.nn.Module, Inputs]]
    expected: Expected
    spiking: bool = False
    """The model's output is the spikes of a layer."""
    forward_mode: bool = False
    """The transition has no reverse mode (a ``while`` loop)."""

    def __repr__(self) -> str:
        return self.name


MODELS: dict[str, ModelCase] = {}


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape)


def spikes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.binomial(1, 0.6, size=shape)


def add(
    name: str,
    make: Callable[[], brainstate.nn.Module],
    expected: Expected,
    *,
    n_in: int = N_IN,
    draw: Callable[[np.random.Generator, tuple[int, ...]], Any] = normal,
    **flags: bool,
) -> None:
    def build(batch: int | None = None) -> tuple[brainstate.nn.Module, Inputs]:
        brainstate.environ.set(dt=0.1 * u.ms)
        brainstate.random.seed(7)
        model = make()
        brainstate.nn.init_all_states(model, batch_size=batch)

        def inputs(seed: int, steps: int) -> Any:
            shape = (steps, n_in) if batch is None else (steps, batch, n_in)
            xs = draw(np.random.default_rng(seed), shape)
            return jax.tree.map(lambda x: jnp.asarray(x, brainstate.environ.dftype()), xs)

        return model, inputs

    MODELS[name] = ModelCase(name, build, expected, **flags)


def single(*weights: Path, state: Path = ('h',), leak: int = 1, **others: Any) -> Expected:
    """One group of one state, reached by each use of a weight."""
    relations = tuple((weight, 0, (1,)) for weight in weights)
    return Expected(((state,),), (((leak,),),), relations, **others)


def parameter(*shape: int, scale: float = 0.5, unit: u.Unit = u.UNITLESS) -> brainstate.ParamState:
    value = scale * brainstate.random.normal(size=shape)
    return brainstate.ParamState(u.maybe_decimal(value * unit))


def of_rank(ndim: int, array: jax.Array) -> jax.Array:
    """What is shared by the batch, with axes of size one in front."""
    return jnp.expand_dims(array, tuple(range(ndim - array.ndim)))


def hidden(
    batch_size: int | None, *shape: int, unit: u.Unit = u.UNITLESS, fill: float = 0.0
) -> brainstate.HiddenState:
    shape = shape if batch_size is None else (batch_size, *shape)
    value = jnp.full(shape, fill, brainstate.environ.dftype())
    return brainstate.HiddenState(u.maybe_decimal(value * unit))


# Recurrent cells of the library


class Cell(brainstate.nn.Module):
    """A cell without a readout, its states under ``('cell',)``."""

    def __init__(self, cell: Callable[[int, int], brainstate.nn.Module]):
        super().__init__()
        self.cell = cell(N_IN, N)

    def update(self, x):
        return self.cell(x)


add(
    'vanilla',
    lambda: Cell(lambda i, o: btf.nn.ValinaRNNCell(i, o, activation='tanh')),
    single(('cell', 'W', 'weight'), state=('cell', 'h'), leak=0),
)
add(
    'gru',
    lambda: Cell(btf.nn.GRUCell),
    single(
        ('cell', 'Wz', 'weight'),
        ('cell', 'Wh', 'weight'),
        state=('cell', 'h'),
        untraced={('cell', 'Wr', 'weight'): 'weight_to_weight'},
    ),
)
add(
    'lstm',
    lambda: Cell(btf.nn.LSTMCell),
    Expected(
        groups=((('cell', 'c'), ('cell', 'h')),),
        patterns=(((1, 0), (1, 0)),),
        relations=(
            (('cell', 'Wi', 'weight'), 0, (1, 1)),
            (('cell', 'Wg', 'weight'), 0, (1, 1)),
            (('cell', 'Wf', 'weight'), 0, (1, 1)),
            (('cell', 'Wo', 'weight'), 0, (0, 1)),
        ),
    ),
)
add(
    'minimal_rnn',
    lambda: Cell(btf.nn.MinimalRNNCell),
    single(('cell', 'phi', 'weight'), ('cell', 'W_u', 'weight'), state=('cell', 'h')),
)


# Spiking layers of brainpy.state


def surrogate() -> Callable:
    return braintools.surrogate.ReluGrad(alpha=0.3, width=3.0)


def spread(n: int) -> u.Quantity:
    """Initial voltages around the threshold, so that the first steps already have spikes."""
    return jnp.linspace(0.5, 1.5, n, dtype=brainstate.environ.dftype()) * u.mV


def lif(n: int) -> bp.LIF:
    return bp.LIF(n, tau=1.0 * u.ms, spk_fun=surrogate(), V_initializer=spread(n))


def alif(n: int) -> bp.ALIF:
    return bp.ALIF(
        n,
        tau=1.0 * u.ms,
        tau_a=3.0 * u.ms,
        beta=0.3 * u.mV,
        spk_fun=surrogate(),
        V_initializer=spread(n),
    )


def gif(n: int) -> bp.Gif:
    return bp.Gif(
        n,
        R=1.0 * u.ohm,
        tau=1.0 * u.ms,
        V_rest=0.0 * u.mV,
        V_reset=0.0 * u.mV,
        V_th_inf=1.0 * u.mV,
        V_th_reset=1.5 * u.mV,
        V_initializer=spread(n),
        V_th_initializer=braintools.init.Constant(1.0 * u.mV),
        a=0.2 / u.ms,
        b=0.5 / u.ms,
        R1=0.5,
        A1=0.4 * u.mA,
        A2=-0.3 * u.mA,
        spk_fun=surrogate(),
    )


def linear(n_in: int, n_out: int, unit: u.Unit, mean: float = 0.5) -> btf.nn.Linear:
    weights = braintools.init.Normal(mean * unit, 1.0 * unit)
    return btf.nn.Linear(n_in, n_out, weights, braintools.init.Constant(0.1 * unit))


class DeltaNet(brainstate.nn.Module):
    """Input and own spikes jump the voltage."""

    def __init__(self):
        super().__init__()
        self.neu = lif(N)
        self.proj = bp.DeltaProj(comm=linear(N_IN + N, N, u.mV, mean=0.2), post=self.neu)

    def update(self, x):
        self.proj(u.math.concatenate([x, self.neu.get_spike()], axis=-1))
        return self.neu(0.0 * u.mA)


class SynapseNet(brainstate.nn.Module):
    """Input and own spikes drive an exponential synapse; the voltage reads its new current."""

    def __init__(
        self,
        neuron: Callable[[int], bp.Neuron],
        n_in: int = N_IN,
        mean: float = 0.5,
        tau: u.Quantity = 0.5 * u.ms,
    ):
        super().__init__()
        self.neu = neuron(N)
        self.proj = bp.AlignPostProj(
            comm=linear(n_in + N, N, u.mS, mean),
            syn=bp.Expon(N, tau=tau),
            out=bp.CUBA(),
            post=self.neu,
        )

    def update(self, x):
        self.proj(u.math.concatenate([x, self.neu.get_spike()], axis=-1))
        return self.neu(0.0 * u.mA)


class SharedSynapseNet(SynapseNet):
    """The same with a described synapse, which brainpy keeps at the neuron and shares."""

    def __init__(self):
        brainstate.nn.Module.__init__(self)
        self.neu = lif(N)
        self.proj = bp.AlignPostProj(
            comm=linear(N_IN + N, N, u.mS), syn=bp.Expon.desc(N), out=bp.CUBA.desc(), post=self.neu
        )


class PlasticNet(SynapseNet):
    """Own spikes pass short-term plasticity, whose states live at the sending neurons."""

    def __init__(self):
        super().__init__(lif)
        self.stp = bp.STP(N, U=0.3, tau_f=2.0 * u.ms, tau_d=1.0 * u.ms)

    def update(self, x):
        released = self.stp(self.neu.get_spike())
        self.proj(u.math.concatenate([x, released], axis=-1))
        return self.neu(0.0 * u.mA)


class ConductanceNet(brainstate.nn.Module):
    """Three excitatory and two inhibitory neurons with conductance synapses."""

    def __init__(self):
        super().__init__()
        self.neu = lif(N)
        self.proj_e = self._projection(N_IN + 3, tau=0.4 * u.ms, reversal=4.0 * u.mV)
        self.proj_i = self._projection(2, tau=0.8 * u.ms, reversal=-2.0 * u.mV)

    def _projection(self, n_in: int, tau: u.Quantity, reversal: u.Quantity) -> bp.AlignPostProj:
        weights = braintools.init.Normal(0.3 * u.siemens, 0.3 * u.siemens)
        return bp.AlignPostProj(
            comm=btf.nn.SignedWLinear(n_in, N, weights),
            syn=bp.Expon(N, tau=tau, g_initializer=braintools.init.Constant(0.0 * u.siemens)),
            out=bp.COBA(E=reversal),
            post=self.neu,
        )

    def update(self, x):
        spike = self.neu.get_spike()
        self.proj_e(u.math.concatenate([x, spike[..., :3]], axis=-1))
        self.proj_i(spike[..., 3:])
        return self.neu(0.0 * u.mA)


class RateReadout(brainstate.nn.Module):
    """A leaky readout on a spiking layer."""

    def __init__(self):
        super().__init__()
        self.layer = SynapseNet(lif)
        self.readout = btf.nn.LeakyRateReadout(N, N_OUT, tau=1.0 * u.ms)

    def update(self, x):
        return self.readout(self.layer(x))


V, G = ('neu', 'V'), ('proj', 'syn', 'g')
COMM = ('proj', 'comm', 'weight')
SHARED = "(<class 'brainpy.state.Expon'>, (5,), {}) // (<class 'brainpy.state.CUBA'>, (), {})"

add('lif', DeltaNet, single(COMM, state=V), draw=spikes, spiking=True)
add(
    'lif_expon',
    lambda: SynapseNet(lif),
    Expected(((V, G),), (((1, 1), (0, 1)),), ((COMM, 0, (1, 1)),)),
    draw=spikes,
    spiking=True,
)
add(
    'lif_expon_shared',
    SharedSynapseNet,
    Expected(
        ((V, ('neu', '_before_updates', SHARED, 'syn', 'g')),),
        (((1, 1), (0, 1)),),
        ((COMM, 0, (1, 1)),),
    ),
    draw=spikes,
    spiking=True,
)
add(
    'alif_expon',
    lambda: SynapseNet(alif),
    Expected(
        groups=((V, ('neu', 'a'), G),),
        patterns=(((1, 1, 1), (1, 1, 0), (0, 0, 1)),),
        relations=((COMM, 0, (1, 0, 1)),),
    ),
    draw=spikes,
    spiking=True,
)
add(
    'gif_expon',
    lambda: SynapseNet(gif),
    Expected(
        groups=((('neu', 'I1'), ('neu', 'I2'), V, ('neu', 'V_th'), G),),
        patterns=(
            (
                (1, 0, 1, 1, 0),
                (0, 1, 1, 1, 0),
                (1, 1, 1, 1, 1),
                (0, 0, 1, 1, 0),
                (0, 0, 0, 0, 1),
            ),
        ),
        relations=((COMM, 0, (0, 0, 1, 0, 1)),),
    ),
    draw=spikes,
    spiking=True,
)
add(
    'coba_ei',
    ConductanceNet,
    Expected(
        groups=((V, ('proj_e', 'syn', 'g'), ('proj_i', 'syn', 'g')),),
        patterns=(((1, 1, 1), (0, 1, 0), (0, 0, 1)),),
        relations=(
            (('proj_e', 'comm', 'weight'), 0, (1, 1, 0)),
            (('proj_i', 'comm', 'weight'), 0, (1, 0, 1)),
        ),
    ),
    draw=spikes,
    spiking=True,
)
add(
    'stp',
    PlasticNet,
    Expected(
        groups=((V, G, ('stp', 'u'), ('stp', 'x')),),
        patterns=(((1, 1, 0, 0), (0, 1, 0, 0), (1, 0, 1, 0), (1, 0, 1, 1)),),
        relations=((COMM, 0, (1, 1, 0, 0)),),
    ),
    draw=spikes,
    spiking=True,
)
add(
    'rate_readout',
    RateReadout,
    Expected(
        groups=((('layer', *V), ('layer', *G)), (('readout', 'r'),)),
        patterns=(((1, 1), (0, 1)), ((1,),)),
        relations=((('layer', *COMM), 0, (1, 1)), (('readout', 'W'), 1, (1,))),
    ),
    draw=spikes,
)


# Stacked layers


class Stack(brainstate.nn.Module):
    def __init__(self, layers: list[brainstate.nn.Module], readout: brainstate.nn.Module):
        super().__init__()
        self.layers = layers
        self.readout = readout

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


add(
    'two_layers',
    lambda: Stack([btf.nn.GRUCell(N_IN, 4), btf.nn.LSTMCell(4, 6)], btf.nn.Linear(6, N_OUT)),
    Expected(
        groups=((('layers', 0, 'h'),), (('layers', 1, 'c'), ('layers', 1, 'h'))),
        patterns=(((1,),), ((1, 0), (1, 0))),
        relations=(
            (('layers', 0, 'Wz', 'weight'), 0, (1,)),
            (('layers', 0, 'Wh', 'weight'), 0, (1,)),
            (('layers', 1, 'Wi', 'weight'), 1, (1, 1)),
            (('layers', 1, 'Wg', 'weight'), 1, (1, 1)),
            (('layers', 1, 'Wf', 'weight'), 1, (1, 1)),
            (('layers', 1, 'Wo', 'weight'), 1, (0, 1)),
        ),
        untraced={
            ('layers', 0, 'Wr', 'weight'): 'weight_to_weight',
            ('readout', 'weight'): 'readout',
        },
    ),
)
add(
    'three_layers',
    lambda: Stack(
        [SynapseNet(lif), SynapseNet(alif, N, mean=0.8), SynapseNet(lif, N, mean=0.8)],
        btf.nn.LeakyRateReadout(N, N_OUT, tau=1.0 * u.ms),
    ),
    Expected(
        groups=(
            (('layers', 0, *V), ('layers', 0, *G)),
            (('layers', 1, *V), ('layers', 1, 'neu', 'a'), ('layers', 1, *G)),
            (('layers', 2, *V), ('layers', 2, *G)),
            (('readout', 'r'),),
        ),
        patterns=(
            ((1, 1), (0, 1)),
            ((1, 1, 1), (1, 1, 0), (0, 0, 1)),
            ((1, 1), (0, 1)),
            ((1,),),
        ),
        relations=(
            (('layers', 0, *COMM), 0, (1, 1)),
            (('layers', 1, *COMM), 1, (1, 0, 1)),
            (('layers', 2, *COMM), 2, (1, 1)),
            (('readout', 'W'), 3, (1,)),
        ),
    ),
    draw=spikes,
)


# One leaky cell, varied in one respect at a time


class Leaky(brainstate.nn.Module):
    """The next ``h`` is ``leak(h) + tanh(y)``, where ``y`` is an ETP matmul of ``[x, h]``."""

    def __init__(self):
        super().__init__()
        self.W = parameter(N_IN + N, N)

    def init_state(self, batch_size=None, **_):
        self.h = hidden(batch_size, N)

    def weight(self):
        return self.W.value

    def drive(self, x):
        return btf.matmul(jnp.concatenate([x, self.h.value], axis=-1), self.weight())

    def leak(self, h):
        return 0.8 * h

    def update(self, x):
        self.h.value = self.leak(self.h.value) + jnp.tanh(self.drive(x))
        return self.h.value


class Doubled(Leaky):
    def weight(self):
        return 2 * self.W.value


class Masked(Leaky):
    def weight(self):
        # Made anew in every trace: JAX keeps what an array became in the precision of the first.
        mask = np.random.default_rng(5).binomial(1, 0.6, (N_IN + N, N))
        return self.W.value * jnp.asarray(mask, self.W.value.dtype)


class Transposed(Leaky):
    def __init__(self):
        super().__init__()
        self.W = parameter(N, N_IN + N)

    def weight(self):
        return self.W.value.T


class Softplus(Leaky):
    def weight(self):
        return jax.nn.softplus(self.W.value) - 0.5


class DropConnect(Leaky):
    """A new mask of weights in every step."""

    def __init__(self):
        super().__init__()
        self.random = brainstate.random.RandomState(3)

    def weight(self):
        mask = self.random.bernoulli(0.7, size=self.W.value.shape)
        return self.W.value * mask.astype(self.W.value.dtype)


class Noisy(Leaky):
    """Noise from brainstate's own generator, which is no state of the model."""

    def leak(self, h):
        return 0.8 * h + 0.1 * brainstate.random.normal(size=h.shape)


class OwnBias(Leaky):
    """A bias in a state of its own."""

    def __init__(self):
        super().__init__()
        self.b = parameter(N)

    def drive(self, x):
        return btf.matmul(jnp.concatenate([x, self.h.value], axis=-1), self.W.value, self.b.value)


class SharedWeight(Leaky):
    """One weight for the input and for the recurrence."""

    def __init__(self):
        super().__init__()
        self.W = parameter(N, N)

    def drive(self, x):
        return btf.matmul(x, self.W.value) + btf.matmul(self.h.value, self.W.value)


class TiedReadout(Leaky):
    """The readout uses the traced weight once more, by a plain product."""

    def update(self, x):
        return super().update(x) @ self.W.value.T


class PlainReadout(Leaky):
    def __init__(self):
        super().__init__()
        self.R = parameter(N, N_OUT)

    def update(self, x):
        return super().update(x) @ self.R.value


class PlainLeak(Leaky):
    """A parameter of the transition that no ETP op marks."""

    def __init__(self):
        super().__init__()
        self.a = parameter(N)

    def leak(self, h):
        return of_rank(h.ndim, jax.nn.sigmoid(self.a.value)) * h


class ReadsOutput(Leaky):
    """The output reads ``y`` beside the hidden state."""

    def update(self, x):
        y = self.drive(x)
        self.h.value = self.leak(self.h.value) + jnp.tanh(y)
        return self.h.value + y


class Reservoir(Leaky):
    """A fixed recurrent matrix by a plain product; no neuron feeds itself."""

    def leak(self, h):
        fixed = np.random.default_rng(6).normal(size=(N, N)) * (1 - np.eye(N))
        return 0.8 * h + 0.2 * jnp.tanh(h @ fixed)


class Lateral(Leaky):
    """The mean over the neurons inhibits each of them."""

    def leak(self, h):
        return 0.8 * h - 0.2 * jnp.mean(h, axis=-1, keepdims=True)


class Pooled(Leaky):
    """A second op of other width reaches the state through a fixed matrix only."""

    def __init__(self):
        super().__init__()
        self.P = parameter(N_IN, N + 1)

    def drive(self, x):
        pool = np.random.default_rng(8).normal(size=(N + 1, N))
        return super().drive(x) + btf.matmul(x, self.P.value) @ pool


class Normalised(Leaky):
    """Layer normalisation between the op and the state."""

    def drive(self, x):
        y = super().drive(x)
        return (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 0.1)


class Wrapped(Leaky):
    """The op inside a transformed function."""

    def __init__(self, wrap: Callable[[Callable], Callable]):
        super().__init__()
        self.wrap = wrap

    def drive(self, x):
        def op(x, h, w):
            return btf.matmul(jnp.concatenate([x, h], axis=-1), w)

        return self.wrap(op)(x, self.h.value, self.W.value)


class Counting(Leaky):
    """Counts its steps in a state that is not hidden."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def update(self, x):
        self.count.value += 1
        return super().update(x)


class CondOp(Counting):
    """Even steps see the input with the other sign: an op in either branch."""

    def drive(self, x):
        xh, w = jnp.concatenate([x, self.h.value], axis=-1), self.W.value
        even = self.count.value % 2 == 0
        return jax.lax.cond(even, lambda: btf.matmul(-xh, w), lambda: btf.matmul(xh, w))


class SwitchOp(Counting):
    """A weight of its own in either branch."""

    def __init__(self):
        super().__init__()
        self.U = parameter(N_IN, N)

    def drive(self, x):
        xh, w, v = jnp.concatenate([x, self.h.value], axis=-1), self.W.value, self.U.value
        branches = (lambda: btf.matmul(xh, w), lambda: btf.matmul(x, v))
        return jax.lax.switch(self.count.value % 2, branches)


class CondTransition(Counting):
    def leak(self, h):
        odd = self.count.value % 2 == 1
        return jax.lax.cond(odd, lambda h: 0.9 * h, lambda h: h - 0.1 * h**3, h)


class Substeps(Leaky):
    """Three steps of the cell in a scan."""

    def update(self, x):
        w = self.W.value

        def substep(h, gain):
            y = btf.matmul(jnp.concatenate([gain * x, h], axis=-1), w)
            return 0.8 * h + jnp.tanh(y), None

        gains = jnp.asarray([1.0, 0.5, -1.0], x.dtype)
        self.h.value, _ = jax.lax.scan(substep, self.h.value, gains)
        return self.h.value


class Relaxing(Leaky):
    """Three relaxation steps in a ``while`` loop without a weight."""

    def leak(self, h):
        def body(carry):
            return carry[0] + 1, carry[1] - 0.1 * carry[1] ** 3

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, h))[1]


class LearnedLeak(Leaky):
    """A leak per neuron, shared by the batch, through ``element_wise``."""

    def __init__(self):
        super().__init__()
        self.a = parameter(N)

    def update(self, x):
        a = btf.element_wise(self.a.value, weight_fn=jax.nn.sigmoid)
        a = of_rank(self.h.value.ndim, a)
        self.h.value = a * self.h.value + (1 - a) * jnp.tanh(self.drive(x))
        return self.h.value


W = ('W',)

add('leaky', Leaky, single(W))
add('double_weight', Doubled, single(W))
add('masked_weight', Masked, single(W))
add('transposed_weight', Transposed, single(W))
add('softplus_weight', Softplus, single(W))
add('drop_connect', DropConnect, single(W))
add('noise', Noisy, single(W))
add('own_bias', OwnBias, single(W, biases={0: ('b',)}))
add('shared_weight', SharedWeight, single(W, W), n_in=N)
add('tied_readout', TiedReadout, single(W))
add('plain_readout', PlainReadout, single(W, untraced={('R',): 'plain'}))
add('plain_leak', PlainLeak, single(W, untraced={('a',): 'plain'}))
add('output_reads_y', ReadsOutput, single(W))
add('reservoir', Reservoir, single(W))
add('lateral', Lateral, single(W, mixing_transitions=frozenset({0})))
add('pooled', Pooled, single(W, untraced={('P',): 'mixing'}))
add('layer_norm', Normalised, single(W, mixing_tails=frozenset({0})))
add('jit', lambda: Wrapped(jax.jit), single(W))
add('checkpoint', lambda: Wrapped(jax.checkpoint), single(W))
add('counter', Counting, single(W))
add('cond', CondOp, single(W, W))
add('switch', SwitchOp, single(W, ('U',)))
add('cond_transition', CondTransition, single(W))
add('scan', Substeps, single(W, W, W))
add('while', Relaxing, single(W), forward_mode=True)
add('learned_leak', LearnedLeak, single(('a',), W))


# States of several planes, units, and surrogates by hand


class TwoPlanes(Leaky):
    """Voltage and current as the two planes of one ``HiddenGroupState``."""

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenGroupState(hidden(batch_size, N, 2).value)

    def update(self, x):
        voltage, current = self.h.value[..., 0], self.h.value[..., 1]
        y = btf.matmul(jnp.concatenate([x, voltage], axis=-1), self.W.value)
        current = 0.7 * current + y
        voltage = 0.9 * voltage + jnp.tanh(current)
        self.h.value = jnp.stack([voltage, current], axis=-1)
        return voltage


class WrittenOnly(Leaky):
    """``s`` is written in each step and read in none."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.s = hidden(batch_size, N)

    def update(self, x):
        h = super().update(x)
        self.s.value = jax.nn.sigmoid(h)
        return h


class ReadOnly(Leaky):
    """``r`` is read in each step and written in none."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.r = hidden(batch_size, N, fill=0.3)

    def leak(self, h):
        return h + 0.2 * (self.r.value - h)


class Stopped(Leaky):
    """``s`` follows ``h`` behind a stop_gradient, and a threshold of ``s`` gates ``h``."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.s = hidden(batch_size, N)

    def update(self, x):
        gate = jnp.where(self.s.value > 0.1, 0.6, 0.9)
        self.h.value = gate.astype(x.dtype) * self.h.value + jnp.tanh(self.drive(x))
        self.s.value = 0.9 * self.s.value + 0.1 * jax.lax.stop_gradient(self.h.value)
        return self.h.value


class Units(brainstate.nn.Module):
    """States, weights, inputs and bias each with a unit, scaled on the way from one to another."""

    def __init__(self):
        super().__init__()
        weight = parameter(N_IN + N, N, scale=300.0, unit=u.nS).value
        bias = parameter(N, scale=300.0, unit=u.pA).value
        self.W = brainstate.ParamState({'weight': weight, 'bias': bias})

    def init_state(self, batch_size=None, **_):
        self.I = hidden(batch_size, N, unit=u.nA)
        self.V = hidden(batch_size, N, unit=u.mV)

    def update(self, x):
        w, b = self.W.value['weight'], self.W.value['bias']
        y = btf.matmul(u.math.concatenate([x, self.V.value], axis=-1), w, b)
        self.I.value = 0.8 * self.I.value + y
        self.V.value = 0.9 * self.V.value + 0.3 * (self.I.value * (1.0 * u.Mohm))
        return self.V.value


@jax.custom_vjp
def spike_by_vjp(v):
    return (v > 0).astype(v.dtype)


spike_by_vjp.defvjp(
    lambda v: (spike_by_vjp(v), v), lambda v, cotangent: (cotangent / (1 + jnp.abs(v)) ** 2,)
)


@jax.custom_jvp
def spike_by_jvp(v):
    return (v > 0).astype(v.dtype)


@spike_by_jvp.defjvp
def _spike_tangent(primals, tangents):
    (v,), (tangent,) = primals, tangents
    return spike_by_jvp(v), tangent / (1 + jnp.abs(v)) ** 2


class Spiking(brainstate.nn.Module):
    """Voltage with a surrogate spike and soft reset, all by hand."""

    def __init__(self, spike: Callable):
        super().__init__()
        self.W = parameter(N_IN + N, N, scale=1.0)
        self.spike = spike

    def init_state(self, batch_size=None, **_):
        self.v = hidden(batch_size, N)

    def update(self, x):
        spike = self.spike(self.v.value - 1)
        y = btf.matmul(jnp.concatenate([x, spike], axis=-1), self.W.value)
        self.v.value = 0.9 * self.v.value - spike + y
        return self.spike(self.v.value - 1)


def millivolts(rng: np.random.Generator, shape: tuple[int, ...]) -> u.Quantity:
    return normal(rng, shape) * u.mV


H, S = ('h',), ('s',)

add(
    'hidden_group_state',
    TwoPlanes,
    Expected(((H,),), (((1, 1), (0, 1)),), ((W, 0, (1, 1)),)),
)
add(
    'written_only',
    WrittenOnly,
    Expected(((H, S),), (((1, 0), (1, 0)),), ((W, 0, (1, 1)),)),
)
add(
    'read_only',
    ReadOnly,
    Expected(((H, ('r',)),), (((1, 1), (0, 1)),), ((W, 0, (1, 0)),)),
)
add(
    'stop_gradient',
    Stopped,
    Expected(((H,), (S,)), (((1,),), ((1,),)), ((W, 0, (1,)),)),
)
add(
    'units',
    Units,
    Expected(
        groups=((('I',), ('V',)),),
        patterns=(((1, 0), (1, 1)),),
        relations=((W, 0, (1, 1)),),
    ),
    draw=millivolts,
)
add(
    'custom_vjp',
    lambda: Spiking(spike_by_vjp),
    single(W, state=('v',)),
    spiking=True,
)
add(
    'custom_jvp',
    lambda: Spiking(spike_by_jvp),
    single(W, state=('v',)),
    spiking=True,
)
