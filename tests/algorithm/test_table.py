"""Every learner on every model of the table, against the step's own gradient and the recurrence."""

import functools
from functools import partial

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast._compat import jaxprs_in_params, open_jaxpr
from tests.algorithm.learning import ALGORITHMS, add_trees, at, begin, check, learning, live_values
from tests.marks import slow_if_one_of_many
from tests.models import MODELS
from tests.oracles.recurrence import BATCH, STEPS, output_loss, recurrence_of
from tests.oracles.step import random_projection, step_function

FEW = ('vanilla', 'lstm', 'alif_expon', 'learned_leak', 'drop_connect', 'units', 'while')
"""Different ways of learning and different states; what holds for one step is tried on more."""

# By module: all tests of a model in a row, so that a worker compiles it once.
most_models_slowly = pytest.mark.parametrize(
    'case',
    [pytest.param(case, id=name, marks=slow_if_one_of_many(name)) for name, case in MODELS.items()],
    scope='module',
)
few_models_quickly = pytest.mark.parametrize(
    'case',
    [
        pytest.param(case, id=name, marks=() if name in FEW else pytest.mark.slow)
        for name, case in MODELS.items()
    ],
    scope='module',
)
every_algorithm = pytest.mark.parametrize('algorithm', ALGORITHMS)


def some_models(*names):
    return pytest.mark.parametrize('case', [MODELS[n] for n in names], ids=names)


@functools.cache
def gradient_of_step(name, precision):
    """``jax.grad`` of the step from a live state: its parameters, by path."""
    case = MODELS[name]
    model, inputs = case.build(BATCH)
    values, x = live_values(case), at(inputs(3, 1), 0)
    step = step_function(model)
    paths = list(model.states(brainstate.HiddenState))

    def loss(params):
        out, hidden, _ = step(params, values.hidden, values.others, x)
        return random_projection((out, [hidden[path] for path in paths]))

    differentiate = jax.jacfwd if case.forward_mode else jax.grad
    return x, jax.jit(differentiate(loss))(values.params)


@every_algorithm
@most_models_slowly
def test_one_step_from_a_zero_trace_gives_the_gradient_of_the_step(case, algorithm, x64):
    learned = learning(case, algorithm)
    x, true = gradient_of_step(case.name, 64)
    begin(learned, live_values(case))
    check(learned.step(x), true, rtol=1e-10)


@every_algorithm
@few_models_quickly
def test_one_step_in_float32_gives_the_gradient_of_the_step_up_to_rounding(case, algorithm):
    learned = learning(case, algorithm)
    x, true = gradient_of_step(case.name, 32)
    begin(learned, live_values(case))
    check(learned.step(x), true, rtol=2e-6)


def skip_if_positions_mix(case):
    if case.expected.mixing_transitions or case.expected.mixing_tails:
        pytest.skip('the oracle does not cut what mixes positions without an op')


@every_algorithm
@most_models_slowly
def test_a_sequence_gives_the_gradient_of_the_recurrence(case, algorithm, x64):
    skip_if_positions_mix(case)
    learned = learning(case, algorithm)
    begin(learned)
    found = add_trees([learned.step(at(learned.xs, t)) for t in range(STEPS)])
    check(found, recurrence_of(case, algorithm), rtol=1e-10)


@every_algorithm
@some_models('lstm', 'lif_expon')
def test_a_sequence_in_float32_gives_the_recurrence_up_to_rounding(case, algorithm):
    learned = learning(case, algorithm)
    begin(learned)
    found = add_trees([learned.step(at(learned.xs, t)) for t in range(STEPS)])
    check(found, recurrence_of(case, algorithm), rtol=2e-5)


@every_algorithm
@few_models_quickly
def test_chunks_give_the_gradient_of_the_chunk_and_the_trace_before_it(case, algorithm, x64):
    skip_if_positions_mix(case)
    if case.forward_mode or (case.name == 'drop_connect' and algorithm == 'pp_prop'):
        pytest.skip('refused when it is compiled')
    learned = learning(case, algorithm, vjp_method='multi-step')
    begin(learned)

    def losses(x):
        return jax.vmap(random_projection)(learned.learner(btf.MultiStepData(x)))

    found = learned.learner.etrace_grad(learned.xs, step_fn=losses, chunk_size=2, reduction='sum')
    check(found, recurrence_of(case, algorithm, chunk_size=2, outputs_only=True), rtol=1e-10)


OWN_WEIGHTS = ('cond', 'switch', 'drop_connect')
"""Models that, when mapped, give each example a weight of its own (JAX does so in a ``cond``)."""


# brainstate finds the states of a mapped model by running it on zeros.
@pytest.mark.filterwarnings('ignore:invalid value encountered in divide:RuntimeWarning')
@every_algorithm
@few_models_quickly
def test_a_mapped_model_learns_as_one_written_for_a_batch(case, algorithm, x64):
    skip_if_positions_mix(case)
    if case.name in OWN_WEIGHTS:
        pytest.skip('see the next test')
    if case.name == 'noise':
        pytest.skip('a mapped model draws other random numbers')
    xs = case.build(BATCH)[1](0, STEPS)
    model, _ = case.build(None)
    options = ALGORITHMS[algorithm][1]
    learner = btf.compile(model, algorithm, at(xs, 0), batch_size=BATCH, vmap=True, **options)
    found = learner.etrace_grad(xs, step_fn=partial(output_loss, learner), reduction='sum')
    check(found, recurrence_of(case, algorithm, outputs_only=True), rtol=1e-10)


@some_models(*OWN_WEIGHTS)
def test_a_mapped_model_with_a_weight_per_example_is_refused(case):
    xs = case.build(BATCH)[1](0, 1)
    with pytest.raises(btf.CompilationError, match=r"\('W',\) passes through no ETP op"):
        btf.compile(case.build(None)[0], 'd_rtrl', at(xs, 0), batch_size=BATCH, vmap=True)


def shapes_in(jaxpr):
    """The shapes of all values that equations compute, inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield from (tuple(getattr(v.aval, 'shape', ())) for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from shapes_in(open_jaxpr(inner)[0])


@every_algorithm
@pytest.mark.parametrize('unit', ['GRUCell', 'LSTMCell'])
def test_no_example_of_a_mapped_model_has_weight_gradients_of_its_own(unit, algorithm):
    batch, n_in, n = 7, 3, 11

    def examples_weights(vmap):
        """How many values have a batch axis and the axes of a weight."""
        xs = jnp.ones((STEPS, batch, n_in))
        learner = btf.compile(
            getattr(btf.nn, unit)(n_in, n),
            algorithm,
            xs[0],
            batch_size=batch,
            vmap=vmap,
            **ALGORITHMS[algorithm][1],
        )
        jaxpr, _ = brainstate.transform.make_jaxpr(
            lambda: learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
        )()
        shapes = list(shapes_in(jaxpr.jaxpr))
        assert (n_in + n, n) in shapes
        return [sorted(shape) for shape in shapes].count(sorted((batch, n_in + n, n)))

    # D-RTRL's trace itself has such a shape: mapping the model must add none.
    written_for_a_batch = examples_weights(vmap=False)
    assert (written_for_a_batch > 0) == (algorithm == 'd_rtrl')
    assert examples_weights(vmap=True) == written_for_a_batch


@some_models('gru', 'lif_expon')
def test_gradients_of_an_unbatched_model_are_right_too(case, x64):
    model, inputs = case.build(None)
    xs = inputs(0, STEPS)
    true = testing.recurrence(model, xs, step_fn=partial(output_loss, model))
    learner = btf.D_RTRL(model)
    learner.compile_graph(at(xs, 0))
    found = learner.etrace_grad(xs, step_fn=partial(output_loss, learner), reduction='sum')
    check(found, true, rtol=1e-10)


# Position-wise recurrence only, and a readout without memory: D-RTRL is exact.


class Chain(brainstate.nn.Module):
    """Leaky states in a row, each reading the new value of the one before; the op reads ``x``."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.W = brainstate.ParamState(brainstate.random.normal(size=(3, 4)))
        self.a = brainstate.ParamState(brainstate.random.normal(size=(4,)))
        self.R = brainstate.ParamState(brainstate.random.normal(size=(4, 2)))

    def init_state(self, batch_size=None, **_):
        zeros = jnp.zeros((batch_size, 4), brainstate.environ.dftype())
        for s in range(self.size):
            setattr(self, f'h{s}', brainstate.HiddenState(zeros))

    def update(self, x):
        signal = btf.matmul(x, self.W.value)
        leak = btf.element_wise(self.a.value, weight_fn=jax.nn.sigmoid)[None]
        last = getattr(self, f'h{self.size - 1}').value
        for s in range(self.size):
            state = getattr(self, f'h{s}')
            state.value = leak * state.value + jnp.tanh(signal) - 0.1 * last
            signal = state.value
        return signal @ self.R.value


@pytest.mark.parametrize('size', [1, 2, 3, 4])
def test_d_rtrl_equals_bptt_where_recurrence_is_position_wise(size, x64):
    model = Chain(size)
    learner = btf.compile(model, 'd_rtrl', jnp.ones((BATCH, 3)), batch_size=BATCH)
    assert [group.num_state for group in learner.graph.hidden_groups] == [size]
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(8, BATCH, 3)))
    true = testing.bptt(model, xs, step_fn=lambda x: jnp.sum(model(x) ** 2))
    found = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction='sum')
    check(found, true, rtol=1e-10)
