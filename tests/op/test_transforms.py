"""Every ETP op is an ordinary JAX function: one table of ops, each equal to a formula in jnp."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

from braintrace_fast.op import (
    ETPPrimitive,
    conv,
    einsum,
    element_wise,
    embedding,
    grouped_matmul,
    lora_matmul,
    matmul,
    register_primitive,
    sparse_matmul,
)
from tests.op import conv_geometries, sparse

pytestmark = pytest.mark.usefixtures('x64')

squared_dot_p = register_primitive(
    'test_squared_dot', lambda x, weight: jnp.dot(x, weight**2), batched=True
)
gain_p = register_primitive(
    'test_gain', lambda x, weight, *, power: x * weight**power, trace_rules=None
)


INDICES = np.array([0, 3, -1, 2, 0])


class Case(NamedTuple):
    name: str
    op: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    linear: tuple[tuple[int, ...], ...]
    """The sets of operands in which the op is linear."""
    traced_under_vmap: bool = True
    """Whether the op survives vmap over its first operand."""


def affine(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    y = x @ weight
    return y + jnp.broadcast_to(bias, y.shape)


def processed(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return matmul(x, weight, bias, weight_fn=jnp.tanh, bias_fn=jnp.square)


CASES = [
    Case('matmul_vector', matmul, jnp.matmul, ((3,), (3, 2)), ((0,), (1,))),
    Case('matmul_batch', matmul, jnp.matmul, ((5, 3), (3, 2)), ((0,), (1,))),
    Case('matmul_two_axes', matmul, jnp.matmul, ((4, 5, 3), (3, 2)), ((0,), (1,))),
    Case('matmul_vector_bias', matmul, affine, ((3,), (3, 2), (2,)), ((1, 2),)),
    Case('matmul_batch_bias', matmul, affine, ((5, 3), (3, 2), (2,)), ((1, 2),)),
    Case(
        'matmul_processed',
        processed,
        lambda x, w, b: affine(x, jnp.tanh(w), b**2),
        ((5, 3), (3, 2), (2,)),
        (),
    ),
    Case(
        'grouped_bias',
        grouped_matmul,
        lambda x, w, b: (y := jnp.einsum('...gi,gio->...go', x, w)) + jnp.broadcast_to(b, y.shape),
        ((5, 2, 3), (2, 3, 4), (2, 4)),
        ((1, 2),),
    ),
    Case(
        'einsum_shared',
        functools.partial(einsum, 'btgk,gkn->bgtn'),
        functools.partial(jnp.einsum, 'btgk,gkn->bgtn'),
        ((5, 2, 3, 4), (3, 4, 2)),
        ((0,), (1,)),
    ),
    Case(
        'lora',
        functools.partial(lora_matmul, alpha=0.5),
        lambda x, b, a: 0.5 * x @ b @ a,
        ((5, 3), (3, 2), (2, 4)),
        ((0,), (1,), (2,)),
    ),
    Case(
        'embedding',
        functools.partial(embedding, INDICES),
        lambda w: w[INDICES],
        ((4, 3),),
        ((0,),),
        False,
    ),
    Case('element_wise', element_wise, lambda w: w, ((4, 3),), ((0,),), False),
    Case(
        'element_wise_processed',
        functools.partial(element_wise, weight_fn=jnp.exp),
        jnp.exp,
        ((4,),),
        (),
        False,
    ),
    Case(
        'user_op_batched',
        squared_dot_p.bind,
        lambda x, w: x @ w**2,
        ((5, 3), (3, 2)),
        ((0,),),
    ),
    Case(
        'user_op',
        functools.partial(gain_p.bind, power=3),
        lambda x, w: x * w**3,
        ((4,), (4,)),
        ((0,),),
        False,
    ),
    Case(
        'user_op_with_indices',
        lambda x, w: sparse.with_rules.bind(x, w, sparse.ROWS, sparse.COLS, size=sparse.OUTPUTS),
        lambda x, w: x @ sparse.dense(w),
        ((3, sparse.INPUTS), sparse.ROWS.shape),
        ((0,), (1,)),
    ),
    *(
        Case(
            f'conv_{name}',
            functools.partial(conv, **options),
            functools.partial(conv_geometries.plain, **options),
            (x, kernel, *bias.values()),
            ((1, 2) if bias else (1,),),
        )
        for name, x, kernel, bias, _, options in conv_geometries.FEW
    ),
    Case(
        'sparse_matmul_vector',
        functools.partial(sparse_matmul, sparse_mat=sparse.MATRIX),
        lambda x, w: x @ sparse.dense(w),
        ((sparse.INPUTS,), sparse.ROWS.shape),
        ((0,), (1,)),
    ),
    Case(
        'sparse_matmul_batch_bias',
        lambda x, w, b: sparse_matmul(x, w, sparse_mat=sparse.MATRIX, bias=b),
        lambda x, w, b: affine(x, sparse.dense(w), b),
        ((3, sparse.INPUTS), sparse.ROWS.shape, (sparse.OUTPUTS,)),
        ((1, 2),),
    ),
]

SHARDED = 'matmul_batch_bias', 'sparse_matmul_batch_bias', 'user_op_batched'
BATCHED = [case for case in CASES if case.name in SHARDED]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def draw(shapes: tuple[tuple[int, ...], ...], seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape)) for shape in shapes)


def etp_equations(function: Callable[..., Any], *args: Any) -> list[Any]:
    def walk(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            if isinstance(eqn.primitive, ETPPrimitive):
                yield eqn
            for inner in jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


def assert_same(found: Any, expected: Any) -> None:
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
    assert any(jnp.any(b != 0) for b in expected)


def all_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def gradients(*args: jax.Array) -> Any:
        y, pull_back = jax.vjp(function, *args)
        return pull_back(jnp.cos(y))

    return gradients


def test_the_forward_is_the_formula_eager_and_jitted(case: Case) -> None:
    args = draw(case.shapes)
    assert_same(case.op(*args), case.plain(*args))
    assert_same(jax.jit(case.op)(*args), case.plain(*args))
    with jax.disable_jit():
        assert_same(case.op(*args), case.plain(*args))


def test_the_op_is_one_visible_equation_also_under_jit(case: Case) -> None:
    args = draw(case.shapes)
    assert len(etp_equations(case.op, *args)) == 1
    assert len(etp_equations(jax.jit(case.op), *args)) == 1


def test_forward_mode(case: Case) -> None:
    args, tangents = draw(case.shapes), draw(case.shapes, seed=1)
    assert_same(jax.jvp(case.op, args, tangents), jax.jvp(case.plain, args, tangents))


def test_reverse_mode_of_all_operands_at_once(case: Case) -> None:
    args = draw(case.shapes)
    assert_same(all_gradients(case.op)(*args), all_gradients(case.plain)(*args))
    assert_same(jax.jit(all_gradients(case.op))(*args), all_gradients(case.plain)(*args))


def test_reverse_mode_of_each_operand_alone(case: Case) -> None:
    args = draw(case.shapes)
    for i in range(len(args)):
        found, expected = (
            jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), i)(*args) for f in (case.op, case.plain)
        )
        assert_same(found, expected)


def test_derivatives_of_first_and_second_order_agree_with_differences(case: Case) -> None:
    check_grads(case.op, draw(case.shapes), order=2, modes=('fwd', 'rev'))


def test_an_operand_that_does_not_move_costs_no_tangent() -> None:
    x, weight = draw(((5, 3), (3, 2)))
    jaxpr = jax.make_jaxpr(lambda dx: jax.jvp(lambda x: matmul(x, weight), (x,), (dx,))[1])(x)
    zeros = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'broadcast_in_dim']
    assert zeros == []


def test_the_op_is_visible_under_a_derivative(case: Case) -> None:
    assert len(etp_equations(all_gradients(case.op), *draw(case.shapes))) == 1


def test_checkpoint_keeps_gradient_and_op(case: Case) -> None:
    args = draw(case.shapes)
    checkpointed = jax.checkpoint(lambda *a: jnp.sin(case.op(*a)))
    expected = all_gradients(lambda *a: jnp.sin(case.plain(*a)))(*args)
    assert len(etp_equations(checkpointed, *args)) == 1
    assert_same(all_gradients(checkpointed)(*args), expected)


def test_scan_keeps_gradient_and_op(case: Case) -> None:
    args = draw(case.shapes)

    def loop(function: Callable[..., Any], *args: jax.Array) -> jax.Array:
        def body(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(total + function(args[0] * scale, *args[1:])), None

        start = jnp.zeros_like(case.plain(*args))
        return jax.lax.scan(body, start, jnp.array([1.0, -2.0, 0.5]))[0]

    looped = functools.partial(loop, case.op)
    assert len(etp_equations(looped, *args)) == 1
    assert_same(
        all_gradients(looped)(*args), all_gradients(functools.partial(loop, case.plain))(*args)
    )


def test_vmap_over_any_operands_along_any_axis(case: Case) -> None:
    n = len(case.shapes)
    for axes in [*itertools.product((None, 0), repeat=n), (-1,) * n]:
        if all(axis is None for axis in axes):
            continue
        stacked = {None: lambda s: s, 0: lambda s: (6, *s), -1: lambda s: (*s, 6)}
        args = draw(tuple(stacked[a](s) for a, s in zip(axes, case.shapes, strict=True)))
        op, plain = (jax.vmap(f, in_axes=axes) for f in (case.op, case.plain))
        found, expected = (jax.vjp(f, *args) for f in (op, plain))
        assert_same(found[0], expected[0])
        assert_same(found[1](jnp.cos(expected[0])), expected[1](jnp.cos(expected[0])))


def test_vmap_over_x_keeps_the_op_with_one_more_leading_axis(case: Case) -> None:
    x, *weights = case.shapes
    args = draw(((2, 6, *x), *weights))
    only_x = (0, *(None for _ in weights))
    twice = jax.vmap(jax.vmap(case.op, only_x), only_x)
    equations = etp_equations(twice, *args)
    assert len(equations) == case.traced_under_vmap
    for eqn in equations:
        assert eqn.invars[0].aval.shape == (2, 6, *x)
        assert eqn.outvars[0].aval.shape[:2] == (2, 6)
    assert_same(twice(*args), jax.vmap(jax.vmap(case.plain, only_x), only_x)(*args))


def test_per_example_gradients(case: Case) -> None:
    x, *weights = case.shapes
    args = draw(((6, *x), *weights))
    only_x = (0, *(None for _ in weights))
    op, plain = (jax.vmap(all_gradients(f), only_x) for f in (case.op, case.plain))
    assert_same(op(*args), plain(*args))


def test_linear_transpose_with_respect_to_x_or_the_weights(case: Case) -> None:
    args = draw(case.shapes)
    for free in case.linear:

        def restricted(function: Callable[..., Any], *values: jax.Array, free=free) -> jax.Array:
            inputs = list(args)
            for i, value in zip(free, values, strict=True):
                inputs[i] = value
            return function(*inputs)

        values = [args[i] for i in free]
        y, pull_back = jax.vjp(functools.partial(restricted, case.plain), *values)
        transposed = jax.linear_transpose(functools.partial(restricted, case.op), *values)
        assert_same(transposed(jnp.cos(y)), pull_back(jnp.cos(y)))


def test_linear_transpose_passes_symbolic_zeros() -> None:
    x, weight = draw(((5, 3), (3, 2)))
    transposed = jax.linear_transpose(lambda x: (matmul(x, weight), 2.0 * x), x)
    (found,) = transposed((jnp.zeros((5, 2)), jnp.ones((5, 3))))
    np.testing.assert_array_equal(found, 2.0)


def test_integer_operands_have_empty_tangents() -> None:
    x, w = draw(((3, sparse.INPUTS), sparse.ROWS.shape))
    indices = (jnp.asarray(sparse.ROWS), jnp.asarray(sparse.COLS))
    op = functools.partial(sparse.with_rules.bind, size=sparse.OUTPUTS)
    empty = tuple(np.zeros(i.shape, jax.dtypes.float0) for i in indices)
    expected = jax.jvp(lambda x, w: x @ sparse.dense(w), (x, w), (x, w))
    assert_same(jax.jvp(op, (x, w, *indices), (x, w, *empty)), expected)
    assert_same(jax.jit(lambda *args: jax.jvp(op, args, (x, w, *empty)))(x, w, *indices), expected)
    total = jax.grad(lambda *args: jnp.sin(op(*args)).sum(), argnums=(0, 1, 2, 3), allow_int=True)
    gradients = total(x, w, *indices)
    assert_same(gradients[:2], all_gradients(lambda x, w: x @ sparse.dense(w))(x, w))
    assert [g.dtype for g in gradients[2:]] == [jax.dtypes.float0] * 2


def test_no_op_relies_on_promoted_ranks(case: Case) -> None:
    with jax.numpy_rank_promotion('raise'):
        jax.jit(all_gradients(case.op))(*draw(case.shapes))


@pytest.mark.parametrize('case', BATCHED, ids=lambda case: case.name)
def test_shard_map_over_the_batch(case: Case) -> None:
    args = draw(case.shapes)
    mesh = jax.make_mesh((1,), ('batch',), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    specs = (spec('batch'), *(spec() for _ in args[1:]))

    def gradients(*args: jax.Array) -> Any:
        return jax.grad(lambda *a: jnp.sin(case.op(*a)).sum(), 1)(*args)

    found = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=spec())(*args)
    assert_same(found, jax.grad(lambda *a: jnp.sin(case.plain(*a)).sum(), 1)(*args))
