"""DNI: what comes after a chunk reaches weights that are not traced, by a guess."""

import re
import warnings

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.models import MODELS
from tests.oracles.recurrence import BATCH

RNG = np.random.default_rng(5)
DRAWN = {name: RNG.normal(size=(3, 3)) for name in 'wpr'}
STEPS = 6
XS = RNG.normal(size=(STEPS, 2, 3))
START = 0.3


def step(matmul, params, old, x):
    """Position-wise states, one of which reads the new value of the other."""
    h, u = old
    h = jnp.tanh(0.8 * h + 0.2 * u + matmul(x, params['w']) + x @ params['p'])
    u = 0.7 * u + 0.5 * h
    return (h, u), (h + u) @ params['r']


class Net(brainstate.nn.Module):
    """With a traced weight ``w``, and plain ones: of the input, ``p``, and of the output, ``r``."""

    def __init__(self, matmul=btf.matmul):
        super().__init__()
        for name in 'wpr':
            setattr(self, name, brainstate.ParamState(jnp.asarray(DRAWN[name], float)))
        self.h, self.u = (brainstate.HiddenState(jnp.full((2, 3), START, float)) for _ in range(2))
        self.matmul = matmul

    def update(self, x):
        params = {name: getattr(self, name).value for name in 'wpr'}
        (self.h.value, self.u.value), out = step(
            self.matmul, params, (self.h.value, self.u.value), x
        )
        return out


def whole_loss(params, xs, old):
    total = jnp.zeros(())
    for x in xs:
        old, out = step(jnp.matmul, params, old, x)
        total = total + jnp.sum(out**2)
    return total


def sequence():
    params = {name: jnp.asarray(DRAWN[name], float) for name in 'wpr'}
    return params, jnp.asarray(XS, float), (jnp.full((2, 3), START, float),) * 2


def true_cotangents(chunk):
    """At the end of each chunk, what all later losses say of the states."""
    params, xs, old = sequence()
    found = []
    for t, x in enumerate(xs):
        old, _ = step(jnp.matmul, params, old, x)
        if (t + 1) % chunk == 0:
            later = xs[t + 1 :]
            found.append(jnp.stack(jax.grad(whole_loss, argnums=2)(params, later, old), -1))
    return jnp.stack(found)


class Knowing:
    """A synthesiser that knows the true cotangents at the end of each chunk."""

    def __init__(self, learner, chunk):
        self.learner, self.chunk, self.table = learner, chunk, true_cotangents(chunk)

    def param_values(self):
        return {'table': self.table, 'index': self.learner.running_index.value // self.chunk}

    def apply(self, values, hiddens):
        return {0: values['table'][values['index']]}


def learner_of(rule, model=None, **options):
    learner = rule(model or Net(), vjp_method=options.pop('vjp_method', 'multi-step'), **options)
    learner.compile_graph(sequence()[1][0])
    return learner


def with_synthesizer(scale=0.0, **options):
    learner = learner_of(btf.DNI, **options)
    learner.attach_synthesizer(btf.SyntheticGradient(learner.group_signal_shapes(), scale=scale))
    return learner


def loss_of(learner, chunk):
    def loss(x):
        out = learner(x if chunk is None else btf.MultiStepData(x))
        return jnp.sum(out**2, axis=tuple(range(chunk is not None, out.ndim)))

    return loss


def gradient(learner, chunk, **options):
    learner.reset_state()
    for state in learner.hidden_states.values():
        state.value = jnp.full((2, 3), START, float)
    options = {'reduction': 'sum', **options}

    @brainstate.transform.jit
    def run(xs):
        return learner.etrace_grad(xs, step_fn=loss_of(learner, chunk), chunk_size=chunk, **options)

    return {path[0]: grad for path, grad in run(sequence()[1]).items()}


@pytest.mark.parametrize('chunk', [None, 2, 3])
def test_a_synthesiser_of_zeros_gives_the_bits_of_d_rtrl(chunk):
    found = gradient(with_synthesizer(), chunk)
    true = gradient(learner_of(btf.D_RTRL), chunk)
    for name in 'wpr':
        assert np.any(true[name])
        np.testing.assert_array_equal(found[name], true[name])


@pytest.mark.parametrize('chunk', [None, 2])
def test_a_live_synthesiser_moves_the_plain_weight_that_reaches_the_states_alone(chunk):
    found, true = (gradient(with_synthesizer(scale), chunk) for scale in (0.5, 0.0))
    assert np.all(found['p'] != true['p'])
    for name in 'wr':
        np.testing.assert_array_equal(found[name], true[name])


@pytest.mark.parametrize(
    ('method', 'chunk'), [('multi-step', 2), ('multi-step', None), ('single-step', None)]
)
def test_with_the_true_cotangents_all_weights_get_the_gradient_of_the_sequence(x64, method, chunk):
    learner = learner_of(btf.DNI, vjp_method=method)
    learner.attach_synthesizer(Knowing(learner, chunk or 1))
    found = gradient(learner, chunk)
    true = jax.grad(whole_loss)(*sequence())
    for name in 'wpr':
        assert np.abs(true[name]).max() > 0.1
        np.testing.assert_allclose(found[name], true[name], rtol=1e-10, atol=1e-10)
    plain = gradient(with_synthesizer(), chunk)
    assert np.abs(plain['p'] - true['p']).max() > 0.1  # or there is nothing to guess


def test_inputs_of_a_chunk_learn_of_the_future(x64):
    learner = learner_of(btf.DNI)
    learner.attach_synthesizer(Knowing(learner, 2))
    params, xs, old = sequence()

    def loss(x):
        return jnp.sum(learner(btf.MultiStepData(x)) ** 2)

    found = brainstate.transform.grad(loss, learner.param_states, argnums=0)(xs[:2])[1]
    true = jax.grad(whole_loss, argnums=1)(params, xs, old)[:2]
    np.testing.assert_allclose(found, true, rtol=1e-10, atol=1e-10)


def test_a_mean_is_the_sum_divided_by_the_number_of_steps(x64):
    learner = with_synthesizer(0.5)
    total, mean = (gradient(learner, 2, reduction=name) for name in ('sum', 'mean'))
    for name in 'wpr':
        np.testing.assert_allclose(mean[name], total[name] / STEPS, rtol=1e-12)


def test_there_is_no_call_without_a_synthesiser_nor_with_one_of_another_shape():
    learner = learner_of(btf.DNI)
    with pytest.raises(RuntimeError, match='attach_synthesizer'):
        gradient(learner, 2)
    with pytest.raises(RuntimeError, match='attach_synthesizer'):
        btf.train_synthetic_gradient(learner, sequence()[1])
    assert learner.group_signal_shapes() == {0: (2, 3, 2)}
    wrong = btf.SyntheticGradient({0: (2, 4, 2)})
    with pytest.raises(ValueError, match='group_signal_shapes'):
        learner.attach_synthesizer(wrong)
    with pytest.raises(ValueError, match='group_signal_shapes'):
        learner_of(btf.DNI, synthesizer=wrong)
    learner = with_synthesizer()
    for chunk in (0, 4):
        with pytest.raises(ValueError, match='chunk_size'):
            btf.train_synthetic_gradient(learner, sequence()[1], chunk_size=chunk)


@pytest.mark.parametrize('shape', [(2, 4, 2), (2, 3, 3)])
def test_guesses_of_another_shape_are_refused(shape):
    class Wrong(btf.SyntheticGradient):
        def apply(self, param_values, group_hiddens):
            return {0: jnp.ones(shape)}

    learner = learner_of(btf.DNI, synthesizer=Wrong({0: (2, 3, 2)}))
    with pytest.raises(ValueError, match=re.escape(f'shape {shape}') + r'(.|\n)*\(2, 3, 2\)'):
        gradient(learner, 2)


@pytest.mark.parametrize('chunk', [1, 3])
def test_training_is_that_of_the_reference(x64, promotes, chunk):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        reference = pytest.importorskip('braintrace', reason='the reference needs Python 3.11')
    xs = sequence()[1]
    ours = with_synthesizer(0.3)
    theirs = learner_of(reference.DNI, Net(reference.matmul))
    theirs.init_etrace_state()
    theirs.attach_synthesizer(reference.SyntheticGradient(theirs.group_signal_shapes()))
    for key, state in theirs.synthesizer.states_dict().items():
        state.value = ours.synthesizer.states_dict()[key].value
    options = {'chunk_size': chunk, 'lr': 0.05, 'epochs': 2, 'reset': False}
    found = btf.train_synthetic_gradient(ours, xs, **options)
    true = reference.train_synthetic_gradient(theirs, xs, **options)
    np.testing.assert_allclose(found, true, rtol=1e-5)
    for key, state in theirs.synthesizer.states_dict().items():
        held = ours.synthesizer.states_dict()[key].value
        np.testing.assert_allclose(held, state.value, rtol=1e-4, atol=1e-6)
        assert np.any(held)


def test_training_starts_anew_in_every_epoch_and_leaves_the_model_as_it_is():
    learner, xs = with_synthesizer(0.3), sequence()[1]
    before = {path: state.value for path, state in learner.param_states.items()}
    same = btf.train_synthetic_gradient(learner, xs, chunk_size=2, lr=0.0, epochs=3)
    assert same[0] == same[1] == same[2]
    assert int(learner.running_index.value) == STEPS
    goes_on = btf.train_synthetic_gradient(learner, xs, chunk_size=2, lr=0.0, reset=False)
    assert goes_on != same[:1]
    falling = btf.train_synthetic_gradient(learner, xs, chunk_size=2, lr=0.05, epochs=40)
    assert falling[-1] < 0.8 * falling[0]
    true = jax.grad(whole_loss)(*sequence())['p']
    trained, plain = (gradient(one, 2)['p'] for one in (learner, with_synthesizer()))
    assert np.linalg.norm(trained - true) < 0.7 * np.linalg.norm(plain - true)
    for path, state in learner.param_states.items():
        np.testing.assert_array_equal(state.value, before[path])


def test_an_optimiser_may_train_the_synthesiser(promotes):
    xs, made = sequence()[1], []
    for takes_optimizer in (True, False):
        learner = with_synthesizer(0.3)
        optimizer = None
        if takes_optimizer:
            optimizer = braintools.optim.SGD(0.05)
            optimizer.register_trainable_weights(learner.synthesizer.states_dict())
        options = {'chunk_size': 2, 'lr': 0.05, 'optimizer': optimizer}
        btf.train_synthetic_gradient(learner, xs, **options)
        made.append(learner.synthesizer.param_values())
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    'name',
    ['units', *(pytest.param(n, marks=pytest.mark.slow) for n in ('stp', 'two_layers', 'counter'))],
)
def test_models_with_units_several_groups_and_other_states_have_synthesisers(promotes, name):
    model, inputs = MODELS[name].build(BATCH)
    xs = inputs(0, 4)
    learner = btf.DNI(model)
    learner.compile_graph(jax.tree.map(lambda a: a[0], xs))
    shapes = learner.group_signal_shapes()
    learner.attach_synthesizer(btf.SyntheticGradient(shapes, scale=0.1))

    def loss(out):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out))

    errors = btf.train_synthetic_gradient(learner, xs, chunk_size=2, loss_fn=loss)
    assert np.all(np.isfinite(errors))
    chunk = btf.MultiStepData(jax.tree.map(lambda a: a[:2], xs))
    grads = brainstate.transform.grad(lambda: loss(learner(chunk)), learner.param_states)()
    leaves = jax.tree.leaves(grads)
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves) and any(map(np.any, leaves))
