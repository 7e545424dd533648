"""How the checks of compiled kernels read programs and blocks; `make accelerators` compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from accelerators import checks
from accelerators.blocks import block_bytes
from accelerators.cases import (
    all_cases,
    as_arrays,
    case_of,
    floor,
    implementation,
    plain_pass,
    stacked_pass,
    stacked_walk,
)
from accelerators.checks import TARGETS, Row, faults_of_comparison, taken
from accelerators.hlo import copies, moved
from accelerators.report import as_line, document
from accelerators.windows import WindowRow, launches
from braintrace_fast.kernels.specs import COMPILED, AdjointSpec, TraceSpec

PROGRAM = """HloModule jit_run, is_scheduled=true

%fused (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  ROOT %copy.9 = f32[8,4]{1,0:T(8,128)} copy(%p)
}

ENTRY %main.1 (a: f32[8,4], b: bf16[8,4]) -> (f32[8,4], f32[4]) {
  %a = f32[8,4]{1,0:T(8,128)} parameter(0), metadata={op_name="a"}
  %b = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(1)
  %start = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[8,4]{1,0:T(8,128)S(1)} copy-done(%start)
  %step = (f32[8,4]{1,0:T(8,128)}, /*index=1*/f32[4]{0:T(128)}) custom-call(%done, %b, %b)
  %new = f32[8,4]{1,0:T(8,128)} get-tuple-element(%step), index=0
  %sum = f32[4]{0:T(128)} get-tuple-element(%step), index=1
  %kept = f32[8,4]{1,0:T(8,128)} fusion(%new), kind=kLoop, calls=%fused
  ROOT %both = (f32[8,4]{1,0:T(8,128)}, f32[4]{0:T(128)}) tuple(%kept, %sum)
}
"""


def test_each_operand_and_result_in_main_memory_is_moved_once():
    staged, bfloat16, results, fusion = 128, 64, 128 + 16, 2 * 128
    assert moved(PROGRAM) == staged + bfloat16 + results + fusion


def test_a_copy_within_main_memory_is_found_inside_a_fusion():
    assert copies(PROGRAM) == [128]


def test_the_bytes_of_a_loop_are_refused():
    looping = PROGRAM.replace('fusion(%new), kind=kLoop, calls', 'while(%new), condition=%x, body')
    with pytest.raises(ValueError, match='bytes of a while are unknown'):
        moved(looping)


LOOP = """HloModule jit_run, is_scheduled=true

%fused (p: f32[4], q: f32[8,4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  %first = f32[4]{0} slice(%q), slice={[0:1], [0:4]}
  ROOT %sum = f32[4]{0} add(%p, %first)
}

%body (state: (f32[4], f32[8,4])) -> (f32[4], f32[8,4]) {
  %state = (f32[4], f32[8,4]) parameter(0)
  %old = f32[4]{0} get-tuple-element(%state), index=0
  %all = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %new = f32[4]{0} fusion(%old, %all), kind=kLoop, calls=%fused
  ROOT %both = (f32[4], f32[8,4]) tuple(%new, %all)
}

ENTRY %main.1 (a: f32[4], b: f32[8,4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %start = (f32[4], f32[8,4]) tuple(%a, %b)
  %end = (f32[4], f32[8,4]) while(%start), condition=%go, body=%body
  ROOT %last = f32[4]{0} get-tuple-element(%end), index=0
}
"""


def test_a_loop_touches_one_step_at_a_time():
    old, step, new = 16, 16, 16
    assert moved(LOOP, steps=8) == 8 * (old + step + new)


UPDATED = """HloModule jit_run, is_scheduled=true

%fused (a: f32[8,4], b: f32[8,4], i: s32[]) -> (f32[8,4], f32[8,4]) {
  %b = f32[8,4]{1,0} parameter(1)
  %a = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(2)
  %flat = f32[8,4]{1,0} bitcast(%a)
  %row = f32[1,4]{1,0} dynamic-slice(%b, %i), dynamic_slice_sizes={1,4}
  %one = f32[8,4]{1,0} dynamic-update-slice(%flat, %row, %i)
  %two = f32[8,4]{1,0} dynamic-update-slice(%b, %row, %i)
  ROOT %both = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%one, %two)
}

%body (state: (f32[8,4], f32[8,4], f32[8,4])) -> (f32[8,4], f32[8,4], f32[8,4]) {
  %state = (f32[8,4], f32[8,4], f32[8,4]) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=0
  %y = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %z = f32[8,4]{1,0} get-tuple-element(%state), index=2
  %at = s32[]{:S(6)} constant(1)
  %pair = (f32[8,4]{1,0}, f32[8,4]{1,0}) fusion(%x, %y, %at), kind=kLoop, calls=%fused
  %w = f32[8,4]{1,0} get-tuple-element(%pair), index=0
  %v = f32[8,4]{1,0} dynamic-update-slice(%z, %x, %at)
  ROOT %new = (f32[8,4], f32[8,4], f32[8,4]) tuple(%w, %y, %v)
}

ENTRY %main.1 (a: f32[8,4], b: f32[8,4], c: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %c = f32[8,4]{1,0} parameter(2)
  %start = (f32[8,4], f32[8,4], f32[8,4]) tuple(%a, %b, %c)
  %end = (f32[8,4], f32[8,4], f32[8,4]) while(%start), condition=%go, body=%body
  ROOT %last = f32[8,4]{1,0} get-tuple-element(%end), index=0
}
"""


def test_what_is_only_updated_in_part_is_not_read():
    fused, alone = 16 + 2 * 16, 16 + 16  # %y, of which a row is read too, and %x
    assert moved(UPDATED, steps=8) == 8 * (fused + alone)
    read_within = UPDATED.replace('tuple(%one, %two)', 'tuple(%one, %sum)').replace(
        '  ROOT %both', '  %sum = f32[8,4]{1,0} add(%one, %two)\n  ROOT %both'
    )
    assert moved(read_within, steps=8) == 8 * (fused + 16 + alone)


THUNKS = """001: kCopy         [source       | next=002 (1)] kCopy
002: kWhile        [prev=001 (1) | next=005 (1) ]
condition:
    003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    004: kCustomKernel [source | sink] forward grid: [1, 1, 1] threads: [1, 1, 1]
005: kCustomKernel [prev=002 (1) | next=006 (1) ] adjoint_scan grid: [128, 1, 1]
006: kCublasLtMatmul [prev=005 (1) | sink ] kCublasLtMatmul
"""
BACK = """007: kWhile        [prev=006 (1) | sink ]
condition:
    008: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    009: kDynamicSliceFusion [source | sink ] params=1, results=1
        010: kCopy [source | sink] kCopy
"""


def compiled(*trips):
    counts = [f'"known_trip_count":{{"n":"{n}"}}' for n in trips]
    loops = [f'  %w = f32[] while(%s), body=%b, backend_config={{{count}}}' for count in counts]
    return '\n'.join(['HloModule m', '', 'ENTRY %main (a: f32[]) -> f32[] {', *loops, '}'])


def test_what_is_launched_after_the_forward_scan():
    expected = ['adjoint_scan', 'kCublasLtMatmul']
    assert list(launches(THUNKS, compiled(64))) == expected
    back = list(launches(THUNKS + BACK, compiled(64, 3)))
    assert back == expected + ['loop_compare_fusion', 'kCopy'] * 3
    with pytest.raises(ValueError, match='no forward scan'):
        list(launches('001: kCopy [source | sink] kCopy', compiled()))


def test_a_window_that_launches_too_much_is_caught():
    def faults(**thunks):
        row = {int(k[1:]): list(launches(t, compiled(64, int(k[1:])))) for k, t in thunks.items()}
        return WindowRow('LIF', 'sm_90', 2, row).faults

    assert faults(_64=THUNKS, _16=THUNKS) == []
    found = faults(_64=THUNKS + BACK, _16=THUNKS + BACK)
    assert 'a window of 64 steps launches 130, more than 6 per relation' in found
    assert 'depend on the number of steps: {64: 130, 16: 34}' in found[-1]
    assert len(WindowRow('LIF', 'sm_90', 1, {64: ['a'] * 7}).faults) == 1


@pytest.mark.parametrize(
    ('auto', 'planes', 'stacked', 'fault'),
    [
        ('kernel', 150, 200, None),
        ('kernel', 150, 199, 'stacked planes 199'),
        ('kernel', 102, 200, 'plain JAX moves 102 bytes, no more'),
        ('jax', 102, 150, None),
        ('jax', 150, 300, 'auto takes plain JAX, which moves 150'),
    ],
)
@pytest.mark.parametrize('op', ['trace_step', 'hidden_jacobian', 'adjoint_scan'])
def test_a_kernel_that_is_not_worth_it_is_caught(op, auto, planes, stacked, fault):
    row = Row(op, '', '', 'v5e', moved=100, planes=planes, stacked=stacked, auto=auto)
    found = faults_of_comparison(row, halved=True)
    assert found == [] if fault is None else fault in found[0] and len(found) == 1


KINDS = {
    'v4': 'TPU v4',
    'v5e': 'TPU v5 lite',
    'v5p': 'TPU v5',
    'v6e': 'TPU v6 lite',
    'tpu7x': 'TPU7x',
}


def test_what_auto_takes_is_asked_for_each_target(monkeypatch):
    monkeypatch.setattr(checks, 'device_kind', KINDS.__getitem__)
    case = case_of(AdjointSpec(2, 7, (3, 37)))
    assert [taken(case, target) for target in TARGETS] == ['kernel'] * 3 + [
        'jax',
        'jax',
        'kernel',
        'jax',
        'jax',
    ]
    large = case_of(AdjointSpec(1, 64, (256, 512)))
    assert [taken(large, t) for t in KINDS] == ['jax', 'jax', 'kernel', 'jax', 'kernel']


def test_there_are_cases_on_both_sides_of_what_auto_takes_on_tpus(monkeypatch):
    monkeypatch.setattr(checks, 'device_kind', KINDS.__getitem__)
    made = [case_of(spec) for spec in COMPILED['adjoint_scan']]
    plain = {
        case.shape: [target for target in KINDS if taken(case, target) == 'jax']
        for case in made
        if 'mosaic' in case.compared
    }
    but_v5p = ['v4', 'v5e', 'v6e', 'tpu7x']
    assert plain == {
        'S=1, K=64, (8, 512)': but_v5p,
        'S=2, K=64, (8, 512)': but_v5p,
        'S=3, K=64, (8, 512)': [],
        'S=4, K=64, (8, 512)': [],
        'S=1, K=64, (256, 512)': ['v4', 'v5e', 'v6e'],
        'S=2, K=128, (256, 512)': [],
        'S=1, K=64, (8, 512), 1 within': [],
        'S=1, K=64, (8, 512), 2 within': but_v5p,
        'S=2, K=64, (8, 512), windows follow': but_v5p,
    }


@pytest.mark.parametrize(('kept', 'rows'), [(False, 3), (True, 1)])
def test_blocks_are_counted_to_the_edge_and_once_while_they_stay(kept, rows):
    def add(x, y, z):
        z[...] = x[...] + y[...]

    def run(x, y):
        return pl.pallas_call(
            add,
            grid=(2, 3),
            in_specs=[
                pl.BlockSpec((8, 128), lambda j, i: (i, j)),
                pl.BlockSpec((1, 128), lambda j, i: (0, j)),
            ],
            out_specs=pl.BlockSpec((8, 128), lambda j, i: (i, j)),
            out_shape=x,
            compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
        )(x, y)

    x, y = (jax.ShapeDtypeStruct((n, 200), jnp.float32) for n in (20, 1))
    assert block_bytes(run, (x, y), kept=kept) == 4 * 200 * (20 + rows + 20)


def test_the_floor_counts_a_trace_read_once_and_written_once():
    planes, rows, x, read, live = 2 * 3 * 5 * 7, (4 + 2 + 2) * 3 * 7, 3 * 5, 5 * 7, 1
    found = floor(case_of(TraceSpec(2, (3, 5, 7))))
    assert found == 4 * (2 * planes + rows + x + read) + live


def test_the_plain_formula_is_that_of_the_kernel():
    case = case_of(TraceSpec(2, (3, 5, 7), steps=4))
    rng = np.random.default_rng(0)
    operands = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), case.operands)
    planes = [e['weight'] for e in operands[3]]
    (new, read) = plain_pass(*operands[:3], planes, operands[4])
    wanted, wanted_read = implementation(case, 'reference')(*operands[:5], None, jnp.ones(()), None)
    for found, e in zip(new, wanted, strict=True):
        np.testing.assert_allclose(found, e['weight'], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(read, wanted_read['weight'], rtol=1e-4, atol=1e-5)
    stacked = jax.eval_shape(stacked_pass, *as_arrays(case.operands[:5]))
    assert stacked[0].shape == (2, 3, 5, 7)


def test_the_plain_walk_is_that_of_the_kernel():
    case = case_of(AdjointSpec(2, 3, (2, 5)))
    rng = np.random.default_rng(0)
    operands = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), case.operands)
    found = implementation(case, 'reference')(*operands)
    D, f, L, R, c = map(np.array, operands[:5])
    moved_axes = np.moveaxis(D, 2, 0), *(np.moveaxis(a, 1, 0) for a in (f[0], L, R)), c[0]
    (nu, P), (w, u) = stacked_walk(*moved_axes)
    wanted = (found.nu, found.P, found.w[0], np.moveaxis(np.array(found.u[0]), 1, 0))
    for a, b in zip((nu, P, w, u), map(np.array, wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_every_kernel_has_cases_of_both_types():
    assert len(all_cases()) == sum(map(len, COMPILED.values()))
    for op in {*COMPILED} - {'hidden_jacobian'}:
        assert {spec.dtype for spec in COMPILED[op]} == {'float32', 'bfloat16'}, op
    jacobians = COMPILED['hidden_jacobian']
    assert any(spec.precision == 'bf16' for spec in jacobians)
    models = {'lif', 'alif_expon', 'gif_expon', 'coba_ei', 'stp', 'gru', 'lstm'}
    assert models <= {spec.model for spec in jacobians}
    assert TARGETS == ('sm_80', 'sm_90', 'sm_100', 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x')


def test_a_row_says_what_is_wrong():
    row = Row('trace_step', 'float32', 'S=2', 'sm_90', 64, 0, 210, 200, 300, 0, 500, 'kernel')
    assert as_line(row).endswith('| sm_90 | 64 | 0 | 210 | 1.05 | 1.50 |  | 2.50 | kernel |')
    assert 'FAILED, it spills' in as_line(row._replace(faults=('it spills',)))
    window = WindowRow('LIF', 'sm_90', 2, {64: ['a'] * 9, 16: ['a'] * 9}, 16)
    page = document([row], [window])
    assert '| float32 | S=2 | sm_90 | 64 | 0 | 210 | 1.05 | 1.50 |  | 2.50 | kernel |' in page
    assert '| LIF | sm_90 | 2 | 64: 9, 16: 9 | 4.5 | 16 | a, a,' in page
    slow = window._replace(launched={64: ['a'] * 13})
    assert 'LIF, sm_90: FAILED, a window of 64 steps launches 13' in document([], [slow])
