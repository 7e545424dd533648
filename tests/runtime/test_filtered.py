"""A window of a filtered trace is its step recurrence, for random factors."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from braintrace_fast.kernels.adjoint_scan import adjoint_scan
from braintrace_fast.kernels.trace_carry import trace_carry
from braintrace_fast.runtime.filtered import second_half, with_filter
from tests.kernels.test_adjoint_scan import BATCH, INPUTS, RULES, SIZE, factors


def recurrence(D, f, L, R, x, start, kappa):
    """Both traces and the gradient by later steps, step by step as they are defined."""
    e, ebar, gradient = start, 0.5 * start, 0.0
    for t in range(x.shape[0]):
        past = np.einsum('sqbo,qbio->sbio', D[:, :, t], e)
        gradient = gradient + np.einsum('sbo,sbio->io', L[:, t], past + kappa * ebar)
        gradient = gradient + np.einsum('qbo,qbio->io', R[:, t], ebar)
        e = past + np.einsum('sbo,bi->sbio', f[:, t], x[t])
        ebar = kappa * ebar + e
    return np.concatenate([e, ebar]), gradient


@settings(max_examples=20)
@given(factors(), st.floats(0, 0.99))
def test_a_window_is_the_recurrence(x64, case, kappa):
    dense, planes = case
    steps, start = dense['x'].shape[0], dense['start']
    trace, gradient = recurrence(**dense, kappa=kappa)
    D = with_filter(planes['D'], jnp.full((steps, BATCH, SIZE), kappa))
    f = (*planes['f'], *planes['f'])
    L, R = second_half([planes['L'], planes['R']])
    found = adjoint_scan(D, [f], L, R, carry=True)
    total = np.zeros((INPUTS, SIZE))
    if found.w[0] is not None:
        total = total + np.einsum('tbi,tbo->io', dense['x'], np.asarray(found.w[0]))
    entry = np.concatenate([start, 0.5 * start])
    for nu, e in zip(found.nu, entry, strict=True):
        if nu is not None:
            total = total + np.einsum('bo,bio->io', np.asarray(nu), e)
    np.testing.assert_allclose(total, gradient, rtol=1e-9, atol=1e-9)
    old = [{'weight': jnp.asarray(e)} for e in entry]
    new, _ = trace_carry(RULES, jnp.asarray(dense['x']), found.P, found.u[0], old)
    for made, true in zip(new, trace, strict=True):
        np.testing.assert_allclose(made['weight'], true, rtol=1e-9, atol=1e-9)
