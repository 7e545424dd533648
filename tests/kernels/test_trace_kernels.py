"""The kernels of ``trace_step`` and ``trace_carry``: interpreted against the reference, lowered."""

import dataclasses
import importlib
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from accelerators.rules import matmul_rules
from braintrace_fast.kernels.outer import mosaic as outer_mosaic
from braintrace_fast.kernels.outer import triton as outer_triton
from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.outer.passes import as_pass
from braintrace_fast.kernels.specs import CHECKED, TraceSpec
from tests.kernel_checks import (
    as_planes,
    assert_close,
    assert_drawn_alike,
    count_calls,
    exact,
    lowered,
    race_message,
    three_steps,
)

MODULES = ('naive', 'reference', 'triton', 'mosaic')


def op_named(name):
    folder = f'braintrace_fast.kernels.{name}'
    modules = {module: importlib.import_module(f'{folder}.{module}') for module in MODULES}
    return SimpleNamespace(name=name, **modules)


STEP, CARRY = op_named('trace_step'), op_named('trace_carry')
OPS = pytest.mark.parametrize('op', [STEP, CARRY], ids=['step', 'carry'])
BACKENDS = pytest.mark.parametrize('backend', ['triton', 'mosaic'])
PLATFORM = dict(triton='cuda', mosaic='tpu')
TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


def rules_of(bias, groups=0):
    return matmul_rules(groups, has_bias=bias, precision='highest')


def given(op, size, lead, inputs, outputs, steps=3, shapes=False, **options):
    """Random operands or their shapes; below a density of one some planes are not there."""
    window = steps if op is CARRY else None
    return made(TraceSpec(size, (*lead, inputs, outputs), steps=window, **options), shapes)


def made(spec, shapes=False):
    return spec.arrays(None if shapes else np.random.default_rng(spec.size + spec.shape[-2]))


def call(op, backend, rules, interpret=None, **fixed):
    """A backend's op as a function of its operands, some of which are fixed."""
    run = getattr(getattr(op, backend), op.name)
    options = {} if interpret is None else dict(interpret=interpret)

    def packed(*operands, **named):
        return run(TraceOperands(rules, *operands, **fixed, **named), **options)

    return packed


def supports(op, backend, rules, *operands, **named):
    return getattr(op, backend).supports(TraceOperands(rules, *operands, **named))


def pass_of(op, *operands, **named):
    return as_pass(TraceOperands(rules_of(False), *operands, **named), window=op is CARRY)


def check(op, backend, operands, interpret=True, groups=0):
    x, D, f, trace, signal = operands
    rules = rules_of('bias' in trace[0], groups)
    assert supports(op, backend, rules, *operands) is None
    found = jax.jit(call(op, backend, rules, interpret=interpret))(*operands)
    wanted = jax.eval_shape(call(op, 'reference', rules), *operands)
    assert_close(found, wanted, naive_values(op, found, TraceOperands(rules, *operands)))
    return found


def naive_values(op, found, operands):
    """What the naive definition says; a bias is the weight of an input that is always one."""
    define = getattr(op.naive, op.name)
    (new, read) = define(operands)
    values = [{'weight': plane} for plane in new], {'weight': read}
    if 'bias' in operands.trace[0]:
        ones = np.ones((*operands.x.shape[:-1], 1))
        rows = [e and {'weight': e['bias'][..., None, :]} for e in operands.trace]
        new, read = define(dataclasses.replace(operands, x=ones, trace=rows))
        for plane, row in zip(values[0], new, strict=True):
            plane['bias'] = row[..., 0, :]
        values[1]['bias'] = read[..., 0, :]
    return as_planes(found, (values[0], values[1] if found[1] else 0.0))


@BACKENDS
@OPS
@pytest.mark.parametrize('case', CHECKED['trace_step'])
def test_a_kernel_is_the_reference(op, backend, case):
    # The interpreter pads operands with NaN and starts results as NaN.
    spec = CHECKED[op.name][case]
    new, read = check(op, backend, made(spec), groups=spec.groups)
    assert np.any(np.asarray(new[0]['weight'], 'float32'))
    assert np.any(np.asarray(read['weight'], 'float32'))


@BACKENDS
@OPS
def test_only_what_is_there_is_computed(op, backend):
    x, D, f, trace, signal = given(op, 2, (2,), 3, 4, bias=True)
    D, nothing = [[None, D[0][1]], [None, None]], [None, None]
    new, read = check(op, backend, (x, D, nothing, trace, [None, signal[1]]))
    assert new[1] is None and read is not None
    new, read = check(op, backend, (x, D, f, [trace[0], None], nothing))
    assert new[1] is None and read is None


@BACKENDS
@OPS
@pytest.mark.parametrize('live', [True, False])
def test_a_trace_that_is_not_live_counts_as_zero(op, backend, live):
    x, D, f, trace, signal = given(op, 2, (9,), 3, 4, bias=True)
    run = call(op, backend, rules_of(True), interpret=True)
    plain = call(op, 'reference', rules_of(True))
    old = trace if live else jax.tree.map(jnp.zeros_like, trace)
    wanted = plain(x, D, f, old, signal)
    for held in (1.0,) if live else (1.0, np.nan, np.inf):
        given_trace = jax.tree.map(lambda e, held=held: e.at[0].multiply(held), trace)
        for function in (run, plain):
            found = jax.jit(function)(x, D, f, given_trace, signal, live=jnp.asarray(live))
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


@BACKENDS
@OPS
@pytest.mark.parametrize('stored', ['float32', 'bfloat16'])
def test_the_product_is_counted_with_what_is_read(op, backend, stored):
    x, D, f, trace, signal = given(op, 2, (9,), 33, 70, 20, bias=True, stored=stored)
    w, rules = f[0][::-1], rules_of(True)
    asked = partial(supports, op, backend, rules, x, D, f, trace, signal)

    def both(backend, product=product, **options):
        run = call(op, backend, rules, **options)

        def counted(x, *rest):
            own = w.astype(x.dtype)
            return run(x, *rest, w=own, total=product(x, own))

        return counted

    assert asked(w=w, total=product(x, w)) is None
    found, plain = jax.jit(both(backend, interpret=True)), both('reference')
    new, read = found(x, D, f, trace, signal)
    wanted = jax.eval_shape(plain, x, D, f, trace, signal)
    assert_close((new, read), wanted, exact(plain, x, D, f, trace, signal))
    only = jax.jit(both(backend, only_bias, interpret=True))(x, D, f, trace, signal)[1]
    assert list(only) == ['bias'] and np.allclose(only['bias'], read['bias'], rtol=1e-4)
    _, alone = found(x, D, f, trace, None)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), alone, product(x, w))
    assert 'shape' in asked(w=w[..., :3], total=alone)


def product(x, w):
    weight = jnp.einsum('...i,...o->io', x, w, precision='highest')
    return {'weight': weight, 'bias': w.sum(tuple(range(w.ndim - 1)))}


def only_bias(x, w):
    return {'bias': product(x, w)['bias']}


def test_what_is_not_needed_is_not_read():
    x, D, f, trace, _ = given(STEP, 3, (2,), 3, 4)
    D = [[D[0][0], None, D[0][2]], [D[1][0], None, None], [None, None, None]]
    todo = pass_of(STEP, x, D, f, trace, [None, None, None])
    assert list(todo.arrays.trace) == [0, 2]  # plane 1 forgets, and nobody looks at it
    assert list(todo.written) == [0, 1, 2] and todo.read is None
    places = dict(enumerate(jax.tree.leaves(todo.arrays)))
    overwritten = {out: places[place].size for place, out in todo.aliases.items()}
    assert overwritten == {0: 24, 2: 24}


@pytest.fixture
def small_tiles(monkeypatch):
    for name, size in dict(SUBLANES=2, SIDES=[(4, 4)], STEPS=2, LEAST_STEPS=1).items():
        monkeypatch.setattr(outer_mosaic, name, size)


@pytest.mark.parametrize(
    ('op', 'stored', 'groups'),
    [(STEP, 'float32', 0), (CARRY, 'float32', 0), (CARRY, 'bfloat16', 0), (CARRY, 'float32', 3)],
)
def test_a_grid_has_no_races(op, stored, groups, small_tiles, capfd):
    # jax 0.10 cannot interpret blocks past the edge of an array that is overwritten in this mode
    lead = (4, groups) if groups else (4,)
    operands = given(op, 2, lead, 8, 4, steps=5, stored=stored)
    check(op, 'mosaic', operands, interpret=TWO_CORES, groups=len(lead) - 1)
    assert 'RACE' not in capfd.readouterr().out


@OPS
def test_a_batch_in_parallel_is_caught(op, small_tiles, monkeypatch, capfd):
    params = partial(pltpu.CompilerParams, dimension_semantics=('parallel',) * 5)
    monkeypatch.setattr(pltpu, 'CompilerParams', lambda dimension_semantics: params())
    operands = given(op, 1, (4,), 2, 2)
    with pytest.raises(AssertionError):
        check(op, 'mosaic', operands, pltpu.InterpretParams(num_cores_or_threads=2))
    run = jax.jit(call(op, 'mosaic', rules_of(False), interpret=TWO_CORES))
    assert 'race detected' in race_message(partial(run, *operands), capfd)


@OPS
def test_an_edge_that_is_not_left_out_is_caught(op, small_tiles, monkeypatch):
    operands = given(op, 1, (3,), 5, 6, steps=4)
    check(op, 'mosaic', operands)
    monkeypatch.setattr(outer_mosaic, '_if', lambda inside, value: value)
    with pytest.raises(AssertionError):
        check(op, 'mosaic', operands)


def test_steps_past_the_last_are_left_out(monkeypatch):
    operands = given(CARRY, 1, (3,), 5, 6, steps=17)
    check(CARRY, 'triton', operands)
    monkeypatch.setattr(plgpu, 'load', lambda ref, mask, other: ref[...])
    with pytest.raises(AssertionError):
        check(CARRY, 'triton', operands)


@OPS
def test_old_planes_are_read_before_any_is_overwritten(op, monkeypatch):
    """No interpreter would see it: in place, a plane that is overwritten too early is lost."""
    operands = given(op, 2, (3,), 40, 40)
    todo = pass_of(op, *operands)
    tile = outer_triton.choose_tile(todo)
    events = []

    def logged(name, access):
        def call(ref, *value, mask, **options):
            if mask.shape == (tile.inputs, tile.outputs):
                events.append(name)
            return access(ref, *value, mask=mask, **options)

        return call

    for name in ('load', 'store'):
        monkeypatch.setattr(plgpu, name, logged(name, getattr(plgpu, name)))
    jax.eval_shape(call(op, 'triton', rules_of(False)), *operands)
    body = ['load', 'load', 'store', 'store']
    assert events[:4] == body and events == body * (len(events) // 4) + ['store']


@BACKENDS
@OPS
def test_a_tile_that_is_left_out_is_caught(op, backend, small_tiles, monkeypatch):
    monkeypatch.setattr(pl, 'cdiv', lambda a, b: max(1, a // b))
    with pytest.raises(AssertionError):
        check(op, backend, given(op, 1, (2,), 17, 65))


@BACKENDS
@OPS
def test_groups_that_are_added_up_are_caught(op, backend, monkeypatch):
    """As if they were a part of the batch; a kernel must keep them apart."""
    operands = given(op, 1, (2, 3), 5, 6)
    check(op, backend, operands, groups=1)
    module = outer_triton if backend == 'triton' else outer_mosaic
    launch = module.launch

    def added(todo, **options):
        new, read = launch(todo, **options)
        return new, jnp.broadcast_to(read.sum(0, keepdims=True), read.shape)

    monkeypatch.setattr(module, 'launch', added)
    with pytest.raises(AssertionError):
        check(op, backend, operands, groups=1)


@OPS
def test_a_program_that_takes_the_tile_of_another_group_is_caught(op, monkeypatch):
    operands = given(op, 1, (2, 3), 35, 6)
    check(op, 'triton', operands, groups=1)
    monkeypatch.setattr(outer_triton, '_place', lambda todo, tiles, i: (i % 3, i // 3 * 0))
    with pytest.raises(AssertionError):
        check(op, 'triton', operands, groups=1)


@BACKENDS
@OPS
@pytest.mark.parametrize(
    ('lead', 'inputs', 'outputs', 'dtype', 'stored'),
    [
        ((8,), 512, 512, 'float32', 'float32'),
        ((9,), 200, 300, 'bfloat16', 'bfloat16'),
        ((), 1, 1, 'float32', 'bfloat16'),
    ],
    ids=str,
)
def test_a_kernel_lowers_in_place(op, backend, lead, inputs, outputs, dtype, stored):
    operands = given(op, 2, lead, inputs, outputs, 20, dtype=dtype, stored=stored, shapes=True)
    text = lowered(call(op, backend, rules_of(False)), *operands, platform=PLATFORM[backend])
    assert count_calls(text, PLATFORM[backend]) == 1
    assert text.count('output_operand_alias<') == 2


BAD_TILES = dict(
    triton=(outer_triton, outer_triton.Tile(16, 48, 16, 4)),
    mosaic=(outer_mosaic, outer_mosaic.Tile(8, 128, 64, 8)),
)


@BACKENDS
@OPS
def test_a_bad_tile_does_not_lower(op, backend, monkeypatch):
    module, tile = BAD_TILES[backend]
    monkeypatch.setattr(module, 'choose_tile', lambda todo: tile)
    operands = given(op, 1, (8,), 512, 512, 16, shapes=True)
    with pytest.raises(Exception, match=r'power of 2|divisible by'):
        lowered(call(op, backend, rules_of(False)), *operands, platform=PLATFORM[backend])


@BACKENDS
@OPS
def test_a_kernel_batches_inside_a_scan(op, backend):
    x, D, f, trace, signal = given(op, 2, (2,), 3, 5, density=0.7)
    others = jax.tree.map(lambda a: jnp.stack([a, -a]), (x, D, f, signal))

    rules = rules_of(False)
    kernel = call(op, backend, rules)
    plain = jax.jit(partial(three_steps, call(op, 'reference', rules)))
    found = jax.jit(partial(three_steps, call(op, backend, rules, interpret=True)))(*others, trace)
    assert_close(found, jax.eval_shape(plain, *others, trace), exact(plain, *others, trace))
    text = lowered(partial(three_steps, kernel), *others, trace, platform=PLATFORM[backend])
    assert count_calls(text, PLATFORM[backend]) == 2


@BACKENDS
@OPS
def test_a_kernel_lowers_inside_shard_map(op, backend):
    x, D, f, trace, signal = given(op, 2, (2,), 3, 4)
    time = [None] * (x.ndim - 2)
    spec = jax.sharding.PartitionSpec
    row, rows = spec('batch', 'neurons'), spec(*time, 'batch', 'neurons')
    plane = spec('batch', None, 'neurons')

    def run(*operands):
        new, read = call(op, backend, rules_of(False))(*operands)
        return new, jax.lax.psum(read, 'batch')

    sharded = jax.shard_map(
        run,
        in_specs=(spec(*time, 'batch', None), row, rows, plane, row),
        out_specs=(plane, spec(None, 'neurons')),
    )
    text = lowered(sharded, x, D, f, trace, signal, platform=PLATFORM[backend], batch=2, neurons=2)
    assert count_calls(text, PLATFORM[backend]) == 1


@BACKENDS
@OPS
@pytest.mark.parametrize('lead', [(3,), (2, 3)], ids=['alone', 'in groups'])
def test_every_backend_rounds_alike(op, backend, lead):
    operands = given(op, 2, lead, 17, 5, stored='bfloat16', bias=True)
    rules = rules_of(True, len(lead) - 1)
    found, _ = jax.jit(call(op, backend, rules, seed=7, interpret=True))(*operands)
    wanted, _ = jax.jit(call(op, 'reference', rules, seed=7))(*operands)
    assert_drawn_alike(found, wanted)
    nearest, _ = jax.jit(call(op, 'reference', rules))(*operands)
    assert np.mean(np.asarray(nearest[0]['weight'] != found[0]['weight'])) > 0.2
    seed = jax.ShapeDtypeStruct((), 'int32')
    text = lowered(
        lambda seed, *rest: call(op, backend, rules, seed=seed)(*rest),
        seed,
        *operands,
        platform=PLATFORM[backend],
    )
    assert count_calls(text, PLATFORM[backend]) == 1


@BACKENDS
@OPS
def test_a_kernel_says_what_it_does_not_take(op, backend):
    def asked(size=1, lead=(2,), inputs=3, outputs=4, dtype='float32', is_outer=True):
        made = given(op, size, lead, inputs, outputs, dtype=dtype, shapes=True)
        rules = dataclasses.replace(rules_of(False), is_outer=is_outer)
        return supports(op, backend, rules, *made)

    assert asked() is None
    assert 'float16' in asked(dtype='float16')
    assert 'empty' in asked(lead=(0,)) and 'empty' in asked(inputs=0)
    assert 'outer product' in asked(is_outer=False)
    reason = dict(triton='takes 99 planes', mosaic='VMEM')[backend]
    assert reason in asked(size=9, lead=(8,), inputs=128, outputs=128)
    with_operands = partial(supports, op, backend, rules_of(False))
    x, D, f, trace, signal = given(op, 1, (2,), 3, 4)
    assert 'no plane' in with_operands(x, D, f, [None], signal)
    assert 'nothing' in with_operands(x, [[None]], [None], trace, None)
    assert 'outer product' in with_operands(None, D, f, trace, signal)
    assert 'shape (4,)' in with_operands(x, [[D[0][0][0]]], f, trace, signal)


@OPS
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('size', [1, 4, 6])
def test_a_tile_fits_into_memory(op, size, dtype):
    made = given(op, size, (64,), 512, 512, 1000, dtype=dtype, shapes=True)
    todo = pass_of(op, *made)
    tile = outer_mosaic.choose_tile(todo)
    assert outer_mosaic.vmem_bytes(todo, tile) < 13 * 2**20
    assert supports(op, 'mosaic', rules_of(False), *made) is None
    assert supports(op, 'triton', rules_of(False), *made) is None


@OPS
def test_random_bits_take_room(op):
    """What was seen not to fit into VMEM, and to spill registers."""
    made = given(op, 6, (8,), 512, 512, 64, stored='bfloat16', shapes=True)
    without, drawn = (pass_of(op, *made, seed=seed) for seed in (None, 7))
    fits = outer_mosaic.vmem_bytes(drawn, outer_mosaic.choose_tile(without)) <= outer_mosaic.VMEM
    assert fits == (op is STEP)
    assert outer_mosaic.vmem_bytes(drawn, outer_mosaic.choose_tile(drawn)) <= outer_mosaic.VMEM
    assert outer_triton.choose_tile(drawn).inputs == (16 if op is CARRY else 8)
    for backend in ('mosaic', 'triton'):
        assert supports(op, backend, rules_of(False), *made, seed=7) is None
    more = given(CARRY, 7, (8,), 512, 512, 64, stored='bfloat16', shapes=True)
    assert 'VMEM' in supports(CARRY, 'mosaic', rules_of(False), *more, seed=7)


@OPS
def test_offsets_must_fit(op):
    made = given(op, 1, (2**11,), 2**10, 2**10, 2, dtype='bfloat16', shapes=True)
    assert '32 bits' in supports(op, 'triton', rules_of(False), *made)
    assert supports(op, 'mosaic', rules_of(False), *made) is None


@pytest.mark.parametrize(('inputs', 'outputs'), [(2**15, 4), (4, 2**15)], ids=str)
def test_offsets_into_a_long_window_must_fit(inputs, outputs):
    made = given(CARRY, 1, (2**6,), inputs, outputs, 2**10, shapes=True)
    assert '32 bits' in supports(CARRY, 'triton', rules_of(False), *made)
    short = given(CARRY, 1, (2**6,), inputs, outputs, 2**9, shapes=True)
    assert supports(CARRY, 'triton', rules_of(False), *short) is None
