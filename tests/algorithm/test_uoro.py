"""UORO: a random trace, whose mean over all signs gives the gradient of the whole sequence."""

import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.errors import NotSupportedError
from tests.models import MODELS, spike_by_vjp
from tests.oracles.recurrence import BATCH, step_loss

RNG = np.random.default_rng(3)
DRAWN = {
    name: RNG.normal(size=shape)
    for name, shape in {'w': (2, 2), 'v': (3, 2), 'r': (2, 2), 'a': (2,), 'xs': (6, 2, 3)}.items()
}
STEPS = 4


class Cell(brainstate.nn.Module):
    """A recurrent cell of any step; its output is read by a plain weight."""

    def __init__(self, step, planes, batch):
        super().__init__()
        drawn = {name: jnp.asarray(DRAWN[name], float) for name in 'wvra'}
        self.step = step
        self.w, self.v, self.r, self.a = (brainstate.ParamState(drawn[name]) for name in 'wvra')
        shape = (batch, 2) if batch else (2,)
        self.h = brainstate.HiddenState(jnp.full(shape, 0.3, float))
        self.u = brainstate.HiddenState(jnp.full(shape, -0.2, float)) if planes == 2 else None

    def update(self, x):
        params = {name: getattr(self, name).value for name in 'wvra'}
        old = [self.h.value] if self.u is None else [self.h.value, self.u.value]
        new, out = self.step(btf.matmul, btf.element_wise, params, old, x)
        for state, value in zip((self.h, self.u), new, strict=False):
            state.value = value
        return out @ params['r']


def rnn(matmul, element_wise, params, old, x):
    """A recurrent network, whose output reads the recurrent product directly as well."""
    (h,) = old
    y = matmul(h, params['w'])
    bias = jnp.broadcast_to(element_wise(params['a']), y.shape)
    new = jnp.tanh(y + matmul(x, params['v']) + bias)
    return [new], new + 0.3 * y


def spiking(matmul, element_wise, params, old, x):
    """Voltages with surrogate spikes, and an adaptation that reads the new spikes."""
    v, adaptation = old
    spike = spike_by_vjp(v)
    leak = jax.nn.sigmoid(element_wise(params['a']))
    v = jnp.broadcast_to(leak, v.shape) * v - 0.5 * adaptation + matmul(spike, params['w'])
    v = v + matmul(x, params['v'])
    adaptation = 0.7 * adaptation + 0.4 * spike_by_vjp(v) * v
    return [v, adaptation], spike_by_vjp(v) + 0.1 * adaptation


CELLS = {'rnn': (rnn, 1), 'spiking': (spiking, 2)}


class Told(btf.UORO):
    """Takes its signs from a table."""

    table = None

    def _draw_projection(self, key, step, group_index, shape, dtype):
        assert key.shape == () and shape[-1] == self.graph.hidden_groups[group_index].num_state
        return self.table[step].reshape(shape).astype(dtype)


def truth(cell, batch, xs, resets=None):
    """The gradient of the whole sequence, by a loop written out."""
    step, planes = CELLS[cell]
    shape = (batch, 2) if batch else (2,)
    start = [jnp.full(shape, 0.3, float), jnp.full(shape, -0.2, float)][:planes]

    def loss(params):
        states, total = start, 0.0
        for t, x in enumerate(xs):
            if resets is not None:
                flags = resets[t][:, None]
                states = [jnp.where(flags, a, b) for a, b in zip(start, states, strict=True)]
            states, out = step(jnp.matmul, lambda a: a, params, states, x)
            total = total + jnp.sum((out @ params['r']) ** 2)
        return total

    return jax.grad(loss)({name: jnp.asarray(DRAWN[name], float) for name in 'wvra'})


def told_learner(cell, batch, xs, **options):
    step, planes = CELLS[cell]
    learner = Told(Cell(step, planes, batch), **options)
    learner.compile_graph(xs[0])
    return learner, [state.value for state in learner.hidden_states.values()]


def sum_of_squares(learner, chunk, resets=False):
    def loss(x, *reset):
        options = {'reset': reset[0] if chunk is None else reset[0][0]} if resets else {}
        out = learner(x if chunk is None else btf.MultiStepData(x), **options)
        return jnp.sum(out**2, axis=tuple(range(chunk is not None, out.ndim)))

    return loss


def gradient_with(learner, start, table, xs, chunk, *resets):
    """The gradient over a sequence with these signs."""
    learner.table = table
    for state, value in zip(learner.hidden_states.values(), start, strict=True):
        state.value = value
    learner.reset_state()
    loss = sum_of_squares(learner, chunk, bool(resets))
    grads = learner.etrace_grad(xs, *resets, step_fn=loss, chunk_size=chunk, reduction='sum')
    return {path[0]: grad for path, grad in grads.items()}


def check(found, true, rtol=1e-9):
    assert found.keys() == true.keys()
    for name in found:
        size = np.abs(true[name]).max()
        assert size > 1e-3
        np.testing.assert_allclose(found[name], true[name], rtol=0, atol=rtol * size)


def all_signs(draws, size):
    """All tables of signs; those of the last draw are never read."""
    patterns = np.array([*itertools.product((-1.0, 1.0), repeat=(draws - 1) * size)])
    return jnp.asarray(np.concatenate([patterns, np.ones((len(patterns), size))], 1)).reshape(
        -1, draws, size
    )


@pytest.mark.parametrize(
    ('cell', 'batch', 'method', 'chunk', 'steps'),
    [
        ('rnn', None, 'single-step', None, 4),
        ('rnn', None, 'multi-step', None, 3),
        ('rnn', None, 'multi-step', 2, 4),
        ('rnn', 2, 'single-step', None, 3),
        ('spiking', None, 'single-step', None, 3),
        ('spiking', None, 'multi-step', 2, 4),
    ],
)
def test_the_mean_over_all_signs_is_the_gradient_of_the_sequence(
    x64, cell, batch, method, chunk, steps
):
    xs = jnp.asarray(DRAWN['xs'][:steps] if batch else DRAWN['xs'][:steps, 0])
    learner, start = told_learner(cell, batch, xs, vjp_method=method)
    size = start[0].size * len(start)
    # The trace is read at the start of calls: signs of the last one do not count.
    free = steps if chunk is None else steps - chunk + 1
    tables = all_signs(free, size)
    tables = jnp.concatenate([tables, jnp.ones((len(tables), steps - free, size))], 1)

    @brainstate.transform.jit
    def gradients():
        return brainstate.transform.for_loop(
            lambda table: gradient_with(learner, start, table, xs, chunk), tables
        )

    each = gradients()
    assert np.std(each['w'], axis=0).min() > 1e-3
    mean = jax.tree.map(lambda a: a.mean(0), each)
    check(mean, truth(cell, batch, xs))


def test_examples_that_start_anew_forget_their_own_past_alone(x64):
    xs = jnp.asarray(DRAWN['xs'][:3])
    resets = jnp.asarray([[False, False], [False, True], [False, False]])
    learner, start = told_learner('rnn', 2, xs, vjp_method='single-step')
    tables = all_signs(3, 4)

    @brainstate.transform.jit
    def gradients():
        return brainstate.transform.for_loop(
            lambda table: gradient_with(learner, start, table, xs, None, resets), tables
        )

    mean = jax.tree.map(lambda a: a.mean(0), gradients())
    check(mean, truth('rnn', 2, xs, resets))


def test_other_signs_with_all_of_them_turned_give_the_same_gradient():
    xs = jnp.asarray(DRAWN['xs'][:STEPS], jnp.float32)
    learner, start = told_learner('spiking', 2, xs)
    table = jnp.asarray(RNG.choice([-1.0, 1.0], (STEPS, 8)), jnp.float32)
    run = brainstate.transform.jit(lambda t: gradient_with(learner, start, t, xs, 2))
    one, turned, other = run(table), run(-table), run(table.at[0, 0].multiply(-1))
    for name in 'wv':
        np.testing.assert_array_equal(one[name], turned[name])
        assert np.any(one[name] != other[name])


@pytest.mark.parametrize('chunk', [2, 3])
def test_numbers_are_those_of_the_reference_with_the_same_signs(reference, x64, promotes, chunk):
    xs, table = jnp.asarray(DRAWN['xs']), jnp.asarray(RNG.choice([-1.0, 1.0], (6, 2, 2, 1)))

    class TheirCell(Cell):
        def update(self, x):
            params = {name: getattr(self, name).value for name in 'wvra'}
            (new,), _ = rnn(reference.matmul, reference.element_wise, params, [self.h.value], x)
            self.h.value = new
            return new

    class Theirs(reference.UORO):
        def _draw_projection(self, key, step, group_index, shape, dtype):
            return table[step]

    class OurCell(Cell):
        def update(self, x):
            params = {name: getattr(self, name).value for name in 'wvra'}
            (self.h.value,), _ = rnn(btf.matmul, btf.element_wise, params, [self.h.value], x)
            return self.h.value

    theirs = Theirs(TheirCell(rnn, 1, 2))
    theirs.compile_graph(reference.MultiStepData(xs[:chunk]))
    theirs.init_etrace_state()
    ours = Told(OurCell(rnn, 1, 2))
    ours.compile_graph(xs[0])
    ours.table = table

    def loss(learner, mark):
        return lambda x: jnp.sum(learner(mark(x)) ** 2, axis=(1, 2))

    options = {'chunk_size': chunk, 'reduction': 'sum'}
    true = theirs.etrace_grad(xs, step_fn=loss(theirs, reference.MultiStepData), **options)
    found = ours.etrace_grad(xs, step_fn=loss(ours, btf.MultiStepData), **options)
    for path in (('w',), ('v',), ('a',)):
        assert np.abs(true[path]).max() > 0.1
        np.testing.assert_allclose(found[path], true[path], rtol=1e-12, atol=1e-12)


def test_one_step_without_a_past_is_differentiated_exactly(x64):
    xs = jnp.asarray(DRAWN['xs'][:1])
    for method in ('single-step', 'multi-step'):
        learner, start = told_learner('spiking', 2, xs, vjp_method=method)
        found = gradient_with(learner, start, jnp.ones((1, 8)), xs, None)
        check(found, truth('spiking', 2, xs), 1e-12)


def own_learner(**options):
    brainstate.random.seed(0)
    cell = btf.nn.ValinaRNNCell(3, 4, activation='tanh')
    return btf.compile(cell, 'uoro', jnp.ones((2, 3)), batch_size=2, **options)


def own_gradient(learner, **options):
    xs = jnp.asarray(DRAWN['xs'], jnp.float32)
    learner.hidden_states['h',].value = jnp.zeros((2, 4))
    grads = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), **options)
    return grads['W', 'weight']['weight']


def test_a_reset_starts_the_signs_anew_and_a_fresh_sequence_does_not():
    learner = own_learner()
    first = own_gradient(learner, trace='fresh')
    second = own_gradient(learner, trace='fresh')
    assert np.any(first != second)
    learner.reset_state()
    np.testing.assert_array_equal(own_gradient(learner, trace='fresh'), first)
    brainstate.nn.reset_all_states(learner)
    np.testing.assert_array_equal(own_gradient(learner), first)


def test_keys_of_either_form_and_seeds_give_the_same_signs():
    keys = (7, np.int64(7), jax.random.key(7), jax.random.PRNGKey(7))
    first, *others = (own_gradient(own_learner(projection_key=key)) for key in keys)
    assert all(np.array_equal(first, other) for other in others)
    assert np.any(first != own_gradient(own_learner(projection_key=8)))


def test_a_saved_learner_goes_on_with_the_same_signs(tmp_path):
    learner = own_learner(projection_key=jax.random.key(1))
    own_gradient(learner)
    learner.save(tmp_path / 'learner')
    expected = own_gradient(learner)
    other = own_learner(projection_key=jax.random.key(1))
    other.load(tmp_path / 'learner')
    np.testing.assert_array_equal(own_gradient(other), expected)
    assert np.any(own_gradient(other) != expected)


def test_the_side_of_a_weight_can_be_looked_at():
    learner = own_learner()
    own_gradient(learner)
    ((group, path), (bias, weight)) = next(iter(learner.get_etrace_of(('W', 'weight')).items()))
    assert (group, path) == (0, ('W', 'weight'))
    assert bias.shape == (4,) and weight.shape == (7, 4) and np.any(weight)
    with pytest.raises(ValueError, match='no trace of'):
        learner.get_etrace_of(('no',))


def test_what_cannot_be_is_refused():
    for eps in (0.0, -1.0, 1e-60, float('inf'), float('nan')):
        with pytest.raises(ValueError, match='projection_eps'):
            own_learner(projection_eps=eps)
    with pytest.raises(TypeError, match='projection_key'):
        own_learner(projection_key='seed')
    with pytest.raises(NotImplementedError, match='multi-step'):
        learner = own_learner(vjp_method='single-step')
        chunk = btf.MultiStepData(jnp.ones((3, 2, 3)))
        brainstate.transform.grad(lambda: jnp.sum(learner(chunk)), learner.param_states)()

    class Doubled(btf.UORO):
        def learning_signals(self, factors, signals, modulator):
            return jax.tree.map(lambda a: 2 * a, signals)

    with pytest.raises(NotSupportedError, match='entry_signals'):
        btf.compile(btf.nn.GRUCell(3, 4), Doubled, jnp.ones(3))


def test_a_while_loop_over_a_state_is_refused():
    class Looping(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((3, 3)))
            self.h = brainstate.HiddenState(jnp.zeros(3))

        def update(self, x):
            h = jax.lax.while_loop(lambda h: jnp.all(h < 1), lambda h: h + 1, self.h.value)
            self.h.value = jnp.tanh(h + btf.matmul(x, self.w.value))
            return self.h.value

    for method in ('single-step', 'multi-step'):
        with pytest.raises(NotSupportedError, match='Use D_RTRL'):
            btf.compile(Looping(), 'uoro', jnp.ones(3), vjp_method=method)


SOME = ('units', 'hidden_group_state', 'stop_gradient', 'coba_ei', 'two_layers')


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=() if n in SOME else pytest.mark.slow) for n in MODELS]
)
def test_every_model_of_the_table_can_be_learned(x64, promotes, name):
    model, inputs = MODELS[name].build(BATCH)
    xs = inputs(0, 3)
    learner = btf.UORO(model)
    try:
        learner.compile_graph(jax.tree.map(lambda a: a[0], xs))
    except NotSupportedError as error:
        assert 'while' in str(error)
        return
    loss = step_loss(model)

    @brainstate.transform.jit
    def gradients():
        return brainstate.transform.for_loop(
            lambda x: brainstate.transform.grad(lambda: loss(learner, x), learner.param_states)(),
            xs,
        )

    leaves = jax.tree.leaves(gradients())
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves) and any(map(np.any, leaves))
    trace = learner.trace.value
    assert int(trace.step) == 3 and len(trace.theta) == len(learner.graph.hidden_groups)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(trace.theta))


@pytest.mark.parametrize('signal', ['random_feedback', 'modulatory'])
def test_another_signal_reads_the_trace_after_the_step(x64, signal):
    """With all signs +1, ``g = (L' . s) theta`` with the trace after the step, written out."""
    config = btf.ETraceConfig(
        trace_factorization='random_projection', recurrence_scope='coupled', learning_signal=signal
    )
    options = {'random_feedback_key': jax.random.key(3)} if signal == 'random_feedback' else {}
    cell = btf.nn.ValinaRNNCell(2, 3, activation='tanh')
    learner = btf.compile(
        cell, config, jnp.ones(2), seed=0, vjp_method='single-step', projection_key=1, **options
    )
    if signal == 'modulatory':
        learner.modulator = jnp.array([0.5, -1.0, 2.0])
    xs = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
    weight = learner.param_states
    for x in xs:
        grads = brainstate.transform.grad(lambda x=x: jnp.sum(learner(x) ** 2), weight)()
        h = cell.h.value
        if signal == 'modulatory':
            L = learner.modulator
        else:
            loss_signal = 2 * h
            L = (
                loss_signal
                / (jnp.linalg.norm(loss_signal) + 1e-8)
                @ learner.random_feedback.feedback[0].B
            )
        ((s,),), (theta,), _ = learner.trace.value
        expected = jnp.vdot(L, s)
        for found, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(theta), strict=True):
            assert jnp.abs(leaf).max() > 0.01
            assert jnp.allclose(found, expected * leaf, rtol=1e-12, atol=1e-14)
