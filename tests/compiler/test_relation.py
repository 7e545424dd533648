"""Relations: which weights are traced, through which op, to which groups, by which way."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import DiagnosticKind, DiagnosticLevel
from tests.compiler.checks import assert_close, build, draw, param
from tests.models import (
    N_IN,
    DropConnect,
    Leaky,
    LearnedLeak,
    N,
    Normalised,
    OwnBias,
    Reservoir,
    Softplus,
    Transposed,
    TwoPlanes,
    Units,
    hidden,
)
from tests.oracles.compiled_step import assert_step_gradient_is_exact, evaluate

pytestmark = pytest.mark.usefixtures('x64')

W = ('W',)


def compiled(make, batch=None):
    model = build(make, batch)
    x = draw(N_IN) if batch is None else draw(batch, N_IN)
    return model, btf.compile_etrace_graph(model, x), x


def only_relation(make, batch=None):
    _, graph, _ = compiled(make, batch)
    (relation,) = graph.hidden_param_op_relations
    return relation


def assert_exact(model, graph, x):
    assert_step_gradient_is_exact(model, evaluate(graph, x), x)


def reasons(graph, path):
    return [record.kind for record in graph.explain(weight_path=path)]


# The fields


def test_a_relation_has_the_fields_of_the_reference():
    fields = (
        'primitive',
        'x_var',
        'y_var',
        'hidden_groups',
        'y_to_hidden_group_jaxprs',
        'connected_hidden_paths',
        'eqn_params',
        'path_classification',
        'trainable_vars',
        'trainable_paths',
        'trainable_leaf_indices',
        'trainable_param_states',
        'trainable_processing_chains',
    )
    assert btf.HiddenParamOpRelation._fields[: len(fields)] == fields


def test_a_relation_tells_the_op_its_variables_and_its_parameters():
    model, graph, x = compiled(lambda: btf.nn.ValinaRNNCell(N_IN, N), 2)
    (relation,) = graph.hidden_param_op_relations
    (eqn,) = [e for e in graph.module_info.jaxpr.eqns if e.primitive is relation.primitive]
    assert isinstance(relation.primitive, btf.ETPPrimitive)
    assert relation.eqn_params == eqn.params
    assert relation.x_var is relation.x is eqn.invars[0]
    assert relation.y_var is relation.y is eqn.outvars[0]
    assert relation.x_var.aval.shape == (2, N_IN + N)
    assert relation.y_var.aval.shape == (2, N)
    assert relation.hidden_groups == list(graph.hidden_groups)
    assert relation.connected_hidden_paths == [('h',)]
    path = ('W', 'weight')
    assert relation.path == path
    assert relation.trainable_vars == {'weight': eqn.invars[1], 'bias': eqn.invars[2]}
    assert relation.trainable_paths == {'weight': path, 'bias': path}
    assert relation.trainable_param_states == {'weight': model.W.weight, 'bias': model.W.weight}
    leaves = jax.tree.leaves(model.W.weight.value)
    for key, leaf in relation.trainable_leaf_indices.items():
        assert leaves[leaf] is model.W.weight.value[key]
    assert relation.trainable_processing_chains == {'weight': (), 'bias': ()}
    assert relation.is_static and relation.is_position_wise and not relation.is_shared


def test_relations_come_in_the_order_of_the_step():
    _, graph, _ = compiled(lambda: btf.nn.LSTMCell(N_IN, N))
    order = {eqn.outvars[0]: n for n, eqn in enumerate(graph.module_info.jaxpr.eqns)}
    positions = [order[relation.y_var] for relation in graph.hidden_param_op_relations]
    assert positions == sorted(positions)
    assert len(positions) == 4


def test_dict_and_repr_show_every_field():
    relation = only_relation(Leaky)
    assert relation.dict() == relation._asdict()
    text = repr(relation)
    assert text.startswith('HiddenParamOpRelation')
    assert all(name in text for name in relation._fields)


def test_finders_give_the_relations_of_the_graph():
    model, graph, x = compiled(lambda: btf.nn.GRUCell(N_IN, N))

    def summary(relations):
        return [(r.path, r.connected_hidden_paths, r.f_patterns) for r in relations]

    info = btf.extract_module_info(model, x)
    _, by_path = btf.find_hidden_groups_from_minfo(info)
    true = summary(graph.hidden_param_op_relations)
    assert summary(btf.find_hidden_param_op_relations_from_minfo(info, by_path)) == true
    assert summary(btf.find_hidden_param_op_relations_from_module(model, x)) == true


# From y to the hidden states


@pytest.mark.parametrize('batch', [None, 2], ids=['unbatched', 'batched'])
def test_y_to_hidden_groups_gives_the_new_states_as_functions_of_y(batch):
    model, graph, x = compiled(lambda: btf.nn.LSTMCell(N_IN, N), batch)
    _, new, _, temps = graph.module_info.jaxpr_call(x)
    for relation in graph.hidden_param_op_relations:
        (group,) = relation.hidden_groups
        y = temps[relation.y_var]
        (states,) = relation.y_to_hidden_groups(y, temps, concat_hidden_vals=False)
        (joined,) = relation.y_to_hidden_groups(y, temps)
        for path, state in zip(group.hidden_paths, states, strict=True):
            assert_close(state, new[path])
        assert_close(joined, group.concat_hidden(states))
        # Position by position: moving one entry of y moves that position only.
        moved = y.at[..., 1].add(0.3)
        (other,) = relation.y_to_hidden_groups(moved, temps)
        changed = np.any(np.asarray(other != joined), axis=-1)
        assert np.array_equal(np.unique(np.nonzero(changed)[-1]), [1])


def test_f_is_the_derivative_of_the_tail():
    _, graph, x = compiled(lambda: btf.nn.LSTMCell(N_IN, N))
    *_, temps = graph.module_info.jaxpr_call(x)
    ((_, f),) = [transition.jacobians(temps) for transition in graph.transitions]
    for relation in graph.hidden_param_op_relations:
        tail = lambda y, r=relation: r.y_to_hidden_groups(y, temps)[0]  # noqa: E731
        y = temps[relation.y_var]
        _, tangent = jax.jvp(tail, [y], [jnp.ones_like(y)])
        for s, (present, plane) in enumerate(
            zip(relation.f_patterns[0], f[relation.y_var], strict=True)
        ):
            assert present == (plane is not None)
            assert_close(0 * y if plane is None else plane, tangent[..., s])


class TwoGroups(brainstate.nn.Module):
    """One op drives a layer of one state and a layer of two."""

    class Layer(brainstate.nn.Module):
        def __init__(self, states: int):
            super().__init__()
            self.names = ['a', 'b'][:states]

        def init_state(self, batch_size=None, **_):
            for name in self.names:
                setattr(self, name, hidden(batch_size, N))

        def update(self, y):
            self.a.value = 0.9 * self.a.value + y
            if 'b' in self.names:
                self.b.value = 0.5 * self.b.value + jnp.sin(self.a.value)
                return self.b.value
            return self.a.value

    def __init__(self):
        super().__init__()
        self.W = param(N_IN, N)
        self.layers = [self.Layer(1), self.Layer(2)]

    def update(self, x):
        y = btf.matmul(x, self.W.value)
        return self.layers[0](jnp.tanh(y)) * self.layers[1](y)


def test_one_op_may_reach_several_groups():
    model, graph, x = compiled(TwoGroups)
    (relation,) = graph.hidden_param_op_relations
    assert [group.index for group in relation.hidden_groups] == [0, 1]
    assert relation.f_patterns == [(True,), (True, True)]
    assert [len(jaxpr.outvars) for jaxpr in relation.y_to_hidden_group_jaxprs] == [1, 2]
    assert relation.connected_hidden_paths == [
        ('layers', 0, 'a'),
        ('layers', 1, 'a'),
        ('layers', 1, 'b'),
    ]
    *_, temps = graph.module_info.jaxpr_call(x)
    shapes = [value.shape for value in relation.y_to_hidden_groups(temps[relation.y_var], temps)]
    assert shapes == [(N, 1), (N, 2)]
    y = temps[relation.y_var]
    f0, f1 = (transition.jacobians(temps)[1][relation.y_var] for transition in graph.transitions)
    assert_close(f0[0], 1 - jnp.tanh(y) ** 2)
    assert_close(f1[0], jnp.ones(N))
    assert_close(f1[1], jnp.cos(0.9 * model.layers[1].a.value + y))
    assert_exact(model, graph, x)
    (record,) = graph.explain(kind=DiagnosticKind.RELATION_INCLUDED)
    assert record.context['hidden_group_indices'] == (0, 1)


def test_an_op_without_input_is_shared_by_the_batch():
    model, graph, x = compiled(LearnedLeak, 2)
    shared, dense = graph.hidden_param_op_relations
    assert shared.x_var is None and shared.is_shared and not dense.is_shared
    assert shared.y_var.aval.shape == (N,)
    *_, temps = graph.module_info.jaxpr_call(x)
    f = graph.transitions[0].jacobians(temps)[1][shared.y_var]
    # h' = a h + (1 - a) tanh(y)
    assert_close(f[0], model.h.value - jnp.tanh(temps[dense.y_var]))


def test_each_plane_of_a_wide_state_has_its_entry():
    assert only_relation(TwoPlanes).f_patterns == [(True, True)]


def test_classification_tells_direct_paths_from_those_that_also_mix():
    assert only_relation(Leaky).path_classification == {('h',): 'all_direct'}
    relation = only_relation(Normalised)
    assert relation.path_classification == {('h',): 'mixed'}
    assert not relation.is_position_wise


def test_a_product_with_a_fixed_matrix_is_cut_without_a_warning():
    _, graph, _ = compiled(Reservoir)
    assert graph.hidden_groups[0].is_position_wise
    assert not [r for r in graph.diagnostics if r.level is not DiagnosticLevel.INFO]


# The way from the parameters to the op


def values_of(model, way):
    states = model.states()
    return [
        jax.tree.leaves(states[path].value)[leaf]
        for path, leaf in zip(way.paths, way.leaf_indices, strict=True)
    ]


@pytest.mark.parametrize(
    'make, function',
    [
        (Leaky, lambda w: w),
        (Softplus, lambda w: jax.nn.softplus(w) - 0.5),
        (Transposed, lambda w: w.T),
    ],
    ids=['identity', 'softplus', 'transpose'],
)
def test_a_way_computes_the_weight_and_pulls_back_through_it(make, function):
    model, graph, _ = compiled(make)
    way = graph.hidden_param_op_relations[0].weight_ways['weight']
    value = model.W.value
    assert way.paths == (W,) and way.is_static and not way.varying_vars
    assert way.is_identity == (make is Leaky) == (not way.chain)
    weight, pull_back = jax.vjp(function, value)
    assert_close(way([value]), weight)
    cotangent = draw(*weight.shape, seed=8)
    (pulled,) = way.pull_back([value], cotangent)
    assert_close(pulled, pull_back(cotangent)[0])


class TwoParameters(Leaky):
    """The weight is a product of two parameters, a matrix and a gain per output."""

    def __init__(self):
        super().__init__()
        self.gain = param(N)

    def weight(self):
        return self.W.value * jnp.exp(self.gain.value)[None]


def test_a_weight_of_two_parameters_is_traced_for_both():
    model, graph, x = compiled(TwoParameters)
    (relation,) = graph.hidden_param_op_relations
    way = relation.weight_ways['weight']
    assert way.paths == (W, ('gain',))
    assert relation.path == way.paths[way.main] == W
    weight, gain = values_of(model, way)
    cotangent = draw(*weight.shape, seed=8)
    for_weight, for_gain = way.pull_back([weight, gain], cotangent)
    assert_close(for_weight, cotangent * jnp.exp(gain)[None])
    assert_close(for_gain, jnp.sum(cotangent * weight * jnp.exp(gain)[None], axis=0))
    traced = dict(btf.CompilationReport(graph).etrace_weights)
    assert traced == {W: [0], ('gain',): [0]}
    assert_exact(model, graph, x)


class TwoLeaves(Leaky):
    """The weight is put together from two leaves of one parameter."""

    def __init__(self):
        super().__init__()
        parts = {'x': param(N_IN, N).value, 'h': param(N, N).value}
        self.W = brainstate.ParamState(parts)

    def weight(self):
        return jnp.concatenate([self.W.value['x'], self.W.value['h']], axis=0)


def test_a_weight_of_two_leaves_is_pulled_back_to_each():
    model, graph, x = compiled(TwoLeaves)
    way = graph.hidden_param_op_relations[0].weight_ways['weight']
    assert way.paths == (W, W)
    assert way.leaf_indices == (0, 1)  # leaves are ordered by key: 'h', then 'x'
    cotangent = draw(N_IN + N, N, seed=8)
    for_h, for_x = way.pull_back(values_of(model, way), cotangent)
    assert_close(for_x, cotangent[:N_IN])
    assert_close(for_h, cotangent[N_IN:])
    assert_exact(model, graph, x)


def test_a_weight_that_varies_in_time_is_known_as_such():
    model, graph, x = compiled(DropConnect)
    (relation,) = graph.hidden_param_op_relations
    way = relation.weight_ways['weight']
    assert not way.is_static and not relation.is_static
    assert way.varying_vars and way.paths == (W,)
    *_, temps = graph.module_info.jaxpr_call(x)
    varying = [temps[v] for v in way.varying_vars]
    weight = way([model.W.value], varying)
    kept = np.asarray(weight != 0)
    assert 0 < kept.sum() < kept.size
    assert_close(weight, np.where(kept, model.W.value, 0))
    (pulled,) = way.pull_back([model.W.value], jnp.ones_like(weight), varying)
    assert_close(pulled, kept.astype(float))
    (record,) = graph.explain(kind=DiagnosticKind.WEIGHT_VARIES_IN_TIME)
    assert record.weight_path == W
    assert 'after the op' in record.message
    assert_exact(model, graph, x)


class Squared(brainstate.nn.Module):
    """The weight is the op's input as well."""

    def __init__(self):
        super().__init__()
        self.W = param(N, N)

    def init_state(self, batch_size=None, **_):
        self.h = hidden(None, N, N)

    def update(self, x):
        self.h.value = 0.9 * self.h.value + btf.matmul(self.W.value, self.W.value)
        return self.h.value * x[0]


def test_a_weight_that_is_also_the_input_is_differentiated_as_both():
    model, graph, x = compiled(Squared)
    (relation,) = graph.hidden_param_op_relations
    assert relation.x_var is relation.trainable_vars['weight']
    assert_exact(model, graph, x)


def test_units_of_weight_and_bias_are_on_their_ways():
    model, x = build(Units), draw(N_IN) * u.mV
    graph = btf.compile_etrace_graph(model, x)
    (relation,) = graph.hidden_param_op_relations
    assert relation.trainable_paths == {'weight': W, 'bias': W}
    bias = relation.weight_ways['bias']
    (raw,) = values_of(model, bias)
    # x is in mV and the weight in nS: the bias, given in pA, is what it is in pA.
    assert_close(bias([raw]), raw)
    assert_exact(model, graph, x)


# What is not traced, and why


class FixedBias(Leaky):
    def drive(self, x):
        xh = jnp.concatenate([x, self.h.value], axis=-1)
        return btf.matmul(xh, self.W.value, jnp.linspace(0.0, 1.0, N))


def test_a_bias_that_is_no_parameter_is_left_out():
    model, graph, x = compiled(FixedBias)
    (relation,) = graph.hidden_param_op_relations
    assert set(relation.weight_ways) == set(relation.trainable_vars) == {'weight'}
    (record,) = graph.explain(kind=DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE)
    assert "'bias'" in record.message and 'ParamState' in record.message
    assert_exact(model, graph, x)


class FixedWeight(OwnBias):
    def drive(self, x):
        xh = jnp.concatenate([x, self.h.value], axis=-1)
        return super().drive(x) + btf.matmul(xh, jnp.ones((N_IN + N, N)))


def test_an_op_without_any_parameter_is_left_out():
    model, graph, x = compiled(FixedWeight)
    (relation,) = graph.hidden_param_op_relations
    assert relation.trainable_paths == {'weight': W, 'bias': ('b',)}
    (record,) = graph.explain(kind=DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE)
    assert record.context['source'].endswith('(FixedWeight.drive)')
    assert_exact(model, graph, x)


class Second(Leaky):
    """The leaky cell with a second parameter of which the op's use varies."""

    shape = (N_IN, N)

    def __init__(self):
        super().__init__()
        self.U = param(*self.shape)


class StoppedWeight(Second):
    def drive(self, x):
        return super().drive(x) + btf.matmul(x, jax.lax.stop_gradient(self.U.value))


def test_a_weight_behind_stop_gradient_is_excluded():
    model, graph, x = compiled(StoppedWeight)
    assert [relation.path for relation in graph.hidden_param_op_relations] == [W]
    excluded = dict(btf.CompilationReport(graph).excluded_weights)
    assert list(excluded) == [('U',)]
    assert graph.explain(weight_path=('U',))
    assert graph.explain(kind=DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE)
    assert_exact(model, graph, x)


class FusedGates(brainstate.nn.Module):
    """An LSTM with one matmul for its four gates."""

    def __init__(self):
        super().__init__()
        self.W = param(N_IN + N, 4 * N)
        self.U = param(N_IN, N)

    def init_state(self, batch_size=None, **_):
        self.c, self.h = hidden(batch_size, N), hidden(batch_size, N)

    def update(self, x):
        y = btf.matmul(jnp.concatenate([x, self.h.value], axis=-1), self.W.value)
        i, f, g, o = jnp.split(y, 4, axis=-1)
        c = jax.nn.sigmoid(f) * self.c.value + jax.nn.sigmoid(i) * jnp.tanh(g)
        self.c.value = c + btf.matmul(x, self.U.value)
        self.h.value = jax.nn.sigmoid(o) * jnp.tanh(self.c.value)
        return self.h.value


class GatedUnit(Second):
    """One matmul for a value and its gate."""

    shape = (N_IN, 2 * N)

    def drive(self, x):
        value, gate = jnp.split(btf.matmul(x, self.U.value), 2, axis=-1)
        return super().drive(x) + value * jax.nn.sigmoid(gate)


@pytest.mark.parametrize('make, path, width', [(FusedGates, W, 4 * N), (GatedUnit, ('U',), 2 * N)])
def test_fused_gates_are_excluded_for_their_shape(make, path, width):
    model, graph, x = compiled(make)
    traced = [relation.path for relation in graph.hidden_param_op_relations]
    assert len(traced) == 1 and path not in traced
    (record,) = graph.explain(weight_path=path)
    assert record.kind is DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH
    assert record.level is DiagnosticLevel.WARNING
    assert f'({width},)' in record.message and f'({N},)' in record.message
    assert 'an op of its own' in record.message
    assert_exact(model, graph, x)


class Permuted(Second):
    """The second op's output arrives at other positions."""

    def drive(self, x):
        return super().drive(x) + btf.matmul(x, self.U.value)[..., ::-1]


def test_an_output_that_arrives_at_other_positions_is_excluded():
    model, graph, x = compiled(Permuted)
    assert reasons(graph, ('U',)) == [DiagnosticKind.RELATION_EXCLUDED_POSITION_MIXING]
    assert_exact(model, graph, x)


class Readout(Second):
    def update(self, x):
        return btf.matmul(super().update(x), self.U.value)

    shape = (N, 2)


class Unused(Second):
    pass


class PlainProduct(Second):
    def drive(self, x):
        return super().drive(x) + x @ self.U.value


class PlainReadout(Readout):
    def update(self, x):
        return Leaky.update(self, x) @ self.U.value


class Chained(Second):
    """The second op's output passes through the first op."""

    shape = (N_IN, N_IN)

    def drive(self, x):
        return super().drive(btf.matmul(x, self.U.value))


@pytest.mark.parametrize(
    'make, kind, level',
    [
        (Readout, DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL, DiagnosticLevel.INFO),
        (Unused, DiagnosticKind.WEIGHT_NOT_USED, DiagnosticLevel.INFO),
        (PlainProduct, DiagnosticKind.WEIGHT_WITHOUT_ETP_OP, DiagnosticLevel.WARNING),
        (PlainReadout, DiagnosticKind.WEIGHT_WITHOUT_ETP_OP, DiagnosticLevel.INFO),
        (Chained, DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT, DiagnosticLevel.INFO),
    ],
)
def test_every_weight_without_a_trace_has_one_record_that_says_why(make, kind, level):
    model, graph, x = compiled(make)
    (record,) = graph.explain(weight_path=('U',))
    assert (record.kind, record.level) == (kind, level)
    assert dict(btf.CompilationReport(graph).excluded_weights) == {('U',): kind.value}
    assert_exact(model, graph, x)


# Integers beside the weight


class Masked(Leaky):
    """A mask of integers beside the weight, in one parameter."""

    def __init__(self):
        super().__init__()
        mask = jnp.asarray(np.random.default_rng(0).binomial(1, 0.5, (N_IN + N, N)))
        self.W = brainstate.ParamState({'mask': mask, 'weight': self.W.value})

    def drive(self, x):
        weight, mask = self.W.value['weight'], self.W.value['mask']
        weight = weight * mask.astype(weight.dtype)
        return btf.matmul(jnp.concatenate([x, self.h.value], axis=-1), weight)


def test_integers_of_a_parameter_are_read_and_not_trained(x64):
    model, x = build(Masked), draw(N_IN)
    (relation,) = btf.compile_etrace_graph(model, x).hidden_param_op_relations
    way = relation.weight_ways['weight']
    assert relation.trainable_leaf_indices == {'weight': 1}
    assert way.is_static and way.traced == (0,) and way.leaf_indices == (1, 0)
    value = model.W.value
    cotangent = draw(N_IN + N, N)
    (pulled,) = way.pull_back([value['weight'], value['mask']], cotangent)
    assert_close(pulled, cotangent * value['mask'].astype(float))
