"""The kernels for GPUs as they are emitted: run on the CPU, with an eye on every access."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from accelerators.blocks import block_bytes
from accelerators.broken import decay
from accelerators.cases import case_of, floor, implementation
from accelerators.emulator import MemoryFault, emulate
from braintrace_fast.kernels.specs import (
    EMULATED,
    JacobianSpec,
    SmoothSpec,
    SparseSpec,
    TraceSpec,
)
from tests.kernel_checks import assert_close, exact

PARAMS = plgpu.CompilerParams(num_warps=1, num_stages=1)


def values_of(case):
    """Operands of a case, drawn where it has but their shapes."""
    rng = np.random.default_rng(0)

    def drawn(a):
        return jnp.asarray(rng.normal(size=a.shape), a.dtype)

    return jax.tree.map(
        lambda a: drawn(a) if isinstance(a, jax.ShapeDtypeStruct) else jnp.asarray(a), case.operands
    )


@pytest.mark.parametrize('spec', EMULATED.values(), ids=EMULATED)
def test_a_kernel_is_the_reference_and_moves_each_byte_once(spec):
    case = case_of(spec)
    operands, reference = values_of(case), implementation(case, 'reference')
    found, traffic = emulate(implementation(case, 'triton'), *operands)
    assert_close(found, jax.eval_shape(reference, *operands), exact(reference, *operands))
    assert traffic.unique_loaded + traffic.unique_stored == floor(case)


ROUNDED = [TraceSpec(2, (2, 19, 70)), SparseSpec(2, (19, 7, 9), entries=70)]


@pytest.mark.parametrize('steps', [None, 7], ids=['step', 'carry'])
@pytest.mark.parametrize('spec', ROUNDED, ids=['dense', 'sparse'])
def test_rounding_draws_the_same_for_each_element(spec, steps):
    case = case_of(replace(spec, stored='bfloat16', steps=steps, rounded=True))
    *operands, _ = values_of(case)
    seed = jnp.uint32(7)
    (found, _), traffic = emulate(implementation(case, 'triton'), *operands, seed)
    wanted, _ = implementation(case, 'reference')(*operands, seed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_less(np.mean(np.asarray(a != b)), 0.01)  # float32 rounds too
    assert traffic.stored == traffic.unique_stored


def differentiated(case):
    """What the kernel gives; it reads and writes what its blocks say, and no byte of it more."""
    kernel = implementation(case, 'triton')
    found, traffic = emulate(kernel, *case.operands)
    assert any(np.any(np.asarray(plane, 'float32')) for plane in jax.tree.leaves(found))
    assert traffic.stored == traffic.unique_stored
    assert traffic.unique_loaded + traffic.unique_stored == floor(case)
    assert traffic.loaded + traffic.stored == block_bytes(kernel, case.operands, kept=False)
    return found


def assert_same(found, expected, dtype, rtol):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, dtype)
        atol = rtol * float(jnp.abs(b).max() + 1e-6)
        np.testing.assert_allclose(np.asarray(a, b.dtype), b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(('batch', 'neurons'), [(3, 50), (2, 300)])
@pytest.mark.parametrize(
    'model', ['gru', 'lstm', 'lif', 'alif_expon', 'gif_expon', 'stp', 'custom_vjp', 'switch']
)
def test_the_transition_of_a_model_is_differentiated(model, batch, neurons):
    case = case_of(JacobianSpec(model, batch, neurons))
    expected = implementation(case, 'reference')(*case.operands)
    assert_same(differentiated(case), expected, 'float32', 2e-6)


def test_the_transition_of_two_conductances_is_differentiated():
    case = case_of(JacobianSpec('coba_ei', 3, 5))
    expected = implementation(case, 'reference')(*case.operands)
    assert_same(differentiated(case), expected, 'float32', 2e-6)


@pytest.mark.parametrize(('batch', 'neurons'), [(3, 50), (2, 300)])
@pytest.mark.parametrize('model', ['lstm', 'lif', 'layer_norm', 'custom_vjp'])
def test_a_transition_in_bfloat16_is_that_of_its_values(model, batch, neurons):
    """But for the rounding of results, and of the numbers that a model is made with."""
    case, wide = (case_of(JacobianSpec(model, batch, neurons, bits)) for bits in ('bf16', 32))
    values = [a.astype(b.dtype) for a, b in zip(*case.operands, *wide.operands, strict=True)]
    expected = implementation(wide, 'reference')(values)
    assert_same(differentiated(case), expected, 'bfloat16', 2**-6)


def kernel_of_two(body, *, size=8, block=4, grid=2, aliases=None):
    """A kernel of two programs, as a function of one array."""
    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        body,
        grid=(grid,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((size,), jnp.float32),
        input_output_aliases=aliases or {},
        compiler_params=PARAMS,
    )


def double(old, new):
    new[...] = 2 * old[...]


MASKS_MATTER = pytest.mark.skipif(
    jax.__version_info__[:2] > (0, 10), reason='Pallas masks partial blocks by itself there'
)


@MASKS_MATTER
def test_a_partial_block_without_a_mask_is_caught():
    with pytest.raises(MemoryFault, match='element 7 of operand 0, which has 7'):
        emulate(kernel_of_two(double, size=7), jnp.ones(7))
    with pytest.raises(MemoryFault, match='twice|which has'):
        emulate(partial(decay, tile=(1, 16, 16), params=PARAMS), jnp.ones((1, 19, 14)))


@pytest.mark.parametrize('verb', ['reads', 'writes'])
def test_a_slice_over_the_edge_is_caught(verb):
    def over(old, new):
        here = pl.ds(4 * pl.program_id(0), 4)
        if verb == 'reads':
            new[:4] = old[here]
        else:
            new[here] = old[:4]

    f = pl.pallas_call(over, grid=(2,), out_shape=jnp.ones(7), compiler_params=PARAMS)
    with pytest.raises(MemoryFault, match=f'{verb} element 7 of .*, which has 7'):
        for seed in range(4):
            emulate(f, jnp.ones(7), seed=seed)


@MASKS_MATTER
@pytest.mark.parametrize('name', ['load', 'store'])
def test_our_kernels_without_their_masks_are_caught(monkeypatch, name):
    access = getattr(plgpu, name)
    monkeypatch.setattr(plgpu, name, lambda *a, mask=None, other=None: access(*a))
    specs = TraceSpec(1, (2, 3, 5)), SmoothSpec(2, (33,)), SparseSpec(1, (2, 3, 5), entries=9)
    for case in map(case_of, specs):
        with pytest.raises(MemoryFault):
            emulate(implementation(case, 'triton'), *values_of(case))


def test_a_window_without_its_mask_is_caught(monkeypatch):
    load = plgpu.load
    monkeypatch.setattr(plgpu, 'load', lambda *a, mask=None, other=None: load(*a))
    case = case_of(TraceSpec(1, (1, 32, 32), steps=7))
    with pytest.raises(MemoryFault, match='reads element 224 of operand 0, which has 224'):
        emulate(implementation(case, 'triton'), *values_of(case))


def total(batch_in_grid):
    """A sum over the batch: by one program, or by racing ones that add to the same sum."""

    def racing(e, g):
        g[...] = g[...] + e[0]

    def alone(e, g):
        g[...] = lax.fori_loop(0, 3, lambda b, sum: sum + e[b], jnp.zeros(4))

    return pl.pallas_call(
        racing if batch_in_grid else alone,
        grid=(3,) if batch_in_grid else (1,),
        in_specs=[pl.BlockSpec((1 if batch_in_grid else 3, 4), lambda b: (b, 0))],
        out_specs=pl.BlockSpec((4,), lambda b: (0,)),
        out_shape=jax.ShapeDtypeStruct((4,), jnp.float32),
        compiler_params=PARAMS,
    )


def test_a_racing_accumulation_is_caught():
    e = jnp.arange(12.0).reshape(3, 4)
    found, _ = emulate(total(batch_in_grid=False), e)
    np.testing.assert_array_equal(found, e.sum(0))
    with pytest.raises(MemoryFault, match=r'reads an element of result 0 that program \d has wri'):
        emulate(total(batch_in_grid=True), e)


@pytest.mark.parametrize('seed', range(4))
def test_reading_what_another_program_overwrites_is_caught_in_any_order(seed):
    def shifted(all_of_it, new):
        at = 4 * (1 - pl.program_id(0)) + jnp.arange(4)
        new[...] = plgpu.load(all_of_it.at[at])

    f = pl.pallas_call(
        shifted,
        grid=(2,),
        in_specs=[pl.BlockSpec((8,), lambda i: (0,))],
        out_specs=pl.BlockSpec((4,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        input_output_aliases={0: 0},
        compiler_params=PARAMS,
    )
    with pytest.raises(MemoryFault, match='has (read|written)'):
        emulate(f, jnp.ones(8), seed=seed)


def test_a_tile_that_is_left_out_stays_nan():
    found, traffic = emulate(kernel_of_two(double, grid=1), jnp.ones(8))
    np.testing.assert_array_equal(found, [2.0] * 4 + [np.nan] * 4)
    assert (traffic.loaded, traffic.stored) == (16, 16)


def test_lanes_that_are_switched_off_hold_nan():
    def masked(old, new):
        new[...] = plgpu.load(old, mask=jnp.arange(4) < 3)

    found, _ = emulate(kernel_of_two(masked, size=4, grid=1), jnp.ones(4))
    np.testing.assert_array_equal(found, [1, 1, 1, np.nan])


def test_a_dot_of_half_the_precision_is_seen():
    def product(precision, a, b, c):
        c[...] = jnp.dot(a[...], b[...], precision=precision)

    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(16, 16)), 'float32') for _ in range(2))

    def error(precision):
        f = pl.pallas_call(partial(product, precision), out_shape=a, compiler_params=PARAMS)
        found, _ = emulate(f, a, b)
        return np.abs(found - np.asarray(a, 'float64') @ np.asarray(b, 'float64')).max()

    assert error(lax.Precision.HIGHEST) < 1e-5 < 1e-4 < error(lax.Precision.DEFAULT)
