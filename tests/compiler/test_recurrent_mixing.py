"""Groups that keep recurrent ops: braintrace's arguments, and the Jacobians of such groups."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from tests.compiler.checks import build, draw, param
from tests.oracles.step import state_values, step_function

N_IN, N = 3, 5
RING = np.eye(N) + np.roll(np.eye(N), 1, axis=1)
CHAIN = np.eye(N) + np.eye(N, k=1)  # the last neuron reaches itself alone
pytestmark = pytest.mark.usefixtures('x64')


class Ring(brainstate.nn.Module):
    """Two states of a batch, and a recurrent weight from each neuron to itself and the next."""

    def __init__(self, batch=(), matrix=RING):
        super().__init__()
        self.matrix = u.sparse.CSR.fromdense(jnp.asarray(matrix))
        self.w, self.v, self.batch = param(int(matrix.sum())), param(N_IN, N), batch

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(draw(*self.batch, N))
        self.s = brainstate.HiddenState(draw(*self.batch, N, seed=6))

    def update(self, x):
        fed = btf.sparse_matmul(self.h.value, self.w.value, sparse_mat=self.matrix)
        self.s.value = 0.8 * self.s.value + fed + btf.matmul(x, self.v.value)
        self.h.value = jnp.tanh(0.5 * self.h.value + self.s.value)
        return self.h.value


class Alone(brainstate.nn.Module):
    """No neuron reaches another one."""

    def __init__(self):
        super().__init__()
        self.v = param(N_IN, N)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(draw(N))

    def update(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + btf.matmul(x, self.v.value))
        return self.h.value


class Looped(Alone):
    """A loop without a reverse mode mixes the neurons by a fixed matrix."""

    def update(self, x):
        matrix = draw(N, N, seed=7)
        self.h.value = jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ matrix)), (0, self.h.value)
        )[1]
        return super().update(x)


def jacobians(model, x, **options):
    """A group, its own Jacobians, and that of the step: ``[p, a, q, b]``, positions flat."""
    minfo = btf.extract_module_info(model, x)
    (group,), _ = btf.find_hidden_groups_from_minfo(minfo, **options)
    _, _, _, values = minfo.add_jaxpr_outs(group.transition_jaxpr_constvars).jaxpr_call(x)
    given = [values[v] for v in group.transition_jaxpr_constvars]
    olds = [state.value for state in group.hidden_states]

    step, start = step_function(model), state_values(model)

    def news(planes):
        old = dict(zip(group.hidden_paths, group.split_hidden(planes), strict=True))
        _, new, _ = step(start.params, old, start.others, x)
        return group.concat_hidden([new[path] for path in group.hidden_paths])

    size = int(np.prod(group.varshape))
    true = jax.jacfwd(news)(group.concat_hidden(olds))
    true = true.reshape(size, group.num_state, size, group.num_state)
    return group, group.diagonal_jacobian(olds, given), group.full_jacobian(olds, given), true


@pytest.mark.parametrize(
    'make, shape',
    [
        (Ring, ()),
        (lambda: Ring((2,)), (2,)),
        (lambda: btf.nn.LSTMCell(N_IN, N), ()),
        (Looped, ()),
    ],
    ids=['ring', 'batch', 'lstm', 'loop'],
)
def test_with_recurrent_mixing_the_jacobians_are_those_of_the_step(make, shape):
    model = build(make)
    group, blocks, full, true = jacobians(model, draw(*shape, N_IN), include_recurrent_mixing=True)
    assert not group.is_diagonal_recurrence and group.snap is None
    np.testing.assert_allclose(full.reshape(true.shape), true, rtol=1e-10, atol=1e-12)
    own = np.moveaxis(np.diagonal(true, axis1=0, axis2=2), -1, 0)
    np.testing.assert_allclose(blocks.reshape(own.shape), own, rtol=1e-10, atol=1e-12)
    assert blocks.shape == (*group.varshape, group.num_state, group.num_state)
    assert np.abs(true).max() > np.abs(own).max() / 100 > 0


def test_without_it_recurrent_ops_are_left_out():
    group, blocks, _, true = jacobians(build(Ring), draw(N_IN))
    assert group.is_diagonal_recurrence and group.trace_state_width == group.num_state == 2
    names = {eqn.primitive.name for eqn in group.transition_jaxpr.eqns}
    assert not any(name.startswith('etp') for name in names)
    own = np.moveaxis(np.diagonal(true, axis1=0, axis2=2), -1, 0)
    assert np.abs(blocks - own).max() > 1e-3


@pytest.mark.parametrize(
    'n, size, matrix, batch',
    [
        (1, 1, RING, (2,)),
        (2, 2, RING, ()),
        (2, 2, CHAIN, ()),
        (3, 3, CHAIN, (2,)),
        (9, N, RING, (2,)),
        (9, N, CHAIN, ()),
    ],
    ids=str,
)
def test_between_neighbours_the_jacobian_has_a_plane_for_each(n, size, matrix, batch):
    options = dict(include_recurrent_mixing=True, sparse_n=n)
    model = build(lambda: Ring(batch, matrix))
    group, wide, _, true = jacobians(model, draw(*batch, N_IN), **options)
    snap = group.snap
    assert (snap.n, snap.num_neighbour, group.trace_state_width) == (n, size, 2 * size)
    assert snap.is_saturated == (size == N and matrix is RING)
    assert snap.is_degenerate == (size == 1)
    assert not snap.conservative and snap.num_position == true.shape[0]
    reach = np.linalg.matrix_power(matrix, n - 1) != 0  # [from, to]
    wide, true = np.asarray(wide).reshape(len(true), size, 2, size, 2), np.asarray(true)
    for p, neighbours in enumerate(snap.neighbours):
        assert set(neighbours % N) == set(np.flatnonzero(reach[p % N])) and neighbours[0] == p
        assert set(neighbours // N) == {p // N}  # of the same example
        for k, to in enumerate(neighbours):
            for other, start in enumerate(neighbours):
                block = true[to, :, start] * (snap.valid[p, k] and snap.valid[p, other])
                np.testing.assert_allclose(wide[p, k, :, other], block, rtol=1e-9, atol=1e-12)


def test_neighbourhoods_that_are_not_known_or_of_no_use_are_noted():
    def kinds(make):
        graph = btf.compile_etrace_graph(
            build(make), draw(N_IN), include_recurrent_mixing=True, sparse_n=2
        )
        return graph.hidden_groups[0].snap, [(r.kind, r.level) for r in graph.diagnostics]

    degenerate = (btf.DiagnosticKind.SNAP_PATTERN_DEGENERATE, btf.DiagnosticLevel.INFO)
    snap, found = kinds(Alone)
    assert snap.is_degenerate and degenerate in found
    snap, found = kinds(Ring)
    assert not snap.is_degenerate and degenerate not in found
    assert repr(snap) == 'SnapPattern(n=2, varshape=(5,), num_neighbour=2, conservative=False)'


def test_groups_of_a_graph_are_those_of_its_arguments():
    graph = btf.compile_etrace_graph(
        build(Ring), draw(N_IN), include_recurrent_mixing=True, sparse_n=2
    )
    (group,) = graph.hidden_groups
    assert group.snap.num_neighbour == 2 and graph.transitions[0].keeps_others
    coupled = btf.compile_etrace_graph(build(Ring), draw(N_IN), include_recurrent_mixing=True)
    assert coupled.hidden_groups[0].snap is None and not coupled.transitions[0].keeps_others


@pytest.mark.parametrize(
    'options, error, says',
    [
        (dict(sparse_n=2), btf.NotSupportedError, 'include_recurrent_mixing=True'),
        (dict(sparse_n=True, include_recurrent_mixing=True), TypeError, 'True'),
        (dict(sparse_n=2.0, include_recurrent_mixing=True), TypeError, '2.0'),
        (dict(sparse_n=0, include_recurrent_mixing=True), ValueError, 'at least 1'),
        (
            dict(sparse_n=2, include_recurrent_mixing=True, snap_max_jacobian_elements=79),
            btf.NotSupportedError,
            'have 80 elements .* snap_max_jacobian_elements=79',
        ),
        (dict(include_recurrent_mixing=True, scope=btf.Coupled()), ValueError, 'not both'),
    ],
    ids=['alone', 'bool', 'float', 'zero', 'size', 'scope'],
)
def test_arguments_that_make_no_sense_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        btf.compile_etrace_graph(build(Ring), draw(N_IN), **options)
    if 'scope' not in options:
        with pytest.raises(error, match=says):
            btf.find_hidden_groups_from_module(build(Ring), draw(N_IN), **options)


def test_values_and_planes_are_counted():
    (group,), _ = btf.find_hidden_groups_from_module(build(Ring), draw(N_IN))
    one = jnp.zeros(N)
    for values in ([one], [one] * 3):
        with pytest.raises(ValueError, match=f'Found {len(values)} values for the 2 states'):
            group.concat_hidden(values)
    joined = group.concat_hidden(value for value in (one, one + 1))
    assert joined.shape == (N, 2)
    with pytest.raises(ValueError, match=r'shape \(5, 3\) should number the 2 planes'):
        group.split_hidden(jnp.zeros((N, 3)))
