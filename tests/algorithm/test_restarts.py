"""Episodes: where examples start anew, and what ``step_fn`` may not write."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.runtime import planner
from tests.models import of_rank

pytestmark = pytest.mark.usefixtures('x64')

STEPS, BATCH, N_IN, N = 8, 3, 2, 4
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(STEPS, BATCH, N_IN))
DONE = RNG.random(size=(STEPS, BATCH)) < 0.35
START = 0.1 * np.arange(1.0, 1 + N)
LEAKS = np.linspace(0.2, 0.9, N)
RULES = {
    'd_rtrl': {},
    'eprop': {'kappa_filter_decay': 0.5},
    'three_factor': {'modulator': 1.5},
}


class Net(brainstate.nn.Module):
    """A current and a voltage, of which the output also reads the old value; and a clock."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(1)
        self.w = brainstate.ParamState(jnp.asarray(rng.normal(size=(N_IN, N))))

    def init_state(self, batch_size=None, **kwargs):
        batch = () if batch_size is None else (batch_size,)
        self.i = brainstate.HiddenState(jnp.zeros((*batch, N)))
        self.v = brainstate.HiddenState(jnp.broadcast_to(jnp.asarray(START), (*batch, N)))
        self.spent = brainstate.ShortTermState(jnp.zeros(batch))
        self.clock = brainstate.ShortTermState(jnp.zeros(()))

    def update(self, x):
        old, self.spent.value = self.v.value, self.spent.value + 1
        self.clock.value = self.clock.value + 1
        self.i.value = 0.8 * self.i.value + btf.matmul(x, self.w.value)
        self.v.value = of_rank(old.ndim, jnp.asarray(LEAKS)) * old + jnp.tanh(self.i.value)
        return self.v.value + 0.3 * old**2 + 0.1 * self.spent.value[..., None]


def make(rule='d_rtrl', batch_size=BATCH, **options):
    x = jnp.asarray(XS[0, :batch_size])
    return btf.compile(Net(), rule, x, batch_size=batch_size, **(RULES[rule] | options))


def loss_of(learner):
    return lambda x, done: jnp.sum(jnp.sin(learner(x, reset=done)))


def gradient(learner, xs=XS, done=DONE, **options):
    return learner.etrace_grad(
        jnp.asarray(xs), jnp.asarray(done), step_fn=loss_of(learner), reduction='sum', **options
    )


def by_steps(learner):
    loss = loss_of(learner)

    @brainstate.transform.jit
    def step(x, done):
        return brainstate.transform.grad(lambda: loss(x, done), learner.param_states)()

    grads = [step(jnp.asarray(x), jnp.asarray(d)) for x, d in zip(XS, DONE, strict=True)]
    return jax.tree.map(lambda *parts: sum(parts), *grads)


def check(found, true):
    testing.compare(found, true).check(1e-12)


def reverse_mode():
    def loss(w):
        i, v, spent = jnp.zeros((BATCH, N)), jnp.broadcast_to(START, (BATCH, N)), jnp.zeros(BATCH)
        total = 0.0
        for x, done in zip(XS, DONE, strict=True):
            i, v = jnp.where(done[:, None], 0.0, i), jnp.where(done[:, None], START[None], v)
            old, spent = v, jnp.where(done, 0.0, spent) + 1
            i = 0.8 * i + x @ w
            v = LEAKS[None] * old + jnp.tanh(i)
            total += jnp.sum(jnp.sin(v + 0.3 * old**2 + 0.1 * spent[:, None]))
        return total

    return {('w',): jax.grad(loss)(Net().w.value)}


@pytest.mark.parametrize('every', [None, 1, 3])
@pytest.mark.parametrize(('trace', 'cheap'), [('carry', 1), ('fresh', 1e6), ('fresh', 0)])
def test_nothing_before_the_end_of_an_episode_counts(monkeypatch, trace, cheap, every):
    monkeypatch.setattr(planner, 'CHEAP', cheap)
    learner = make()
    check(gradient(learner, trace=trace, trace_every=every), reverse_mode())
    assert learner.plan.backwards == (cheap == 0 and every is not None)


@pytest.mark.parametrize('rule', RULES)
def test_episodes_in_one_call_are_sequences_of_their_own(rule):
    episodes = []
    for steps in (slice(0, 3), slice(3, None)):
        learner = make(rule)
        episodes.append(gradient(learner, XS[steps], np.zeros(len(XS[steps]), bool)))
    done = np.arange(STEPS) == 3
    true = jax.tree.map(lambda *parts: sum(parts), *episodes)
    check(gradient(make(rule), done=done, trace_every=2), true)


@pytest.mark.parametrize('rule', RULES)
def test_steps_and_windows_start_anew_alike(rule):
    check(gradient(make(rule), trace_every=3), by_steps(make(rule)))


def test_examples_that_start_anew_in_the_first_step_forget_the_trace():
    learner, fresh = make(), make()
    learner.etrace_evolve(jnp.asarray(XS[::-1].copy()))
    first = np.zeros((STEPS, BATCH), bool)
    first[0] = True
    check(gradient(learner, done=first, trace_every=3), gradient(fresh, done=~first & first))


def test_one_flag_for_all():
    done = DONE.any(1)
    learner = make()
    found = gradient(learner, done=done)
    check(found, gradient(make(), done=np.repeat(done[:, None], BATCH, 1)))
    assert learner.model.clock.value < STEPS  # with one for all, what is shared starts anew too


def test_what_the_batch_shares_goes_on():
    learner = make()
    gradient(learner)
    assert learner.model.clock.value == STEPS
    last = STEPS - np.array([np.flatnonzero(own)[-1] for own in DONE.T])
    np.testing.assert_array_equal(learner.model.spent.value, last)


def test_a_mapped_model_starts_anew():
    model = Net()
    learner = btf.compile(model, 'd_rtrl', jnp.asarray(XS[0]), batch_size=BATCH, vmap=True)
    check(gradient(learner), reverse_mode())


def test_a_chunk_may_start_anew():
    done = DONE.copy()
    done[1::2] = False

    def loss(x, flags):
        found = learner(btf.MultiStepData(x), reset=flags[0])
        return jnp.sum(jnp.sin(found), axis=(1, 2))

    learner = make(vjp_method='multi-step')
    found = learner.etrace_grad(
        jnp.asarray(XS), jnp.asarray(done), step_fn=loss, chunk_size=2, reduction='sum'
    )
    check(found, gradient(make(), done=done))


def test_kernels_start_anew():
    check(gradient(make().with_backend('interpret'), trace_every=3), reverse_mode())


def test_flags_of_another_shape_are_refused():
    learner = make()
    with pytest.raises(ValueError, match=r'reset has shape \(4,\).*one per example'):
        learner(jnp.asarray(XS[0]), reset=jnp.zeros(4, bool))


def test_flags_per_neuron_are_refused():
    """They would end the past of some neurons, and that of others goes on in the same example."""
    learner = btf.compile(Net(), 'd_rtrl', jnp.asarray(XS[0, 0]))
    with pytest.raises(ValueError, match=r'reset has shape \(4,\).*no examples.*one per example'):
        learner(jnp.asarray(XS[0, 0]), reset=jnp.zeros(N, bool))


class Shared(Net):
    """All examples get the same input, and the flags are as many as the neurons."""

    def update(self, x):
        y = btf.matmul(x, self.w.value)
        self.i.value = 0.8 * self.i.value + jnp.broadcast_to(y, self.i.value.shape)
        leaks = jnp.broadcast_to(jnp.asarray(LEAKS), self.v.value.shape)
        self.v.value = leaks * self.v.value + jnp.tanh(self.i.value)
        return self.v.value


def test_flags_per_example_of_an_op_that_all_share():
    xs, done = jnp.asarray(XS[:, 0]), jnp.asarray(RNG.random(size=(STEPS, N)) < 0.35)
    gradients = []
    for options in ({'trace_every': 3}, {'trace': 'fresh'}):
        learner = btf.compile(Shared(), 'd_rtrl', xs[0], batch_size=N)
        gradients.append(gradient(learner, xs, done, **options))
    check(*gradients)
    assert all(np.any(a) for a in jax.tree.leaves(gradients))


def test_pp_prop_says_that_it_cannot():
    learner = btf.compile(Net(), 'pp_prop', jnp.asarray(XS[0]), batch_size=BATCH, decay_or_rank=0.9)
    with pytest.raises(btf.NotSupportedError, match='inside the model'):
        gradient(learner)


# What step_fn writes.


def write_before(learner, state, value):
    def step(x, done):
        state.value = value(state.value)
        return jnp.sum(learner(x))

    return step


def write_after(learner, state, value):
    def step(x, done):
        loss = jnp.sum(learner(x))
        state.value = value(state.value)
        return loss

    return step


@pytest.mark.parametrize('writing', [write_before, write_after])
@pytest.mark.parametrize('value', [lambda a: 0.5 * a, jnp.zeros_like], ids=['half', 'zeros'])
@pytest.mark.parametrize('options', [{}, {'vjp_method': 'multi-step'}], ids=['windows', 'steps'])
@pytest.mark.parametrize('name', ['v', 'w'])
def test_writing_a_state_that_is_traced_or_a_weight_is_refused(name, options, value, writing):
    learner = make(**options)
    state = getattr(learner.model, name)
    before = jax.tree.map(np.asarray, [learner.trace.value, state.value])
    step = writing(learner, state, value)
    advice = {'v': 'hidden state .*reset=done', 'w': 'weight .*in every step'}[name]
    for run in (learner.etrace_grad, learner.etrace_evolve):
        with pytest.raises(btf.NotSupportedError, match=f'step_fn writes the {advice}'):
            run(jnp.asarray(XS), jnp.asarray(DONE), step_fn=step)
    jax.tree.map(np.testing.assert_array_equal, before, [learner.trace.value, state.value])


def test_writing_a_readout_is_refused():
    learner, readout = make(), brainstate.ParamState(jnp.ones(N))
    step = write_after(learner, readout, lambda a: 0.9 * a)
    with pytest.raises(btf.NotSupportedError, match='writes the weight readout'):
        learner.etrace_grad(
            jnp.asarray(XS), jnp.asarray(DONE), step_fn=step, weights={'readout': readout}
        )


def test_resetting_the_trace_inside_a_step_is_refused():
    learner = make()

    def step(x, done):
        learner.reset_state()
        return jnp.sum(learner(x))

    with pytest.raises(btf.NotSupportedError, match='reset=done'):
        learner.etrace_grad(jnp.asarray(XS), jnp.asarray(DONE), step_fn=step)
    learner.reset_state()


def test_a_step_may_write_what_is_not_traced():
    learner, count = make(), brainstate.ShortTermState(jnp.zeros(()))

    def step(x, done):
        count.value = count.value + 1
        learner.model.clock.value = 2 * learner.model.clock.value
        return loss_of(learner)(x, done)

    found = learner.etrace_grad(jnp.asarray(XS), jnp.asarray(DONE), step_fn=step, reduction='sum')
    check(found, reverse_mode())
    assert count.value == STEPS


def test_a_call_inside_another_transformation_is_refused_in_windows():
    learner = make()
    step = brainstate.transform.jit(loss_of(learner))
    for run in (learner.etrace_grad, learner.etrace_evolve):
        with pytest.raises(btf.NotSupportedError, match='Call it directly'):
            run(jnp.asarray(XS), jnp.asarray(DONE), step_fn=step)
