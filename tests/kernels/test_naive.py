"""The references against the naive definitions of the ops: formulas, in a loop over steps."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from accelerators.rules import matmul_rules, sparse_rules
from braintrace_fast.kernels.adjoint_scan.operands import AdjointOperands
from braintrace_fast.kernels.factored_trace.operands import FactoredOperands, SmoothOperands
from braintrace_fast.kernels.hidden_jacobian import naive, reference
from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.specs import CHECKED, AdjointSpec, SmoothSpec, SparseSpec
from tests.kernel_checks import as_planes, exact
from tests.kernels.test_hidden_jacobian import NO_KERNEL, transitions


def defined(op, module):
    folder, _, name = op.partition('.')
    found = importlib.import_module(f'braintrace_fast.kernels.{folder}.{module}')
    return getattr(found, name or folder)


def assert_same(found, values):
    """Planes of float64 are those of the naive definition, and not all zero."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(as_planes(found, values)), strict=True)
    is_zero = True
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
        is_zero &= not np.any(b)
    assert not is_zero


def check(op, operands):
    assert_same(exact(defined(op, 'reference'), operands), defined(op, 'naive')(operands))


def arrays_of(spec):
    return spec.arrays(np.random.default_rng(spec.steps or 0))


def named(specs):
    return pytest.mark.parametrize('spec', specs.values(), ids=specs)


WITHIN = {'within': AdjointSpec(2, 5, (3, 4), ops=2, within=True)}


@pytest.mark.parametrize('carry', [False, True])
@named(CHECKED['adjoint_scan'] | WITHIN)
def test_a_window_goes_back_as_defined(spec, carry):
    within = (spec.within,) * spec.ops
    operands = AdjointOperands(*arrays_of(spec), within=within, carry=carry)
    found = exact(defined(spec.op, 'reference'), operands)
    nu, w, P, u = defined(spec.op, 'naive')(operands)
    w = [None if a is None else b for a, b in zip(found.w, w, strict=True)]  # not c by itself
    assert_same(found, (nu, w, P, u))


@named(CHECKED['factored_trace'])
def test_a_factorised_trace_is_as_defined(spec):
    check(spec.op, FactoredOperands(*arrays_of(spec), decay=0.9))


@pytest.mark.parametrize('backwards', [False, True])
def test_smoothing_is_as_defined(backwards):
    spec = SmoothSpec(9, (3, 4), backwards=backwards)
    check(spec.op, SmoothOperands(*arrays_of(spec), decay=0.9, reverse=backwards))


@pytest.mark.parametrize('live', [None, True, False])
@named(
    {
        f'{op}, {name}': spec
        for op in ('trace_step', 'trace_carry', 'sparse_step', 'sparse_carry')
        for name, spec in CHECKED[op].items()
    }
)
def test_a_trace_is_as_defined(spec, live):
    spec = dataclasses.replace(spec, bias=False, dtype='float32', stored=None)
    x, D, f, trace, signal = arrays_of(spec)
    w = f[0][::-1]
    rows, columns = (np.asarray(a, 'float64').reshape(-1, a.shape[-1]) for a in (x, w))
    total = {'weight': rows.T @ columns}
    rules = matmul_rules(has_bias=False, precision='highest')
    if isinstance(spec, SparseSpec):
        rules = sparse_rules(*spec.places(), has_bias=False)
        total = {'weight': total['weight'][spec.places()]}
    options = dict(live=live if live is None else np.asarray(live), w=w, total=total)
    operands = TraceOperands(rules, x, D, f, trace, signal, **options)
    new, read = exact(defined(spec.op, 'reference'), operands)
    values, value = defined(spec.op, 'naive')(operands)
    assert_same(([e and e['weight'] for e in new], read['weight']), (values, value))


@pytest.mark.parametrize(
    'name', [*CHECKED['hidden_jacobian'], *(m for m in NO_KERNEL if m != 'while')]
)
def test_derivatives_are_the_diagonal_of_the_dense_jacobian(name):
    with jax.numpy_rank_promotion('allow'):  # a model's equations are as its user wrote them
        cases = transitions(name)
    for case in cases:
        found, values = reference.hidden_jacobian(case), naive.hidden_jacobian(case)
        planes = as_planes(found, values)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(planes), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * np.abs(b).max() + 1e-8)
