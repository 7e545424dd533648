"""The kernels of ``hidden_jacobian`` against the plain definition, on the transitions of models."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import ad

from accelerators.cases import first_step
from braintrace_fast.kernels import expand
from braintrace_fast.kernels.dispatch import Backend
from braintrace_fast.kernels.hidden_jacobian import (
    hidden_jacobian,
    mosaic,
    program,
    reference,
    triton,
)
from braintrace_fast.kernels.hidden_jacobian.operands import JacobianOperands
from braintrace_fast.kernels.specs import CHECKED, JacobianSpec
from tests.kernel_checks import assert_close, count_calls, exact, lowered, race_message

KERNELS = {'cuda': triton, 'tpu': mosaic}
NO_KERNEL = {
    'while': 'while loop',
    'learned_leak': 'fewer axes',
    'hidden_group_state': 'several planes',
    'cond_transition': 'cond has no expansion',
}


@functools.cache
def transitions(name, batch=3):
    """The transitions of a model, each with the operands of its first step."""
    compiled, values = first_step(JacobianSpec(name, batch))
    return [
        JacobianOperands(
            t,
            [[values[v] for v in row.constvars] for row in t.rows],
            [values[v] for v in (*t.hidden_invars, *t.y_vars)],
        )
        for t in compiled
    ]


def unpacked(case):
    return case.transition, case.constants, case.inputs


def of_arrays(kernel, transition):
    """A kernel as a function of the arrays of its operands."""
    return lambda *arrays: kernel.hidden_jacobian(JacobianOperands(transition, *arrays))


def assert_same(found, expected, rtol=2e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6 * float(jnp.abs(b).max() + 1e-6))


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
@pytest.mark.parametrize('name', CHECKED['hidden_jacobian'])
def test_the_kernel_is_the_definition(name, kernel):
    for case in transitions(name):
        expected = reference.hidden_jacobian(case)
        assert any(float(jnp.abs(plane).max()) > 0 for plane in jax.tree.leaves(expected))
        assert kernel.supports(case) is None
        assert_same(kernel.hidden_jacobian(case, interpret=True), expected)


@pytest.mark.parametrize('platform', KERNELS)
@pytest.mark.parametrize('name', CHECKED['hidden_jacobian'])
def test_it_lowers(name, platform):
    kernel = KERNELS[platform]
    for transition, *operands in map(unpacked, transitions(name)):
        run = of_arrays(kernel, transition)
        assert count_calls(lowered(run, *operands, platform=platform), platform) == 1


@pytest.mark.parametrize('name', NO_KERNEL)
def test_what_has_no_kernel_says_why_and_takes_plain_jax(name):
    for case in transitions(name):
        assert NO_KERNEL[name] in triton.supports(case)
        assert NO_KERNEL[name] in mosaic.supports(case)
        found = hidden_jacobian(*unpacked(case), backend=Backend('interpret'))
        assert_same(found, reference.hidden_jacobian(case))


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
@pytest.mark.parametrize('batch', [None, 1, 17])
def test_batches_of_any_size(batch, kernel):
    """17 rows are neither a multiple of a tile nor one."""
    for case in transitions('lif_expon', batch):
        expected = reference.hidden_jacobian(case)
        assert_same(kernel.hidden_jacobian(case, interpret=True), expected)


class Leaky:
    """A transition with one operand of each kind, over positions of any shape."""

    widths, reached, pattern = (0,), ((True, True),), ((True, True),)
    shared, forward_only = (False,), False

    def __init__(self, scale=1.0):
        self.scale = scale

    def evaluate(self, row, constants, inputs):
        (one, by_column, by_row), (h, y) = constants, inputs
        by_column = jnp.expand_dims(by_column, tuple(range(h.ndim - 1)))
        return jnp.tanh(h * one + y * by_column) * by_row + self.scale * h * y

    @staticmethod
    def operands(shape, dtype=jnp.float32):
        rng = np.random.default_rng(0)
        shapes = ((), shape[-1:], (*shape[:-1], 1), shape, shape)
        one, column, row, h, y = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
        return [[one, column, row]], [h, y]


def leaky(shape, dtype=jnp.float32, scale=1.0):
    return JacobianOperands(Leaky(scale), *Leaky.operands(shape, dtype))


class Divided(Leaky):
    """What Triton cannot do in bfloat16."""

    def evaluate(self, row, constants, inputs):
        return super().evaluate(row, constants, inputs) / (2 + jnp.exp(inputs[1]))


SHAPES = [(1,), (5,), (1, 1), (300, 1), (3, 130), (2, 3, 7), (9, 257)]


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
def test_any_shape(kernel, shape):
    case = leaky(shape)
    expected = reference.hidden_jacobian(case)
    assert_same(kernel.hidden_jacobian(case, interpret=True), expected)


@pytest.mark.parametrize('platform', KERNELS)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_any_shape_lowers(platform, shape):
    run = of_arrays(KERNELS[platform], Leaky())
    assert count_calls(lowered(run, *Leaky.operands(shape), platform=platform), platform) == 1


def interpreted(case):
    """On two cores, with memory that was not written NaN."""
    params = pltpu.InterpretParams(
        uninitialized_memory='nan', detect_races=True, num_cores_or_threads=2
    )
    return jax.jit(lambda: mosaic.hidden_jacobian(case, interpret=params))()


def test_nothing_past_an_edge_reaches_a_result(capfd):
    case = leaky((17, 770))
    assert_same(interpreted(case), reference.hidden_jacobian(case))
    assert 'RACE' not in capfd.readouterr().out


def test_tiles_that_overlap_are_caught(monkeypatch, capfd):
    """Here every cell of the grid writes the first tile."""
    spec = pl.BlockSpec
    monkeypatch.setattr(pl, 'BlockSpec', lambda shape, at: spec(shape, lambda i, j: (0, 0)))
    case = leaky((17, 770))
    assert 'race detected' in race_message(lambda: interpreted(case), capfd)


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
def test_bfloat16_is_evaluated_in_float32(kernel):
    case = leaky((3, 130), jnp.bfloat16)
    assert kernel.supports(case) is None
    found = kernel.hidden_jacobian(case, interpret=True)
    define = reference.hidden_jacobian
    assert_close(found, define(case), exact(define, case))  # float32 inside
    platform = next(name for name, own in KERNELS.items() if own is kernel)
    run = of_arrays(kernel, Divided())
    text = lowered(run, *Leaky.operands((3, 130), jnp.bfloat16), platform=platform)
    assert count_calls(text, platform) == 1


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
def test_types_and_sizes_without_a_kernel(x64, kernel):
    assert 'float64' in kernel.supports(leaky((3, 4), jnp.float64))
    assert 'no positions' in kernel.supports(leaky((0, 4)))


def test_positions_beyond_32_bits_have_no_kernel_on_gpus():
    large = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    assert '32 bits' in triton.supports(JacobianOperands(Leaky(), [[]], [large, large]))


class Many(Leaky):
    """More arrays than fit on chip."""

    def evaluate(self, row, constants, inputs):
        return inputs[0] * sum(constants) + inputs[1]


def test_arrays_that_do_not_fit_into_vmem_have_no_kernel():
    def asked(count):
        constants = [[jnp.full((16, 512), k) for k in range(count)]]
        return mosaic.supports(JacobianOperands(Many(), constants, [jnp.ones((16, 512))] * 2))

    tile = mosaic.tile_of(1024, 1024, mosaic.ARRAYS)
    assert 2 * 4 * math.prod(tile) * mosaic.ARRAYS <= mosaic.BUFFERS
    assert asked(mosaic.ARRAYS - 2) is None  # beside two results
    assert 'arrays' in asked(mosaic.ARRAYS - 1)


class Wide(Leaky):
    """Between operands and results of float32, another type."""

    def evaluate(self, row, constants, inputs):
        h, y = inputs
        return jnp.sin(h.astype(jnp.float64)).astype(jnp.float32) * y


class ByNumber(Leaky):
    """A power whose exponent is of another type."""

    def evaluate(self, row, constants, inputs):
        with jax.numpy_dtype_promotion('standard'):  # in JAX's own rule for its derivative
            return jax.lax.pow(inputs[0], jnp.int64(3)) * inputs[1]


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
@pytest.mark.parametrize(('transition', 'dtype'), [(Wide, 'float64'), (ByNumber, 'int64')])
def test_types_inside_without_a_kernel(x64, transition, dtype, kernel):
    case = JacobianOperands(transition(), [[]], [jnp.ones((2, 3), jnp.float32)] * 2)
    assert dtype in kernel.supports(case)


@jax.custom_vjp
def ramp(h):
    return jnp.tanh(h)


def ramp_forward(h):
    return ramp(h), h


def ramp_backward(h, cotangent):
    return (cotangent * (1 + jnp.arange(h.shape[-1], dtype=h.dtype))[None],)


ramp.defvjp(ramp_forward, ramp_backward)


class Ramp(Leaky):
    """A derivative that depends on where a position is."""

    def evaluate(self, row, constants, inputs):
        return ramp(inputs[0]) + inputs[1]


class RampInside(Ramp):
    def evaluate(self, row, constants, inputs):
        return inputs[0] * jax.jit(lambda: jnp.arange(4.0))()[None] + inputs[1]


class Total(Ramp):
    def evaluate(self, row, constants, inputs):
        return inputs[0] * jnp.ones((3, 4)).sum(0, keepdims=True) + inputs[1]


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
@pytest.mark.parametrize(
    ('transition', 'name'), [(Ramp, 'iota'), (RampInside, 'iota'), (Total, 'reduce_sum')]
)
def test_arrays_that_are_made_inside_have_no_kernel(transition, name, kernel):
    case = JacobianOperands(transition(), [[]], [jnp.ones((3, 4)), jnp.ones((3, 4))])
    assert name in kernel.supports(case)
    found = hidden_jacobian(*unpacked(case), backend=Backend('interpret'))
    assert_same(found, reference.hidden_jacobian(case))


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
def test_it_is_mapped_and_scanned(kernel):
    ((number, column, row),), inputs = Leaky.operands((2, 3, 130))

    def one(run, row, h, y):
        return run(JacobianOperands(Leaky(), [[number, column, row]], [h, y]))

    by_kernel = functools.partial(one, functools.partial(kernel.hidden_jacobian, interpret=True))
    by_definition = functools.partial(one, reference.hidden_jacobian)
    expected = jax.vmap(by_definition)(row, *inputs)
    assert_same(jax.vmap(by_kernel)(row, *inputs), expected)
    _, scanned = jax.lax.scan(lambda c, xs: (c, by_kernel(*xs)), 0, (row, *inputs))
    assert_same(scanned, expected)


def test_a_wrong_derivative_is_caught():
    """The comparison of these tests fails for a kernel of another transition."""
    found = triton.hidden_jacobian(leaky((3, 5), scale=1.001), interpret=True)
    with pytest.raises(AssertionError):
        assert_same(found, reference.hidden_jacobian(leaky((3, 5))))


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
def test_a_tile_that_is_left_out_is_caught(kernel, monkeypatch):
    case = leaky((3, 600))
    monkeypatch.setattr(pl, 'cdiv', lambda a, b: max(1, a // b))
    with pytest.raises(AssertionError):
        assert_same(kernel.hidden_jacobian(case, interpret=True), reference.hidden_jacobian(case))


@pytest.mark.parametrize(
    ('platform', 'name', 'value'),
    [('cuda', 'BLOCK', 96), ('tpu', 'tile_of', lambda *sizes: (12, 100))],
    ids=['cuda', 'tpu'],
)
def test_a_bad_tile_does_not_lower(platform, name, value, monkeypatch):
    monkeypatch.setattr(KERNELS[platform], name, value)
    run = of_arrays(KERNELS[platform], Leaky())
    with pytest.raises(Exception, match=r'power of 2|divisible by'):
        lowered(run, *Leaky.operands((64, 512)), platform=platform)


def test_a_column_is_not_taken_for_a_row():
    """With as many rows as columns, only the axis that is broadcast tells them apart."""

    class Outer(Leaky):
        def evaluate(self, row, constants, inputs):
            return inputs[0] * constants[0][:, None] + inputs[1]

    case = JacobianOperands(Outer(), [[jnp.arange(4.0)]], [jnp.ones((4, 4)), jnp.ones((4, 4))])
    assert 'moves positions' in triton.supports(case)


POINTS = np.concatenate([np.linspace(-6, 6, 121), [1e-3, -1e-3, 0.05, 0.5, -0.5, 1.5, 2.5]])


@pytest.mark.parametrize(
    ('kind', 'name', 'function'),
    [
        ('mosaic', 'expm1', np.expm1),
        ('mosaic', 'cbrt', np.cbrt),
        ('mosaic', 'atan', np.arctan),
        ('mosaic', 'sinh', np.sinh),
        ('mosaic', 'cosh', np.cosh),
        ('triton', 'erf', np.vectorize(math.erf)),
        ('triton', 'round', np.round),
        ('triton', 'exprel', lambda x: np.where(x == 0, 1, np.expm1(x) / np.where(x == 0, 1, x))),
    ],
)
def test_expansions(kind, name, function):
    params = {'rounding_method': 1} if name == 'round' else {}
    found = expand.EXPANSIONS[kind][name](jnp.asarray(POINTS, jnp.float32), **params)
    found = found[0] if isinstance(found, tuple) else found
    np.testing.assert_allclose(found, function(POINTS), rtol=2e-6, atol=3e-7)


@pytest.mark.parametrize('method', jax.lax.RoundingMethod)
def test_rounding_where_a_half_more_is_no_float(method):
    ends = [0.0, 0.25, 0.49999997, 0.5, 0.50000006, 0.99999994, 1.5, 2.5, 3.5, 2**22 + 0.5]
    ends += [2**22 + 1.5, 2**23 - 0.5, 2**23 + 1, 2**23 + 3, 2**24 + 2, 1e30, np.inf, np.nan]
    points = jnp.asarray([*ends, *(-end for end in ends)], jnp.float32)
    found = expand.EXPANSIONS['triton']['round'](points, rounding_method=method)
    np.testing.assert_array_equal(found, jax.lax.round(points, method))


softsign_p = Primitive('test_softsign')
softsign_p.def_impl(lambda x: x / (1 + jnp.abs(x)))
softsign_p.def_abstract_eval(lambda x: x)
ad.defjvp(softsign_p, lambda tangent, x: tangent * (1 - jnp.abs(softsign_p.bind(x))) ** 2)


class Softsign(Leaky):
    """With a primitive that no kernel has, also in its derivative."""

    def evaluate(self, row, constants, inputs):
        return softsign_p.bind(inputs[0]) * inputs[1]


@pytest.mark.parametrize('platform', KERNELS)
def test_users_add_expansions(platform, monkeypatch):
    kernel = KERNELS[platform]
    monkeypatch.setattr(expand, 'EXPANSIONS', {k: {**v} for k, v in expand.EXPANSIONS.items()})
    monkeypatch.setattr(program, 'EXPANSIONS', expand.EXPANSIONS)
    case = JacobianOperands(Softsign(), [[]], list(jnp.linspace(-2.0, 2.0, 12).reshape(2, 2, 3)))
    assert 'test_softsign has no expansion' in kernel.supports(case)
    expand.register_expansion('test_softsign', lambda x: x / (1 + jnp.abs(x)))
    assert kernel.supports(case) is None
    found = kernel.hidden_jacobian(case, interpret=True)
    assert_same(found, reference.hidden_jacobian(case))
    text = lowered(kernel.hidden_jacobian, case, platform=platform)
    assert count_calls(text, platform) == 1


def test_expansions_are_for_kernels_that_there_are():
    with pytest.raises(ValueError, match='There are no'):
        expand.register_expansion('tanh', jnp.tanh, ['metal'])


@pytest.mark.parametrize('kernel', [triton, mosaic], ids=['triton', 'mosaic'])
def test_only_what_a_derivative_depends_on_is_read_and_once(kernel):
    class Sum(Leaky):
        widths, reached = (0, 0), ((True, True), (True, True))
        pattern = ((True, True), (True, True))
        shared = ()

        def evaluate(self, row, constants, inputs):
            gain, offset = constants
            return gain * inputs[0] * inputs[1] + offset

    gain, offset, *inputs = jnp.arange(24.0).reshape(4, 2, 3)
    case = JacobianOperands(Sum(), [[gain, offset], [gain, offset]], inputs)
    found = program.program_of(case)
    assert [id(a) for a in found.operands] == [id(a) for a in (gain, *inputs)]
    assert_same(kernel.hidden_jacobian(case, interpret=True), reference.hidden_jacobian(case))


def test_a_choice_by_number_lowers():
    """Triton selects by truth values; a switch on integers is a chain of comparisons."""

    class Switch(Leaky):
        def evaluate(self, row, constants, inputs):
            h, y = inputs
            which = jnp.where(h < 0, 0, jnp.where(h < 1, 1, 2))
            return jax.lax.select_n(which, h * y, h + y, jnp.sin(h) * y)

    case = JacobianOperands(Switch(), [[]], [jnp.linspace(-2.0, 3.0, 6), jnp.linspace(1.0, 2.0, 6)])
    assert_same(triton.hidden_jacobian(case, interpret=True), reference.hidden_jacobian(case))
    assert count_calls(lowered(triton.hidden_jacobian, case, platform='cuda'), 'cuda') == 1


@pytest.mark.parametrize('name', ['lif', 'alif_expon', 'gif_expon'])
def test_what_is_one_number_throughout_is_no_operand(name):
    for case in transitions(name):
        for operand in program.program_of(case).operands:
            values = np.unique(operand)
            is_input = any(operand is a for a in case.inputs)
            assert operand.shape == () or values.size > 1 or is_input
