"""Operands without examples, inputs, outputs or positions give empty results and zero sums."""

from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accelerators.cases import case_of
from braintrace_fast.kernels.adjoint_scan import adjoint_scan
from braintrace_fast.kernels.dispatch import Backend
from braintrace_fast.kernels.factored_trace import factored_trace, smooth
from braintrace_fast.kernels.hidden_jacobian import hidden_jacobian
from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.specs import (
    AdjointSpec,
    FactoredSpec,
    SmoothSpec,
    SparseSpec,
    TraceSpec,
)
from braintrace_fast.kernels.trace_carry import trace_carry
from braintrace_fast.kernels.trace_step import trace_step
from tests.kernels.test_hidden_jacobian import Leaky

PLANES = {trace_step: ('D', 'f'), trace_carry: ('P', 'u')}
EMPTY = {'batch': (0, 3, 5), 'inputs': (2, 0, 5), 'outputs': (2, 3, 0), 'no batch': (0, 5)}
POSITIONS = [(0,), (0, 5), (2, 0)]
BACKENDS = pytest.mark.parametrize('name', ['jax', 'pallas', 'interpret'])


def checked(run, operands):
    """What an op gives for ones, compiled and not; it has no number but zero."""
    ones = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), operands)
    found = run(*ones)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(run)(*ones)), strict=True):
        assert a.shape == b.shape and not np.any(a) and not np.any(b)
    return found


@BACKENDS
@pytest.mark.parametrize('shape', EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize('op', [trace_step, trace_carry], ids=['step', 'carry'])
def test_traces(op, shape, name):
    case = case_of(TraceSpec(2, shape, steps=7 if op is trace_carry else None))
    run = partial(called, partial(op, backend=Backend(name)), case)
    new, read = checked(run, case.operands)
    assert [e['weight'].shape for e in new] == [shape, shape]
    assert read['weight'].shape == shape[-2:]


@BACKENDS
@pytest.mark.parametrize('op', [trace_step, trace_carry], ids=['step', 'carry'])
@pytest.mark.parametrize(
    ('shape', 'entries'),
    [((0, 3, 5), 4), ((2, 3, 5), 0), ((0, 5), 0), ((3, 0), 0)],
    ids=['no examples', 'no entries', 'no inputs', 'no outputs'],
)
def test_traces_of_entries(op, shape, entries, name):
    steps = 7 if op is trace_carry else None
    case = case_of(SparseSpec(2, shape, steps=steps, entries=entries))
    run = partial(called, partial(op, backend=Backend(name)), case)
    *shapes, places, live, w = case.operands
    new, read = checked(lambda arrays, *more: run(*arrays, places, *more), (shapes, live, w))
    assert [e['weight'].shape for e in new] == [(*shape[:-2], entries)] * 2
    assert read['weight'].shape == (entries,)


def called(api, case, *operands):
    """What the entry point of an op gives for the operands of a case."""
    packed = case.pack(*operands)
    named = {field.name: getattr(packed, field.name) for field in fields(packed)}
    if isinstance(packed, TraceOperands):
        old, new = PLANES[api.func]
        named |= {old: named.pop('decay'), new: named.pop('fresh')}
    return api(**named)


@BACKENDS
@pytest.mark.parametrize('positions', POSITIONS, ids=str)
@pytest.mark.parametrize('op', [adjoint_scan, factored_trace, smooth], ids=lambda op: op.__name__)
def test_scans(op, positions, name):
    specs = {adjoint_scan: AdjointSpec, factored_trace: FactoredSpec}
    spec = SmoothSpec(4, positions) if op is smooth else specs[op](2, 4, positions)
    case = case_of(spec)
    run = partial(called, partial(op, backend=Backend(name)), case)
    found = checked(run, case.operands)
    assert {leaf.shape[-len(positions) :] for leaf in jax.tree.leaves(found)} == {positions}


@BACKENDS
@pytest.mark.parametrize('positions', POSITIONS, ids=str)
def test_derivatives(positions, name):
    run = partial(hidden_jacobian, Leaky(), backend=Backend(name))
    found = checked(run, Leaky.operands(positions))
    assert [plane.shape for plane in found[0]] == [positions] * 2
