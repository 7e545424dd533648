"""The kernels of ``factored_trace`` and ``smooth``: interpreted, and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from braintrace_fast.kernels.factored_trace import mosaic, naive, reference, triton
from braintrace_fast.kernels.factored_trace.operands import FactoredOperands, SmoothOperands
from braintrace_fast.kernels.factored_trace.scanned import as_scan
from braintrace_fast.kernels.scan import mosaic as mosaic_scan
from braintrace_fast.kernels.scan import triton as triton_scan
from braintrace_fast.kernels.specs import CHECKED, FactoredSpec
from tests.kernel_checks import as_planes, assert_close, count_calls, exact, lowered

KERNELS = pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
PLATFORMS = pytest.mark.parametrize(
    ('kernel', 'platform'), [(triton, 'cuda'), (mosaic, 'tpu')], ids=['cuda', 'tpu']
)
DECAY = 0.9


def factors(size, steps, shape, density=0.6, **options):
    """Random ``D, f, start``; some planes of ``D`` and ``f`` are absent."""
    return made(FactoredSpec(size, steps, shape, density=density, **options))


def made(spec):
    return spec.arrays(np.random.default_rng(spec.steps))


def packed(name, *arrays, **options):
    kinds = {'factored_trace': FactoredOperands, 'smooth': SmoothOperands}
    return kinds[name](*arrays, decay=DECAY, **options)


def of_arrays(run, **options):
    """An implementation of ``factored_trace`` as a function of arrays."""
    return lambda *arrays: run(packed('factored_trace', *arrays), **options)


def check(kernel, name, *arrays, interpret=True):
    operands = packed(name, *arrays)
    found = getattr(kernel, name)(operands, interpret=interpret)
    wanted = jax.eval_shape(getattr(reference, name), operands)
    assert_close(found, wanted, as_planes(found, getattr(naive, name)(operands)))


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    """Unroll less than a GPU wants: what the interpreter compiles is then shorter."""
    monkeypatch.setattr(triton_scan, 'UNROLL', 2)


CASES = CHECKED['factored_trace']


@KERNELS
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_a_kernel_is_the_reference(kernel, case):
    # The interpreter pads operands with NaN and starts results as NaN.
    D, f, start = made(case)
    assert kernel.supports(packed('factored_trace', D, f, start)) is None
    check(kernel, 'factored_trace', D, f, start)


@KERNELS
def test_a_plane_that_is_the_same_in_all_steps_is_given_once(kernel):
    D, f, start = factors(2, 5, (3, 7), density=1.0)
    D[1][0] = D[1][0][:1]
    assert kernel.supports(packed('factored_trace', D, f, start)) is None
    check(kernel, 'factored_trace', D, f, start)
    D[1], f[0][1] = [None, None], f[0][1][:1, :1, :1]  # one number for all positions
    assert kernel.supports(packed('factored_trace', D, f, start)) is None
    check(kernel, 'factored_trace', D, f, start)


@KERNELS
@pytest.mark.parametrize(
    ('shape', 'dtype'), [((), 'float32'), ((5,), 'bfloat16'), ((2, 3, 5), 'bfloat16')], ids=str
)
def test_smoothing_is_the_reference(kernel, shape, dtype):
    x = factors(1, 9, shape, dtype=dtype)[1][0][0]  # the trace may be wider than the input
    start = jnp.ones(shape)
    assert kernel.supports_smooth(packed('smooth', x, start)) is None
    check(kernel, 'smooth', x, start)
    assert kernel.supports_smooth(packed('smooth', x, None)) is None
    check(kernel, 'smooth', x, None)
    left, back = kernel.smooth(packed('smooth', x, start, reverse=True), interpret=True)
    same, forth = kernel.smooth(packed('smooth', x[::-1], start), interpret=True)
    np.testing.assert_array_equal(back, forth[::-1])
    np.testing.assert_array_equal(left, same)


@pytest.mark.parametrize(
    ('shape', 'steps', 'at_once'), [((9, 130), 7, 3), ((130,), 20, 8)], ids=['planes', 'rows']
)
def test_the_state_outlives_a_chunk(monkeypatch, capfd, shape, steps, at_once):
    monkeypatch.setattr(mosaic_scan, 'REGISTERS', 1)
    operands = factors(1, steps, shape, density=1.0)
    window = mosaic_scan.window(as_scan(packed('factored_trace', *operands)))
    tile = mosaic_scan.choose_tile(window)._replace(steps=at_once)
    monkeypatch.setattr(mosaic_scan, 'BUFFERS', mosaic_scan.chunk_bytes(window, tile))
    assert mosaic_scan.choose_tile(window) == tile
    races = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    check(mosaic, 'factored_trace', *operands, interpret=races)
    assert 'RACE' not in capfd.readouterr().out


@KERNELS
def test_a_tile_that_is_left_out_is_caught(kernel, monkeypatch):
    monkeypatch.setattr(mosaic_scan, 'REGISTERS', 1)
    monkeypatch.setattr(pl, 'cdiv', lambda a, b: max(1, a // b))
    with pytest.raises(AssertionError):
        check(kernel, 'smooth', jnp.ones((2, 130)), jnp.ones(130))


@PLATFORMS
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_a_kernel_lowers(kernel, platform, case):
    D, f, start = made(case)

    def both(D, f, start):
        hat = kernel.factored_trace(packed('factored_trace', D, f, start))
        return hat, kernel.smooth(packed('smooth', f[0][0], start[0][0]))

    assert count_calls(lowered(both, D, f, start, platform=platform), platform) == 2


@PLATFORMS
def test_a_kernel_batches_inside_a_scan(kernel, platform):
    batched = jax.tree.map(lambda a: jnp.stack([a, -a]), factors(2, 3, (5,)))

    def windows(run, D, f, start):
        def body(start, _):
            last, hat = jax.vmap(run)(D, f, start)
            return [list(op) for op in last], hat

        return jax.lax.scan(body, start, length=2)

    define = partial(windows, of_arrays(reference.factored_trace))
    found = jax.jit(partial(windows, of_arrays(kernel.factored_trace, interpret=True)))(*batched)
    assert_close(found, jax.eval_shape(define, *batched), exact(define, *batched))
    text = lowered(partial(windows, of_arrays(kernel.factored_trace)), *batched, platform=platform)
    assert count_calls(text, platform) == 1


@KERNELS
def test_a_kernel_says_what_it_does_not_take(kernel):
    plane, start = jax.ShapeDtypeStruct((2, 3), 'float32'), jax.ShapeDtypeStruct((3,), 'float32')
    narrow = jax.ShapeDtypeStruct((3,), 'bfloat16')
    computed = jnp.float32(0.5)
    supports, supports_smooth = kernel.supports, kernel.supports_smooth
    assert 'number' in supports(FactoredOperands([[plane]], [[plane]], [[start]], computed))
    assert 'number' in supports_smooth(SmoothOperands(plane, start, computed))
    assert 'nothing' in supports(packed('factored_trace', [[None]], [[None]], [[start]]))
    mixed = packed('factored_trace', [[plane, None]] * 2, [[plane] * 2], [[start, narrow]])
    assert 'bfloat16 and float32' in supports(mixed)
    whole, empty = jax.ShapeDtypeStruct((2, 3), 'int32'), jax.ShapeDtypeStruct((0, 3), 'float32')
    assert 'int32' in supports_smooth(packed('smooth', whole, start))
    assert 'empty' in supports_smooth(packed('smooth', empty, start))
