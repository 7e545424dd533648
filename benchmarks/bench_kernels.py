"""Each kernel op's definition in plain JAX against its formula, written out with dense matrices.

``KERNELS`` is the registry: an op is one entry, ``name: (reference, formula, arguments)``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accelerators.rules import matmul_rules, sparse_rules
from braintrace_fast.benchmarking import Program
from braintrace_fast.kernels.adjoint_scan import adjoint_scan
from braintrace_fast.kernels.factored_trace import factored_trace
from braintrace_fast.kernels.hidden_jacobian import hidden_jacobian
from braintrace_fast.kernels.specs import TIMED
from braintrace_fast.kernels.trace_carry import trace_carry
from braintrace_fast.kernels.trace_step import trace_step

STEPS = TIMED['trace_carry'].steps
DECAY = 0.9


def arrays(name):
    """Operands of an op between 0 and 1."""
    return TIMED[name].arrays(np.random.default_rng(0), fractions=True)


def three(D):
    """The planes of :func:`sparse`, as one array."""
    return jnp.stack([D[0][0], D[0][1], D[1][1]])


def sparse(D):
    """A voltage that reads a current, which reads itself: one plane of four is absent."""
    return [[D[0], D[1]], [None, D[2]]]


def dense(D):
    """The same with that plane filled in, as ``(K, S, S, ...)``."""
    return jnp.stack([jnp.stack([D[0], D[1]], 1), jnp.stack([0 * D[2], D[2]], 1)], 1)


def scan_by_planes(D, f, L):
    adjoint = adjoint_scan(sparse(D), [list(f)], list(L), carry=True)
    return jnp.stack(adjoint.nu), adjoint.w[0], jnp.stack(adjoint.u[0], 1)


def scan_by_matrices(D, f, L):
    f, L = jnp.moveaxis(f, 0, 1), jnp.moveaxis(L, 0, 1)
    one = jnp.broadcast_to(jnp.eye(2)[..., None, None], (2, *f.shape[1:]))

    def body(carry, step):
        nu, P = carry
        D, f, L = step
        w, u = jnp.einsum('sbo,sbo->bo', f, nu), jnp.einsum('sqbo,qbo->sbo', P, f)
        nu = jnp.einsum('sqbo,sbo->qbo', D, L + nu)
        return (nu, jnp.einsum('srbo,rqbo->sqbo', P, D)), (w, u)

    (nu, _), (w, u) = jax.lax.scan(body, (0 * f[0], one), (dense(D), f, L), reverse=True)
    return nu, w, u


RULES = matmul_rules(has_bias=False, precision=None)


def traces(e):
    return [{'weight': plane} for plane in e]


def carry_by_planes(x, P, u, e, nu):
    new, read = trace_carry(RULES, x, sparse(P), list(u), traces(e), list(nu))
    return jnp.stack([plane['weight'] for plane in new]), read['weight']


def carry_by_matrices(x, P, u, e, nu):
    matrices = dense([plane[None] for plane in P])[0]
    new = jnp.einsum('sqbo,qbio->sbio', matrices, e) + jnp.einsum('kbi,skbo->sbio', x, u)
    return new, jnp.einsum('qbo,qbio->io', nu, e)


def step_by_planes(x, D, f, e, signal):
    new, read = trace_step(RULES, x, sparse(D), list(f), traces(e), list(signal))
    return jnp.stack([plane['weight'] for plane in new]), read['weight']


def step_by_matrices(x, D, f, e, signal):
    return carry_by_matrices(x[None], D, f[:, None], e, signal)


PLACES = TIMED['sparse_carry'].places()
SPARSE_RULES = sparse_rules(*map(jnp.asarray, PLACES), has_bias=False)


def entries_carry_by_planes(x, P, u, e, nu):
    new, read = trace_carry(SPARSE_RULES, x, sparse(P), list(u), traces(e), list(nu))
    return jnp.stack([plane['weight'] for plane in new]), read['weight']


def entries_carry_by_matrices(x, P, u, e, nu):
    rows, cols = PLACES
    matrices = dense([plane[None] for plane in P])[0][..., cols]
    new = jnp.einsum('sqbp,qbp->sbp', matrices, e)
    new += jnp.einsum('kbp,skbp->sbp', x[..., rows], u[..., cols])
    return new, jnp.einsum('qbp,qbp->p', nu[..., cols], e)


def entries_step_by_planes(x, D, f, e, signal):
    new, read = trace_step(SPARSE_RULES, x, sparse(D), list(f), traces(e), list(signal))
    return jnp.stack([plane['weight'] for plane in new]), read['weight']


def entries_step_by_matrices(x, D, f, e, signal):
    return entries_carry_by_matrices(x[None], D, f[:, None], e, signal)


class Transition:
    """A voltage with a soft reset that reads the new value of a current, at every step."""

    widths, reached, pattern = (0, 0), ((True,) * 3,) * 2, ((True,) * 3, (False, True, True))
    shared, forward_only = (False,), False

    @staticmethod
    def evaluate(row, constants, inputs):
        v, g, y = inputs
        g = 0.9 * g + y
        return g if row else 0.95 * v + jnp.tanh(g) - jax.nn.sigmoid(v)


def jacobian_by_planes(v, g, y):
    return jax.tree.leaves(hidden_jacobian(Transition(), [(), ()], [v, g, y]))


def jacobian_by_matrices(v, g, y):
    def new(states, y):
        inputs = [states[0], states[1], y]
        return jnp.stack([Transition.evaluate(row, (), inputs) for row in range(2)])

    places = tuple(a.reshape(-1) for a in (v, g, y))
    D, f = jax.vmap(jax.jacrev(new, argnums=(0, 1)))(jnp.stack(places[:2], 1), places[2])
    planes = D[:, 0, 0], D[:, 0, 1], f[:, 0], D[:, 1, 1], f[:, 1]
    return [plane.reshape(v.shape) for plane in planes]


def smoothed_by_planes(D, f, start):
    return jnp.stack(factored_trace(sparse(D), [list(f)], [list(start)], DECAY)[1][0], 1)


def smoothed_by_matrices(D, f, start):
    def body(old, step):
        D, f = step
        new = DECAY * jnp.einsum('sqbo,qbo->sbo', D, old) + (1 - DECAY) * f
        return new, new

    return jax.lax.scan(body, start, (dense(D), jnp.moveaxis(f, 0, 1)))[1]


def arguments_of_scan():
    D, f, L, *_ = arrays('adjoint_scan')
    return three(D), jnp.stack(f[0]), jnp.stack(L)


def arguments_of_trace(name):
    x, D, f, trace, signal = arrays(name)
    planes = map(jnp.stack, (f, [e['weight'] for e in trace], signal))
    return x, three(D), *planes


def arguments_of_factors():
    D, f, start = arrays('factored_trace')
    return three(D), jnp.stack(f[0]), jnp.stack(start[0])


def arguments_of_jacobian():
    """Two states and an input."""
    D, _, L, *_ = arrays('adjoint_scan')
    return *L, D[0][0]


KERNELS = {
    'adjoint_scan': (scan_by_planes, scan_by_matrices, arguments_of_scan),
    'sparse_carry': (
        entries_carry_by_planes,
        entries_carry_by_matrices,
        functools.partial(arguments_of_trace, 'sparse_carry'),
    ),
    'sparse_step': (
        entries_step_by_planes,
        entries_step_by_matrices,
        functools.partial(arguments_of_trace, 'sparse_step'),
    ),
    'trace_carry': (
        carry_by_planes,
        carry_by_matrices,
        functools.partial(arguments_of_trace, 'trace_carry'),
    ),
    'trace_step': (
        step_by_planes,
        step_by_matrices,
        functools.partial(arguments_of_trace, 'trace_step'),
    ),
    'hidden_jacobian': (jacobian_by_planes, jacobian_by_matrices, arguments_of_jacobian),
    'factored_trace': (smoothed_by_planes, smoothed_by_matrices, arguments_of_factors),
}


@pytest.mark.quick
@pytest.mark.benchmark(group='kernels')
@pytest.mark.parametrize('name', KERNELS)
def test_kernel(etrace_benchmark, suite, name):
    reference, formula, arguments = KERNELS[name]
    program, baseline = (Program(run, *arguments(), steps=STEPS) for run in (reference, formula))
    error = 0.0
    for found, true in zip(jax.tree.leaves(program()), jax.tree.leaves(baseline()), strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-5)
        error = max(error, float(jnp.linalg.norm(found - true) / jnp.linalg.norm(true)))
    info = etrace_benchmark.measure(
        program, baseline, baseline_name='formula', seconds=suite.seconds
    )
    info |= {'workload': name, 'contender': 'reference', 'gradient_errors': {'all': error}}
