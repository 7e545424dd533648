"""Models that are written once for both libraries, and their gradients by either."""

from __future__ import annotations

import warnings
from functools import partial
from types import ModuleType
from typing import Any

import brainpy.state as bp
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import testing
from tests.models import alif, lif, parameter
from tests.oracles.step import random_projection
from tests.promotion import promoting

N_IN, N, BATCH, STEPS = 3, 4, 2, 6


class Cell(brainstate.nn.Module):
    def __init__(self, lib: ModuleType, name: str, **options: Any):
        super().__init__()
        self.cell = getattr(lib.nn, name)(N_IN, N, **options)

    def update(self, x):
        return self.cell(x)


class Leaky(brainstate.nn.Module):
    def __init__(self, lib: ModuleType):
        super().__init__()
        self.lib = lib
        self.W = parameter(N_IN + N, N)

    def init_state(self, batch_size=None, **_):
        zeros = jnp.zeros((batch_size, N), brainstate.environ.dftype())
        self.h = brainstate.HiddenState(zeros)

    def weight(self):
        return self.W.value

    def drive(self, x):
        return self.lib.matmul(jnp.concatenate([x, self.h.value], axis=-1), self.weight())

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.drive(x))
        return self.h.value


class Skip(Leaky):
    """As MiniGRU: gate and candidate are driven by the input alone."""

    def __init__(self, lib: ModuleType):
        super().__init__(lib)
        self.W = parameter(N_IN, N)
        self.Z = parameter(N_IN, N)

    def update(self, x):
        z = jax.nn.sigmoid(self.lib.matmul(x, self.Z.value))
        self.h.value = (1 - z) * self.h.value + z * self.lib.matmul(x, self.W.value)
        return self.h.value


class PlainReadout(Leaky):
    def __init__(self, lib: ModuleType):
        super().__init__(lib)
        self.R = parameter(N, 2)

    def update(self, x):
        return super().update(x) @ self.R.value


class ReadsOutput(Leaky):
    def update(self, x):
        y = self.drive(x)
        self.h.value = 0.8 * self.h.value + jnp.tanh(y)
        return self.h.value + y


class ReadsOld(Leaky):
    def update(self, x):
        old = self.h.value
        return super().update(x) * old


class ReadsUnstored(Leaky):
    """The output reads a value that is stored only after a function."""

    def update(self, x):
        new = 0.8 * self.h.value + jnp.tanh(self.drive(x))
        self.h.value = jnp.tanh(new)
        return new


class Remembers(Leaky):
    """A state that only keeps the old value of another."""

    def __init__(self, lib: ModuleType):
        super().__init__(lib)
        self.W = parameter(N_IN, N)

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.old = brainstate.HiddenState(jnp.zeros_like(self.h.value))

    def drive(self, x):
        return self.lib.matmul(x, self.W.value)

    def update(self, x):
        old = self.h.value
        new = super().update(x)
        self.old.value = old
        return new * self.old.value


class OutputLoops(Leaky):
    def update(self, x):
        def body(carry):
            return carry[0] + 1, jnp.sin(carry[1])

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, super().update(x)))[1]


LONG = 20
"""Iterations of a scan that is not unrolled."""


SUBSTEPS = 'stacked', 'start', 'sliced', 'outside'


class Substeps(Leaky):
    """Many substeps in every step, with a weight inside the scan."""

    def __init__(self, lib: ModuleType, kind: str = 'carry'):
        super().__init__(lib)
        self.kind = kind
        self.W = parameter(LONG, N_IN, N) if kind == 'sliced' else parameter(N_IN, N)

    def update(self, x):
        start, outside = self.h.value, 0.0
        if self.kind == 'start':
            start = 0.5 * start
        if self.kind == 'outside':
            outside = self.lib.matmul(x, self.W.value)

        def substep(h, w):
            y = self.lib.matmul(x, self.W.value if w is None else w)
            h = 0.9 * h + 0.1 * jnp.tanh(y + outside)
            return h, h

        weights = self.W.value if self.kind == 'sliced' else None
        self.h.value, stack = jax.lax.scan(substep, start, weights, length=LONG)
        return stack.sum(0) if self.kind == 'stacked' else self.h.value


class Normalised(Leaky):
    """The op's output passes a layer normalisation, whose Jacobian has rows that sum to 0."""

    def drive(self, x):
        y = super().drive(x)
        y = y - y.mean(axis=-1, keepdims=True)
        return y / jnp.sqrt((y**2).mean(axis=-1, keepdims=True))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + self.drive(x)
        return self.h.value


class UsedBackwards(brainstate.nn.Module):
    """Two layers; the one that is defined last is used first."""

    def __init__(self, lib: ModuleType):
        super().__init__()
        self.a = Cell(lib, 'ValinaRNNCell', activation='tanh')
        self.b = lib.nn.GRUCell(N_IN, 2 * N)

    def update(self, x):
        b = self.b(x)
        return self.a(x) + b[..., :N]


class Doubled(Leaky):
    def weight(self):
        return 2 * self.W.value


class Masked(Leaky):
    MASK = np.random.default_rng(5).binomial(1, 0.6, (N_IN + N, N))

    def weight(self):
        return self.W.value * jnp.asarray(self.MASK, self.W.value.dtype)


class Transposed(Leaky):
    """Square, so that a gradient in the wrong coordinates has the right shape."""

    def __init__(self, lib: ModuleType):
        super().__init__(lib)
        self.W = parameter(N, N)

    def drive(self, x):
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, N - N_IN)])
        return self.lib.matmul(padded + self.h.value, self.W.value.T)


class Checkpointed(Leaky):
    def drive(self, x):
        xh = jnp.concatenate([x, self.h.value], axis=-1)
        return jax.checkpoint(self.lib.matmul)(xh, self.W.value)


class Spiking(brainstate.nn.Module):
    """A spiking layer; with a synapse its voltage reads the new current."""

    def __init__(self, lib: ModuleType, synapse: bool, neurons: Any = lif):
        super().__init__()
        self.neu = neurons(N)
        unit = u.mS if synapse else u.mV
        weights = braintools.init.Normal(0.5 * unit, 1.0 * unit)
        comm = lib.nn.Linear(N_IN + N, N, weights, braintools.init.Constant(0.1 * unit))
        if synapse:
            self.proj = bp.AlignPostProj(
                comm=comm, syn=bp.Expon(N, tau=0.5 * u.ms), out=bp.CUBA(), post=self.neu
            )
        else:
            self.proj = bp.DeltaProj(comm=comm, post=self.neu)

    def update(self, x):
        self.proj(u.math.concatenate([x, self.neu.get_spike()], axis=-1))
        return self.neu(0.0 * u.mA)


MODELS = {
    'vanilla': partial(Cell, name='ValinaRNNCell', activation='tanh'),
    'gru': partial(Cell, name='GRUCell'),
    'lstm': partial(Cell, name='LSTMCell'),
    'lru': partial(Cell, name='LRUCell'),
    'minimal_rnn': partial(Cell, name='MinimalRNNCell'),
    'leaky': Leaky,
    'skip': Skip,
    'plain_readout': PlainReadout,
    'reads_output': ReadsOutput,
    'reads_old': ReadsOld,
    'reads_unstored': ReadsUnstored,
    'output_loops': OutputLoops,
    'remembers': Remembers,
    'substeps': Substeps,
    **{f'substeps_{kind}': partial(Substeps, kind=kind) for kind in SUBSTEPS},
    'normalised': Normalised,
    'used_backwards': UsedBackwards,
    'doubled': Doubled,
    'masked': Masked,
    'transposed': Transposed,
    'checkpoint': Checkpointed,
    'lif': partial(Spiking, synapse=False),
    'lif_expon': partial(Spiking, synapse=True),
    'alif_expon': partial(Spiking, synapse=True, neurons=alif),
}
KAPPA = 0.7
RULES = {'d_rtrl': ('D_RTRL', {}), 'pp_prop': ('pp_prop', {'decay_or_rank': (0.8, 0.9)})}
SIGNAL_RULES = {
    'filter': ('EProp', {'kappa_filter_decay': KAPPA}),
    'feedback': (
        'EProp',
        {'feedback': 'random', 'random_feedback_key': jax.random.PRNGKey(3)},
    ),
    'modulator': ('ThreeFactor', {}),
    'uoro': ('UORO', {'vjp_method': 'single-step'}),
    'dni': ('DNI', {}),
}


def build(lib: ModuleType, name: str, steps: int = STEPS) -> tuple[brainstate.nn.Module, Any]:
    brainstate.random.seed(7)
    model = MODELS[name](lib)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    rng = np.random.default_rng(1)
    for state in model.states(brainstate.HiddenState).values():
        state.value = jax.tree.map(lambda a: a + 0.3 * rng.normal(size=a.shape), state.value)
    shape = (steps, BATCH, N_IN)
    xs = rng.binomial(1, 0.6, shape) if 'lif' in name else rng.normal(size=shape)
    return model, jnp.asarray(xs, brainstate.environ.dftype())


def learner_of(lib: ModuleType, name: str, rule: str, steps: int = STEPS, **options: Any) -> Any:
    cls, defaults = (RULES | SIGNAL_RULES)[rule]
    with warnings.catch_warnings(), promoting(lib is not btf):
        warnings.simplefilter('ignore', UserWarning)  # of weights that the reference leaves out
        model, xs = build(lib, name, steps)
        learner = getattr(lib, cls)(model, **(defaults | options))
        learner.compile_graph(xs[0])
    return learner, xs


def gradient(
    lib: ModuleType, name: str, rule: str = 'd_rtrl', steps: int = STEPS, **options: Any
) -> Any:
    learner, xs = learner_of(lib, name, rule, steps, **options)

    def loss(x):
        return random_projection(learner(x))

    with promoting(lib is not btf):
        return learner.etrace_grad(xs, step_fn=loss, reduction='sum')


def chunk_gradient(lib: ModuleType, name: str, rule: str, size: int = 2) -> Any:
    learner, xs = learner_of(lib, name, rule, vjp_method='multi-step')

    def losses(x):
        return jax.vmap(random_projection)(learner(lib.MultiStepData(x)))

    with promoting(lib is not btf):
        return learner.etrace_grad(xs, step_fn=losses, chunk_size=size, reduction='sum')


def truth(name: str, steps: int = STEPS) -> Any:
    """The recurrence of D-RTRL; with one step, the gradient of the step."""
    model, xs = build(btf, name, steps)
    return testing.recurrence(
        model,
        xs,
        step_fn=lambda x: random_projection(model(x)),
        forward_mode=name == 'output_loops',
    )


def ratio(found: Any, true: Any) -> float:
    """The gradient projected on the true one."""
    found, true = flat(found), flat(true)
    return float(found @ true / (true @ true))


def by_name(gradients: Any) -> dict[str, Any]:
    """Gradients by the name of the layer or parameter."""
    return {next(k for k in path if k not in ('cell', 'proj')): g for path, g in gradients.items()}


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def relative_error(found: Any, true: Any) -> float:
    found, true = flat(found), flat(true)
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def step_gradients(reference: ModuleType, name: str) -> tuple[Any, Any, Any]:
    """Ours, theirs and the true gradient of one step from a zero trace, by name."""
    return tuple(
        map(
            by_name,
            (
                gradient(btf, name, steps=1),
                gradient(reference, name, steps=1),
                truth(name, steps=1),
            ),
        )
    )


def eprop_gradients(lib: ModuleType, name: str, rule: str, evolved: int = 0) -> list[Any]:
    """Per step, after some that are evolved only."""
    learner, xs = learner_of(lib, name, rule)
    step = brainstate.transform.jit(
        lambda x: brainstate.transform.grad(
            lambda: random_projection(learner(x)), learner.param_states
        )()
    )
    with promoting(lib is not btf):
        if evolved:
            learner.etrace_evolve(xs[:evolved])
        return [step(x) for x in xs[evolved:]]
