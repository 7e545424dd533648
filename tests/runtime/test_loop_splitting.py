"""A loop that is split gives what the loop gives."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.interpreters import mlir

import braintrace_fast as braintrace
from braintrace_fast._compat import Primitive
from braintrace_fast.runtime.loop_splitting import StatefulLoop, loop


def plain(body, carry, xs):
    def step(carry, x):
        carry, ys, terms = body(carry, x)
        return carry, (ys, terms)

    carry, (ys, terms) = lax.scan(step, carry, xs)
    return carry, ys, jax.tree.map(lambda a: a.sum(0), terms)


def check_same(body, carry, xs):
    split, expected = loop(body, carry, xs), plain(body, carry, xs)
    assert jax.tree.structure(split) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)
XS = jnp.asarray(rng.normal(size=(5, 3, 4)), jnp.float32)


def test_the_gradient_of_a_recurrent_step():
    def body(carry, x):
        h, w = carry

        def loss(w):
            new = jnp.tanh(x @ w + h)
            return (new**2).sum(), new

        (value, new), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return (new, w), (value, new), {'w': gradient, 'twice': 2 * gradient.T, 'one': 1.0}

    check_same(body, (jnp.zeros((3, 4)), W), XS)


def test_products_are_summed_in_one_product():
    def body(carry, x):
        return carry + x, (), x.T @ carry

    jaxpr = jax.make_jaxpr(lambda xs: loop(body, jnp.zeros((3, 4)), xs))(XS)
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'dot_general']
    contracted = [eqn.params['dimension_numbers'][0] for eqn in dots]
    assert [(0 in a, 0 in b) for a, b in contracted] == [(True, True)]
    check_same(body, jnp.zeros((3, 4)), XS)


def test_what_no_state_waits_for_is_not_in_the_loop():
    def body(h, x):
        return jnp.tanh(h + x), jnp.sin(h) @ W, ()

    jaxpr = jax.make_jaxpr(lambda xs: loop(body, jnp.zeros((3, 4)), xs))(XS)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'scan')
    inside = {eqn.primitive.name for eqn in scan.params['jaxpr'].jaxpr.eqns}
    assert 'tanh' in inside and not inside & {'sin', 'dot_general'}
    check_same(body, jnp.zeros((3, 4)), XS)


def test_results_that_do_not_move_and_literals():
    def body(carry, x):
        h, still = carry
        return (x, still), (still, h, jnp.zeros(2), x), (still, 3.0, h)

    check_same(body, (jnp.zeros((3, 4)), jnp.arange(2.0)), XS)


def test_nothing_to_carry():
    check_same(lambda carry, x: (carry, 2 * x, x), (), XS)


def test_control_flow_and_random_numbers_inside():
    def body(carry, x):
        h, key = carry
        key, sub = jax.random.split(key)
        noise = jax.random.normal(sub, h.shape)
        h = lax.cond(h.sum() > 0, lambda a: a + noise, lambda a: a - x, h)
        _, seen = lax.scan(lambda a, b: (a + b, a * b), h[0], h)
        return (h, key), seen, (noise * x).sum()

    check_same(body, (jnp.ones((3, 4)), jax.random.PRNGKey(0)), XS)


def on_host(x):
    """Runs on the host, one step at a time: nothing says how to map it."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda a: np.cos(a), like, lax.stop_gradient(x))


unmapped = Primitive('unmapped')
unmapped.def_abstract_eval(lambda x: x)
mlir.register_lowering(unmapped, mlir.lower_fun(jnp.cos, multiple_results=False))


@jax.custom_jvp
def with_own_rule(x):
    return on_host(x)


with_own_rule.defjvp(lambda primals, tangents: (with_own_rule(*primals), -jnp.sin(*primals)))

UNMAPPED = {
    'a callback': on_host,
    'a primitive': unmapped.bind,
    'in jit': jax.jit(on_host),
    'in cond': lambda x: lax.cond(x.sum() > 0, on_host, lambda x: x, x),
    'in scan': lambda x: lax.scan(lambda a, b: (a, on_host(b)), (), x)[1],
    'in checkpoint': jax.checkpoint(on_host),
    'in a function with a rule of its own': with_own_rule,
}


@pytest.mark.parametrize('case', UNMAPPED)
def test_what_cannot_be_mapped_stays_in_the_loop(case):
    f = UNMAPPED[case]

    def body(carry, x):
        h, w = carry
        seen, foreseen = f(h), f(x)
        new = jnp.tanh(foreseen @ w + h)
        return (new, w), (seen * 2, foreseen), (f(new), seen, seen.T @ foreseen, f(seen + x).T)

    check_same(body, (jnp.zeros((3, 4)), W), XS)


def test_what_cannot_be_mapped_and_is_not_used_is_left_out():
    def body(h, x):
        on_host(h)
        return h + x, h, ()

    eqns, _ = scanned(body, jnp.zeros((3, 4)), XS)
    assert 'pure_callback' not in {eqn.primitive.name for eqn in eqns}


def test_states_are_read_and_written():
    state, untouched = brainstate.ShortTermState(jnp.zeros(4)), brainstate.ParamState(W)

    def step(x):
        state.value = jnp.tanh(x.sum(0) @ untouched.value + state.value)
        return state.value * 2, (state.value,)

    ys, (total,) = StatefulLoop(step, (XS,))((XS,))
    last = state.value
    state.value = jnp.zeros(4)
    expected = brainstate.transform.for_loop(lambda x: step(x)[0], XS)
    np.testing.assert_allclose(ys, expected, rtol=1e-5)
    np.testing.assert_allclose(total, expected.sum(0) / 2, rtol=1e-5)
    np.testing.assert_allclose(last, state.value, rtol=1e-5)


def scanned(body, carry, xs):
    """The equations that run in the loop, and the shapes of what it reads of all steps."""
    jaxpr = jax.make_jaxpr(lambda xs: loop(body, carry, xs))(xs)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'scan')
    shapes = [v.aval.shape for v in scan.invars if v.aval.shape[:1] == xs.shape[:1]]
    return scan.params['jaxpr'].jaxpr.eqns, shapes


def _is_product(eqn):
    return eqn.primitive.name == 'dot_general'


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


HEAVY, FEW, MANY = normal(9, 4), normal(5, 2, 9), normal(5, 6, 9)


@pytest.mark.parametrize(('xs', 'is_ahead'), [(FEW, True), (MANY, False)])
def test_a_product_of_inputs_alone_runs_ahead_where_its_weights_are_more_than_its_results(
    xs, is_ahead
):
    def body(carry, x):
        h, w = carry
        new = jnp.tanh(h + jnp.sin(x) @ w)
        return (new, w), new * (jnp.sin(x) @ w), ()

    carry = jnp.zeros((xs.shape[1], 4)), HEAVY
    check_same(body, carry, xs)
    inside, read = scanned(body, carry, xs)
    names = {eqn.primitive.name for eqn in inside}
    assert names.isdisjoint({'sin', 'dot_general'}) == is_ahead
    assert read == [xs.shape] + [(5, 2, 4)] * is_ahead


def test_of_layers_of_inputs_the_last_product_alone_is_kept():
    deep = normal(9, 9)

    def body(h, x):
        return jnp.tanh(h + jnp.tanh(x @ deep) @ HEAVY), (), ()

    check_same(body, jnp.zeros((2, 4)), FEW)
    inside, read = scanned(body, jnp.zeros((2, 4)), FEW)
    assert not any(map(_is_product, inside)) and read == [FEW.shape, (5, 2, 4)]


def test_a_state_that_is_a_product_of_inputs():
    def body(carry, x):
        old, w = carry
        new = x @ w
        return (new, w), (old * new, new), old.sum()

    check_same(body, (jnp.ones((2, 4)), HEAVY), FEW)


@pytest.mark.parametrize('order', ['xh', 'hx', 'xhh', 'hxh', 'xhx'])
def test_inputs_and_states_side_by_side_are_multiplied_apart(x64, order):
    """Of what is known in the loop alone, neighbours stay together."""
    xs = normal(5, 2, 9, dtype=float)
    sizes = [{'x': 9, 'h': 4}[part] for part in order]
    weights = normal(sum(sizes), 4, dtype=float) / 4

    def body(carry, x):
        h, w = carry
        joined = jnp.concatenate([{'x': x, 'h': h}[part] for part in order], -1)
        new = jnp.tanh(joined @ w)
        return (new, w), joined * 2, joined.T @ new

    carry = jnp.ones((2, 4)), weights
    split, expected = loop(body, carry, xs), plain(body, carry, xs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, split, expected)
    inside, _ = scanned(body, carry, xs)
    rows = [eqn.invars[1].aval.shape[0] for eqn in inside if _is_product(eqn)]
    assert rows == {'xhh': [8], 'hxh': [4, 4]}.get(order, [4])


def test_the_products_of_traced_ops_leave_the_loop_as_well():
    weights, bias = normal(13, 4) / 4, jnp.ones(4)

    def body(carry, x):
        h, w = carry
        return (jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), w, bias)), w), h, ()

    carry = jnp.ones((2, 4)), weights
    check_same(body, carry, FEW)
    inside, read = scanned(body, carry, FEW)
    assert [eqn.invars[1].aval.shape for eqn in inside if _is_product(eqn)] == [(4, 4)]
    assert read == [FEW.shape, (5, 2, 4)]


@pytest.mark.parametrize(
    ('inputs', 'dtype'), [(3, jnp.float32), (9, jnp.bfloat16)], ids=['few weights', 'few bits']
)
def test_products_that_stay_whole(inputs, dtype):
    """To take them apart would cost more, or round twice."""
    weights = normal(inputs + 4, 4, dtype=dtype)
    xs = normal(5, 2, inputs, dtype=dtype)

    def body(carry, x):
        h, w = carry
        return (jnp.tanh(jnp.concatenate([x, h], -1) @ w), w), h, ()

    carry = jnp.ones((2, 4), dtype), weights
    inside, _ = scanned(body, carry, xs)
    assert [eqn.invars[1].aval.shape for eqn in inside if _is_product(eqn)] == [weights.shape]
    split, expected = loop(body, carry, xs), plain(body, carry, xs)
    np.testing.assert_array_equal(split[1], expected[1])


def test_joined_along_an_axis_that_is_not_summed():
    def body(carry, x):
        h, w = carry
        rows = jnp.concatenate([x, h], 0) @ w
        return (jnp.tanh(rows[:1]), w), rows, ()

    check_same(body, (jnp.ones((1, 9)), normal(9, 9)), FEW)


def test_weights_that_move_are_read_in_every_step():
    def body(carry, x):
        h, w = carry
        return (jnp.tanh(h + x @ w), 0.9 * w), h, ()

    check_same(body, (jnp.ones((2, 4)), HEAVY), FEW)
    inside, _ = scanned(body, (jnp.ones((2, 4)), HEAVY), FEW)
    assert any(map(_is_product, inside))


def test_a_state_is_kept_once_for_two_steps():
    """What the rest reads of a step is in its old and its new state: the product is not kept."""

    def body(carry, x):
        h, w = carry
        product = x @ w
        new = 0.5 * h + product
        return (new, w), (new * h, jnp.sin(new)), ()

    check_same(body, (jnp.ones((3, 4)), W), XS)
    jaxpr = jax.make_jaxpr(lambda xs: loop(body, (jnp.ones((3, 4)), W), xs))(XS)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'scan')
    kept = [v.aval.shape for v in scan.outvars if v.aval.ndim == 3]
    assert kept == [(len(XS) + 1, 3, 4)]


def test_what_does_not_move_is_given_once():
    still = brainstate.ShortTermState(jnp.arange(2.0))
    (fixed, moving), _ = StatefulLoop(lambda x: ((2 * still.value, x), ()), (XS,))((XS,))
    np.testing.assert_array_equal(fixed, [[0.0, 2.0]])
    np.testing.assert_array_equal(moving, XS)


def test_of_an_array_of_one_number_the_number_is_kept():
    ramp = jnp.arange(4.0)

    def results(x):
        even = jnp.exp(jnp.full((3, 4), 0.5)) - 1
        uneven = jnp.exp(jnp.concatenate([jnp.zeros((3, 2)), jnp.ones((3, 2))], 1))
        counted = jnp.exp(lax.iota(jnp.float32, 4)) + ramp
        return (even, uneven, counted, even * x), (even, even[:0])

    (even, uneven, counted, moving), (total, _) = StatefulLoop(results, (XS,))((XS,))
    assert even.shape == (1, 1, 1)
    assert (uneven.shape, counted.shape, moving.shape) == ((1, 3, 4), (1, 4), XS.shape)
    np.testing.assert_allclose(total, np.full((3, 4), 5 * even.item()), rtol=1e-5)

    def body(carry, x):
        ys, terms = results(carry)
        return ys[0] * carry + x + ys[1], ys, terms

    check_same(body, jnp.ones((3, 4)), XS)


def test_a_number_that_is_shown_is_whole():
    seen = []

    def body(carry, x):
        return carry + x, jnp.exp(jnp.full((3, 4), 0.5)), ()

    show = lambda step, ys: jax.debug.callback(lambda a: seen.append(a.shape), ys)  # noqa: E731
    jax.block_until_ready(loop(body, jnp.zeros((3, 4)), XS, show))
    jax.effects_barrier()
    assert seen == [(3, 4)] * 5


def test_what_is_zero_in_all_steps_is_known():
    count = brainstate.ShortTermState(jnp.zeros(2))

    def step(x):
        count.value = count.value + x
        return {'none': -jnp.zeros(2), 'ones': jnp.ones(2), 'some': 0 * count.value}, x

    stateful = StatefulLoop(step, (jnp.ones((3, 2)),))
    assert stateful.are_zero == {'none': True, 'ones': False, 'some': False}
    assert jax.tree.map(len, stateful((jnp.ones((3, 2)),))[0]) == {'none': 1, 'ones': 1, 'some': 3}


@settings(max_examples=15)
@given(batch=st.sampled_from([1, 2, 6]), seed=st.integers(0, 10**6))
def test_random_bodies(x64, batch, seed):
    """Whatever is computed from states, inputs and weights, and given back in whatever place."""
    names = ['tanh', 'times', 'inputs', 'states', 'joined', 'layers']

    def body(carry, x):
        h, g, w, moving = carry
        draw = np.random.default_rng(seed)
        pool = [h, g, x[:, :4]]

        def some():
            return pool[draw.integers(len(pool))]

        for name in draw.choice(names, size=8):
            makes = {
                'tanh': lambda: jnp.tanh(some() + some()),
                'times': lambda: some() * some(),
                'inputs': lambda: jnp.sin(x) @ w['x'],
                'states': lambda: jnp.tanh(some() @ w['h'] + some() @ moving),
                'joined': lambda: jnp.concatenate([x, some(), some()], -1) @ w['both'],
                'layers': lambda: jnp.tanh(x @ w['deep']) @ w['x'],
            }
            pool.append(makes[name]())
        new = jnp.tanh(some()), jnp.tanh(some() + some()), w, 0.9 * moving
        return new, (some(), some() * some()), {'product': some().T @ some(), 'sum': some().sum()}

    draw = np.random.default_rng(1)
    shapes = {'x': (9, 4), 'h': (4, 4), 'both': (17, 4), 'deep': (9, 9)}
    weights = {name: jnp.asarray(draw.normal(size=s) / 3) for name, s in shapes.items()}
    states = [jnp.asarray(draw.normal(size=(batch, 4))) for _ in range(2)]
    xs = jnp.asarray(draw.normal(size=(5, batch, 9)))
    carry = *states, weights, weights['h'] / 2
    split, expected = loop(body, carry, xs), plain(body, carry, xs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    jax.tree.map(close, split, expected)
