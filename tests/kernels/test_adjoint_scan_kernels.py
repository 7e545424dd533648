"""The kernels of ``adjoint_scan``: interpreted against the exact reference, and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from braintrace_fast.kernels.adjoint_scan import adjoint_scan, mosaic, naive, reference, triton
from braintrace_fast.kernels.adjoint_scan.operands import AdjointOperands
from braintrace_fast.kernels.adjoint_scan.scanned import as_scan
from braintrace_fast.kernels.scan import mosaic as mosaic_scan
from braintrace_fast.kernels.scan import triton as triton_scan
from braintrace_fast.kernels.specs import CHECKED, AdjointSpec
from tests.kernel_checks import as_planes, assert_close, count_calls, exact, lowered, race_message

KERNELS = pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
PLATFORMS = pytest.mark.parametrize(
    ('kernel', 'platform'), [(triton, 'cuda'), (mosaic, 'tpu')], ids=['cuda', 'tpu']
)


def planes(size, steps, shape, seed=0, **options):
    """Random ``D, f, L, R``; of a density below one some planes are absent."""
    return made(AdjointSpec(size, steps, shape, **options), seed)


def made(spec, seed=0):
    return spec.arrays(np.random.default_rng(seed))[:4]


def check(kernel, *planes, interpret=True, **options):
    operands = AdjointOperands(*planes, **options)
    assert kernel.supports(operands) is None
    found = kernel.adjoint_scan(operands, interpret=interpret)
    nu, w, P, u = naive.adjoint_scan(operands)
    w = [None if a is None else b for a, b in zip(found.w, w, strict=True)]  # not c by itself
    values = as_planes(found, (nu, w, P, u))
    assert_close(found, jax.eval_shape(reference.adjoint_scan, operands), values)
    return found


def carried(run, **options):
    """An implementation as a function of planes, whose exit is wanted too."""
    return lambda *planes: run(AdjointOperands(*planes, carry=True), **options)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    """Unroll less than a GPU wants: what the interpreter compiles is then shorter."""
    monkeypatch.setattr(triton_scan, 'UNROLL', 2)


CASES = CHECKED['adjoint_scan']


@KERNELS
@pytest.mark.parametrize('shape', [(3, 5), (7,)], ids=str)
def test_a_plane_that_is_the_same_in_all_steps_is_given_once(kernel, shape):
    D, f, L, R = planes(size=2, steps=5, shape=shape, density=0.8, seed=8)
    D[0][-1], f[0][0] = D[0][-1][:1], None if f[0][0] is None else f[0][0][:1]
    check(kernel, D, f, L, R, carry=True)


@KERNELS
@pytest.mark.parametrize('steps', [1, 5])
def test_a_plane_that_is_one_number_is_given_as_that(kernel, steps):
    D, f, L, R = planes(size=2, steps=steps, shape=(3, 5), seed=12)
    D[0][1], f[0][0] = D[0][1][:1, :1, :1], f[0][0][:1, :1, :1]
    found = check(kernel, D, f, L, R, carry=True)
    D[0][1], f[0][0] = (jnp.broadcast_to(a, (steps, 3, 5)) for a in (D[0][1], f[0][0]))
    expected = adjoint_scan(D, f, L, R, carry=True)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@KERNELS
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_a_kernel_is_the_reference(kernel, case):
    # The interpreter pads operands with NaN and starts results as NaN.
    operands = case.arrays(np.random.default_rng(0))
    found = check(kernel, *operands, carry=True)
    assert all(np.any(np.asarray(leaf, 'float32')) for leaf in jax.tree.leaves(found.nu))


@KERNELS
def test_only_what_is_wanted_is_computed(kernel):
    D, f, L, R = planes(2, 5, (2, 3), density=0.7, seed=8)
    assert check(kernel, D, f, L, None, carry=False).P == ()
    assert check(kernel, D, f, None, None, carry=True).nu == (None, None)
    assert 'nothing' in kernel.supports(AdjointOperands(D, f))


@KERNELS
def test_what_a_step_says_of_an_op_is_added(kernel):
    D, f, L, _ = planes(2, 5, (2, 3), ops=3, seed=9)
    f[1] = [None, None]  # no later step says anything of this op
    c = [planes(1, 5, (2, 3), seed=10)[2][0], L[0], None]
    found, plain = (check(kernel, D, f, L, None, carry=False, c=own) for own in (c, None))
    np.testing.assert_allclose(found.w[0], plain.w[0] + c[0], rtol=1e-5, atol=1e-5)
    assert found.w[1] is None
    assert adjoint_scan(D, f, L, c=c).w[1] is L[0]


@KERNELS
def test_the_signal_of_the_step_itself_counts_for_ops_of_states_alone(kernel):
    D, f, L, _ = planes(2, 5, (2, 3), ops=2, seed=11)
    found = check(kernel, D, f, L, None, carry=False, within=(True, False))
    plain = adjoint_scan(D, f, L)
    through = sum(a * b for a, b in zip(f[0], L, strict=True))
    np.testing.assert_allclose(found.w[0], plain.w[0] + through, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.w[1], plain.w[1], rtol=1e-5, atol=1e-5)


def test_what_no_result_needs_is_not_read():
    D, f, L, R = planes(2, 3, (4,))
    D[1] = [None, None]  # the second state forgets: its signal reaches no earlier step
    window = triton_scan.window(as_scan(AdjointOperands(D, f, L, R)))
    read = {id(plane) for plane in window.xs}
    assert id(L[1]) not in read
    assert {id(p) for p in (*D[0], *f[0], L[0], *R)} == read


@pytest.mark.parametrize(
    ('shape', 'steps', 'at_once', 'dtype'),
    [((9, 130), 7, 3, 'float32'), ((130,), 20, 8, 'float32'), ((130,), 35, 16, 'bfloat16')],
    ids=['planes', 'rows', 'bfloat16 rows'],
)
def test_the_state_outlives_a_chunk(monkeypatch, capfd, shape, steps, at_once, dtype):
    monkeypatch.setattr(mosaic_scan, 'REGISTERS', 1)
    operands = planes(1, steps, shape, dtype=dtype)
    window = mosaic_scan.window(as_scan(AdjointOperands(*operands, carry=True)))
    tile = mosaic_scan.choose_tile(window)._replace(steps=at_once)
    monkeypatch.setattr(mosaic_scan, 'BUFFERS', mosaic_scan.chunk_bytes(window, tile))
    assert mosaic_scan.choose_tile(window) == tile
    assert steps > 2 * at_once and steps % at_once and shape[-1] > tile.lanes
    races = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    check(mosaic, *operands, carry=True, interpret=races)
    assert 'RACE' not in capfd.readouterr().out


def test_cells_that_write_one_block_are_caught(monkeypatch, capfd):
    layout = mosaic_scan._layout

    def overlapping(*arguments):
        grid, (shape, edge), chunk = layout(*arguments)
        return grid, (shape, pl.BlockSpec(edge.block_shape, lambda *cell: (0, 0, 0))), chunk

    monkeypatch.setattr(mosaic_scan, '_layout', overlapping)
    races = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    run = partial(carried(mosaic.adjoint_scan, interpret=races), *planes(1, 1, (16, 3)))
    assert 'race detected' in race_message(run, capfd)


def test_chunks_in_parallel_are_caught(monkeypatch):
    monkeypatch.setattr(mosaic_scan, 'BUFFERS', 1)
    params = partial(pltpu.CompilerParams, dimension_semantics=('parallel',) * 4)
    monkeypatch.setattr(pltpu, 'CompilerParams', lambda dimension_semantics: params())
    two_cores = pltpu.InterpretParams(num_cores_or_threads=2)
    with pytest.raises(AssertionError):
        check(mosaic, *planes(1, 4, (2, 3)), carry=True, interpret=two_cores)


@KERNELS
def test_a_tile_that_is_left_out_is_caught(kernel, monkeypatch):
    monkeypatch.setattr(mosaic_scan, 'REGISTERS', 1)
    monkeypatch.setattr(pl, 'cdiv', lambda a, b: max(1, a // b))
    with pytest.raises(AssertionError):
        check(kernel, *planes(1, 2, (130,)), carry=True)


@PLATFORMS
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_a_kernel_lowers(kernel, platform, case):
    operands = made(case)
    text = lowered(carried(kernel.adjoint_scan), *operands, platform=platform)
    assert count_calls(text, platform) == 1


BAD_TILES = [
    (triton_scan, triton, 'cuda', triton_scan.Tile(48, 1, 1)),
    (mosaic_scan, mosaic, 'tpu', mosaic_scan.Tile(10, 8, 64)),
]


@pytest.mark.parametrize(('scan', 'kernel', 'platform', 'tile'), BAD_TILES, ids=['cuda', 'tpu'])
def test_a_bad_tile_does_not_lower(monkeypatch, scan, kernel, platform, tile):
    monkeypatch.setattr(scan, 'choose_tile', lambda window: tile)
    with pytest.raises(Exception, match=r'power of 2|divisible by'):
        lowered(carried(kernel.adjoint_scan), *planes(1, 10, (8, 512)), platform=platform)


@PLATFORMS
def test_a_kernel_batches_inside_a_scan(kernel, platform):
    operands = planes(2, 3, (5,), density=0.7)
    batched = jax.tree.map(lambda a: jnp.stack([a, -a]), operands)

    def twice(run, *operands):
        def body(total, _):
            found = jax.vmap(run)(*operands)
            return jax.tree.map(jnp.add, total, found), None

        found = jax.eval_shape(jax.vmap(run), *operands)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), found)
        return jax.lax.scan(body, zeros, length=2)[0]

    found = jax.jit(partial(twice, carried(kernel.adjoint_scan, interpret=True)))(*batched)
    define = partial(twice, carried(reference.adjoint_scan))
    assert_close(found, jax.eval_shape(define, *batched), exact(define, *batched))
    text = lowered(partial(twice, carried(kernel.adjoint_scan)), *batched, platform=platform)
    assert count_calls(text, platform) == 1


@PLATFORMS
def test_a_kernel_lowers_inside_shard_map(kernel, platform):
    operands = planes(2, 3, (2, 4), density=0.7)
    spec = jax.sharding.PartitionSpec

    run = carried(kernel.adjoint_scan)
    found = jax.eval_shape(run, *operands)
    outs = jax.tree.map(lambda a: spec(*[None] * (a.ndim - 2), 'batch', 'neurons'), found)
    ins = spec(None, 'batch', 'neurons')
    sharded = jax.shard_map(run, in_specs=ins, out_specs=outs)
    text = lowered(sharded, *operands, platform=platform, batch=2, neurons=2)
    assert count_calls(text, platform) == 1


@KERNELS
def test_a_kernel_says_what_it_does_not_take(kernel):
    def asked(size, steps, shape, dtype='float32'):
        plane = jax.ShapeDtypeStruct((steps, *shape), dtype)
        vector = [plane] * size
        return kernel.supports(AdjointOperands([vector] * size, [vector], vector, carry=True))

    assert asked(8, 64, (64, 512)) is None
    assert 'float16' in asked(1, 2, (3,), 'float16')
    assert 'empty' in asked(1, 2, (0, 3))
    assert 'empty' in asked(1, 0, (3,))
    assert 'planes per position' in asked(40, 2, (3,))
    one, other = jnp.ones((2, 3)), jnp.ones((2, 3), 'bfloat16')
    mixed = AdjointOperands([[one]], [[other]], carry=True)
    assert 'bfloat16 and float32' in kernel.supports(mixed)


@pytest.mark.parametrize('shape', [(64, 512), (4096,)], ids=['planes', 'rows'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('size', [1, 3, 8])
def test_a_chunk_fits_into_memory(size, dtype, shape):
    plane = jax.ShapeDtypeStruct((10_000, *shape), dtype)
    operands = [[plane] * size] * size, [[plane] * size] * 4, [plane] * size, [plane] * size
    window = mosaic_scan.window(as_scan(AdjointOperands(*operands, carry=True)))
    tile = mosaic_scan.choose_tile(window)
    assert mosaic_scan.vmem_bytes(window, tile) < 14 * 2**20
    assert 4 * mosaic_scan.vmem_bytes(window, tile) > mosaic_scan.BUFFERS


def test_offsets_must_fit():
    plane = jax.ShapeDtypeStruct((2**11, 2**10, 2**10), 'bfloat16')
    operands = AdjointOperands([[plane]], [[plane]], [plane], carry=True)
    assert '32 bits' in triton.supports(operands)
    assert mosaic.supports(operands) is None


@KERNELS
def test_a_window_that_reads_nothing_is_run(kernel):
    signal = jnp.ones((2, 3))
    found = check(kernel, [[None]], [[None]], [signal], None, carry=True)
    assert not np.any(found.P[0][0])
