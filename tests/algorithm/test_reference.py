"""Beside braintrace 0.2.6: the same gradients where it is right, and right ones where it is not.

The second half is the README's table of differences, a test per row: the reference's deviation is
reproduced, so that a change on its side is noticed, and ours is compared with the truth.
"""

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
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import testing
from tests.models import alif, lif, parameter
from tests.oracles.step import random_projection
from tests.promotion import promoting

pytestmark = [
    pytest.mark.usefixtures('x64'),
    pytest.mark.filterwarnings('ignore:core.Jaxpr is missing a DebugInfo:DeprecationWarning'),
]

N_IN, N, BATCH, STEPS = 3, 4, 2, 6


@pytest.fixture(scope='module')
def reference() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return pytest.importorskip('braintrace', reason='the reference needs Python 3.11')


# Models that are written once for both libraries


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
    'minimal_rnn': partial(Cell, name='MinimalRNNCell'),
    'leaky': Leaky,
    'skip': Skip,
    'plain_readout': PlainReadout,
    'reads_output': ReadsOutput,
    'reads_old': ReadsOld,
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
    return testing.recurrence(model, xs, step_fn=lambda x: random_projection(model(x)))


def ratio(found: Any, true: Any) -> float:
    """The gradient projected on the true one."""
    found, true = flat(found), flat(true)
    return float(found @ true / (true @ true))


def by_name(gradients: Any) -> dict[str, Any]:
    """Gradients by the name of the layer or parameter."""
    return {next(k for k in path if k not in ('cell', 'proj')): g for path, g in gradients.items()}


# Where PARITY.md says that the reference is right

RIGHT_SINGLE_STEP = {
    'vanilla': ('W',),
    'gru': ('Wh', 'Wz'),
    'leaky': ('W',),
    'skip': ('W', 'Z'),
    'lif': ('comm',),
    'plain_readout': ('W',),
}
RIGHT_MULTI_STEP = {
    'vanilla': ('W',),
    'gru': ('Wh', 'Wz', 'Wr'),
    'lstm': ('Wi', 'Wf', 'Wg', 'Wo'),
    'minimal_rnn': ('phi', 'W_u'),
    'skip': ('W', 'Z'),
    'lif': ('comm',),
    'lif_expon': ('comm',),
}


def assert_same(ours: Any, theirs: Any, names: tuple[str, ...]) -> None:
    ours, theirs = by_name(ours), by_name(theirs)
    chosen = {(name,): ours[name] for name in names}, {(name,): theirs[name] for name in names}
    testing.compare(*chosen).check(rtol=1e-5)


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', RIGHT_SINGLE_STEP)
def test_same_gradient_where_the_reference_is_right(reference, name, rule):
    ours, theirs = (gradient(lib, name, rule) for lib in (btf, reference))
    assert_same(ours, theirs, RIGHT_SINGLE_STEP[name])


@pytest.mark.parametrize('name', RIGHT_MULTI_STEP)
def test_same_gradient_of_chunks(reference, name):
    ours, theirs = (chunk_gradient(lib, name, 'd_rtrl') for lib in (btf, reference))
    assert_same(ours, theirs, RIGHT_MULTI_STEP[name])


@pytest.mark.parametrize('name', ['vanilla', 'gru', 'lstm'])
def test_same_gradient_of_plain_steps_by_a_multi_step_learner(reference, name):
    ours, theirs = (gradient(lib, name, vjp_method='multi-step') for lib in (btf, reference))
    assert_same(ours, theirs, RIGHT_MULTI_STEP[name])


# The rows of the table of differences


@pytest.mark.parametrize(
    ('rule', 'name', 'weights'),
    [
        ('filter', 'vanilla', ('W',)),
        ('filter', 'lif', ('comm',)),
        ('feedback', 'vanilla', ('W',)),
        ('feedback', 'lif', ('comm',)),
    ],
)
def test_same_gradient_of_eprop_step_by_step(reference, rule, name, weights):
    ours, theirs = (eprop_gradients(lib, name, rule) for lib in (btf, reference))
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other, weights)


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


def test_random_feedback_draws_the_matrices_of_the_reference(reference):
    """Also where the order of the groups differs."""
    ours, theirs = (learner_of(lib, 'used_backwards', 'feedback')[0] for lib in (btf, reference))
    for group in ours.graph.hidden_groups:
        other = next(
            g for g in theirs.graph.hidden_groups if set(g.hidden_paths) == set(group.hidden_paths)
        )
        mine = ours.random_feedback.feedback[group.index].B
        np.testing.assert_array_equal(mine, theirs._random_feedback[other.index].B)


@pytest.mark.parametrize(
    ('name', 'weights'),
    [('vanilla', ('W',)), ('lstm', ('Wi', 'Wf', 'Wg', 'Wo')), ('lif_expon', ('comm',))],
)
def test_same_gradient_of_three_factors(reference, name, weights):
    """The modulator takes the place of the signal that the reference counts twice."""
    rewards = jnp.asarray([0.5, -1.0, 2.0, 0.0, 1.5, -0.3])

    def gradient(lib):
        learner, xs = learner_of(lib, name, 'modulator')
        loss = lambda x, m: random_projection(learner(x, modulator=m))  # noqa: E731
        with promoting(lib is not btf):
            return learner.etrace_grad(xs, rewards, step_fn=loss)

    assert_same(gradient(btf), gradient(reference), weights)


@pytest.mark.parametrize(('kappa', 'error'), [(1.0, ValueError), (1.5, ValueError)])
def test_same_errors_of_arguments(reference, kappa, error):
    for lib in (btf, reference):
        with pytest.raises(error):
            lib.EProp(build(lib, 'vanilla')[0], kappa_filter_decay=kappa)
        with pytest.raises(error):
            lib.KappaFilter(jnp.zeros(2), kappa)


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


def test_states_that_read_each_others_new_value_count_once(reference):
    ours, theirs, true = step_gradients(reference, 'lif_expon')
    assert ratio(theirs['comm'], true['comm']) == pytest.approx(2.0, rel=1e-9)
    assert ratio(ours['comm'], true['comm']) == pytest.approx(1.0, rel=1e-12)
    ours, theirs, true = step_gradients(reference, 'alif_expon')
    assert ratio(theirs['comm'], true['comm']) == pytest.approx(2.0, rel=0.1)
    assert relative_error(ours['comm'], true['comm']) < 1e-12
    ours, theirs, true = step_gradients(reference, 'lstm')
    for gate, deviation in {'Wi': 2.0, 'Wf': 2.0, 'Wg': 2.0, 'Wo': 1.0}.items():
        assert ratio(theirs[gate], true[gate]) == pytest.approx(deviation, rel=1e-9)
        assert ratio(ours[gate], true[gate]) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize('name, weight', [('plain_readout', 'R'), ('gru', 'Wr')])
def test_a_parameter_without_a_traced_occurrence_has_its_step_gradient(reference, name, weight):
    ours, theirs, true = step_gradients(reference, name)
    assert np.all(flat(theirs[weight]) == 0)
    assert relative_error(ours[weight], true[weight]) < 1e-12
    ours, true = by_name(gradient(btf, name)), by_name(truth(name))
    assert relative_error(ours[weight], true[weight]) < 1e-12


def test_an_output_that_reads_a_gate_or_y_directly_counts(reference):
    ours, theirs, true = step_gradients(reference, 'minimal_rnn')
    assert relative_error(theirs['phi'], true['phi']) > 0.05
    assert relative_error(ours['phi'], true['phi']) < 1e-12
    ours, theirs, true = step_gradients(reference, 'reads_output')
    assert relative_error(theirs['W'], true['W']) > 0.3
    assert relative_error(ours['W'], true['W']) < 1e-12


def test_an_output_that_reads_the_state_of_the_step_before_counts(reference):
    ours, theirs = (gradient(lib, 'reads_old') for lib in (btf, reference))
    assert relative_error(theirs, truth('reads_old')) > 0.1
    assert relative_error(ours, truth('reads_old')) < 1e-10


def test_an_operation_that_mixes_positions_before_the_state_is_differentiated(reference):
    ours, theirs, true = step_gradients(reference, 'normalised')
    assert np.abs(flat(theirs['W'])).max() < 1e-10 * np.abs(flat(true['W'])).max()
    assert relative_error(ours['W'], true['W']) < 1e-12
    learner, _ = learner_of(btf, 'normalised', 'd_rtrl')
    kind = btf.DiagnosticKind.TAIL_NOT_POSITION_WISE
    assert {record.weight_path for record in learner.graph.explain(kind=kind)} == {('W',)}


def test_groups_are_in_the_order_of_the_models_states(reference):
    orders = [
        [group.hidden_paths for group in learner_of(lib, 'used_backwards', 'd_rtrl')[0].graph[1]]
        for lib in (btf, reference)
    ]
    states = build(btf, 'used_backwards')[0].states(brainstate.HiddenState)
    assert orders[0] == [[path] for path in states]
    assert orders[1] == orders[0][::-1]


def loop_gradient(lib: ModuleType, name: str) -> Any:
    learner, xs = learner_of(lib, name, 'd_rtrl')

    def loss():
        return brainstate.transform.for_loop(lambda x: random_projection(learner(x)), xs).sum()

    return brainstate.transform.grad(loss, learner.param_states)()


def test_grad_around_a_whole_loop_is_the_same_as_per_step(reference):
    per_step, true = gradient(reference, 'leaky'), truth('leaky')
    assert relative_error(per_step, true) < 1e-10
    assert relative_error(loop_gradient(reference, 'leaky'), true) > 0.1
    assert relative_error(loop_gradient(btf, 'leaky'), true) < 1e-10


@pytest.mark.parametrize('name', ['doubled', 'masked', 'transposed'])
def test_a_weight_processed_before_the_op_has_the_gradient_of_the_parameter(reference, name):
    ours, theirs, true = step_gradients(reference, name)
    assert relative_error(theirs['W'], true['W']) > 0.1
    assert relative_error(ours['W'], true['W']) < 1e-12


def test_an_op_under_checkpoint_is_traced(reference):
    ours, theirs, true = step_gradients(reference, 'checkpoint')
    assert np.all(flat(theirs['W']) == 0)
    assert relative_error(ours['W'], true['W']) < 1e-12
    assert relative_error(gradient(btf, 'checkpoint'), truth('checkpoint')) < 1e-12


def test_bias_correction_of_chunks_counts_steps(reference):
    """Two chunks of three steps: the trace is read once, at the entry of the second."""
    ours, theirs = (
        flat(chunk_gradient(lib, 'leaky', 'pp_prop', size=3)) for lib in (btf, reference)
    )
    model, xs = build(btf, 'leaky')
    decay = RULES['pp_prop'][1]['decay_or_rank']
    oracle = testing.Recurrence(model, xs, step_fn=lambda x: random_projection(model(x)))
    assert relative_error(ours, oracle.gradient(decay, chunk_size=3)) < 1e-10
    learner, _ = learner_of(btf, 'leaky', 'pp_prop', vjp_method='multi-step')
    without_trace = 0.0
    for chunk in (xs[:3], xs[3:]):
        learner.reset_state()
        grads = learner.etrace_grad(
            chunk,
            step_fn=lambda x: jax.vmap(random_projection)(learner(btf.MultiStepData(x))),
            chunk_size=3,
            reduction='sum',
        )
        without_trace = without_trace + flat(grads)
    # After three steps, but one call: the reference corrects for two.
    deviation = (1 - decay[1] ** 3) / (1 - decay[1] ** 2)
    assert ratio(theirs - without_trace, ours - without_trace) == pytest.approx(deviation)


def test_the_filter_of_eprop_advances_without_a_gradient(reference):
    """The loss is linear in the states: with ``g_r`` of D-RTRL, ``sum_r kappa^(t-r) g_r``."""
    evolved = 3
    sums = [0.0, *(flat(truth('vanilla', steps)) for steps in range(1, STEPS + 1))]
    g = [after - before for before, after in zip(sums, sums[1:], strict=False)]

    def filtered(since):
        return sum(
            KAPPA ** (t - r) * g[r] for t in range(evolved, STEPS) for r in range(since, t + 1)
        )

    ours, theirs = (
        sum(map(flat, eprop_gradients(lib, 'vanilla', 'filter', evolved)))
        for lib in (btf, reference)
    )
    np.testing.assert_allclose(ours, filtered(0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(theirs, filtered(evolved), rtol=1e-5, atol=1e-7)
    assert np.linalg.norm(ours - theirs) > 0.1 * np.linalg.norm(ours)


def test_a_standing_modulator_that_is_set_anew_counts_under_jit(reference):
    def gradients(lib):
        learner, xs = learner_of(lib, 'vanilla', 'modulator', modulator=1.0)
        start = [(state, state.value) for state in learner.states().values()]

        @brainstate.transform.jit
        def step():
            loss = lambda: random_projection(learner(xs[0]))  # noqa: E731
            with promoting(lib is not btf):
                return brainstate.transform.grad(loss, learner.param_states)()

        first = flat(step())
        for state, value in start:
            state.value = value
        learner.modulator = -2.0
        return first, flat(step())

    ours, theirs = gradients(btf), gradients(reference)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], -2 * ours[0], rtol=1e-6)
    np.testing.assert_allclose(theirs[1], theirs[0], rtol=1e-6)


@pytest.mark.parametrize('rule', ['modulator', 'feedback'])
def test_a_mask_weighs_other_signals_too(reference, rule):
    options = {'modulator': 1.0} if rule == 'modulator' else {}

    def gradient(lib, weight):
        learner, xs = learner_of(lib, 'vanilla', rule, **options)
        loss = lambda x: random_projection(learner(x))  # noqa: E731
        mask = jnp.full(STEPS, weight)
        with promoting(lib is not btf):
            return flat(learner.etrace_grad(xs, step_fn=loss, mask=mask, reduction='sum'))

    ours, theirs = gradient(btf, 1.0), gradient(reference, 1.0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient(btf, 0.5), 0.5 * ours, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient(reference, 0.5), theirs, rtol=1e-5, atol=1e-7)
    learns_from_none = np.any(gradient(reference, 0.0))
    assert learns_from_none == (rule == 'modulator') and not np.any(gradient(btf, 0.0))


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def relative_error(found: Any, true: Any) -> float:
    found, true = flat(found), flat(true)
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


class Gained(brainstate.nn.Module):
    """A leaky sum of inputs, amplified by what the environment says."""

    def __init__(self, lib):
        super().__init__()
        self.lib = lib
        self.w = brainstate.ParamState(jnp.eye(2))
        self.h = brainstate.HiddenState(jnp.zeros(2))

    def update(self, x):
        gain = brainstate.environ.get('gain', 1.0)
        self.h.value = 0.5 * self.h.value + gain * self.lib.matmul(x, self.w.value)
        return self.h.value


def gained(lib: ModuleType) -> Any:
    learner = lib.D_RTRL(Gained(lib))
    learner.compile_graph(jnp.ones(2))
    return learner


def test_the_environment_is_followed(reference):
    ours, theirs = gained(btf), gained(reference)
    with brainstate.environ.context(gain=3.0):
        np.testing.assert_array_equal(theirs(jnp.ones(2)), jnp.ones(2))
        np.testing.assert_array_equal(ours(jnp.ones(2)), 3 * jnp.ones(2))


def test_a_state_that_step_fn_writes_is_known_to_the_trace(reference):
    """Two episodes of one step: each has the gradient 1."""
    done = jnp.asarray([0.0, 1.0])

    def writing(learner):
        def step(x, done):
            (state,) = learner.hidden_states.values()
            state.value = (1 - done) * state.value
            return learner(x).sum()

        return step

    ours, theirs = gained(btf), gained(reference)
    xs, options = jnp.ones((2, 2)), {'reduction': 'sum'}
    with promoting():
        found = theirs.etrace_grad(xs, done, step_fn=writing(theirs), **options)
    np.testing.assert_array_equal(found['w',], jnp.full((2, 2), 2.5))
    with pytest.raises(btf.NotSupportedError, match='reset=done'):
        ours.etrace_grad(xs, done, step_fn=writing(ours), **options)
    found = ours.etrace_grad(xs, done, step_fn=lambda x, d: ours(x, reset=d).sum(), **options)
    np.testing.assert_array_equal(found['w',], jnp.full((2, 2), 2.0))
