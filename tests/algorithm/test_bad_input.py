"""Bad input is refused with an error that says so, and states and traces stay as they were."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.models import MODELS

STEPS, BATCH = 4, 2
XS = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)), jnp.float32)


def new_learner(**options):
    return btf.compile(btf.nn.LSTMCell(3, 4), 'd_rtrl', XS[0], batch_size=BATCH, **options)


@pytest.fixture(scope='module')
def learner():
    """In the middle of a sequence."""
    with brainstate.environ.context(dt=0.1):
        learner = new_learner()
        learner.etrace_evolve(XS)
        return learner


@pytest.fixture
def unchanged(learner):
    """Checks afterwards that nothing was changed."""
    states = [*learner.model.states().values(), learner.trace, learner.running_index]
    before = [jax.tree.map(np.asarray, state.value) for state in states]
    yield
    for state, value in zip(states, before, strict=True):
        for a, b in zip(jax.tree.leaves(state.value), jax.tree.leaves(value), strict=True):
            assert not isinstance(a, jax.core.Tracer)
            np.testing.assert_array_equal(a, b)
    learner(XS[0])
    for state, value in zip(states, before, strict=True):
        state.value = jax.tree.map(jnp.asarray, value)


def loss_of(learner):
    return lambda x, *_: jnp.sum(learner(x) ** 2)


@pytest.mark.parametrize(
    'sequences, error, message',
    [
        ((XS[..., :2],), ValueError, 'compiled for .2, 3.'),
        ((XS[:, :1],), ValueError, 'compiled for .2, 3.'),
        ((XS[:, 0],), ValueError, 'compiled for .2, 3.'),
        ((XS > 0,), TypeError, 'compiled for float32'),
        ((XS.astype(jnp.int32),), TypeError, 'compiled for float32'),
        ((XS.astype(jnp.complex64),), TypeError, 'compiled for float32'),
        ((XS, XS[:2]), ValueError, 'common leading length'),
        ((XS[:0],), ValueError, 'at least one step'),
        ((), ValueError, 'common leading length'),
        ((jnp.asarray(1.0),), ValueError, 'common leading length'),
        ((btf.MultiStepData(XS),), TypeError, 'wrapped in MultiStepData'),
    ],
    ids=[
        'features',
        'batch',
        'axes',
        'bool',
        'int',
        'complex',
        'unequal',
        'empty',
        'none',
        'scalar',
        'marked',
    ],
)
def test_wrong_sequences(learner, unchanged, sequences, error, message):
    with pytest.raises(error, match=message):
        learner.etrace_grad(*sequences, step_fn=loss_of(learner))


@pytest.mark.parametrize('x', [XS[0, :, :2], XS[0, :1], XS[0, 0], XS])
def test_wrong_shapes_in_a_plain_call(learner, unchanged, x):
    with pytest.raises((TypeError, ValueError), match=r'shape|\(2, 3\)'):
        learner(x)


@pytest.mark.parametrize('mask', [np.ones(STEPS + 1), np.ones((STEPS, BATCH)), 1.0])
def test_a_mask_of_the_wrong_shape(learner, unchanged, mask):
    with pytest.raises(ValueError, match='mask has shape'):
        learner.etrace_grad(XS, step_fn=loss_of(learner), mask=mask)


@pytest.mark.parametrize(
    'options, error, message',
    [
        ({'reduction': 'max'}, ValueError, "reduction is 'max'.*mean"),
        ({'loss_output': 'all'}, ValueError, "loss_output is 'all'.*per_step"),
        ({'chunk_size': 0}, ValueError, 'at least 1'),
        ({'chunk_size': -2}, ValueError, 'at least 1'),
        ({'chunk_size': 2}, ValueError, 'multi-step'),
        ({'chunk_size': 2.0}, TypeError, 'Python int'),
        ({'chunk_size': True}, TypeError, 'Python int'),
        ({'step_fn': None}, TypeError, 'step_fn'),
        ({'pbar': 'yes'}, TypeError, 'pbar'),
        ({'pbar': 1.5}, TypeError, 'pbar'),
        ({'pbar': 0}, ValueError, 'should be > 0'),
        ({'weights': [brainstate.ParamState(0.0)]}, TypeError, 'weights is a list.*dict'),
        ({'weights': brainstate.ParamState(0.0)}, TypeError, 'weights is a ParamState.*dict'),
        ({'weights': {'a': 1.0}}, TypeError, "'a': 'float'.*not its value"),
    ],
)
def test_wrong_options(learner, unchanged, options, error, message):
    with pytest.raises(error, match=message):
        learner.etrace_grad(XS, **({'step_fn': loss_of(learner)} | options))


@pytest.mark.parametrize('pbar', ['yes', 1.5])
def test_a_wrong_progress_bar_of_evolving(learner, unchanged, pbar):
    with pytest.raises(TypeError, match='pbar'):
        learner.etrace_evolve(XS, pbar=pbar)


def test_a_chunk_that_does_not_divide_the_sequence():
    learner = new_learner(vjp_method='multi-step')
    with pytest.raises(ValueError, match='does not divide'):
        learner.etrace_grad(XS, step_fn=loss_of(learner), chunk_size=3)


def test_a_window_under_single_step(learner, unchanged):
    with pytest.raises((NotImplementedError, ValueError), match='multi-step'):
        learner.etrace_grad(XS, step_fn=lambda x: jnp.sum(learner(btf.MultiStepData(x[None]))))


@pytest.mark.parametrize('times', [0, 2])
def test_step_fn_must_call_the_learner_once(learner, unchanged, times):
    def step_fn(x):
        return sum((jnp.sum(learner(x)) for _ in range(times)), start=jnp.sum(x))

    with pytest.raises(ValueError, match=f'called the learner {times} times'):
        learner.etrace_grad(XS, step_fn=step_fn)
    with pytest.raises(ValueError, match=f'called the learner {times} times'):
        learner.etrace_evolve(XS, step_fn=step_fn)


def test_a_loss_that_is_no_scalar(learner, unchanged):
    with pytest.raises(ValueError, match=r'loss of shape \(2, 4\), expected \(\)'):
        learner.etrace_grad(XS, step_fn=learner)


def test_an_error_inside_step_fn_leaves_the_states_alone(learner, unchanged):
    def step_fn(x):
        learner(x)
        raise KeyError('mine')

    with pytest.raises(KeyError, match='mine'):
        learner.etrace_grad(XS, step_fn=step_fn)


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_values_that_are_not_finite_are_refused_on_request(learner, unchanged, bad):
    xs = XS.at[2, 0, 0].set(bad)
    states = [*learner.model.states().values(), learner.trace, learner.running_index]
    before = [state.value for state in states]
    learner.etrace_grad(xs, step_fn=loss_of(learner))  # not asked for: passes
    for state, value in zip(states, before, strict=True):
        state.value = value

    def step_fn(x):
        return jnp.sum(learner(x)) + jnp.sum(x)

    with pytest.raises(FloatingPointError, match=r'losses of steps \[2'):
        learner.etrace_grad(xs, step_fn=step_fn, check_finite=True)


def test_gradients_that_are_not_finite_are_refused_on_request(learner, unchanged):
    def step_fn(x):
        return jnp.sum(jnp.sqrt(0.0 * learner(x)))

    with pytest.raises(FloatingPointError, match='the gradients'):
        learner.etrace_grad(XS, step_fn=step_fn, check_finite=True)


def test_states_that_are_not_finite_are_refused_on_request(learner, unchanged):
    def step_fn(x):
        learner(jnp.where(jnp.all(x == XS[-1]), jnp.nan, x))  # of which no loss can tell
        return jnp.sum(x)

    with pytest.raises(FloatingPointError, match='the states or traces'):
        learner.etrace_grad(XS, step_fn=step_fn, check_finite=True)


def test_finite_values_cannot_be_checked_inside_jit(learner, unchanged):
    @brainstate.transform.jit
    def run():
        return learner.etrace_grad(XS, step_fn=loss_of(learner), check_finite=True)

    with pytest.raises(ValueError, match='not known inside jit'):
        run()


def test_a_learner_used_before_it_is_compiled():
    model = btf.nn.LSTMCell(3, 4)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    learner = btf.D_RTRL(model)
    before = [state.value for state in model.states().values()]
    for use in (
        lambda: learner(XS[0]),
        lambda: learner.etrace_grad(XS, step_fn=loss_of(learner)),
        lambda: learner.etrace_evolve(XS),
        lambda: learner.reset_state(),
        lambda: learner.graph,
        lambda: learner.report,
    ):
        with pytest.raises(ValueError, match='not (been )?compiled yet.*compile_graph'):
            use()
    for state, value in zip(model.states().values(), before, strict=True):
        assert state.value is value


def test_states_that_were_made_anew_after_compiling():
    learner = new_learner()
    brainstate.nn.init_all_states(learner.model, batch_size=BATCH)
    trace = learner.trace.value
    for use in (
        lambda: learner(XS[0]),
        lambda: learner.etrace_grad(XS, step_fn=loss_of(learner)),
        lambda: learner.etrace_evolve(XS),
        lambda: learner.reset_state(),
    ):
        with pytest.raises(ValueError, match=r"\('h',\).*made anew.*reset_all_states"):
            use()
    assert learner.trace.value is trace
    learner.compile_graph(XS[0])
    learner(XS[0])


@pytest.mark.parametrize(
    'arguments, options, error, message',
    [
        (('rtrl', XS[0]), {}, ValueError, "'rtrl' is not known.*d_rtrl"),
        ((3, XS[0]), {}, TypeError, 'a name, an ETraceConfig'),
        (('d_rtrl',), {}, ValueError, 'example input'),
        (('d_rtrl', XS[0]), {'vjp_method': 'two-step'}, ValueError, "'two-step'.*single-step"),
        (('d_rtrl', XS[0]), {'backend': 'cuda'}, ValueError, "'cuda' is not known.*pallas"),
        (('d_rtrl', XS[0]), {'verbose': 3}, ValueError, 'verbose'),
        (('d_rtrl', XS[0]), {'vmap': True, 'batch_size': None}, ValueError, 'batch_size'),
        (('pp_prop', XS[0]), {}, TypeError, 'decay_or_rank'),
        (('pp_prop', XS[0]), {'decay_or_rank': 1.0}, ValueError, r'\[0, 1\)'),
        (('pp_prop', XS[0]), {'decay_or_rank': 0}, ValueError, 'at least 1'),
        (('pp_prop', XS[0]), {'decay_or_rank': 'much'}, TypeError, 'decay'),
        (('pp_prop', XS[0]), {'decay_or_rank': (0.9,) * 3}, ValueError, 'pair'),
    ],
)
def test_wrong_arguments_of_compile(arguments, options, error, message):
    with pytest.raises(error, match=message):
        btf.compile(btf.nn.LSTMCell(3, 4), *arguments, **({'batch_size': BATCH} | options))


def test_a_model_that_is_no_module():
    with pytest.raises(TypeError, match=r'expected a brainstate\.nn\.Module'):
        btf.D_RTRL(lambda x: x)


def test_windows_of_weights_that_vary_in_time_under_pp_prop():
    model, inputs = MODELS['drop_connect'].build(BATCH)
    learner = btf.pp_prop(model, 0.9, vjp_method='multi-step')
    with pytest.raises(btf.NotSupportedError, match=r"\('W',\) varies in time.*D_RTRL"):
        learner.compile_graph(inputs(0, 1)[0])


class Leaky(brainstate.nn.Module):
    """A masked weight into a leaky state; the output may take another way."""

    def __init__(self, mask=1, output=lambda h: h):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.mask = mask
        self.output = output
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        mask = self.mask.value if isinstance(self.mask, brainstate.State) else self.mask
        mask = jnp.asarray(mask['mask'] if isinstance(mask, dict) else mask)
        weight = self.w.value * mask.astype(self.w.value.dtype)
        self.h.value = 0.9 * self.h.value + btf.matmul(x, weight)
        return self.output(self.h.value)


MASK = jnp.ones((3, 4), jnp.int32)


@pytest.mark.parametrize('value', [MASK, {'mask': MASK, 'scale': jnp.ones(4)}])
def test_the_gradient_by_integers(value):
    model = Leaky(brainstate.ParamState(value))
    learner = btf.compile(model, btf.D_RTRL, XS[0, 0])
    with pytest.raises(TypeError, match=r"'mask',.* holds int32.*weights="):
        learner.etrace_grad(XS[:, 0], step_fn=loss_of(learner))
    weights = {'w': model.w}
    grads = learner.etrace_grad(XS[:, 0], step_fn=loss_of(learner), weights=weights)
    assert jnp.abs(grads['w']).max() > 0


def halved_thrice(h):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / 2), (0, h))[1]


def test_windows_whose_loss_reads_a_while_loop():
    learner = btf.compile(
        Leaky(output=halved_thrice), btf.D_RTRL, XS[0, 0], vjp_method='multi-step'
    )

    def losses(x):
        return jnp.sum(learner(btf.MultiStepData(x)) ** 2, -1)

    with pytest.raises(btf.NotSupportedError, match=r'test_bad_input.py:\d+ .*single-step.*scan'):
        learner.etrace_grad(XS[:, 0], step_fn=losses, chunk_size=2)


@pytest.mark.parametrize('backend', ['auto', 'jax', 'pallas', 'interpret'])
def test_the_backend_is_stored(backend):
    assert new_learner(backend=backend).backend == backend
