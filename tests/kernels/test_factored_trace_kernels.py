"""The kernels of ``factored_trace`` and ``smooth``: interpreted, and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from braintrace_fast.kernels.factored_trace import mosaic, reference, triton
from braintrace_fast.kernels.factored_trace.operands import as_scan
from braintrace_fast.kernels.scan import mosaic as mosaic_scan
from braintrace_fast.kernels.scan import triton as triton_scan
from tests.kernel_checks import assert_close, count_calls, exact, lowered

KERNELS = pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
PLATFORMS = pytest.mark.parametrize(
    ('kernel', 'platform'), [(triton, 'cuda'), (mosaic, 'tpu')], ids=['cuda', 'tpu']
)
DECAY = 0.9


def factors(size, steps, shape, density=0.6, dtype='float32', seed=0, ops=1):
    """Random ``D, f, start``; some planes of ``D`` and ``f`` are absent."""
    rng = np.random.default_rng(seed)

    def plane(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def perhaps():
        value = plane(steps, *shape)
        return value if rng.random() < density else None

    D = [[perhaps() for _ in range(size)] for _ in range(size)]
    f = [[plane(steps, *shape), *(perhaps() for _ in range(size - 1))] for _ in range(ops)]
    return D, f, [[plane(*shape) for _ in range(size)] for _ in range(ops)]


def check(kernel, name, *operands, interpret=True):
    define = partial(getattr(reference, name), decay=DECAY)
    found = getattr(kernel, name)(*operands, DECAY, interpret=interpret)
    assert_close(found, jax.eval_shape(define, *operands), exact(define, *operands))


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    """Unroll less than a GPU wants: what the interpreter compiles is then shorter."""
    monkeypatch.setattr(triton_scan, 'UNROLL', 2)


CASES = {
    'one neuron': dict(size=1, steps=1, shape=(1,)),
    'no batch': dict(size=2, steps=11, shape=(37,), seed=1),
    'batch 1': dict(size=3, steps=4, shape=(1, 3), density=0.4, seed=2, ops=2),
    'two axes of neurons': dict(size=2, steps=3, shape=(2, 3, 5), seed=3),
    'no axis': dict(size=2, steps=9, shape=(), seed=4),
    'bfloat16': dict(size=2, steps=9, shape=(3, 33), dtype='bfloat16', seed=5),
    'bfloat16, no batch': dict(size=1, steps=19, shape=(33,), dtype='bfloat16', seed=6),
}


@KERNELS
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_a_kernel_is_the_reference(kernel, case):
    # The interpreter pads operands with NaN and starts results as NaN.
    D, f, start = factors(**case)
    assert kernel.supports(D, f, start, DECAY) is None
    check(kernel, 'factored_trace', D, f, start)


@KERNELS
def test_a_plane_that_is_the_same_in_all_steps_is_given_once(kernel):
    D, f, start = factors(2, 5, (3, 7), density=1.0)
    D[1][0] = D[1][0][:1]
    assert kernel.supports(D, f, start, DECAY) is None
    check(kernel, 'factored_trace', D, f, start)
    D[1], f[0][1] = [None, None], f[0][1][:1, :1, :1]  # one number for all positions
    assert kernel.supports(D, f, start, DECAY) is None
    check(kernel, 'factored_trace', D, f, start)


@KERNELS
@pytest.mark.parametrize(
    ('shape', 'dtype'), [((), 'float32'), ((5,), 'bfloat16'), ((2, 3, 5), 'bfloat16')], ids=str
)
def test_smoothing_is_the_reference(kernel, shape, dtype):
    x = factors(1, 9, shape, dtype=dtype)[1][0][0]  # the trace may be wider than the input
    start = jnp.ones(shape)
    assert kernel.supports_smooth(x, start, DECAY) is None
    check(kernel, 'smooth', x, start)
    assert kernel.supports_smooth(x, None, DECAY) is None
    check(kernel, 'smooth', x, None)
    left, back = kernel.smooth(x, start, DECAY, reverse=True, interpret=True)
    same, forth = kernel.smooth(x[::-1], start, DECAY, interpret=True)
    np.testing.assert_array_equal(back, forth[::-1])
    np.testing.assert_array_equal(left, same)


@pytest.mark.parametrize(
    ('shape', 'steps', 'at_once'), [((9, 130), 7, 3), ((130,), 20, 8)], ids=['planes', 'rows']
)
def test_the_state_outlives_a_chunk(monkeypatch, capfd, shape, steps, at_once):
    monkeypatch.setattr(mosaic_scan, 'REGISTERS', 1)
    operands = factors(1, steps, shape, density=1.0)
    window = mosaic_scan.window(as_scan(*operands, DECAY))
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
    D, f, start = factors(**case)

    def both(D, f, start):
        hat = kernel.factored_trace(D, f, start, DECAY)
        return hat, kernel.smooth(f[0][0], start[0][0], DECAY)

    assert count_calls(lowered(both, D, f, start, platform=platform), platform) == 2


@PLATFORMS
def test_a_kernel_batches_inside_a_scan(kernel, platform):
    batched = jax.tree.map(lambda a: jnp.stack([a, -a]), factors(2, 3, (5,)))

    def windows(run, D, f, start):
        def body(start, _):
            last, hat = jax.vmap(partial(run, decay=DECAY))(D, f, start)
            return [list(op) for op in last], hat

        return jax.lax.scan(body, start, length=2)

    define = partial(windows, reference.factored_trace)
    found = jax.jit(partial(windows, partial(kernel.factored_trace, interpret=True)))(*batched)
    assert_close(found, jax.eval_shape(define, *batched), exact(define, *batched))
    text = lowered(partial(windows, kernel.factored_trace), *batched, platform=platform)
    assert count_calls(text, platform) == 1


@KERNELS
def test_a_kernel_says_what_it_does_not_take(kernel):
    plane, start = jax.ShapeDtypeStruct((2, 3), 'float32'), jax.ShapeDtypeStruct((3,), 'float32')
    narrow = jax.ShapeDtypeStruct((3,), 'bfloat16')
    assert 'number' in kernel.supports([[plane]], [[plane]], [[start]], jnp.float32(0.5))
    assert 'number' in kernel.supports_smooth(plane, start, jnp.float32(0.5))
    assert 'nothing' in kernel.supports([[None]], [[None]], [[start]], DECAY)
    assert 'bfloat16 and float32' in kernel.supports(
        [[plane, None]] * 2, [[plane] * 2], [[start, narrow]], DECAY
    )
    assert 'int32' in kernel.supports_smooth(jax.ShapeDtypeStruct((2, 3), 'int32'), start, DECAY)
    assert 'empty' in kernel.supports_smooth(jax.ShapeDtypeStruct((0, 3), 'float32'), start, DECAY)
