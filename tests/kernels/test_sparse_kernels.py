"""The kernels of ``sparse_step`` and ``sparse_carry``: interpreted against the formula, lowered."""

import dataclasses
import importlib
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from accelerators.rules import sparse_rules
from braintrace_fast.kernels import dispatch
from braintrace_fast.kernels.dispatch import Backend
from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.outer.passes import as_pass
from braintrace_fast.kernels.sparse import triton as sparse_triton
from braintrace_fast.kernels.specs import CHECKED, SparseSpec
from braintrace_fast.kernels.trace_carry import trace_carry
from braintrace_fast.kernels.trace_step import trace_step
from braintrace_fast.op.sparse_sums import sample
from tests.kernel_checks import (
    as_planes,
    assert_close,
    assert_drawn_alike,
    count_calls,
    lowered,
    three_steps,
)


def op_named(name):
    folder = f'braintrace_fast.kernels.{name}'
    modules = {
        module: importlib.import_module(f'{folder}.{module}')
        for module in ('naive', 'reference', 'triton', 'mosaic')
    }
    return SimpleNamespace(name=name, **modules)


STEP, CARRY = op_named('sparse_step'), op_named('sparse_carry')
OPS = pytest.mark.parametrize('op', [STEP, CARRY], ids=['step', 'carry'])


def spec_of(op, *args, steps=3, **options):
    return SparseSpec(*args, steps=steps if op is CARRY else None, **options)


def rules_of(spec):
    return sparse_rules(*spec.places(), has_bias=spec.bias)


def arrays_of(spec):
    return spec.arrays(np.random.default_rng(spec.size + spec.entries))


def call(op, module, spec, **options):
    """A module's op as a function of its operands."""
    run = getattr(getattr(op, module), op.name)
    options |= {'interpret': True} if module == 'triton' and 'interpret' not in options else {}
    return lambda *operands, **named: run(
        TraceOperands(rules_of(spec), *operands, **named), **options
    )


def product(spec, x, w):
    """What ``w`` adds to what is read."""
    bias = {'bias': w.sum(tuple(range(w.ndim - 1)))} if spec.bias else {}
    return {'weight': sample(x, w, *map(jnp.asarray, spec.places()))} | bias


def naive_values(op, spec, found, *operands, **named):
    """What the formula says; a bias has an entry per output, of an input that is always one."""
    define = getattr(op.naive, op.name)
    new, read = define(TraceOperands(rules_of(spec), *operands, **named))
    values = [{'weight': plane} for plane in new], {'weight': read}
    if spec.bias:
        x, D, f, trace, signal = operands
        outputs = np.arange(spec.shape[-1])
        rules = sparse_rules(np.zeros_like(outputs), outputs, has_bias=False)
        rows = [e and {'weight': e['bias']} for e in trace]
        ones = np.ones((*x.shape[:-1], 1))
        new, read = define(TraceOperands(rules, ones, D, f, rows, signal, **named))
        for plane, row in zip(values[0], new, strict=True):
            plane['bias'] = row
        values[1]['bias'] = read
    return as_planes(found, (values[0], values[1] if found[1] else 0.0))


def check(op, spec, *operands, **named):
    operands = operands or arrays_of(spec)
    assert op.triton.supports(TraceOperands(rules_of(spec), *operands, **named)) is None
    found = jax.jit(call(op, 'triton', spec))(*operands, **named)
    wanted = jax.eval_shape(call(op, 'reference', spec), *operands, **named)
    assert_close(found, wanted, naive_values(op, spec, found, *operands, **named))
    return found


@OPS
@pytest.mark.parametrize('case', CHECKED['sparse_step'])
def test_a_kernel_is_as_defined(op, case):
    # The interpreter pads operands with NaN and starts results as NaN.
    new, read = check(op, CHECKED[op.name][case])
    assert np.any(np.asarray(new[0]['weight'], 'float32'))
    assert np.any(np.asarray(read['weight'], 'float32'))


@OPS
@pytest.mark.parametrize('case', ['many planes', 'no batch, past a block', 'two axes of batch'])
def test_the_product_is_counted_with_what_is_read(op, case):
    spec = dataclasses.replace(CHECKED[op.name][case], density=1.0)
    x, D, f, trace, signal = arrays_of(spec)
    w = f[0][::-1]
    total = product(spec, x, w)
    check(op, spec, x, D, f, trace, signal, w=w, total=total)
    _, alone = call(op, 'triton', spec)(x, D, f, trace, None, w=w, total=total)
    assert alone is total


@OPS
@pytest.mark.parametrize('batch', [(), (1,), (16,), (17,)], ids=str)
@pytest.mark.parametrize('entries', [31, 64, 257])
def test_blocks_end_where_entries_and_examples_do(op, batch, entries):
    spec = spec_of(op, 2, (*batch, 20, 9), entries=entries, steps=5)
    tile = sparse_triton.choose_tile(pass_of(op, spec))
    assert tile.examples * tile.entries <= 1024
    check(op, spec)


def pass_of(op, spec, **named):
    return as_pass(TraceOperands(rules_of(spec), *spec.arrays(), **named), window=op is CARRY)


@OPS
def test_only_what_is_there_is_computed(op):
    spec = spec_of(op, 2, (2, 3, 4), entries=9, bias=True)
    x, D, f, trace, signal = arrays_of(spec)
    D, nothing = [[None, D[0][1]], [None, None]], [None, None]
    new, read = check(op, spec, x, D, nothing, trace, [None, signal[1]])
    assert new[1] is None and read is not None
    new, read = check(op, spec, x, D, f, [trace[0], None], nothing)
    assert new[1] is None and read is None


def test_rows_are_not_read_without_an_input():
    spec = spec_of(STEP, 1, (2, 3, 4), entries=9)
    x, D, _, trace, signal = spec.arrays()
    todo = as_pass(TraceOperands(rules_of(spec), x, D, [None], trace, signal), window=False)
    assert todo.arrays.x is None and todo.arrays.rows is None
    assert todo.arrays.cols is not None


@OPS
@pytest.mark.parametrize('live', [True, False])
def test_a_trace_that_is_not_live_counts_as_zero(op, live):
    spec = spec_of(op, 2, (9, 3, 4), entries=11, bias=True)
    x, D, f, trace, signal = arrays_of(spec)
    held = trace if live else jax.tree.map(lambda e: e.at[0].set(jnp.nan), trace)
    old = trace if live else jax.tree.map(jnp.zeros_like, trace)
    wanted = call(op, 'reference', spec)(x, D, f, old, signal)
    for module in ('triton', 'reference'):
        run = jax.jit(call(op, module, spec))
        found = run(x, D, f, held, signal, live=jnp.asarray(live))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


@OPS
@pytest.mark.parametrize('batch', [(), (19,)], ids=['alone', 'in a batch'])
def test_every_backend_rounds_alike(op, batch):
    spec = spec_of(op, 2, (*batch, 17, 15), stored='bfloat16', entries=301, bias=True)
    operands = arrays_of(spec)
    found, wanted = (
        jax.jit(call(op, module, spec))(*operands, seed=7)[0] for module in ('triton', 'reference')
    )
    assert_drawn_alike(found, wanted)
    nearest, _ = jax.jit(call(op, 'reference', spec))(*operands)
    assert np.mean(np.asarray(nearest[0]['weight'] != found[0]['weight'])) > 0.2


BREAKS = {
    'a column for a row': lambda refs: refs._replace(rows=refs.cols),
    'entries in another order': lambda refs: refs._replace(cols=refs.cols[::-1]),
    'examples in another order': lambda refs: refs._replace(x=refs.x[..., ::-1]),
    'a plane of another state': lambda refs: refs._replace(
        decay={(s, q): refs.decay[q, s] for s, q in refs.decay}
    ),
}


@OPS
@pytest.mark.parametrize('name', BREAKS)
def test_what_is_gathered_from_elsewhere_is_caught(op, name, monkeypatch):
    spec, last = spec_of(op, 2, (5, 9, 9), entries=70), sparse_triton._examples_last
    check(op, spec)
    monkeypatch.setattr(sparse_triton, '_examples_last', lambda arrays: BREAKS[name](last(arrays)))
    with pytest.raises(AssertionError):
        check(op, spec)


@OPS
@pytest.mark.parametrize('batch', [2, 17])
def test_a_block_that_is_left_out_is_caught(op, batch, monkeypatch):
    spec = spec_of(op, 1, (batch, 5, 6), entries=700)
    monkeypatch.setattr(pl, 'cdiv', lambda a, b: max(1, a // b))
    with pytest.raises(AssertionError):
        check(op, spec)


def test_steps_past_the_last_are_left_out(monkeypatch):
    spec = spec_of(CARRY, 1, (5, 6), entries=30, steps=6)
    check(CARRY, spec)
    load = plgpu.load

    def unmasked(ref, mask, other):
        return load(ref) if mask.ndim == 3 else load(ref, mask=mask, other=other)

    monkeypatch.setattr(plgpu, 'load', unmasked)
    with pytest.raises(AssertionError):
        check(CARRY, spec)


@OPS
def test_old_planes_are_read_before_any_is_overwritten(op, monkeypatch):
    """No interpreter would see it: in place, a plane that is overwritten too early is lost."""
    spec = spec_of(op, 2, (3, 40, 40), entries=99)
    events = []

    def logged(name, access):
        def logging(ref, *value, mask, **options):
            if mask.ndim == 2 and isinstance(ref.transforms[-1].indices[0], pl.Slice):  # a trace
                events.append(name)
            return access(ref, *value, mask=mask, **options)

        return logging

    for name in ('load', 'store'):
        monkeypatch.setattr(plgpu, name, logged(name, getattr(plgpu, name)))
    jax.eval_shape(call(op, 'triton', spec, interpret=False), *spec.arrays())
    body = ['load', 'load', 'store', 'store']
    assert events and events == body * (len(events) // 4)


@OPS
@pytest.mark.parametrize(
    ('batch', 'dtype', 'stored'),
    [((8,), 'float32', 'float32'), ((9,), 'bfloat16', 'bfloat16'), ((), 'float32', 'bfloat16')],
    ids=str,
)
def test_a_kernel_lowers_in_place(op, batch, dtype, stored):
    spec = spec_of(op, 2, (*batch, 200, 300), dtype=dtype, stored=stored, entries=777, steps=20)
    text = lowered(call(op, 'triton', spec, interpret=False), *spec.arrays(), platform='cuda')
    assert count_calls(text, 'cuda') == 1
    assert text.count('output_operand_alias<') == 2


@OPS
def test_a_tile_that_is_no_power_of_two_does_not_lower(op, monkeypatch):
    spec = spec_of(op, 1, (8, 30, 40), entries=77)
    tile = sparse_triton.Tile(48, 8, 1, 4)
    monkeypatch.setattr(sparse_triton, 'choose_tile', lambda todo: tile)
    with pytest.raises(Exception, match='power of 2'):
        lowered(call(op, 'triton', spec, interpret=False), *spec.arrays(), platform='cuda')


@OPS
def test_a_kernel_batches_inside_a_scan(op):
    spec = spec_of(op, 2, (2, 3, 5), entries=8)
    x, D, f, trace, signal = arrays_of(spec)
    others = jax.tree.map(lambda a: jnp.stack([a, -a]), (x, D, f, signal))

    found, wanted = (
        jax.jit(partial(three_steps, call(op, module, spec)))(*others, trace)
        for module in ('triton', 'reference')
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, wanted)
    kernel = call(op, 'triton', spec, interpret=False)
    assert (
        count_calls(lowered(partial(three_steps, kernel), *others, trace, platform='cuda'), 'cuda')
        == 2
    )


@OPS
def test_a_kernel_lowers_inside_shard_map(op):
    spec = spec_of(op, 2, (2, 3, 4), entries=9)
    sharding = jax.sharding.PartitionSpec
    rows, row = sharding(*[None] * (op is CARRY), 'batch'), sharding('batch')

    def run(*operands):
        new, read = call(op, 'triton', spec, interpret=False)(*operands)
        return new, jax.lax.psum(read, 'batch')

    in_specs = (rows, row, rows, row, row)
    sharded = jax.shard_map(run, in_specs=in_specs, out_specs=(row, sharding()))
    text = lowered(sharded, *spec.arrays(), platform='cuda', batch=2)
    assert count_calls(text, 'cuda') == 1


@OPS
def test_a_kernel_says_what_it_does_not_take(op):
    def asked(*args, made=lambda arrays: arrays, **options):
        spec = spec_of(op, *args, **options)
        return op.triton.supports(TraceOperands(rules_of(spec), *made(spec.arrays())))

    small = partial(asked, 1, (2, 3, 4), entries=5)
    assert small() is None
    assert 'float16' in small(dtype='float16')
    assert 'float64' in small(dtype='float64')
    assert 'empty' in asked(1, (0, 3, 4), entries=5)
    assert 'empty' in asked(1, (2, 3, 4), entries=0)
    assert 'takes 99 planes' in asked(9, (8, 30, 30), entries=40)
    assert '32 bits' in asked(1, (2**11, 9, 9), entries=2**20)
    assert 'nothing' in small(made=lambda a: (a[0], [[None]], [None], a[3], None))
    assert 'no plane' in small(made=lambda a: (*a[:3], [None], a[4]))
    assert 'shape (4,)' in small(made=lambda a: (a[0], [[a[1][0][0].update(shape=(4,))]], *a[2:]))


@OPS
def test_tpus_take_plain_jax_and_say_why(op):
    spec = spec_of(op, 1, (2, 3, 4), entries=5)
    api = trace_step if op is STEP else trace_carry
    with dispatch.recording() as choices:
        run = partial(api, rules_of(spec), backend=Backend('pallas'))
        jax.eval_shape(run, *spec.arrays())
    by_platform = {choice.platform: choice for choice in choices}
    assert {choice.op for choice in choices} == {op.name}
    assert by_platform['cuda'].implementation == 'triton'
    assert by_platform['tpu'].implementation == 'jax'
    assert 'gathered by index' in by_platform['tpu'].reason


def test_auto_takes_plain_jax_where_it_moves_as_few_bytes():
    def taken(op, *args, **options):
        spec = spec_of(op, *args, entries=5, **options)
        api = trace_step if op is STEP else trace_carry
        run = partial(api, rules_of(spec), backend=Backend('pallas', auto=True))
        with dispatch.recording() as choices:
            jax.eval_shape(run, *spec.arrays())
        return next(c.implementation for c in choices if c.platform == 'cuda')

    assert taken(STEP, 2, (8, 3, 4)) == 'triton'
    assert taken(STEP, 2, (8, 3, 4), signal=False) == 'jax'
    assert taken(STEP, 2, (1, 3, 4)) == taken(STEP, 2, (3, 4)) == 'jax'
    assert taken(CARRY, 2, (1, 3, 4)) == taken(CARRY, 2, (8, 3, 4), signal=False) == 'triton'
