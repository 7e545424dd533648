"""How the checks of compiled kernels read programs and blocks; `make accelerators` compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from accelerators.blocks import block_bytes
from accelerators.cases import (
    all_cases,
    as_arrays,
    floor,
    implementation,
    plain_pass,
    stacked_pass,
    trace_step,
)
from accelerators.checks import TARGETS, Row
from accelerators.hlo import copies, moved
from accelerators.report import as_line, document

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
    planes, rows, x, read = 2 * 3 * 5 * 7, (4 + 2 + 2) * 3 * 7, 3 * 5, 5 * 7
    assert floor(trace_step(2, (3, 5, 7), 'float32')) == 4 * (2 * planes + rows + x + read)


def test_the_plain_formula_is_that_of_the_kernel():
    case = trace_step(2, (3, 5, 7), 'float32', steps=4)
    rng = np.random.default_rng(0)
    operands = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), case.operands)
    planes = [e['weight'] for e in operands[3]]
    (new, read) = plain_pass(*operands[:3], planes, operands[4])
    wanted, wanted_read = implementation(case, 'reference')(*operands)
    for found, e in zip(new, wanted, strict=True):
        np.testing.assert_allclose(found, e['weight'], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(read, wanted_read['weight'], rtol=1e-4, atol=1e-5)
    stacked = jax.eval_shape(stacked_pass, *as_arrays(case.operands, stacked=True))
    assert stacked[0].shape == (2, 3, 5, 7)


def test_every_kernel_has_cases_of_both_types():
    made = [(make.func.__name__, str(make.args)) for make in all_cases()]
    for op in ('trace_step', 'trace_carry', 'adjoint_scan', 'factored_trace', 'smooth'):
        for dtype in ('float32', 'bfloat16'):
            assert any(name == op and dtype in args for name, args in made), (op, dtype)
    assert {'lif', 'alif_expon', 'gif_expon', 'coba_ei', 'stp', 'gru', 'lstm'} <= {
        make.args[0] for make in all_cases() if make.func.__name__ == 'hidden_jacobian'
    }
    assert TARGETS == ('sm_80', 'sm_90', 'sm_100', 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x')


def test_a_row_says_what_is_wrong():
    row = Row('trace_step', 'float32', 'S=2', 'sm_90', 64, 0, 210, 200, 300, 0, 500)
    assert as_line(row).endswith('| sm_90 | 64 | 0 | 210 | 1.05 | 1.50 |  | 2.50 |')
    assert 'FAILED, it spills' in as_line(row._replace(faults=('it spills',)))
    assert '| float32 | S=2 | sm_90 | 64 | 0 | 210 | 1.05 | 1.50 |  | 2.50 |' in document([row])
