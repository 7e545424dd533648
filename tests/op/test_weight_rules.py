"""``weight_vjp`` is the gradient of the weights; the trace rules are its per-position pieces."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_fast.op import (
    ETPPrimitive,
    TraceRules,
    einsum,
    element_wise,
    embedding,
    grouped_matmul,
    lora_matmul,
    matmul,
    register_primitive,
)
from braintrace_fast.op.outer import outer_total

pytestmark = pytest.mark.usefixtures('x64')

Weights = dict[str, jax.Array]


class Case(NamedTuple):
    """``plain`` is the op at one position of the batch."""

    name: str
    call: Callable[..., Any]
    plain: Callable[[Any, Weights], jax.Array]
    x: tuple[int, ...] | None
    weights: dict[str, tuple[int, ...]]
    y: tuple[int, ...]
    batch: tuple[int, ...]
    rows: int = 0
    """For an op of indices: how many rows they may name."""


def dense(x: jax.Array, weights: Weights) -> jax.Array:
    return x @ weights['weight'] + weights.get('bias', 0.0)


def grouped(x: jax.Array, weights: Weights) -> jax.Array:
    y = jnp.einsum('gi,gio->go', x, weights['weight'])
    return y + weights['bias'] if 'bias' in weights else y


def low_rank(x: jax.Array, weights: Weights) -> jax.Array:
    return 0.5 * x @ weights['lora_b'] @ weights['lora_a'] + weights.get('bias', 0.0)


def low_rank_op(x: jax.Array, b: jax.Array, a: jax.Array, bias: Any = None) -> jax.Array:
    return lora_matmul(x, b, a, alpha=0.5, bias=bias)


GROUPS = {'weight': (2, 3, 4), 'bias': (2, 4)}
LOW_RANK = {'lora_b': (3, 2), 'lora_a': (2, 4)}
SHARED = 'btgks,nkgm->bmtgn'
WEIGHT, WITH_BIAS = {'weight': (3, 2)}, {'weight': (3, 2), 'bias': (2,)}

CASES = [
    Case('matmul_vector', matmul, dense, (3,), WEIGHT, (2,), ()),
    Case('matmul_batch', matmul, dense, (3,), WEIGHT, (2,), (5,)),
    Case('matmul_bias', matmul, dense, (3,), WITH_BIAS, (2,), (5,)),
    Case('matmul_two_axes', matmul, dense, (3,), WITH_BIAS, (2,), (4, 5)),
    Case('matmul_single_input', matmul, dense, (1,), {'weight': (1, 7)}, (7,), (5,)),
    Case('grouped', grouped_matmul, grouped, (2, 3), {'weight': (2, 3, 4)}, (2, 4), ()),
    Case('grouped_bias', grouped_matmul, grouped, (2, 3), GROUPS, (2, 4), (5,)),
    Case('grouped_two_axes', grouped_matmul, grouped, (2, 3), GROUPS, (2, 4), (4, 5)),
    Case(
        'einsum',
        partial(einsum, SHARED),
        lambda x, w: jnp.einsum(SHARED, x[None], w['weight'])[0],
        (2, 2, 3, 2),
        {'weight': (2, 3, 2, 3)},
        (3, 2, 2, 2),
        (5,),
    ),
    Case('lora', low_rank_op, low_rank, (3,), LOW_RANK, (4,), (5,)),
    Case('lora_bias', low_rank_op, low_rank, (3,), LOW_RANK | {'bias': (4,)}, (4,), (4, 5)),
    Case('embedding', embedding, lambda x, w: w['weight'][x], (), WEIGHT, (2,), (5,), 3),
    Case(
        'embedding_shaped',
        embedding,
        lambda x, w: w['weight'][x],
        (),
        {'weight': (4, 3, 2)},
        (3, 2),
        (5,),
        4,
    ),
    Case('embedding_one', embedding, lambda x, w: w['weight'][x], (), WEIGHT, (2,), (), 3),
    Case('element_wise', element_wise, lambda _, w: w['weight'], None, {'weight': (3,)}, (3,), ()),
    Case(
        'element_wise_in_batched_group',
        element_wise,
        lambda _, w: w['weight'],
        None,
        {'weight': (4, 3)},
        (4, 3),
        (5,),
    ),
    Case(
        'scalar',
        element_wise,
        lambda _, w: jnp.broadcast_to(w['weight'], (3,)),
        None,
        {'weight': ()},
        (3,),
        (5,),
    ),
    Case(
        'shared_axis',
        element_wise,
        lambda _, w: jnp.broadcast_to(w['weight'], (4, 3)),
        None,
        {'weight': (4, 1)},
        (4, 3),
        (5,),
    ),
]

# A weight shared between positions has a finer trace than itself, until that is contracted; and
# others have theirs in other coordinates.
FINER = 'scalar', 'shared_axis', 'einsum', 'lora', 'lora_bias', 'embedding_shaped'
ONE_WEIGHT_PER_POSITION = [case for case in CASES if case.name not in FINER]


class Setup(NamedTuple):
    primitive: ETPPrimitive
    params: dict[str, Any]
    weights: Weights
    draw_x: Callable[..., Any]
    draw_plane: Callable[..., jax.Array]
    case: Case

    @property
    def rules(self) -> TraceRules:
        """The rules, as functions of the op's own input and planes, that give its own weights."""
        rules, params = self.primitive.trace_rules, self.params

        def view(function: Any, value: Any) -> Any:
            return value if function is None else function(value, **params)

        def of_x(rule: Any) -> Any:
            return lambda x, plane, **_: rule(
                view(rules.operand, x), view(rules.plane_view, plane), **params
            )

        def contract(plane: Any, trace: Any, **_: Any) -> Any:
            read = rules.contract(view(rules.plane_view, plane), trace, **params)
            return jax.vjp(lambda w: view(rules.weight_view, w), self.weights)[1](read)[0]

        return TraceRules(
            of_x(rules.outer),
            of_x(rules.outer_sum),
            lambda plane, trace, **_: rules.decay(view(rules.plane_view, plane), trace, **params),
            contract,
        )

    def jacobian_rows(self, x: Any, plane: jax.Array) -> Weights:
        """``sum_position plane * dy/dweight`` for each place in the batch, by dense Jacobians."""
        batch_ndim = plane.ndim - len(self.case.y)

        def at_one_place(x: Any, plane: jax.Array) -> Weights:
            jacobians = jax.jacobian(lambda w: self.case.plain(x, w))(self.weights)
            return jax.tree.map(lambda jac: jnp.tensordot(plane, jac, plane.ndim), jacobians)

        x_axis = None if x is None else 0
        for _ in range(batch_ndim):
            at_one_place = jax.vmap(at_one_place, in_axes=(x_axis, 0))
        return jax.jit(at_one_place)(x, plane)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def setup(request: pytest.FixtureRequest) -> Setup:
    case = request.param
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape))

    def inputs(*lead: int) -> Any:
        if case.x is None:
            return None
        shape = (*lead, *case.batch, *case.x)
        return jnp.asarray(rng.integers(case.rows, size=shape)) if case.rows else normal(shape)

    weights = {key: normal(shape) for key, shape in case.weights.items()}
    operands = () if case.x is None else (inputs(),)
    (eqn,) = jax.make_jaxpr(case.call)(*operands, *weights.values()).jaxpr.eqns
    return Setup(
        eqn.primitive,
        eqn.params,
        weights,
        inputs,
        lambda *lead: normal((*lead, *case.batch, *case.y)),
        case,
    )


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key].dtype == jnp.float64
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-13, atol=1e-13)
        assert jnp.any(expected[key] != 0)


def test_trainable_invars_name_the_weights_and_their_positions(setup: Setup) -> None:
    first = 0 if setup.primitive.x_invar_index is None else 1
    expected = {key: first + i for i, key in enumerate(setup.weights)}
    assert setup.primitive.trainable_invars(setup.params) == expected


@pytest.mark.parametrize('lead', [(), (7,), (2, 7)], ids=['step', 'window', 'two_axes'])
def test_weight_vjp_sums_over_time_and_batch(setup: Setup, lead: tuple[int, ...]) -> None:
    x, cotangent = setup.draw_x(*lead), setup.draw_plane(*lead)
    rows = setup.jacobian_rows(x, cotangent)
    summed = tuple(range(len(lead) + len(setup.case.batch)))
    expected = {key: rows[key].sum(summed) for key in rows}
    for extra in ({}, {'leading_axes': len(lead)}):
        found = setup.primitive.weight_vjp(x, cotangent, setup.weights, **extra, **setup.params)
        assert_same(found, expected)


@pytest.mark.parametrize('setup', ONE_WEIGHT_PER_POSITION, indirect=True, ids=lambda c: c.name)
def test_outer_is_the_jacobian_of_each_position(setup: Setup) -> None:
    x, plane = setup.draw_x(), setup.draw_plane()
    found = setup.rules.outer(x, plane)
    assert_same(found, setup.jacobian_rows(x, plane))


def test_outer_sum_is_the_sum_of_outer_over_time(setup: Setup) -> None:
    rules = setup.rules
    x, plane = setup.draw_x(7), setup.draw_plane(7)
    steps = [rules.outer(None if x is None else x[t], plane[t], **setup.params) for t in range(7)]
    expected = jax.tree.map(lambda *values: sum(values), *steps)
    assert_same(rules.outer_sum(x, plane, **setup.params), expected)


def test_decay_scales_every_position_of_the_trace(setup: Setup) -> None:
    rules, params = setup.rules, setup.params
    x, plane, decay = setup.draw_x(), setup.draw_plane(), setup.draw_plane()
    trace = rules.outer(x, plane, **params)
    assert_same(rules.decay(decay, trace, **params), rules.outer(x, decay * plane, **params))


def test_contract_is_the_gradient_that_the_trace_stands_for(setup: Setup) -> None:
    rules, params = setup.rules, setup.params
    x, plane, signal = setup.draw_x(), setup.draw_plane(), setup.draw_plane()
    rows = setup.jacobian_rows(x, signal * plane)
    expected = {key: rows[key].sum(tuple(range(len(setup.case.batch)))) for key in rows}
    found = rules.contract(signal, rules.outer(x, plane, **params), **params)
    assert_same(found, expected)
    assert {key: value.shape for key, value in found.items()} == setup.case.weights


OUTER = [case for case in CASES if case.call in (matmul, grouped_matmul)]


@pytest.mark.parametrize('setup', OUTER, indirect=True, ids=lambda case: case.name)
def test_one_output_stands_for_many_that_are_the_same(setup: Setup) -> None:
    rules, params = setup.rules, setup.params
    x, decay, signal = setup.draw_x(), setup.draw_plane(), setup.draw_plane()
    narrow = setup.draw_plane()[..., :1]
    whole = jnp.broadcast_to(narrow, signal.shape)
    trace, expected = rules.outer(x, narrow, **params), rules.outer(x, whole, **params)
    assert all(leaf.shape[-1] == 1 for leaf in trace.values())
    for rule in (rules.decay, rules.contract):
        assert_same(rule(signal, trace, **params), rule(signal, expected, **params))
    decayed = rules.decay(decay[..., :1], trace, **params)
    assert all(leaf.shape[-1] == 1 for leaf in decayed.values())
    x, u = setup.draw_x(4), setup.draw_plane(4)
    first = {key: leaf[..., :1] for key, leaf in rules.outer_sum(x, u, **params).items()}
    assert_same(rules.outer_sum(x, u[..., :1], **params), first)


def test_two_windows_of_the_recurrence_in_closed_form(setup: Setup) -> None:
    """``e_K = P_0 e_0 + sum_t x_t (x) u_t`` for one state plane, against the step recurrence."""
    rules, params, steps = setup.rules, setup.params, 4
    x, f, decay = setup.draw_x(steps), setup.draw_plane(steps), setup.draw_plane(steps)
    entry = rules.outer(setup.draw_x(), setup.draw_plane(), **params)

    expected = entry
    for t in range(steps):
        new = rules.outer(None if x is None else x[t], f[t], **params)
        decayed = rules.decay(decay[t], expected, **params)
        expected = jax.tree.map(jnp.add, decayed, new)

    suffix = jnp.cumprod(decay[::-1], axis=0)[::-1]
    u = f * jnp.concatenate([suffix[1:], jnp.ones_like(f[:1])])
    found = jax.tree.map(
        jnp.add, rules.decay(suffix[0], entry, **params), rules.outer_sum(x, u, **params)
    )
    assert_same(found, expected)


def test_outer_of_abstract_arrays_gives_the_shape_of_a_zero_trace(setup: Setup) -> None:
    rules, params = setup.rules, setup.params
    x, plane = setup.draw_x(), setup.draw_plane()
    zero = jax.eval_shape(lambda x, plane: rules.outer(x, plane, **params), x, plane)
    assert jax.tree.map(jnp.shape, rules.outer(x, plane, **params)) == jax.tree.map(
        lambda leaf: leaf.shape, zero
    )


def test_weight_vjp_keeps_the_dtype_of_the_weights() -> None:
    x, cotangent = jnp.ones((5, 3), jnp.bfloat16), jnp.ones((5, 2), jnp.float32)
    weights = {'weight': jnp.ones((3, 2), jnp.float32), 'bias': jnp.ones(2, jnp.bfloat16)}
    with jax.numpy_dtype_promotion('standard'):  # users mix types
        (eqn,) = jax.make_jaxpr(matmul)(x, *weights.values()).jaxpr.eqns
        found = eqn.primitive.weight_vjp(x, cotangent, weights, **eqn.params)
    assert {key: value.dtype for key, value in found.items()} == {
        'weight': jnp.float32,
        'bias': jnp.bfloat16,
    }


@pytest.mark.parametrize('batched', [False, True])
def test_an_op_without_rules_gets_its_weight_vjp_from_its_forward(batched: bool) -> None:
    def forward(x: jax.Array, weight: jax.Array, *, power: int) -> jax.Array:
        return jnp.dot(x, weight**power)

    primitive = register_primitive(f'test_derived_vjp_{batched}', forward, batched=batched)
    rng = np.random.default_rng(0)
    x, cotangent = jnp.asarray(rng.normal(size=(7, 5, 3))), jnp.asarray(rng.normal(size=(7, 5, 2)))
    weights = {'weight': jnp.asarray(rng.normal(size=(3, 2)))}
    expected = {'weight': 2 * weights['weight'] * jnp.einsum('tbi,tbo->io', x, cotangent)}
    for leading_axes in (1, 2):
        found = primitive.weight_vjp(x, cotangent, weights, leading_axes=leading_axes, power=2)
        assert_same(found, expected)
    assert primitive.trace_rules is None


def test_a_given_weight_vjp_is_used_with_time_in_front_only_if_it_can_sum_over_it() -> None:
    def forward(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x[::-1] * weight

    def weight_vjp(x: jax.Array, cotangent: jax.Array, weights: Weights) -> Weights:
        return {'weight': x[::-1] * cotangent}

    primitive = register_primitive('test_one_place_vjp', forward, weight_vjp=weight_vjp)
    x, weights = jnp.arange(6.0).reshape(2, 3), {'weight': jnp.ones(3)}
    np.testing.assert_array_equal(
        primitive.weight_vjp(x, jnp.ones((2, 3)), weights, leading_axes=1)['weight'], [7, 5, 3]
    )
    np.testing.assert_array_equal(
        primitive.weight_vjp(x[0], jnp.ones(3), weights)['weight'], [2, 1, 0]
    )


def test_an_op_of_weights_alone_sums_extra_axes_of_the_cotangent() -> None:
    primitive = register_primitive(
        'test_no_x',
        lambda weight: weight**2,
        x_invar_index=None,
        trainable_invars_fn=lambda params: {'weight': 0},
    )
    found = primitive.weight_vjp(
        None, jnp.ones((7, 5, 3)), {'weight': jnp.arange(3.0)}, leading_axes=2
    )
    np.testing.assert_array_equal(found['weight'], [0.0, 70.0, 140.0])


@pytest.mark.parametrize('sizes', [(3, 5), (3, 20), (20, 3), (1, 1)], ids=str)
def test_the_sum_of_outer_products_of_groups(sizes) -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(4, 2, 3, size))) for size in sizes)
    found = jax.jit(partial(outer_total, groups=1))(x, y)
    np.testing.assert_allclose(found, np.einsum('tbgi,tbgo->gio', x, y), rtol=1e-12)


@pytest.mark.parametrize('sizes', [(3, 5), (3, 20), (20, 3), (1, 1)], ids=str)
def test_the_sum_of_outer_products_whichever_operand_is_narrow(sizes) -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(4, 2, size)), jnp.float32) for size in sizes)
    expected = np.einsum('tbi,tbo->io', x, y)
    np.testing.assert_allclose(jax.jit(outer_total)(x, y), expected, rtol=1e-5, atol=1e-5)
    mapped = jax.vmap(outer_total)(x, y)
    np.testing.assert_allclose(mapped.sum(0), expected, rtol=1e-5, atol=1e-5)
