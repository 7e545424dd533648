"""A sparse weight is the matrix that it stands for, in every format, and says what does not fit."""

import functools
import gc
from pathlib import Path
from typing import Any

import brainevent
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast.op import matmul, sparse_matmul, sparse_pattern, sparse_sums
from braintrace_fast.op.sparse_matmul import sparse_matmul_p
from tests.op_models import OP_MODELS
from tests.op_models.model import Driven
from tests.promotion import promoting

INPUTS, OUTPUTS = 5, 4
SHAPE = (INPUTS, OUTPUTS)
MASK = np.array([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
MATRIX = np.where(MASK, np.random.default_rng(0).normal(size=SHAPE), 0.0)
TARGETS = np.array([[0, 1], [3, 2], [1, 2], [0, 0], [2, 3]])
SOURCES = np.array([[0, 4, 2], [3, 1, 1], [2, 0, 4], [1, 2, 3]])
BCOO, BCSR = jax.experimental.sparse.BCOO, jax.experimental.sparse.BCSR

x64 = pytest.mark.usefixtures('x64')


def draw(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def coo(rows: Any, cols: Any, shape: tuple[int, int] = SHAPE) -> u.sparse.COO:
    return u.sparse.COO((np.ones(len(rows)), np.array(rows), np.array(cols)), shape=shape)


FORMATS = {
    'brainevent.CSR': lambda: brainevent.CSR.fromdense(MATRIX),
    'brainevent.CSC': lambda: brainevent.CSC.fromdense(MATRIX),
    'brainevent.Dense': lambda: brainevent.Dense(jnp.asarray(MATRIX)),
    'saiunit.CSR': lambda: u.sparse.CSR.fromdense(jnp.asarray(MATRIX)),
    'saiunit.CSC': lambda: u.sparse.CSC.fromdense(jnp.asarray(MATRIX)),
    'saiunit.COO': lambda: u.sparse.COO.fromdense(jnp.asarray(MATRIX)),
    'unsorted COO': lambda: coo([2, 0, 3, 0], [1, 3, 0, 1]),
    'twice at a place': lambda: coo([1, 1, 4], [2, 2, 0]),
    'jax.BCOO': lambda: BCOO.fromdense(jnp.asarray(MATRIX)),
    'jax.BCSR': lambda: BCSR.fromdense(jnp.asarray(MATRIX)),
    'FixedNumPerPre': lambda: brainevent.FixedNumPerPre(jnp.ones((5, 2)), TARGETS, shape=SHAPE),
    'FixedNumPerPost': lambda: brainevent.FixedNumPerPost(jnp.ones((4, 3)), SOURCES, shape=SHAPE),
}


@pytest.fixture(params=FORMATS)
def matrix(request: pytest.FixtureRequest, x64: None) -> Any:
    return FORMATS[request.param]()


def todense(matrix: Any, weight: jax.Array) -> jax.Array:
    """The matrix that a weight stands for, written down without the library."""
    kind = type(matrix).__name__
    if kind == 'Dense':
        return weight
    dense = jnp.zeros(SHAPE, weight.dtype)
    if kind == 'FixedNumPerPre':
        return dense.at[np.arange(INPUTS)[:, None], TARGETS].add(weight)
    if kind == 'FixedNumPerPost':
        return dense.at[SOURCES, np.arange(OUTPUTS)[:, None]].add(weight)
    if kind == 'BCOO':
        return dense.at[tuple(np.asarray(matrix.indices).T)].add(weight)
    if kind == 'COO':
        return dense.at[np.asarray(matrix.row), np.asarray(matrix.col)].add(weight)
    by_column = kind == 'CSC'
    for k in range(OUTPUTS if by_column else INPUTS):
        for p in range(int(matrix.indptr[k]), int(matrix.indptr[k + 1])):
            other = int(matrix.indices[p])
            dense = dense.at[(other, k) if by_column else (k, other)].add(weight[p])
    return dense


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert any(jnp.any(b != 0) for b in jax.tree.leaves(expected))


def test_every_format_is_the_matrix_that_it_stands_for(matrix) -> None:
    x, weight, bias = draw(2, 3, INPUTS), draw(*matrix.data.shape, seed=2), draw(OUTPUTS, seed=3)

    def outcome(function: Any) -> Any:
        y, pull_back = jax.vjp(function, x, weight, bias)
        tangents = draw(*x.shape, seed=4), draw(*weight.shape, seed=5), draw(OUTPUTS, seed=6)
        return y, pull_back(jnp.cos(y)), jax.jvp(function, (x, weight, bias), tangents)[1]

    def sparse(x: Any, weight: Any, bias: Any) -> Any:
        return sparse_matmul(x, weight, sparse_mat=matrix, bias=bias)

    def dense(x: Any, weight: Any, bias: Any) -> Any:
        y = x @ todense(matrix, weight)
        return y + jnp.broadcast_to(bias, y.shape)

    assert_same(jax.jit(lambda: outcome(sparse))(), outcome(dense))


@pytest.mark.parametrize('shape', [(1,), ()], ids=str)
@pytest.mark.parametrize('name', ['saiunit.CSR', 'FixedNumPerPost'])
@x64
def test_all_entries_may_share_one_weight(name, shape) -> None:
    matrix = FORMATS[name]()
    x, weight = draw(3, INPUTS), jnp.full(shape, 0.7)

    def sparse(weight: Any) -> Any:
        return sparse_matmul(x, weight, sparse_mat=matrix)

    def dense(weight: Any) -> Any:
        return x @ todense(matrix, jnp.broadcast_to(weight, matrix.data.shape))

    for function in (lambda f: f, lambda f: jax.grad(lambda w: jnp.sin(f(w)).sum())):
        assert_same(function(sparse)(weight), function(dense)(weight))


@x64
@pytest.mark.parametrize('examples', [1, 7, 8, 20, 40])
@pytest.mark.parametrize('entries', [0, 3, 60])
def test_the_sums_are_the_same_in_blocks_of_any_size(examples, entries, monkeypatch) -> None:
    monkeypatch.setattr(sparse_sums, 'ENTRIES', 16)
    rng = np.random.default_rng(0)
    sources, targets = rng.integers(0, 6, entries), rng.integers(0, 3, entries)
    x, w, y = draw(examples, 6), draw(entries), draw(examples, 3)
    matrix = np.zeros((6, 3))
    np.add.at(matrix, (sources, targets), w)
    spread = functools.partial(sparse_sums._spread, size=3)
    places = jnp.asarray(sources, jnp.int32), jnp.asarray(targets, jnp.int32)
    np.testing.assert_allclose(jax.jit(spread)(x, w, *places), x @ matrix, rtol=1e-12, atol=1e-12)
    expected = (np.asarray(x).T @ np.asarray(y))[sources, targets]
    found = jax.jit(sparse_sums._sample)(x, y, *places)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert not entries or np.any(expected)


@x64
def test_traces_and_gradients_of_a_full_pattern_are_those_of_matmul() -> None:
    full = u.sparse.CSR.fromdense(jnp.ones((3, 2)))
    pattern = sparse_pattern.pattern_of(full)
    params = dict(has_bias=True, rows=pattern.rows, cols=pattern.cols, size=2)
    x, plane, decay, bias = draw(7, 4, 3), draw(7, 4, 2, seed=2), draw(4, 2, seed=3), draw(2)
    (eqn,) = jax.make_jaxpr(matmul)(x, draw(3, 2), bias).jaxpr.eqns
    weights = {'weight': draw(3, 2), 'bias': bias}
    flat = {'weight': draw(6), 'bias': bias}
    ours, dense = sparse_matmul_p.trace_rules, eqn.primitive.trace_rules

    def outcomes(rules: Any, vjp: Any, weights: Any, **params: Any) -> Any:
        trace = rules.outer_sum(x, plane, **params)
        return [
            rules.outer(x[0], plane[0], **params),
            trace,
            rules.decay(decay, trace, **params),
            rules.contract(decay, trace, **params),
            vjp(x, plane, weights, **params),
        ]

    found = outcomes(ours, sparse_matmul_p.weight_vjp, flat, **params)
    expected = outcomes(dense, eqn.primitive.weight_vjp, weights, **eqn.params)
    for ours_now, dense_now in zip(found, expected, strict=True):
        whole = dense_now['weight']
        assert_same(ours_now['weight'], whole.reshape(*whole.shape[:-2], 6))
        assert_same(ours_now['bias'], dense_now['bias'])


def test_units_and_functions_of_the_weight() -> None:
    matrix = u.sparse.CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    found = sparse_matmul(
        jnp.array([1.0, 10.0]) * u.mV,
        jnp.array([2.0, 3.0]) * u.mS,
        sparse_mat=matrix,
        bias=jnp.array([1.0, 2.0]) * u.nA,
        weight_fn=jnp.square,
        bias_fn=jnp.exp,
    )
    expected = [90.0 + np.exp(1e-3), 4.0 + np.exp(2e-3)]
    np.testing.assert_allclose(found.to_decimal(u.uA), expected, rtol=1e-6)


@pytest.mark.parametrize('dtype', [bool, np.int32, np.float32])
def test_events_are_taken_as_their_values(dtype) -> None:
    matrix = brainevent.CSR.fromdense(MATRIX.astype(np.float32))
    spikes = jnp.asarray([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]], dtype)
    found = sparse_matmul(brainevent.BinaryArray(spikes), matrix.data, sparse_mat=matrix)
    np.testing.assert_allclose(found, spikes.astype(np.float32) @ MATRIX, rtol=1e-5)
    assert found.dtype == jnp.float32


def test_the_pattern_is_found_once_per_matrix_and_dropped_with_it() -> None:
    matrix = u.sparse.CSR.fromdense(jnp.asarray(MATRIX))
    pattern = sparse_pattern.pattern_of(matrix)
    key = id(matrix)
    assert sparse_pattern.pattern_of(matrix) is pattern
    del matrix
    gc.collect()
    assert key not in sparse_pattern._patterns


def test_the_pattern_is_a_constant_also_if_it_is_first_seen_in_a_traced_function() -> None:
    matrix = u.sparse.CSR.fromdense(jnp.asarray(MATRIX))
    jax.jit(lambda w: sparse_matmul(jnp.ones(INPUTS), w, sparse_mat=matrix))(matrix.data)
    assert not isinstance(sparse_pattern.pattern_of(matrix).rows, jax.core.Tracer)


def test_the_library_does_without_brainevent() -> None:
    files = Path(sparse_pattern.__file__).parents[1].rglob('*.py')
    assert not [file for file in files if 'import brainevent' in file.read_text()]


@x64
def test_a_trace_has_one_number_per_entry_example_and_state() -> None:
    model = OP_MODELS['sparse_matmul_shared']  # one weight, but a trace of every entry
    batch, entries = 3, 8
    xs = model.inputs(1, batch)
    with promoting():
        learner = btf.compile(Driven(model, 'two'), 'd_rtrl', xs[0], batch_size=batch)
    (slow, fast), *_ = learner.trace.value
    assert fast['weight'].nbytes == entries * batch * 8
    # All neurons have one time constant: a number per input and example, and one per example.
    assert sum(a.nbytes for a in slow.values()) == (xs[0].size + batch) * 8


GOOD = u.sparse.CSR.fromdense(jnp.asarray(MATRIX, jnp.float32))
ENTRIES = int(MASK.sum())
X, W = jnp.ones(INPUTS), jnp.ones(ENTRIES)


def compressed(indices: Any, indptr: Any) -> u.sparse.CSR:
    return u.sparse.CSR(
        (np.ones(len(indices)), np.array(indices), np.array(indptr)), shape=(2, OUTPUTS)
    )


def fixed(indices: Any) -> Any:
    class FixedNumPerPost:
        shape, data = SHAPE, np.ones(np.shape(indices))

    FixedNumPerPost.indices = np.array(indices)
    return FixedNumPerPost()


@pytest.mark.parametrize(
    ('x', 'weight', 'options', 'error', 'message'),
    [
        (1.0, W, {}, ValueError, 'expected 5 features in the last axis of x'),
        (jnp.ones((3, 4)), W, {}, ValueError, r'x of shape \(3, 4\).*\(5, 4\)'),
        (X, jnp.ones(3), {}, ValueError, rf'weight of shape \(3,\), expected \({ENTRIES},\)'),
        (X, jnp.ones(SHAPE), {}, ValueError, r'weight of shape \(5, 4\)'),
        (X, W, {'bias': jnp.ones(5)}, ValueError, r'bias of shape \(5,\), expected \(4,\)'),
        (X, jnp.ones(ENTRIES, int), {}, TypeError, 'weight of dtype int32'),
        (X, W, {'bias': jnp.ones(4, bool)}, TypeError, 'bias of dtype bool'),
        (X * u.mV, W, {'bias': jnp.ones(4)}, u.UnitMismatchError, 'bias has the unit 1'),
        (X, W, {'sparse_mat': np.ones(SHAPE)}, TypeError, 'type ndarray, expected a brainevent'),
        (X, W, {'sparse_mat': coo([0], [4])}, ValueError, '1 entries.*column 4, expected 0 to 3'),
        (X, W, {'sparse_mat': coo([5, 0], [0, 0])}, ValueError, 'row 5, expected 0 to 4'),
        (X, W, {'sparse_mat': coo([-1], [0])}, ValueError, 'row -1'),
        (X, W, {'sparse_mat': coo([0, 1], [0])}, ValueError, r'rows of shape \(2,\) and columns'),
        (X, W, {'sparse_mat': compressed([0, 1], [0, 2])}, ValueError, 'expected 3 numbers'),
        (X, W, {'sparse_mat': compressed([0, 1], [0, 1, 1])}, ValueError, 'from 0 to the number'),
        (X, W, {'sparse_mat': compressed([0, 1], [0, 3, 2])}, ValueError, 'rise'),
        (X, W, {'sparse_mat': fixed(SOURCES.T)}, ValueError, r'expected \(4, n\)'),
        (X, W, {'sparse_mat': fixed(SOURCES * 1.0)}, TypeError, 'dtype float64 in sparse_mat'),
        (
            X,
            W,
            {'sparse_mat': BCOO.fromdense(jnp.ones((2, 5, 4)))},
            ValueError,
            r'shape \(2, 5, 4\), expected \(inputs, outputs\)',
        ),
        (
            X,
            W,
            {'sparse_mat': BCOO.fromdense(jnp.ones(SHAPE), n_batch=1)},
            ValueError,
            'without batch or dense axes',
        ),
        (
            X,
            W,
            {'sparse_mat': brainevent.JITCScalarR((1.0, 0.1, 3), shape=SHAPE)},
            TypeError,
            'JITCScalarR, whose entries are drawn just in time',
        ),
    ],
)
def test_it_says_what_it_found_and_expected(x, weight, options, error, message) -> None:
    before = dict(sparse_pattern._patterns)
    with pytest.raises(error, match=message):
        sparse_matmul(x, weight, **{'sparse_mat': GOOD, **options})
    if 'sparse_mat' in options:
        assert sparse_pattern._patterns == before


def test_a_matrix_whose_indices_are_traced_is_refused() -> None:
    matrix = BCOO.fromdense(jnp.asarray(MATRIX, jnp.float32))
    with pytest.raises(TypeError, match='indices of sparse_mat are traced.*close over'):
        jax.jit(lambda m: sparse_matmul(X, m.data, sparse_mat=m))(matrix)


@pytest.mark.parametrize('name', ['brainevent.CSR', 'brainevent.CSC'])
@pytest.mark.usefixtures('x64')
def test_the_reference_computes_the_same(reference, name) -> None:
    brainevent.config.set_backend('cpu', 'jax_raw')
    matrix = FORMATS[name]()
    x, weight, bias = draw(3, INPUTS), draw(ENTRIES, seed=2), draw(OUTPUTS, seed=3)

    def gradients(library: Any) -> Any:
        def total(x: Any, weight: Any, bias: Any) -> Any:
            y = library(x, weight, sparse_mat=matrix, bias=bias, weight_fn=jnp.tanh)
            return jnp.sin(y).sum()

        return jax.grad(total, (0, 1, 2))(x, weight, bias)

    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        expected = gradients(reference.sparse_matmul)
    assert_same(gradients(sparse_matmul), expected)
