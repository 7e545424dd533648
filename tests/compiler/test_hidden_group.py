"""Hidden groups: their fields and functions, and which states are grouped."""

from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import DiagnosticKind, HiddenGroup, NotSupportedError
from braintrace_fast.compiler import group_merging, jacrev_last_dim
from tests.compiler.checks import assert_close, build, draw, param
from tests.models import N_IN, Leaky, N, Stack, TwoPlanes, Units, hidden

pytestmark = pytest.mark.usefixtures('x64')

FIELDS = (
    'index',
    'hidden_paths',
    'hidden_states',
    'hidden_invars',
    'hidden_outvars',
    'transition_jaxpr',
    'transition_jaxpr_constvars',
)


def find(make, batch=None):
    model = build(make, batch)
    x = draw(N_IN) if batch is None else draw(batch, N_IN)
    groups, by_path = btf.find_hidden_groups_from_module(model, x)
    return model, x, groups, by_path


def paths(groups):
    return [group.hidden_paths for group in groups]


def hand_made(*states: brainstate.HiddenState) -> HiddenGroup:
    names = [(f'state{i}',) for i in range(len(states))]
    return HiddenGroup(0, names, list(states), [], [], None, [])


# The fields


def test_a_group_has_the_fields_of_the_seeds():
    assert HiddenGroup._fields[: len(FIELDS)] == FIELDS


@pytest.mark.parametrize('batch', [None, 2], ids=['unbatched', 'batched'])
def test_fields_name_the_states_and_their_variables(batch):
    model, x, (group,), by_path = find(lambda: btf.nn.LSTMCell(N_IN, N), batch)
    assert group.index == 0
    assert group.hidden_paths == [('c',), ('h',)]
    assert group.hidden_states == [model.c, model.h]
    info = btf.extract_module_info(model, x)
    for variables, table in (
        (group.hidden_invars, info.hidden_path_to_invar),
        (group.hidden_outvars, info.hidden_path_to_outvar),
    ):
        assert [v.aval.shape for v in variables] == [v.aval.shape for v in table.values()]
    assert group.varshape == ((N,) if batch is None else (batch, N))
    assert group.num_state == 2
    assert dict(by_path) == {('c',): group, ('h',): group}
    assert len(group.transition_jaxpr.outvars) == 2


def test_dict_and_repr_show_every_field():
    _, _, (group,), _ = find(Leaky)
    assert group.dict() == group._asdict()
    assert repr(group).startswith('HiddenGroup')
    assert all(name in repr(group) for name in FIELDS)


def test_finders_agree():
    model, x, groups, by_path = find(lambda: btf.nn.LSTMCell(N_IN, N))
    found, table = btf.find_hidden_groups_from_minfo(btf.extract_module_info(model, x))
    assert paths(found) == paths(groups)
    assert list(table) == list(by_path)


# varshape, num_state, concat and split


def wide(*shape: int) -> brainstate.HiddenGroupState:
    return brainstate.HiddenGroupState(jnp.zeros(shape))


def test_a_wide_state_counts_its_planes():
    group = hand_made(hidden(None, N), wide(N, 3), hidden(None, N))
    assert group.varshape == (N,)
    assert group.num_state == 5


@pytest.mark.parametrize('batch', [(), (2,)], ids=['unbatched', 'batched'])
def test_split_hidden_undoes_concat_hidden(batch):
    group = hand_made(hidden(None, *batch, N), wide(*batch, N, 3), hidden(None, *batch, N))
    values = [draw(*state.value.shape, seed=i) for i, state in enumerate(group.hidden_states)]
    joined = group.concat_hidden(values)
    assert joined.shape == (*batch, N, 5)
    assert_close(joined[..., 0], values[0])
    assert_close(joined[..., 1:4], values[1])
    assert_close(joined[..., 4], values[2])
    for value, again in zip(values, group.split_hidden(joined), strict=True):
        assert_close(again, value)


def test_concat_hidden_joins_values_with_a_unit():
    group = hand_made(hidden(None, N, unit=u.mV), hidden(None, N, unit=u.mV))
    values = [draw(N, seed=1) * u.mV, draw(N, seed=2) * u.volt]
    joined = group.concat_hidden(values)
    assert_close(joined[..., 1].to_decimal(u.mV), 1e3 * draw(N, seed=2))
    back = group.split_hidden(joined)
    assert_close(back[0].to_decimal(u.mV), draw(N, seed=1))


def test_concat_hidden_takes_one_value_per_state():
    group = hand_made(hidden(None, N), hidden(None, N))
    with pytest.raises(ValueError):
        group.concat_hidden([jnp.zeros(N)])


def test_states_of_one_shape_are_consistent():
    hand_made(hidden(None, N), wide(N, 2)).check_consistent_varshape()


def test_states_of_different_shapes_in_one_group_are_refused():
    group = hand_made(hidden(None, N), hidden(None, N + 1))
    with pytest.raises(NotSupportedError, match='have different shapes') as error:
        group.check_consistent_varshape()
    message = str(error.value)
    assert f"('state0',): ({N},)" in message and f"('state1',): ({N + 1},)" in message
    assert 'give them the same shape' in message


# The transition and its Jacobian


@pytest.mark.parametrize('batch', [None, 2], ids=['unbatched', 'batched'])
@pytest.mark.parametrize(
    'make', [lambda: btf.nn.LSTMCell(N_IN, N), TwoPlanes], ids=['lstm', 'wide state']
)
def test_transition_gives_the_new_states(make, batch):
    model = build(make, batch)
    x = draw(N_IN) if batch is None else draw(batch, N_IN)
    graph = btf.compile_etrace_graph(model, x)
    (group,) = graph.hidden_groups
    _, new, _, temps = graph.module_info.jaxpr_call(x)
    olds = [temps[v] for v in group.hidden_invars]
    inputs = [temps[v] for v in group.transition_jaxpr_constvars]
    found = group.transition(olds, inputs)
    for path, value in zip(group.hidden_paths, found, strict=True):
        assert_close(value, new[path])
    jacobian = group.diagonal_jacobian(olds, inputs)
    assert jacobian.shape == (*group.varshape, group.num_state, group.num_state)
    # The same by moving all positions of one plane at once: they do not mix.
    planes = group.concat_hidden(olds)
    for q in range(group.num_state):
        _, column = jax.jvp(
            lambda p: group.concat_hidden(group.transition(group.split_hidden(p), inputs)),
            [planes],
            [jnp.zeros_like(planes).at[..., q].set(1)],
        )
        assert_close(jacobian[..., :, q], column)
        present = [row[q] for row in group.pattern]
        assert [bool(np.any(column[..., s] != 0)) for s in range(group.num_state)] == present


def test_equations_of_a_transition_are_in_dependency_order():
    _, _, (group,), _ = find(lambda: btf.nn.LSTMCell(N_IN, N))
    jaxpr = group.transition_jaxpr
    known = {*group.hidden_invars, *jaxpr.constvars, *jaxpr.invars}
    assert jaxpr.eqns
    for eqn in jaxpr.eqns:
        assert {v for v in eqn.invars if not hasattr(v, 'val')} <= known
        known.update(eqn.outvars)
    assert set(jaxpr.outvars) <= known


def test_units_stay_outside_of_the_transition():
    model, x = build(Units), draw(N_IN) * u.mV
    graph = btf.compile_etrace_graph(model, x)
    (group,) = graph.hidden_groups
    *_, temps = graph.module_info.jaxpr_call(x)
    jacobian = group.diagonal_jacobian(
        [temps[v] for v in group.hidden_invars],
        [temps[v] for v in group.transition_jaxpr_constvars],
    )
    assert group.hidden_paths == [('I',), ('V',)]
    # I in nA, V in mV: V' = 0.9 V + 0.3 I' Mohm, and nA Mohm is mV.
    expected = np.broadcast_to([[0.8, 0.0], [0.3 * 0.8, 0.9]], (N, 2, 2))
    assert_close(jacobian, expected)


# jacrev_last_dim


def test_jacrev_last_dim_is_the_jacobian_over_the_last_axis():
    A = np.random.default_rng(0).normal(size=(3, 3))
    values = draw(2, N, 3)
    jacobian = jacrev_last_dim(lambda h: jnp.sin(h) @ A.T, values)
    assert jacobian.shape == (2, N, 3, 3)
    assert_close(jacobian, A[None, None] * jnp.cos(values)[..., None, :])


def test_jacrev_last_dim_refuses_another_number_of_states():
    with pytest.raises(ValueError, match='maps 3 states to 2'):
        jacrev_last_dim(lambda h: h[..., :2], jnp.ones((N, 3)))


# Which states are grouped


class States(brainstate.nn.Module):
    """Three states over one shape; ``couple`` maps the old ones to the new ones."""

    def __init__(self, couple: Callable, shapes: tuple[tuple[int, ...], ...] = ((N,),) * 3):
        super().__init__()
        self.W = param(N_IN, N)
        self.couple, self.shapes = couple, shapes

    def init_state(self, batch_size=None, **_):
        self.a, self.b, self.c = (hidden(batch_size, *shape) for shape in self.shapes)

    def update(self, x):
        y = btf.matmul(x, self.W.value)
        old = self.a.value, self.b.value, self.c.value
        self.a.value, self.b.value, self.c.value = self.couple(y, *old)
        return self.a.value


A, B, C = ('a',), ('b',), ('c',)


def apart(y, a, b, c):
    return 0.9 * a + y, 0.8 * b, 0.7 * c


def chain(y, a, b, c):
    """``a`` drives ``b`` and ``b`` drives ``c``: all three, transitively."""
    return 0.9 * a + y, 0.8 * b + a, 0.7 * c + b


def chain_backwards(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + c, 0.7 * c + a


def common_target(y, a, b, c):
    """``a`` and ``b`` drive ``c``, and not each other."""
    return 0.9 * a + y, 0.8 * b, 0.7 * c + a * b


def new_value(y, a, b, c):
    """``b`` reads the new value of ``a``."""
    a = 0.9 * a + y
    return a, 0.8 * b + jnp.sin(a), 0.7 * c


def stopped(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + jax.lax.stop_gradient(a), 0.7 * c + b


def thresholded(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + jnp.where(a > 0, 1.0, 0.0), 0.7 * c


def by_product(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + a @ np.ones((N, N)), 0.7 * c


def by_mean(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + jnp.mean(a), 0.7 * c


def by_reversal(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + a[::-1], 0.7 * c


def swapped(y, a, b, c):
    return b + y, a, 0.7 * c


@pytest.mark.parametrize(
    'couple, groups',
    [
        (apart, [[A], [B], [C]]),
        (chain, [[A, B, C]]),
        (chain_backwards, [[A, B, C]]),
        (common_target, [[A, B, C]]),
        (new_value, [[A, B], [C]]),
        (stopped, [[A], [B, C]]),
        (thresholded, [[A], [B], [C]]),
        (by_product, [[A], [B], [C]]),
        (by_mean, [[A], [B], [C]]),
        (by_reversal, [[A], [B], [C]]),
        (swapped, [[A, B], [C]]),
    ],
)
def test_states_that_drive_each_other_position_by_position_are_one_group(couple, groups):
    _, _, found, by_path = find(lambda: States(couple))
    assert paths(found) == groups
    assert [group.index for group in found] == list(range(len(groups)))
    for group in found:
        for path in group.hidden_paths:
            assert by_path[path] is group


def test_the_pattern_is_that_of_the_paths():
    def pattern(couple):
        _, _, (group, *_), _ = find(lambda: States(couple))
        return np.array(group.pattern, int).tolist()

    assert pattern(chain) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert pattern(common_target) == [[1, 0, 0], [0, 1, 0], [1, 1, 1]]
    assert pattern(new_value) == [[1, 0], [1, 1]]
    assert pattern(swapped) == [[0, 1], [1, 0]]


def test_merging_is_reported():
    graph = btf.compile_etrace_graph(build(lambda: States(new_value)), draw(N_IN))
    (record,) = graph.explain(kind=DiagnosticKind.HIDDEN_GROUP_MERGED)
    assert record.hidden_paths == (A, B)


def broadcast(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + a[None], 0.7 * c + a[..., :1]


def test_only_equal_shapes_connect():
    _, _, groups, _ = find(lambda: States(broadcast, ((N,), (2, N), (1,))))
    assert paths(groups) == [[A], [B], [C]]
    assert [group.varshape for group in groups] == [(N,), (2, N), (1,)]


def folded(y, a, b, c):
    return 0.9 * a + y, 0.8 * b + a.reshape(1, N), 0.7 * c


def test_a_reshape_that_keeps_positions_does_not_make_shapes_equal():
    _, _, groups, _ = find(lambda: States(folded, ((N,), (1, N), (N,))))
    assert paths(groups) == [[A], [B], [C]]


class ResidualLayer(Leaky):
    """Passes on its input, which may be the state of the layer before, beside its own state."""

    def __init__(self, n_in: int):
        super().__init__()
        self.W = param(n_in + N, N)

    def update(self, x):
        own = super().update(x)
        return own + x if x.shape == own.shape else own


class ResidualStack(Stack):
    """The second layer's state reads the first one's position by position."""

    def update(self, x):
        first, second = self.layers
        x = first(x)
        second.h.value = second.h.value + 0.1 * x
        return second(x)


def test_layers_of_different_index_stay_apart_where_a_residual_path_connects_them():
    def make():
        return ResidualStack([ResidualLayer(N_IN), ResidualLayer(N)], None)

    model, x, groups, _ = find(make)
    assert paths(groups) == [[('layers', 0, 'h')], [('layers', 1, 'h')]]
    graph = btf.compile_etrace_graph(model, x)
    (record,) = graph.explain(kind=DiagnosticKind.HIDDEN_COUPLING_NOT_TRACED)
    assert record.hidden_paths == (('layers', 0, 'h'), ('layers', 1, 'h'))


class NamedLayers(brainstate.nn.Module):
    """The same coupling between layers that have names is within one group."""

    def __init__(self):
        super().__init__()
        self.first, self.second = ResidualLayer(N_IN), ResidualLayer(N)

    def update(self, x):
        x = self.first(x)
        self.second.h.value = self.second.h.value + 0.1 * x
        return self.second(x)


def test_layers_with_names_are_one_group_where_they_are_coupled():
    _, _, groups, _ = find(NamedLayers)
    assert paths(groups) == [[('first', 'h'), ('second', 'h')]]


# group_merging


@pytest.mark.parametrize('version', [0, 1])
def test_group_merging_joins_sets_that_share_a_member(version):
    assert group_merging([], version=version) == []
    merged = group_merging([(1, 2), (4, 5), (2, 3)], version=version)
    assert merged == [frozenset({1, 2, 3}), frozenset({4, 5})]
    chain = [(1, 2), (3, 4), (5, 6), (2, 3), (4, 5), (7,)]
    assert group_merging(chain, version=version) == [frozenset(range(1, 7)), frozenset({7})]


def test_group_merging_knows_two_versions():
    assert group_merging([(1, 2), (2, 3)]) == group_merging([(1, 2), (2, 3)], version=1)
    with pytest.raises(ValueError, match='versions 0 and 1, not 2'):
        group_merging([(1, 2)], version=2)


class TwoTypes(Leaky):
    """A state in float32 that is coupled with one in float64."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.s = brainstate.HiddenState(jnp.full(N, 0.5, jnp.float32))

    def leak(self, h):
        new = 0.8 * h + (self.s.value**2).astype(h.dtype)
        self.s.value = 0.5 * self.s.value + 0.1 * h.astype(jnp.float32)
        return new


def test_states_of_two_types_have_a_jacobian(x64):
    model, x = build(TwoTypes), draw(N_IN)
    graph = btf.compile_etrace_graph(model, x)
    (group,) = graph.hidden_groups
    *_, temps = graph.module_info.jaxpr_call(x)
    found = group.diagonal_jacobian(
        [temps[v] for v in group.hidden_invars],
        [temps[v] for v in group.transition_jaxpr_constvars],
    )
    s = model.s.value
    true = jnp.stack([jnp.full(N, 0.8), 2.0 * s, jnp.full(N, 0.1), jnp.full(N, 0.5)], -1)
    assert_close(found, true.reshape(N, 2, 2), 1e-6)
