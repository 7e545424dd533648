"""Names of braintrace 0.1: served with a warning, and as right as the functions of ops."""

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.deprecated import DEPRECATED
from tests.promotion import promoting

N_IN, N, BATCH, STEPS = 3, 4, 2, 5
DECAY = 0.9


@pytest.fixture
def quiet():
    """Deprecated names without their warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', r'braintrace.* is deprecated since', DeprecationWarning)
        yield


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


# The names


@pytest.mark.parametrize('name', DEPRECATED)
def test_each_access_warns_once_and_says_what_to_use(name):
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            found = getattr(btf, name)
        assert found.__name__ == name and [w.category for w in caught] == [DeprecationWarning]
        text = str(caught[0].message)
        assert text.startswith(f'braintrace_fast.{name} is deprecated since braintrace 0.2.0, and ')
        assert f'will be removed. Use {DEPRECATED[name].successor} instead.' in text
        assert caught[0].filename == __file__  # where the name is used


def test_an_import_of_a_name_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        from braintrace_fast import MatMulOp  # noqa: F401
        from braintrace_fast.nn import ReLU  # noqa: F401
    assert [str(w.message).split()[0] for w in caught] == [
        'braintrace_fast.MatMulOp',
        'braintrace_fast.nn.ReLU',
    ]
    assert {w.filename for w in caught} == {__file__}


def test_names_are_listed_but_not_exported():
    assert set(DEPRECATED) | set(btf.__all__) <= set(dir(btf))
    assert not set(DEPRECATED) & set(btf.__all__)
    with pytest.raises(AttributeError, match="'braintrace_fast' has no attribute 'NoSuchOp'"):
        btf.NoSuchOp  # noqa: B018


def test_names_are_loaded_when_they_are_asked_for():
    code = """
from braintrace_fast import *
import sys, warnings
assert 'braintrace_fast.deprecated.ops' not in sys.modules
warnings.simplefilter('error', DeprecationWarning)
import braintrace_fast
try:
    braintrace_fast.MatMulOp
except DeprecationWarning:
    sys.exit(42)
"""
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 42


@pytest.mark.parametrize('name', DEPRECATED)
def test_arguments_are_those_of_the_reference(name, reference, quiet):
    ours, theirs = (
        {
            key: parameter.default
            for key, parameter in inspect.signature(getattr(lib, name)).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for lib in (btf, reference)
    )
    assert list(ours) == list(theirs)
    for key, default in ours.items():
        assert theirs[key] == default or default(theirs) is theirs[key](theirs)  # identities


# Op objects


class Case(NamedTuple):
    """An op object, and what it computes, by a function of an op and in plain JAX."""

    op: Callable[[ModuleType], Any]
    weights: Callable[[], dict[str, jax.Array]]
    written: Callable[[Any, Any], Any]
    plain: Callable[[Any, Any], Any]
    x_shape: tuple[int, ...] = (N_IN,)
    y_shape: tuple[int, ...] = (N,)


def dense() -> dict[str, jax.Array]:
    return {'weight': draw(N_IN, N, seed=1), 'bias': draw(N, seed=2)}


def mask(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape) % 3 != 1


def low_rank() -> dict[str, jax.Array]:
    return {'B': draw(N_IN, 2, seed=1), 'A': draw(2, N, seed=2), 'bias': draw(N, seed=3)}


def affine(x: Any, weight: Any, bias: Any) -> Any:
    return x @ weight + jnp.broadcast_to(bias, (*x.shape[:-1], N))


def sparse() -> Any:
    with jax.ensure_compile_time_eval():
        return u.sparse.CSR.fromdense(jnp.where(mask(N_IN, N), draw(N_IN, N, seed=1), 0))


def scattered(values: Any) -> Any:
    return jnp.zeros((N_IN, N)).at[np.nonzero(mask(N_IN, N))].set(values)


def convolved(x: Any, kernel: Any, bias: Any) -> Any:
    """Of three taps and stride one, over ``(batch, channels, places)``."""
    padded = jnp.pad(x, [(0, 0), (0, 0), (1, 1)])
    taps = jnp.stack([padded[..., i : i + x.shape[-1]] for i in range(3)], axis=-1)
    return jnp.einsum('bcpu,ocu->bop', taps, kernel) + bias[None, :, None]


KERNEL = (2, 3, 3)
CASES = {
    'dense': Case(
        lambda lib: lib.MatMulOp(),
        dense,
        lambda x, w: btf.matmul(x, w['weight'], w['bias']),
        lambda x, w: affine(x, w['weight'], w['bias']),
    ),
    'mask': Case(
        lambda lib: lib.MatMulOp(mask(N_IN, N)),
        dense,
        lambda x, w: btf.matmul(x, jnp.where(mask(N_IN, N), w['weight'], 0), w['bias']),
        lambda x, w: affine(x, jnp.where(mask(N_IN, N), w['weight'], 0), w['bias']),
    ),
    'mask, then function': Case(
        lambda lib: lib.MatMulOp(mask(N_IN, N), jnp.cos),
        dense,
        lambda x, w: btf.matmul(x, jnp.where(mask(N_IN, N), jnp.cos(w['weight']), 1), w['bias']),
        lambda x, w: affine(x, jnp.where(mask(N_IN, N), jnp.cos(w['weight']), 1), w['bias']),
    ),
    'function, then mask': Case(
        lambda lib: lib.MatMulOp(mask(N_IN, N), jnp.cos, apply_weight_fn_before_mask=True),
        dense,
        lambda x, w: btf.matmul(x, jnp.where(mask(N_IN, N), jnp.cos(w['weight']), 0), w['bias']),
        lambda x, w: affine(x, jnp.where(mask(N_IN, N), jnp.cos(w['weight']), 0), w['bias']),
    ),
    'conv': Case(
        lambda lib: lib.ConvOp(
            jax.ShapeDtypeStruct((BATCH, 3, 5), float),
            (1,),
            'SAME',
            weight_mask=mask(*KERNEL),
            weight_fn=jnp.tanh,
        ),
        lambda: {'weight': draw(*KERNEL, seed=1), 'bias': draw(2, seed=2)},
        lambda x, w: btf.conv(
            x, jnp.tanh(jnp.where(mask(*KERNEL), w['weight'], 0)), w['bias'], strides=(1,)
        ),
        lambda x, w: convolved(x, jnp.tanh(jnp.where(mask(*KERNEL), w['weight'], 0)), w['bias']),
        (3, 5),
        (2, 5),
    ),
    'sparse': Case(
        lambda lib: lib.SpMatMulOp(sparse(), jnp.tanh),
        lambda: {'weight': sparse().data, 'bias': draw(N, seed=2)},
        lambda x, w: btf.sparse_matmul(
            x, jnp.tanh(w['weight']), sparse_mat=sparse(), bias=w['bias']
        ),
        lambda x, w: affine(x, scattered(jnp.tanh(w['weight'])), w['bias']),
    ),
    'low rank': Case(
        lambda lib: lib.LoraOp(),
        low_rank,
        lambda x, w: btf.lora_matmul(x, w['B'], w['A'], bias=w['bias']),
        lambda x, w: affine(x, w['B'] @ w['A'], w['bias']),
    ),
    'low rank, scaled': Case(
        lambda lib: lib.LoraOp(0.5),
        low_rank,
        lambda x, w: btf.lora_matmul(x, w['B'], w['A'], alpha=0.5, bias=w['bias']),
        lambda x, w: affine(x, 0.5 * w['B'] @ w['A'], w['bias']),
    ),
    'low rank, scaled by output': Case(
        lambda lib: lib.LoraOp(jnp.arange(1.0, N + 1)),
        low_rank,
        lambda x, w: btf.matmul(x, w['B'] @ w['A'] * jnp.arange(1.0, N + 1)[None], w['bias']),
        lambda x, w: affine(x, w['B'] @ w['A'] * jnp.arange(1.0, N + 1)[None], w['bias']),
    ),
}


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('name', CASES)
def test_an_op_computes_the_same_traced_and_in_plain_jax(name):
    case = CASES[name]
    op, weights, x = case.op(btf), case.weights(), draw(BATCH, *case.x_shape)
    expected = case.plain(x, weights)
    for run in (op, op.xw_to_y, op.raw_xw_to_y, jax.jit(op), jax.jit(op.raw_xw_to_y)):
        np.testing.assert_allclose(run(x, weights), expected, rtol=1e-12)
    assert 'etp_' in str(jax.make_jaxpr(op)(x, weights))
    assert 'etp_' not in str(jax.make_jaxpr(op.raw_xw_to_y)(x, weights))


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('name', CASES)
def test_an_op_pulls_a_cotangent_back_to_its_weights(name):
    case = CASES[name]
    op, weights, x = case.op(btf), case.weights(), draw(BATCH, *case.x_shape)
    cotangent = draw(BATCH, *case.y_shape, seed=5)
    true = jax.vjp(lambda weights: case.plain(x, weights), weights)[1](cotangent)[0]
    testing.compare(op.xy_to_dw(x, cotangent, weights), true).check(1e-12)


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('name', CASES)
def test_a_bias_may_be_absent(name):
    case = CASES[name]
    op, weights, x = case.op(btf), case.weights(), draw(BATCH, *case.x_shape)
    expected = case.plain(x, weights | {'bias': jnp.zeros_like(weights.pop('bias'))})
    for absent in (weights, weights | {'bias': None}):
        for run in (op, op.raw_xw_to_y):
            np.testing.assert_allclose(run(x, absent), expected, rtol=1e-12)


@pytest.mark.usefixtures('quiet')
def test_units_pass_through_ops():
    x, weight = jnp.ones(N_IN) * u.mS, jnp.ones((N_IN, N)) * u.mV
    weights = {'weight': weight, 'bias': jnp.ones(N) * u.nA}
    op = btf.MatMulOp(mask(N_IN, N))
    for y in (op(x, weights), op.raw_xw_to_y(x, weights), btf.matmul(x, weight, weights['bias'])):
        assert u.get_unit(y) == u.uA
    pulled = op.xy_to_dw(x, jnp.ones(N), weights)
    np.testing.assert_array_equal(u.get_mantissa(pulled['weight']), mask(N_IN, N))
    assert u.get_unit(pulled['weight']) == u.mV  # as JAX has it: in the weight's own form
    gain = btf.ElemWiseOp(jnp.exp)
    for y in (gain(jnp.ones(2) * u.mV), gain.raw_xw_to_y(None, jnp.ones(2) * u.mV)):
        assert u.get_unit(y) == u.mV
        np.testing.assert_allclose(u.get_mantissa(y), np.e, rtol=1e-6)


@pytest.mark.usefixtures('x64', 'quiet')
def test_an_op_of_ones_own_has_a_plain_form_and_a_pull_back():
    class Squared(btf.ETraceOp):
        def xw_to_y(self, inputs, weights):
            return btf.matmul(inputs, weights**2)

    op, weight, x = Squared(name='squared'), draw(N_IN, N), draw(BATCH, N_IN)
    assert (op.name, op.is_diagonal) == ('squared', False)
    np.testing.assert_allclose(op.raw_xw_to_y(x, weight), x @ weight**2, rtol=1e-12)
    assert 'etp_' not in str(jax.make_jaxpr(op.raw_xw_to_y)(x, weight))
    true = 2 * weight * jnp.broadcast_to(x.sum(0)[:, None], weight.shape)
    np.testing.assert_allclose(op.xy_to_dw(x, jnp.ones((BATCH, N)), weight), true, rtol=1e-12)


# Parameters in a model


class Leaky(brainstate.nn.Module):
    """States that are driven by ``drive(x)``, of one parameter or more."""

    def __init__(self, drive, shape, **params):
        super().__init__()
        self.drive, self.shape = drive, shape
        for name, param in params.items():
            setattr(self, name, param)

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, *self.shape)))

    def update(self, x):
        self.h.value = jnp.tanh(0.8 * self.h.value + self.drive(x))
        return self.h.value


def model_of(param: Any, drive: Callable[[Any], Any], *shape: int) -> Leaky:
    return Leaky(drive, shape, W=param)


def in_param(case: Case, lib: ModuleType = btf) -> Leaky:
    param = lib.ETraceParam(case.weights(), case.op(lib))
    return model_of(param, param.execute, *case.y_shape)


def by_function(case: Case, function: Callable[[Any, Any], Any]) -> Leaky:
    param = brainstate.ParamState(case.weights())
    return model_of(param, lambda x: function(x, param.value), *case.y_shape)


def loss_of(run):
    return lambda x: jnp.sum(jnp.sin(3 * run(x)))


RULES = {'d_rtrl': {}, 'pp_prop': {'decay_or_rank': DECAY}}


def learned(model: Leaky, xs: jax.Array, rule: str = 'd_rtrl', *, vmap=False, **options) -> Any:
    learner = btf.compile(model, rule, xs[0], batch_size=BATCH, vmap=vmap, **RULES[rule])
    return learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum', **options)


def true_gradient(model: Leaky, xs: jax.Array, rule: str = 'd_rtrl') -> Any:
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    if rule == 'd_rtrl':
        return testing.bptt(model, xs, step_fn=loss_of(model))
    return testing.recurrence(model, xs, step_fn=loss_of(model), decay=(DECAY, DECAY))


@pytest.mark.usefixtures('x64', 'quiet', 'silent')
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', CASES)
def test_a_parameter_is_learned_like_the_function_of_its_op(name, rule):
    case = CASES[name]
    xs = draw(STEPS, BATCH, *case.x_shape)
    found = learned(in_param(case), xs, rule, trace_every=2)
    testing.compare(found, learned(by_function(case, case.written), xs, rule)).check(1e-11)
    # the oracle of pp-prop finds the op in the model; BPTT needs none
    truth = case.plain if rule == 'd_rtrl' else case.written
    testing.compare(found, true_gradient(by_function(case, truth), xs, rule)).check(1e-11)


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('rule', RULES)
def test_masked_weights_get_no_gradient(rule):
    case = CASES['mask']
    gradient = learned(in_param(case), draw(STEPS, BATCH, N_IN), rule)[('W',)]['weight']
    np.testing.assert_array_equal(np.asarray(gradient) != 0, mask(N_IN, N))


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('name', ['mask', 'conv', 'sparse', 'low rank, scaled'])
def test_a_parameter_is_learned_in_a_mapped_model_and_without_a_trace(name):
    case = CASES[name]
    xs = draw(STEPS, BATCH, *case.x_shape)
    true = true_gradient(by_function(case, case.plain), xs)
    testing.compare(learned(in_param(case), xs, trace='fresh'), true).check(1e-11)
    if name != 'conv':  # whose plain form here needs a batch
        testing.compare(learned(in_param(case), xs, vmap=True), true).check(1e-11)


@pytest.mark.usefixtures('x64', 'quiet', 'silent')
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('as_op', [False, True], ids=['function', 'op'])
def test_an_element_wise_parameter_is_learned(rule, as_op):
    xs = draw(STEPS, BATCH, N)

    def gain_of(weight):
        return jnp.broadcast_to(weight, (BATCH, N))

    gain = btf.ElemWiseParam(draw(N, seed=1), btf.ElemWiseOp(jnp.cos) if as_op else jnp.cos)
    bare = brainstate.ParamState(draw(N, seed=1))
    found = learned(model_of(gain, lambda x: gain_of(gain.execute()) * x, N), xs, rule)

    def written(x):
        return gain_of(btf.element_wise(bare.value, weight_fn=jnp.cos)) * x

    def plain(x):
        return gain_of(jnp.cos(bare.value)) * x

    testing.compare(found, learned(model_of(bare, written, N), xs, rule)).check(1e-11)
    truth = plain if rule == 'd_rtrl' else written
    testing.compare(found, true_gradient(model_of(bare, truth, N), xs, rule)).check(1e-11)


@pytest.mark.usefixtures('x64', 'quiet')
def test_an_element_wise_op_takes_a_dictionary_of_weights():
    op = btf.ElemWiseOp(lambda w: w['scale'] * jnp.tanh(w['shape']))
    weights = {'scale': draw(N), 'shape': draw(N, seed=1)}
    expected = weights['scale'] * jnp.tanh(weights['shape'])
    for y in (op(weights), op.raw_xw_to_y(None, weights), btf.ElemWiseParam(weights, op).execute()):
        np.testing.assert_allclose(y, expected, rtol=1e-12)


@pytest.mark.usefixtures('x64', 'quiet')
def test_kinds_of_gradients_make_no_difference():
    case, xs = CASES['dense'], draw(STEPS, BATCH, N_IN)
    true = true_gradient(by_function(case, case.plain), xs)
    for kind, kept in ((None, 'adaptive'), ('full',) * 2, ('approx',) * 2, ('adaptive',) * 2):
        param = btf.ETraceParam(case.weights(), btf.MatMulOp(), grad=kind, name='w')
        assert (param.gradient, param.is_etrace, param.name) == (kept, True, 'w')
        testing.compare(learned(model_of(param, param.execute, N), xs), true).check(1e-11)
    assert btf.ElemWiseParam(draw(N)).gradient == 'full'


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('as_op', [False, True], ids=['function', 'op'])
def test_a_parameter_without_a_trace_gets_the_gradient_of_each_step(rule, as_op):
    case, xs = CASES['mask'], draw(STEPS, BATCH, N_IN)
    traced = btf.ETraceParam({'weight': draw(N_IN, N, seed=7)}, btf.MatMulOp())
    other = btf.NonTempParam(case.weights(), case.op(btf) if as_op else case.plain, name='v')
    assert isinstance(other, brainstate.ParamState) and other.name == 'v'
    model = Leaky(lambda x: traced.execute(x) + other.execute(x), (N,), V=traced, W=other)
    found = learned(model, xs, rule)

    def loss(weights):
        def step(h, x):
            drive = x @ traced.value['weight'] + case.plain(x, weights)
            h = jnp.tanh(0.8 * jax.lax.stop_gradient(h) + drive)
            return h, jnp.sum(jnp.sin(3 * h))

        return jax.lax.scan(step, jnp.zeros((BATCH, N)), xs)[1].sum()

    true = jax.grad(loss)(other.value)
    testing.compare(found[('W',)], true).check(1e-11)
    assert np.abs(np.asarray(found[('V',)]['weight'])).max() > 0.1


@pytest.mark.usefixtures('x64', 'quiet', 'silent')
@pytest.mark.parametrize('as_op', [False, True], ids=['function', 'op'])
def test_a_fake_parameter_is_a_constant(as_op):
    case, xs = CASES['mask'], draw(STEPS, BATCH, N_IN)
    fake = btf.FakeETraceParam(case.weights(), case.op(btf) if as_op else case.plain)
    gain = btf.FakeElemWiseParam(draw(N), btf.ElemWiseOp(jnp.tanh) if as_op else jnp.tanh, 'g')
    assert not isinstance(fake, brainstate.State) and not isinstance(gain, brainstate.State)
    np.testing.assert_allclose(gain.execute(), jnp.tanh(draw(N)), rtol=1e-12)
    assert gain.name == 'g'

    def model(function):
        param = brainstate.ParamState({'weight': draw(N_IN, N, seed=7)})

        def drive(x):
            scale = jnp.broadcast_to(gain.execute(), (BATCH, N))
            return function(x, param.value['weight']) + scale * fake.execute(x)

        return Leaky(drive, (N,), W=param, fake=fake, gain=gain)

    found = learned(model(btf.matmul), xs)
    assert list(found) == [('W',)]
    testing.compare(found, true_gradient(model(jnp.matmul), xs)).check(1e-11)


# Beside the reference


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('name', ['dense', 'mask', 'low rank'])
@pytest.mark.parametrize('rule', RULES)
def test_gradients_are_those_of_the_reference_where_it_is_right(name, rule, reference):
    case, xs = CASES[name], draw(STEPS, BATCH, N_IN)
    found = learned(in_param(case), xs, rule)
    with promoting():
        model = in_param(case, reference)
        learner = reference.compile(model, rule, xs[0], batch_size=BATCH, **RULES[rule])
        theirs = learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum')
    if name == 'mask':  # before the op, where it is wrong
        difference = theirs[('W',)]['weight'] - found[('W',)]['weight']
        assert np.abs(np.asarray(difference)).max() > 0.1
    else:
        testing.compare(found, theirs).check(1e-11)


@pytest.mark.usefixtures('x64', 'quiet')
@pytest.mark.parametrize('name', [name for name in CASES if name != 'sparse'])
def test_outputs_are_those_of_the_reference(name, reference):
    case = CASES[name]
    weights, x = case.weights(), draw(BATCH, *case.x_shape)
    with promoting():
        expected = case.op(reference)(x, weights)
    np.testing.assert_allclose(case.op(btf)(x, weights), expected, rtol=1e-12)


# Bad input


X = jnp.ones(N_IN)
WRONG = {
    'weights that are no dictionary': (
        lambda: btf.MatMulOp()(X, jnp.ones((N_IN, N))),
        TypeError,
        "MatMulOp: found weights of type .*, expected a dictionary with 'weight' and, if",
    ),
    'a key is missing': (
        lambda: btf.MatMulOp()(X, {'w': jnp.ones((N_IN, N))}),
        ValueError,
        r"MatMulOp: found weights with the keys \['w'\], expected .* Add 'weight'",
    ),
    'no dictionary for a convolution': (
        lambda: btf.ConvOp(None, (1,), 'SAME')(X, X),
        TypeError,
        'ConvOp: found weights of type',
    ),
    'no kernel': (
        lambda: btf.ConvOp(None, (1,), 'SAME')(X, {'bias': X}),
        ValueError,
        "ConvOp: .*Add 'weight'",
    ),
    'no dictionary for a sparse matrix': (
        lambda: btf.SpMatMulOp(sparse())(X, X),
        TypeError,
        'SpMatMulOp: found weights of type',
    ),
    'no values of entries': (
        lambda: btf.SpMatMulOp(sparse()).raw_xw_to_y(X, {'data': X}),
        ValueError,
        "SpMatMulOp: .*Add 'weight'",
    ),
    'no dictionary for low rank': (
        lambda: btf.LoraOp()(X, X),
        TypeError,
        "LoraOp: found weights of type .* with 'B', 'A' and",
    ),
    'half of a product': (
        lambda: btf.LoraOp()(X, {'B': jnp.ones((N_IN, 2))}),
        ValueError,
        "LoraOp: .*Add 'A'",
    ),
    'a mask that is no array': (
        lambda: btf.MatMulOp([[1, 0]]),
        TypeError,
        'MatMulOp: found a weight_mask of type list, expected an array',
    ),
    'a mask of a kernel that is no array': (
        lambda: btf.ConvOp(None, (1,), 'SAME', weight_mask='none'),
        TypeError,
        'ConvOp: found a weight_mask of type str',
    ),
    'a weight_fn that is no function': (
        lambda: btf.MatMulOp(weight_fn=3),
        TypeError,
        'MatMulOp: found weight_fn=3, expected a function',
    ),
    'an order that is no boolean': (
        lambda: btf.MatMulOp(apply_weight_fn_before_mask='yes'),
        TypeError,
        "found apply_weight_fn_before_mask='yes', expected True or False",
    ),
    'a function of entries that is none': (
        lambda: btf.SpMatMulOp(sparse(), 3),
        TypeError,
        'SpMatMulOp: found weight_fn=3',
    ),
    'a dense matrix': (
        lambda: btf.SpMatMulOp(jnp.ones((N_IN, N))),
        TypeError,
        'SpMatMulOp: found a sparse_mat of type .*, expected a matrix of saiunit.sparse or of',
    ),
    'an alpha that is no number': (lambda: btf.LoraOp('1'), TypeError, 'str'),
    'a function for an op': (
        lambda: btf.ETraceParam(X, jnp.tanh),
        TypeError,
        'ETraceParam: found an op of type .*, expected an ETraceOp',
    ),
    'no such kind of gradient': (
        lambda: btf.ETraceParam({}, btf.MatMulOp(), grad='ignored'),
        ValueError,
        r"found grad='ignored', expected one of \['full', 'approx', 'adaptive'\]",
    ),
    'an op that has an input': (
        lambda: btf.ElemWiseParam(X, btf.MatMulOp()),
        TypeError,
        'found a MatMulOp, expected a function of the weight alone or an ElemWiseOp',
    ),
    'an op that has an input, of a constant': (
        lambda: btf.FakeElemWiseParam(X, btf.MatMulOp()),
        TypeError,
        'found a MatMulOp, expected a function of the weight alone',
    ),
    'no function of the weight': (lambda: btf.ElemWiseParam(X, 3), TypeError, 'found fn=3'),
    'no function of the input': (
        lambda: btf.NonTempParam(X, 3),
        TypeError,
        'NonTempParam: found op=3, expected a function',
    ),
    'no function of the input, of a constant': (
        lambda: btf.FakeETraceParam(X, 3),
        TypeError,
        'FakeETraceParam: found op=3',
    ),
    'no function of the constant': (
        lambda: btf.FakeElemWiseParam(X, 3),
        TypeError,
        'FakeElemWiseParam: found op=3',
    ),
    'an op without a definition': (
        lambda: btf.ETraceOp()(X, X),
        NotImplementedError,
        'ETraceOp has no xw_to_y',
    ),
    'a rule of traces': (
        lambda: btf.MatMulOp().dt_to_t(X, X),
        NotImplementedError,
        'MatMulOp has no dt_to_t: .*register_primitive',
    ),
    'a cotangent of another shape': (
        lambda: btf.MatMulOp().xy_to_dw(X, jnp.ones(2), {'weight': jnp.ones((N_IN, N))}),
        ValueError,
        r'xy_to_dw: found a cotangent of shape \(2,\), expected \(4,\)',
    ),
}


@pytest.mark.usefixtures('quiet')
@pytest.mark.parametrize('case', WRONG)
def test_bad_input_is_refused(case):
    attempt, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        attempt()
