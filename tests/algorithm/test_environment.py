"""What a model reads of brainstate's environment follows each call, by step and in windows."""

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
from braintrace_fast.runtime import executor

pytestmark = pytest.mark.usefixtures('x64')

STEPS, BATCH, N_IN, N = 6, 2, 3, 4
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(STEPS, BATCH, N_IN))
TIMES = 0.3 * np.arange(1, STEPS + 1)
RULES = {
    'd_rtrl': {},
    'pp_prop': {'decay_or_rank': 0.9},
    'eprop': {'kappa_filter_decay': 0.5},
    'three_factor': {'modulator': 1.5},
}


class Reader(brainstate.nn.Module):
    """A leaky state; ``read`` says what it takes from the environment."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        rng = np.random.default_rng(1)
        self.w = brainstate.ParamState(jnp.asarray(rng.normal(size=(N_IN, N))))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, N)))

    def update(self, x):
        leak, drive = self.read(x)
        self.h.value = leak * self.h.value + jnp.tanh(drive + btf.matmul(x, self.w.value))
        return self.h.value


def clocked(x):
    t = brainstate.environ.get('t')
    return jnp.exp(-t), jnp.sin(t)


def make(read=clocked, rule='d_rtrl', **options):
    return btf.compile(
        Reader(read), rule, jnp.asarray(XS[0]), batch_size=BATCH, **(RULES[rule] | options)
    )


def restart(learner):
    learner.model.h.value = jnp.zeros((BATCH, N))
    learner.reset_state()


def loss_at(learner, key='t'):
    def loss(x, value):
        with brainstate.environ.context(**{key: value}):
            return jnp.sum(jnp.sin(learner(x)))

    return loss


def in_windows(learner, values=TIMES, key='t', **options):
    restart(learner)
    return learner.etrace_grad(
        jnp.asarray(XS),
        jax.tree.map(jnp.asarray, values),
        step_fn=loss_at(learner, key),
        reduction='sum',
        **options,
    )


def by_steps(learner, values=TIMES, key='t'):
    """The same from Python, where values of the environment are Python's own."""
    restart(learner)
    loss = loss_at(learner, key)
    grads = [
        brainstate.transform.grad(
            lambda x=x, v=v: loss(jnp.asarray(x), v.item()), learner.param_states
        )()
        for x, v in zip(XS, values, strict=True)
    ]
    return jax.tree.map(lambda *parts: sum(parts), *grads)


def true_gradient(read_at, values=TIMES):
    """By reverse mode over all steps, of the formula of ``Reader``."""

    def loss(w):
        h, total = jnp.zeros((BATCH, N)), 0.0
        for x, value in zip(XS, values, strict=True):
            leak, drive = read_at(value, x)
            h = leak * h + jnp.tanh(drive + x @ w)
            total += jnp.sum(jnp.sin(h))
        return total

    return {('w',): jax.grad(loss)(make(lambda x: (0.5, 0.0)).model.w.value)}


def at_time(t, x):
    return jnp.exp(-t), jnp.sin(t)


def compiled(learner):
    return len(learner.graph_executor._graphs)


def check(found, true):
    testing.compare(found, true).check(1e-12)


@pytest.fixture
def timed():
    with brainstate.environ.context(t=0.0):
        yield


@pytest.mark.parametrize('every', [None, 1, 4])
@pytest.mark.parametrize('trace', ['carry', 'fresh'])
def test_the_time_of_each_step_counts_in_windows(timed, trace, every):
    check(in_windows(make(), trace=trace, trace_every=every), true_gradient(at_time))


def test_the_time_of_each_step_counts_by_step_and_nothing_is_compiled_again(timed):
    learner = make()
    check(by_steps(learner), true_gradient(at_time))
    assert compiled(learner) == 1


@pytest.mark.parametrize('rule', RULES)
def test_steps_and_windows_agree_for_every_rule(timed, rule):
    learner = make(rule=rule)
    check(in_windows(learner, trace_every=4), by_steps(learner))


def test_time_in_a_loop_of_the_users_own(timed):
    learner = make()
    loss = loss_at(learner)

    @brainstate.transform.jit
    def run(xs, times):
        def step(x, t):
            return brainstate.transform.grad(lambda: loss(x, t), learner.param_states)()

        return jax.tree.map(lambda a: a.sum(0), brainstate.transform.for_loop(step, xs, times))

    check(run(jnp.asarray(XS), jnp.asarray(TIMES)), true_gradient(at_time))


def test_time_with_a_mapped_model(timed):
    model = Reader(clocked)
    model.init_state = lambda **_: setattr(model, 'h', brainstate.HiddenState(jnp.zeros(N)))
    learner = btf.compile(model, 'd_rtrl', jnp.asarray(XS[0]), batch_size=BATCH, vmap=True)
    found = learner.etrace_grad(
        jnp.asarray(XS), jnp.asarray(TIMES), step_fn=loss_at(learner), reduction='sum'
    )
    check(found, true_gradient(at_time))


def test_a_chunk_runs_in_one_environment(timed):
    learner = make(vjp_method='multi-step')

    def loss(x, t):
        with brainstate.environ.context(t=t[0]):
            return jnp.sum(jnp.sin(learner(btf.MultiStepData(x))), axis=(1, 2))

    times = np.repeat(TIMES[::3], 3)
    found = learner.etrace_grad(
        jnp.asarray(XS), jnp.asarray(times), step_fn=loss, chunk_size=3, reduction='sum'
    )
    check(found, true_gradient(at_time, times))


def test_evolving_follows_the_time(timed):
    learner, other = make(), make()

    def run(learner, **options):
        def step(x, t):
            with brainstate.environ.context(t=t):
                return learner(x)

        return learner.etrace_evolve(
            jnp.asarray(XS), jnp.asarray(TIMES), step_fn=step, return_outputs=True, **options
        )

    whole, pieces = run(learner), run(other, trace_every=1)
    np.testing.assert_allclose(whole, pieces, rtol=1e-12)
    check(*(dict(enumerate(one.get_etrace_of(('w',)).values())) for one in (learner, other)))
    restart(learner)
    with brainstate.environ.context(t=0.0):
        frozen = learner.etrace_evolve(jnp.asarray(XS), return_outputs=True)
    assert np.abs(whole - frozen).max() > 0.1


def test_a_refractory_neuron_knows_the_time():
    def make_model():
        brainstate.random.seed(1)

        class Net(brainstate.nn.Module):
            def __init__(self):
                super().__init__()
                init = braintools.init.Uniform(5.0, 30.0)
                self.w = btf.nn.Linear(N_IN, N, w_init=init, b_init=None)
                self.neurons = bp.LIFRef(N, tau=20.0 * u.ms, tau_ref=0.15 * u.ms, V_th=0.2 * u.mV)

            def update(self, x):
                self.neurons(self.w(x) * u.mA)
                return self.neurons.V.value

        return Net()

    model, plain = make_model(), make_model()
    xs, times = jnp.abs(jnp.asarray(XS)), jnp.arange(0.0, STEPS) * 0.1 * u.ms
    with brainstate.environ.context(t=0.0 * u.ms):
        learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=BATCH)
        brainstate.nn.init_all_states(plain, batch_size=BATCH)

    def running(run):
        def step(x, t):
            with brainstate.environ.context(t=t):
                return run(x)

        return step

    true = brainstate.transform.for_loop(running(plain), xs, times)
    found = learner.etrace_evolve(xs, times, step_fn=running(learner), return_outputs=True)
    np.testing.assert_allclose(found.to_decimal(u.mV), true.to_decimal(u.mV), rtol=1e-12)
    brainstate.nn.reset_all_states(plain, batch_size=BATCH)
    frozen = brainstate.transform.for_loop(running(plain), xs, 0 * times)
    assert np.abs((frozen - true).to_decimal(u.mV)).max() > 0.05


# Numbers that may change but have not, and flags.


def stepped(x):
    dt = brainstate.environ.get_dt()
    return jnp.exp(-dt / u.ms), 0.0


def test_a_number_is_a_constant_until_it_changes():
    learner = make(stepped)
    assert list(learner.graph.module_info.environment.constants) == ['dt']
    in_windows(learner, key='unread')
    assert compiled(learner) == 1
    steps = (0.2 + TIMES) * u.ms
    true = true_gradient(lambda dt, x: (jnp.exp(-dt / u.ms), 0.0), steps)
    check(in_windows(learner, steps, 'dt', trace_every=4), true)
    assert list(learner.graph.module_info.environment.inputs) == ['dt']
    true = true_gradient(lambda dt, x: (jnp.exp(-dt / u.ms), 0.0), 2 * steps)
    check(in_windows(learner, 2 * steps, 'dt', trace='fresh'), true)
    assert compiled(learner) == 2


def test_another_unit_of_time_means_the_same():
    def read(x):
        return jnp.exp(-brainstate.environ.get('t') / u.ms), 0.0

    with brainstate.environ.context(t=0.0 * u.ms):
        learner = make(read)
    found = in_windows(learner, TIMES * u.ms)
    check(in_windows(learner, 1e-3 * TIMES * u.second), found)
    assert np.abs(found['w',]).max() > 0.1


class Dropping(Reader):
    def __init__(self):
        super().__init__(lambda x: (0.5, 0.0))
        self.dropout = brainstate.nn.Dropout(0.5)

    def update(self, x):
        return super().update(self.dropout(x))


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop'])
def test_dropout_follows_the_flag(rule):
    def outputs(fit):
        restart(learner)
        with brainstate.environ.context(fit=fit):
            return learner.etrace_evolve(jnp.asarray(XS), return_outputs=True)

    def gradient(fit):
        restart(learner)
        with brainstate.environ.context(fit=fit):
            return learner.etrace_grad(
                jnp.asarray(XS), step_fn=lambda x: jnp.sum(jnp.sin(learner(x))), trace_every=4
            )

    plain = make(lambda x: (0.5, 0.0), rule)
    with brainstate.environ.context(fit=True):
        learner = btf.compile(Dropping(), rule, jnp.asarray(XS[0]), batch_size=BATCH, **RULES[rule])
    true = plain.etrace_evolve(jnp.asarray(XS), return_outputs=True)
    np.testing.assert_allclose(outputs(fit=False), true, rtol=1e-12)
    assert np.abs(outputs(fit=True) - true).max() > 0.1
    restart(plain)
    expected = plain.etrace_grad(
        jnp.asarray(XS), step_fn=lambda x: jnp.sum(jnp.sin(plain(x))), trace_every=4
    )
    gradient(fit=True)
    check(gradient(fit=False), expected)
    assert compiled(learner) == 2


def test_a_key_that_was_missing_counts_when_it_is_set():
    learner = make(lambda x: (brainstate.environ.get('leak', 0.5), 0.0))
    found = in_windows(learner, 0.1 * TIMES, 'leak')
    check(found, true_gradient(lambda leak, x: (leak, 0.0), 0.1 * TIMES))


def test_random_feedback_stays_the_same_in_another_environment():
    key = jax.random.key(0)
    learner = make(clocked_flag, 'eprop', feedback='random', random_feedback_key=key)
    other = make(lambda x: (0.25, 0.0), 'eprop', feedback='random', random_feedback_key=key)

    with brainstate.environ.context(flag=True):
        found = brainstate.transform.jit(lambda: in_windows(learner, key='unread'))()
    check(found, in_windows(other, key='unread'))
    assert np.abs(found['w',]).max() > 1e-3
    with jax.checking_leaks():
        check(in_windows(learner, key='unread'), in_windows(learner, key='unread', trace_every=1))


def clocked_flag(x):
    return (0.25 if brainstate.environ.get('flag', False) else 0.5), 0.0


def test_a_graph_that_is_made_inside_jit_serves_outside():
    learner = make(clocked_flag)
    with brainstate.environ.context(flag=True):
        found = brainstate.transform.jit(lambda: in_windows(learner, key='unread'))()
        check(in_windows(learner, key='unread'), found)
        check(by_steps(learner, key='unread'), found)
    assert compiled(learner) == 2
    assert np.abs(found['w',] - in_windows(learner, key='unread')['w',]).max() > 1e-3


def test_numbers_that_decide_what_is_computed_are_compiled_each(monkeypatch):
    monkeypatch.setattr(executor, 'MOST_VARIANTS', 3)

    def read(x):
        return sum(0.1 for _ in range(brainstate.environ.get('n', 1))), brainstate.environ.get('t')

    def at(n):
        with brainstate.environ.context(n=n):
            return in_windows(learner)

    with brainstate.environ.context(t=0.0, n=2):
        learner = make(read)
        check(at(3), true_gradient(lambda t, x: (sum([0.1] * 3), t)))
        assert compiled(learner) == 2
        at(4)
        with pytest.raises(btf.NotSupportedError, match=r'n is 99 \(it was .*jax.lax.cond'):
            at(99)
        check(at(3), true_gradient(lambda t, x: (sum([0.1] * 3), t)))


def test_traces_of_another_form_are_refused():
    """A second op that is there with a flag alone would need a trace that nobody made."""

    class Flagged(Reader):
        def update(self, x):
            extra = 0.0
            if brainstate.environ.get('flag', False):
                extra = btf.matmul(jnp.cos(x), self.w.value)
            self.h.value = 0.5 * self.h.value + btf.matmul(x, self.w.value) + extra
            return self.h.value

    learner = btf.compile(Flagged(None), 'd_rtrl', jnp.asarray(XS[0]), batch_size=BATCH)
    with brainstate.environ.context(flag=True):
        with pytest.raises(btf.NotSupportedError, match='Compile another learner'):
            learner(jnp.asarray(XS[0]))
    assert np.abs(in_windows(learner, key='unread')['w',]).max() > 0.1


def test_files_do_not_depend_on_the_environment_that_was_used_last(tmp_path):
    def new():
        with brainstate.environ.context(fit=True):
            return btf.compile(Dropping(), 'd_rtrl', jnp.asarray(XS[0]), batch_size=BATCH)

    learner, other = new(), new()
    for fit in (True, False):
        with brainstate.environ.context(fit=fit):
            learner.etrace_evolve(jnp.asarray(XS))
    learner.save(tmp_path / 'learner')
    outputs = []
    for run in (learner, other):
        run.load(tmp_path / 'learner')  # with the random key of the dropout, which both share
        with brainstate.environ.context(fit=True):
            outputs.append(run.etrace_evolve(jnp.asarray(XS), return_outputs=True))
    np.testing.assert_array_equal(*outputs)


def test_another_backend_goes_on_in_the_same_environment(timed):
    learner = make().with_backend('interpret')
    check(in_windows(learner), true_gradient(at_time))
