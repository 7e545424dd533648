"""``adjoint_scan``, ``trace_carry`` and ``trace_step`` against the step recurrence in float64."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerators.rules import matmul_rules
from braintrace_fast.kernels.adjoint_scan import adjoint_scan
from braintrace_fast.kernels.adjoint_scan import reference as adjoint_reference
from braintrace_fast.kernels.factored_trace import factored_trace, naive, smooth
from braintrace_fast.kernels.factored_trace.operands import FactoredOperands, SmoothOperands
from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.trace_carry import blocked, reference, trace_carry
from braintrace_fast.kernels.trace_step import trace_step

BATCH, INPUTS, SIZE = 2, 3, 4
ROUNDOFF = 2.0**-8  # of bfloat16


RULES = matmul_rules(has_bias=False, precision=None)


@st.composite
def factors(draw):
    """Random planes, dense and as planes with None for what is structurally zero."""
    size = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([0.0, 0.5, 1.5]))
    present = np.array(draw(st.lists(st.booleans(), min_size=size * size, max_size=size * size)))
    reached = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    reached[0] = True
    bypass = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    patterns = present.reshape(size, size), reached, bypass
    return made(rng, steps, scale, *patterns, fixed=draw(st.booleans()))


def made(rng, steps, scale, present, reached, bypass, fixed):
    size = len(present)
    shape = (steps, BATCH, SIZE)
    D = scale * rng.normal(size=(size, size, *shape)) * present[:, :, None, None, None]
    D *= rng.random(D.shape) < 0.8  # resets
    f = rng.normal(size=(size, *shape)) * reached[:, None, None, None]
    if fixed:  # but for the first f
        D[:], f[1:] = D[:, :, :1], f[1:, :1]
    kept = slice(0, 1 if fixed else None)
    L, R = rng.normal(size=(2, size, *shape))
    R *= bypass[:, None, None, None]
    x = rng.normal(size=(steps, BATCH, INPUTS))
    start = rng.normal(size=(size, BATCH, INPUTS, SIZE))
    planes = dict(
        D=[
            [jnp.asarray(D[s, q, kept]) if present[s, q] else None for q in range(size)]
            for s in range(size)
        ],
        f=[
            jnp.asarray(f[s, kept if s else slice(None)]) if reached[s] else None
            for s in range(size)
        ],
        L=list(map(jnp.asarray, L)),
        R=[jnp.asarray(R[q]) if bypass[q] else None for q in range(size)],
    )
    return dict(D=D, f=f, L=L, R=R, x=x, start=start), planes


def recurrence(D, f, L, R, x, start):
    """The trace and the gradient, step by step, as they are defined."""
    e, gradient = start, 0.0
    for t in range(x.shape[0]):
        past = np.einsum('sqbo,qbio->sbio', D[:, :, t], e)
        gradient = gradient + np.einsum('sbo,sbio->io', L[:, t], past)
        gradient = gradient + np.einsum('qbo,qbio->io', R[:, t], e)
        e = past + np.einsum('sbo,bi->sbio', f[:, t], x[t])
    return e, gradient


@settings(max_examples=30)
@given(factors(), st.booleans(), st.booleans(), st.booleans())
def test_a_window_is_the_recurrence(x64, case, overwrite, within, at_once):
    check_window(*case, overwrite, within, at_once)


def check_window(dense, planes, overwrite=True, within=False, at_once=False):
    trace, gradient = recurrence(**dense)
    if within:
        gradient = gradient + np.einsum('stbo,stbo,tbi->io', dense['L'], dense['f'], dense['x'])
    found = adjoint_scan(
        planes['D'], [planes['f']], planes['L'], planes['R'], within=[within], carry=True
    )
    x, start = jnp.asarray(dense['x']), jnp.asarray(dense['start'])
    total = np.zeros((INPUTS, SIZE))
    options = dict(overwrite=overwrite)
    if found.w[0] is not None:
        total = np.einsum('tbi,tbo->io', dense['x'], np.asarray(found.w[0]))
        if at_once:
            options |= dict(w=found.w[0], total={'weight': jnp.asarray(total)})
            total = np.zeros_like(total)
    old = [{'weight': e} for e in start]
    new, read = trace_carry(RULES, x, found.P, found.u[0], old, found.nu, **options)
    for s, e in enumerate(new):
        np.testing.assert_allclose(e['weight'], trace[s], rtol=1e-9, atol=1e-9)
    if read is not None:
        total = total + np.asarray(read['weight'])
    np.testing.assert_allclose(total, gradient, rtol=1e-9, atol=1e-9)


def wrong_order(run, operands):
    """Suffix products with the first step to the left."""
    reversed_D = jax.tree.map(lambda a: a[::-1], operands.D)
    return run(operands)._replace(P=run(replace(operands, D=reversed_D)).P)


def a_step_late(run, operands):
    """What an op does to the exit, of the step before."""
    found = run(operands)
    return found._replace(u=jax.tree.map(lambda a: jnp.roll(a, 1, 0), found.u))


def no_bypass(run, operands):
    """Without what the loss reads of the states before a step."""
    return run(replace(operands, R=jax.tree.map(jnp.zeros_like, operands.R)))


@pytest.mark.parametrize('broken', [wrong_order, a_step_late, no_bypass])
def test_a_broken_definition_is_caught(x64, broken, monkeypatch):
    pattern = np.ones((2, 2), bool), np.ones(2, bool), np.ones(2, bool)
    case = made(np.random.default_rng(0), 3, 0.5, *pattern, fixed=False)
    check_window(*case)
    whole = functools.partial(broken, adjoint_reference.adjoint_scan)
    monkeypatch.setattr(adjoint_reference, 'adjoint_scan', whole)
    with pytest.raises(AssertionError):
        check_window(*case)


def flags(draw, *shape):
    size = int(np.prod(shape))
    return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape)


@st.composite
def sequences(draw):
    """Several ops that reach one group, over steps that need not fill their last window."""
    size, ops = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    steps = draw(st.integers(1, 9))
    window = draw(st.integers(1, steps))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    decays = st.lists(st.sampled_from([0.0, 0.5, -0.9, 1.5]), min_size=size**2, max_size=size**2)
    scales = np.array(draw(decays)).reshape(size, size, 1, 1, 1)
    present = dict(
        D=flags(draw, size, size),
        f=flags(draw, ops, size),
        L=flags(draw, size),
        R=flags(draw, size),
    )
    present['f'][np.arange(ops), rng.integers(size, size=ops)] = True
    shape = (steps, BATCH, SIZE)
    values = {
        name: rng.normal(size=(*own.shape, *shape)) * own[..., None, None, None]
        for name, own in present.items()
    }
    values['D'] = np.abs(values['D']) * scales * (rng.random(values['D'].shape) < 0.9)  # resets
    values['x'] = rng.normal(size=(ops, steps, BATCH, INPUTS))
    values['start'] = rng.normal(size=(ops, size, BATCH, INPUTS, SIZE))
    exact = {k: np.array(jnp.asarray(v, jnp.bfloat16), np.float64) for k, v in values.items()}
    return exact, present, window, tuple(flags(draw, ops).tolist())


def _planes(a, present, dtype):
    """Nested lists of planes, with None where there is none."""
    if present.ndim:
        return [_planes(*pair, dtype) for pair in zip(a, present, strict=True)]
    return jnp.asarray(a, dtype) if present else None


scan = jax.jit(functools.partial(adjoint_scan, carry=True), static_argnames='within')


def packed(run, **options):
    """An implementation as a function of the arrays of its operands."""
    return lambda *arrays: run(TraceOperands(RULES, *arrays), **options)


CARRIES = {
    'chosen': functools.partial(trace_carry, RULES),
    'chosen, not in place': functools.partial(trace_carry, RULES, overwrite=False),
    'plain': packed(reference.trace_carry),
    'blocked': packed(blocked.trace_carry),
    'blocked, not in place': packed(blocked.trace_carry, overwrite=False),
}
CARRIES = {name: jax.jit(carry) for name, carry in CARRIES.items()}


def chained(case, present, window, within, carry, dtype, stored):
    """The traces and gradients per op, window after window."""
    ops, steps = case['x'].shape[:2]
    planes = [_planes(case[name], present[name], dtype) for name in 'DfLR']
    traces = [[{'weight': jnp.asarray(e, stored)} for e in start] for start in case['start']]
    totals = np.zeros((ops, INPUTS, SIZE))
    for first in range(0, steps, window):
        part = jax.tree.map(lambda a, i=first: a[i : i + window], planes)
        found = scan(*part, within=within)
        for k in range(ops):
            x = case['x'][k, first : first + window]
            own = jnp.asarray(x, dtype), found.P, found.u[k], traces[k], found.nu
            traces[k], read = carry(*own)
            if found.w[k] is not None:
                totals[k] += np.einsum('tbi,tbo->io', x, np.asarray(found.w[k], np.float64))
            if read is not None:
                totals[k] += np.asarray(read['weight'], np.float64)
    as_array = functools.partial(np.asarray, dtype=np.float64)
    return np.array([[as_array(e['weight']) for e in planes] for planes in traces]), totals


def recurrences(D, f, L, R, x, start, within):
    """The same step by step."""
    traces, totals = [], []
    for own_f, own_x, own_start, own in zip(f, x, start, within, strict=True):
        trace, total = recurrence(D, own_f, L, R, own_x, own_start)
        if own:
            total = total + np.einsum('stbo,stbo,tbi->io', L, own_f, own_x)
        traces.append(trace)
        totals.append(total)
    return np.array(traces), np.array(totals)


def check_windows(drawn, carry, dtype, stored, error):
    """Off by a part of sums without cancellation that each write adds to, at most."""
    case, present, window, within = drawn
    found = chained(case, present, window, within, carry, dtype, stored)
    sizes = recurrences(**{k: np.abs(v) for k, v in case.items()}, within=within)
    writes = -(-case['x'].shape[1] // window)
    bound = (1 + error) ** writes - 1 + 16 * float(jnp.finfo(dtype).eps)
    for a, b, size in zip(found, recurrences(**case, within=within), sizes, strict=True):
        assert np.all(np.abs(a - b) <= bound * size)


some_carry = st.sampled_from(list(CARRIES))


@settings(max_examples=8)
@given(sequences(), some_carry)
def test_windows_one_after_the_other_are_the_recurrence(x64, drawn, name):
    check_windows(drawn, CARRIES[name], jnp.float64, jnp.float64, error=0.0)


@settings(max_examples=6)
@given(sequences(), some_carry)
def test_traces_in_bfloat16_are_off_by_a_rounding_per_write(drawn, name):
    check_windows(drawn, CARRIES[name], jnp.float32, jnp.bfloat16, error=ROUNDOFF)


@pytest.mark.slow
@settings(max_examples=80)
@given(sequences(), some_carry)
def test_many_windows_are_the_recurrence(x64, drawn, name):
    check_windows(drawn, CARRIES[name], jnp.float64, jnp.float64, error=0.0)


@pytest.mark.slow
@settings(max_examples=80)
@given(sequences(), some_carry)
def test_many_traces_in_bfloat16_are_off_by_a_rounding_per_write(drawn, name):
    check_windows(drawn, CARRIES[name], jnp.float32, jnp.bfloat16, error=ROUNDOFF)


def test_the_bound_of_bfloat16_is_reached_by_half():
    """So that the test above means something: one window, one product to store."""
    planes = jnp.ones((2, 1, 1))
    found = adjoint_scan([[planes]], [[planes]], carry=True)
    worst = 1 + 2**-8 - 2**-20  # just below the middle of two neighbours
    x = jnp.array([worst, 0.0]).reshape(2, 1, 1)
    (new,), _ = trace_carry(
        RULES, x, found.P, found.u[0], [{'weight': jnp.zeros((1, 1, 1), 'bfloat16')}]
    )
    error = abs(float(new['weight'][0, 0, 0]) - worst) / worst
    assert 0.5 * 2**-8 < error <= 2**-8


step = jax.jit(functools.partial(trace_step, RULES))


@settings(max_examples=10)
@given(factors())
def test_steps_are_the_recurrence(x64, case):
    dense, planes = case
    trace, gradient = recurrence(**dense)
    e, total = [{'weight': jnp.asarray(plane)} for plane in dense['start']], 0.0
    for t, x in enumerate(dense['x']):
        D, f = jax.tree.map(lambda a, t=t: a[t], (planes['D'], planes['f']))
        signal = np.einsum('sbo,sqbo->qbo', dense['L'][:, t], dense['D'][:, :, t])
        new, read = step(jnp.asarray(x), D, f, e, list(jnp.asarray(signal + dense['R'][:, t])))
        total = total + read['weight']
        e = [{'weight': 0 * e[s]['weight']} if n is None else n for s, n in enumerate(new)]
    for plane, expected in zip(e, trace, strict=True):
        np.testing.assert_allclose(plane['weight'], expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(total, gradient, rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(factors(), st.floats(0, 0.99))
def test_the_factorised_trace_is_its_recurrence(x64, case, decay):
    dense, planes = case
    start = dense['start'][:, :, 0]
    starts = list(map(jnp.asarray, start))
    (last, _), (found, same) = factored_trace(planes['D'], [planes['f']] * 2, [starts] * 2, decay)
    assert all(bool(jnp.all(a == b)) for a, b in zip(found, same, strict=True))
    xs, x = jnp.asarray(dense['x']), np.full((BATCH, INPUTS), 0.5)
    left, xhat = smooth(xs, jnp.asarray(decay * x), decay)
    back_left, back = smooth(xs, None, decay, reverse=True)
    forth_left, forth = smooth(xs[::-1], jnp.zeros_like(x), decay)
    np.testing.assert_allclose(back, forth[::-1], rtol=1e-12)
    np.testing.assert_allclose(back_left, forth_left, rtol=1e-12)
    smoothed = naive.smooth(SmoothOperands(xs, decay * x, decay))
    assert_same((left, xhat), smoothed)
    operands = FactoredOperands(planes['D'], [planes['f']], [starts], decay)
    assert_same(((last,), (found,)), naive.factored_trace(operands))


def assert_same(found, expected):
    for a, b in zip(map(np.asarray, found), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_planes_of_two_shapes_are_refused():
    with pytest.raises(ValueError, match='of one shape'):
        adjoint_scan([[jnp.ones((3, 2))]], [[jnp.ones((3, 4))]])
    with pytest.raises(ValueError, match='of one shape'):
        adjoint_scan([[jnp.ones((3, 2))]], [[jnp.ones((2, 2))]])
    with pytest.raises(ValueError, match='of one shape'):
        factored_trace([[jnp.ones((3, 2))]], [[jnp.ones((3, 1))]], [[jnp.ones(2)]], 0.5)
    with pytest.raises(ValueError, match='L has 2 planes, expected 1'):
        adjoint_scan([[jnp.ones((3, 2))]], [[jnp.ones((3, 2))]], [None, None])
    with pytest.raises(ValueError, match='u has 2 planes'):
        trace_carry(RULES, jnp.ones((3, 2)), [[None]], [None, None], [None])
    with pytest.raises(ValueError, match='D has 2 planes'):
        factored_trace([[None]] * 2, [[None]], [[jnp.ones(2)]], 0.5)
    with pytest.raises(ValueError, match='x has shape'):
        smooth(jnp.ones((3, 2)), jnp.ones(3), 0.5)
