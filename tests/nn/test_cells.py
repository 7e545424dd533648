"""The cells and the readout compute their formulas, from the states they say they have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace_fast import nn
from tests.promotion import promoting

pytestmark = pytest.mark.usefixtures('x64')

N_IN, N = 3, 4
Values = dict[str, jax.Array]


def dense(layer: nn.Linear, *inputs: jax.Array) -> jax.Array:
    params = layer.weight.value
    return jnp.concatenate(inputs, -1) @ params['weight'] + params['bias']


def vanilla(cell: Any, x: jax.Array, old: Values) -> Values:
    return {'h': jnp.maximum(dense(cell.W, x, old['h']), 0.0)}


def gru(cell: Any, x: jax.Array, old: Values) -> Values:
    h = old['h']
    z, r = (jax.nn.sigmoid(dense(layer, x, h)) for layer in (cell.Wz, cell.Wr))
    return {'h': (1 - z) * h + z * jnp.tanh(dense(cell.Wh, x, r * h))}


def lstm(cell: Any, x: jax.Array, old: Values) -> Values:
    i, g, f, o = (dense(w, x, old['h']) for w in (cell.Wi, cell.Wg, cell.Wf, cell.Wo))
    c = jax.nn.sigmoid(f + 1) * old['c'] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return {'c': c, 'h': jax.nn.sigmoid(o) * jnp.tanh(c)}


def minimal(cell: Any, x: jax.Array, old: Values) -> Values:
    z = dense(cell.phi, x)
    f = jax.nn.sigmoid(dense(cell.W_u, z, old['h']))
    return {'h': f * old['h'] + (1 - f) * z}


def urlstm(cell: Any, x: jax.Array, old: Values) -> Values:
    weights = (layer.weight.value['weight'] for layer in (cell.Wu, cell.Wf, cell.Wr, cell.Wo))
    candidate, f, r, o = (jnp.concatenate([x, old['h']], -1) @ weight for weight in weights)
    f, r = jax.nn.sigmoid(f + cell.bias.value), jax.nn.sigmoid(r - cell.bias.value)
    g = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
    c = g * old['c'] + (1 - g) * jnp.tanh(candidate)
    return {'c': c, 'h': jax.nn.sigmoid(o) * jnp.tanh(c)}


def mgu(cell: Any, x: jax.Array, old: Values) -> Values:
    h = old['h']
    f = jax.nn.sigmoid(dense(cell.Wf, x, h))
    return {'h': (1 - f) * h + f * jnp.tanh(dense(cell.Wh, x, f * h))}


def mini_gru(cell: Any, x: jax.Array, old: Values) -> Values:
    z = jax.nn.sigmoid(dense(cell.W_z, x, old['h']))
    return {'h': (1 - z) * old['h'] + z * dense(cell.W_x, x)}


def mini_lstm(cell: Any, x: jax.Array, old: Values) -> Values:
    f, i = (jax.nn.sigmoid(dense(layer, x, old['h'])) for layer in (cell.W_f, cell.W_i))
    return {'h': f * old['h'] + i * dense(cell.W_x, x)}


def cfn(cell: Any, x: jax.Array, old: Values) -> Values:
    f, i = (jax.nn.sigmoid(dense(layer, x, old['h'])) for layer in (cell.Wf, cell.Wi))
    return {'h': f * jnp.tanh(old['h']) + i * jnp.tanh(dense(cell.Wh, x))}


def lru(cell: Any, x: jax.Array, old: Values) -> Values:
    """In complex numbers."""

    def matrix(name: str) -> jax.Array:
        re, im = (getattr(cell, f'{name}_{part}').weight.value['weight'] for part in ('re', 'im'))
        return jax.lax.complex(re, im)

    turn = jnp.exp(jax.lax.complex(-jnp.exp(cell.nu_log.value), jnp.exp(cell.theta_log.value)))
    inputs = jnp.exp(cell.gamma_log.value).astype(complex) * (x.astype(complex) @ matrix('B'))
    h = turn * jax.lax.complex(old['h_re'], old['h_im']) + inputs
    return {'h_re': h.real, 'h_im': h.imag, 'y': (h @ matrix('C')).real + cell.D.value * x}


def readout(cell: Any, x: jax.Array, old: Values) -> Values:
    return {'r': jnp.exp(-0.1 / 5.0) * old['r'] + x @ cell.W.value}


class Case(NamedTuple):
    make: Callable[..., Any]
    formula: Callable[[Any, jax.Array, Values], Values]
    states: tuple[str, ...]
    output: str
    state_init: str | None = 'state_init'


CASES = {
    'vanilla': Case(nn.ValinaRNNCell, vanilla, ('h',), 'h'),
    'gru': Case(nn.GRUCell, gru, ('h',), 'h'),
    'lstm': Case(nn.LSTMCell, lstm, ('c', 'h'), 'h'),
    'minimal': Case(nn.MinimalRNNCell, minimal, ('h',), 'h'),
    'urlstm': Case(nn.URLSTMCell, urlstm, ('c', 'h'), 'h'),
    'mgu': Case(nn.MGUCell, mgu, ('h',), 'h'),
    'mini_gru': Case(nn.MiniGRU, mini_gru, ('h',), 'h'),
    'mini_lstm': Case(nn.MiniLSTM, mini_lstm, ('h',), 'h'),
    'cfn': Case(nn.CFNCell, cfn, ('h',), 'h'),
    'lru': Case(nn.LRUCell, lru, ('h_im', 'h_re'), 'y', None),
    'readout': Case(nn.LeakyRateReadout, readout, ('r',), 'r', 'r_init'),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def values(cell: Any) -> Values:
    return {path[0]: state.value for path, state in cell.states(brainstate.HiddenState).items()}


@pytest.mark.parametrize('batch', [None, 5])
def test_steps_follow_the_formula(case: Case, batch: int | None) -> None:
    cell = case.make(N_IN, N)
    cell.init_state(batch)
    lead = () if batch is None else (batch,)
    rng = np.random.default_rng(0)
    for _ in range(3):
        x, old = jnp.asarray(rng.normal(size=(*lead, N_IN))), values(cell)
        with promoting():
            expected = case.formula(cell, x, old)
        output = cell(x)
        for name, value in values(cell).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-14)
            assert value.dtype == jnp.float64
        np.testing.assert_allclose(output, expected[case.output], rtol=1e-12, atol=1e-14)
    assert jnp.any(output != 0)


@pytest.mark.parametrize('batch', [None, 5])
def test_states_start_and_restart_at_their_initial_value(case: Case, batch: int | None) -> None:
    start = 0.0 if case.state_init is None else 0.5
    option = {} if case.state_init is None else {case.state_init: brainstate.nn.init.Constant(0.5)}
    cell = case.make(N_IN, N, **option)
    lead = () if batch is None else (batch,)
    cell.init_state(batch)
    first = cell.states(brainstate.HiddenState)
    assert tuple(path[0] for path in first) == case.states
    cell(jnp.ones((*lead, N_IN)))
    cell.reset_state(batch)
    for path, state in cell.states(brainstate.HiddenState).items():
        assert state is first[path]
        np.testing.assert_array_equal(state.value, np.full((*lead, N), start))


def test_a_cell_in_a_scan_has_the_gradient_of_its_formula(case: Case) -> None:
    cell = case.make(N_IN, N)
    cell.init_state(5)
    start = values(cell)
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(6, 5, N_IN)))
    parameters = cell.states(brainstate.ParamState)

    def by_cell() -> jax.Array:
        return jnp.sin(brainstate.transform.for_loop(cell, xs)).sum()

    def by_formula() -> jax.Array:
        state, total = start, 0.0
        with promoting():
            for x in xs:
                state = case.formula(cell, x, state)
                total += jnp.sin(state[case.output]).sum()
        return total

    found, expected = (brainstate.transform.grad(f, parameters)() for f in (by_cell, by_formula))
    assert found.keys() == expected.keys()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        assert jnp.any(b != 0)


ACTIVE = [nn.CFNCell, nn.GRUCell, nn.LSTMCell, nn.MGUCell, nn.URLSTMCell, nn.ValinaRNNCell]


@pytest.mark.parametrize('make', ACTIVE)
def test_an_activation_is_a_name_or_a_function(make: Callable[..., Any]) -> None:
    assert make(N_IN, N, activation='softplus').activation is brainstate.nn.softplus
    assert make(N_IN, N, activation=jnp.sin).activation is jnp.sin
    for wrong in ('no_such_function', 3):
        with pytest.raises(ValueError, match=f'activation={wrong!r}, expected a function'):
            make(N_IN, N, activation=wrong)


def test_minimal_cell_takes_a_phi() -> None:
    cell = nn.MinimalRNNCell(N, N, phi=jnp.tanh)
    cell.init_state()
    assert [path[0] for path in cell.states(brainstate.ParamState)] == ['W_u']
    assert cell(jnp.ones(N)).shape == (N,)
    with pytest.raises(TypeError, match='phi=3, expected a function or a module'):
        nn.MinimalRNNCell(N, N, phi=3)


@pytest.mark.parametrize('name', sorted({*CASES} - {'lru'}))
def test_sizes_may_be_tuples(name: str) -> None:
    cell = CASES[name].make((N_IN,), (N,))
    cell.init_state(5)
    assert (cell.in_size, cell.out_size) == ((N_IN,), (N,))
    assert cell(jnp.ones((5, N_IN))).shape == (5, N)


def test_readout_without_time_step_says_how_to_set_it() -> None:
    with brainstate.environ.context(dt=None), pytest.raises(ValueError, match='dt is not set'):
        nn.LeakyRateReadout(N_IN, N)


def test_readout_takes_a_time_constant_per_output() -> None:
    tau = jnp.array([1.0, 10.0, 100.0, 1000.0]) * u.ms
    cell = nn.LeakyRateReadout(N_IN, N, tau=tau)
    decay = np.exp(-0.1 / tau.to_decimal(u.ms))
    np.testing.assert_allclose(cell.decay, decay, rtol=1e-14)
    cell.init_state(5)
    cell.r.value = jnp.ones((5, N))
    np.testing.assert_allclose(cell(jnp.zeros((5, N_IN))), np.tile(decay, (5, 1)), rtol=1e-14)
