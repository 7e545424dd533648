"""The compiled graph: its fields, its filters, what the step outputs, and the recursion guard."""

import threading

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import DiagnosticKind
from braintrace_fast.compiler import (
    ExitPerturbation,
    GroupTransition,
    compiler_context,
    diagnostic_context,
    order_hidden_group_index,
)
from tests.compiler.checks import assert_close, assert_trees_close, build, draw, leaves_of
from tests.models import N_IN, DropConnect, Leaky, LearnedLeak, N, Stack, hidden
from tests.oracles.compiled_step import assert_step_gradient_is_exact, evaluate

pytestmark = pytest.mark.usefixtures('x64')

FIELDS = (
    'module_info',
    'hidden_groups',
    'hid_path_to_group',
    'hidden_param_op_relations',
    'hidden_perturb',
    'diagnostics',
)


def gru():
    return btf.nn.GRUCell(N_IN, N)


def two_layers():
    return Stack([btf.nn.GRUCell(N_IN, N), btf.nn.LSTMCell(N, N)], btf.nn.Linear(N, N))


def compiled(make, **options):
    model, x = build(make), draw(N_IN)
    return model, btf.compile_etrace_graph(model, x, **options), x


# order_hidden_group_index


def test_the_index_of_a_group_is_its_position():
    _, graph, _ = compiled(two_layers)
    groups = list(graph.hidden_groups)
    assert len(groups) == 2
    order_hidden_group_index([])
    order_hidden_group_index(groups)
    with pytest.raises(AssertionError, match='position 0 has index 1'):
        order_hidden_group_index(groups[::-1])
    with pytest.raises(AssertionError, match='position 0 has index 1'):
        order_hidden_group_index(groups[1:])


# The fields


def test_a_graph_has_the_fields_of_the_seeds():
    assert btf.ETraceGraph._fields[: len(FIELDS)] == FIELDS
    model, graph, _ = compiled(two_layers)
    assert isinstance(graph.module_info, btf.ModuleInfo)
    assert all(isinstance(group, btf.HiddenGroup) for group in graph.hidden_groups)
    assert set(graph.hid_path_to_group) == set(model.states(brainstate.HiddenState))
    for path, group in graph.hid_path_to_group.items():
        assert group is graph.hidden_groups[group.index] and path in group.hidden_paths
    for relation in graph.hidden_param_op_relations:
        assert isinstance(relation, btf.HiddenParamOpRelation)
        assert all(group is graph.hidden_groups[group.index] for group in relation.hidden_groups)
    assert isinstance(graph.hidden_perturb, btf.HiddenPerturbation)
    assert isinstance(graph.diagnostics, tuple)
    assert all(isinstance(record, btf.CompilationRecord) for record in graph.diagnostics)
    assert all(isinstance(transition, GroupTransition) for transition in graph.transitions)
    assert len(graph.transitions) == len(graph.hidden_groups)
    assert isinstance(graph.exit_perturb, ExitPerturbation)


def test_dict_and_repr_show_every_field():
    _, graph, _ = compiled(gru)
    assert graph.dict() == graph._asdict()
    assert repr(graph).startswith('ETraceGraph')
    assert all(name in repr(graph) for name in FIELDS)


def test_compiling_leaves_the_model_as_it_is():
    model, x = build(two_layers), draw(N_IN)
    before, states = leaves_of(model), dict(model.states())
    btf.compile_etrace_graph(model, x)
    assert dict(model.states()) == states
    assert_trees_close(leaves_of(model), before, 0)


def test_a_model_can_be_compiled_again_and_for_other_shapes():
    model, x = build(gru), draw(N_IN)
    first, second = (btf.compile_etrace_graph(model, x) for _ in range(2))
    for a, b in zip(evaluate(first, x).c, evaluate(second, x).c, strict=True):
        assert_close(a, b)
    brainstate.nn.init_all_states(model, batch_size=4)
    third = btf.compile_etrace_graph(model, draw(4, N_IN))
    assert third.hidden_groups[0].varshape == (4, N)


# explain


def test_explain_without_filters_is_the_whole_log_in_order():
    _, graph, _ = compiled(two_layers)
    assert graph.explain() == graph.diagnostics
    assert len(graph.diagnostics) > 5


def test_filters_of_explain_are_anded_and_keep_the_order_of_emission():
    _, graph, _ = compiled(two_layers)
    log = graph.diagnostics
    weight, state = ('layers', 1, 'Wo', 'weight'), ('layers', 1, 'h')
    included = DiagnosticKind.RELATION_INCLUDED
    by_weight, by_state, by_kind = (
        graph.explain(weight_path=weight),
        graph.explain(hidden_path=state),
        graph.explain(kind=included),
    )
    assert by_weight == tuple(r for r in log if r.weight_path == weight) != ()
    assert by_state == tuple(r for r in log if state in r.hidden_paths) != ()
    assert by_kind == tuple(r for r in log if r.kind is included) != ()
    assert [r.weight_path for r in by_kind] == [r.path for r in graph.hidden_param_op_relations]
    (record,) = graph.explain(weight_path=weight, hidden_path=state, kind=included)
    assert record in by_weight and record in by_state and record in by_kind
    assert len(by_state) > 1 < len(by_kind)


def test_explain_finds_nothing_where_one_filter_does_not_match():
    _, graph, _ = compiled(two_layers)
    weight = ('layers', 1, 'Wo', 'weight')
    assert graph.explain(weight_path=weight, hidden_path=('layers', 0, 'h')) == ()
    assert graph.explain(weight_path=weight, kind=DiagnosticKind.WEIGHT_NOT_USED) == ()
    assert graph.explain(weight_path=('nowhere',)) == ()
    assert graph.explain(hidden_path=('nowhere',)) == ()


# What the step outputs besides its results


def variables_of(graph):
    relations, groups = graph.hidden_param_op_relations, graph.hidden_groups
    x = [relation.x_var for relation in relations if relation.x_var is not None]
    y_to_h = [
        v
        for relation in relations
        for constvars in relation.y_to_hidden_group_constvars
        for v in (relation.y_var, *constvars)
    ]
    h_to_h = [v for g in groups for v in (*g.hidden_invars, *g.transition_jaxpr_constvars)]
    return x, y_to_h, h_to_h


@pytest.mark.parametrize('make', [gru, two_layers, LearnedLeak, DropConnect])
def test_the_step_also_outputs_x_y_to_h_and_h_to_h_variables(make):
    model, graph, x = compiled(make)
    info = graph.module_info
    originals = info.jaxpr.outvars[: info.num_var_out + info.num_var_state]
    hoisted = info.jaxpr.outvars[len(originals) :]
    assert len(set(hoisted)) == len(hoisted)
    assert not set(hoisted) & {v for v in originals if not hasattr(v, 'val')}
    *_, temps = info.jaxpr_call(x)
    kinds = variables_of(graph)
    for variables in kinds:
        assert variables and set(variables) <= set(temps)
    for transition in graph.transitions:
        assert set(transition.variables) <= set(temps)
    for relation in graph.hidden_param_op_relations:
        for way in relation.weight_ways.values():
            assert set(way.varying_vars) <= set(temps)
    # In order: each kind starts where the one before has ended, but for what has been there.
    first_of_kind = {v: kind for kind in (2, 1, 0) for v in kinds[kind] if v in hoisted}
    order = [first_of_kind[v] for v in hoisted if v in first_of_kind]
    assert order == sorted(order)


def test_the_outputs_of_the_plain_step_come_first_and_unchanged():
    model, graph, x = compiled(two_layers)
    plain = btf.extract_module_info(model, x)
    assert graph.module_info.num_var_out == plain.num_var_out
    assert graph.module_info.num_var_state == plain.num_var_state
    assert_trees_close(graph.module_info.jaxpr_call(x)[:3], plain.jaxpr_call(x)[:3])


# include_hidden_perturb


def test_the_perturbed_steps_can_be_left_out():
    _, full, x = compiled(gru)
    _, graph, _ = compiled(gru, include_hidden_perturb=False)
    assert graph.hidden_perturb is None and graph.exit_perturb is None
    assert [r.path for r in graph.hidden_param_op_relations] == [
        r.path for r in full.hidden_param_op_relations
    ]
    assert_trees_close(graph.module_info.jaxpr_call(x)[0], full.module_info.jaxpr_call(x)[0])
    again = 'include_hidden_perturb=True'
    with pytest.raises(ValueError, match=f'no hidden perturbation.*{again}'):
        graph.call_hidden_perturb((x,), [])
    with pytest.raises(ValueError, match=f'no exit perturbation.*{again}'):
        graph.call_exit_perturb((x,), [], [], [])


# The recursion guard


def test_compiling_inside_a_compilation_is_refused():
    with compiler_context('outer'):
        with pytest.raises(NotImplementedError, match='"compile_graph".*"outer" is compiling'):
            compiled(gru)
        with pytest.raises(NotImplementedError):
            with compiler_context('inner'):
                pass
    compiled(gru)


def test_the_guard_is_lifted_after_an_error():
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            with compiler_context('outer'):
                raise error('stopped')
    with compiler_context('again'):
        pass


class Recursive(Leaky):
    """Compiles another model inside its own step."""

    def update(self, x):
        btf.compile_etrace_graph(build(Leaky), jnp.ones(N_IN))
        return super().update(x)


def test_a_model_that_compiles_in_its_step_is_refused_and_nothing_stays_behind():
    model, x = build(Recursive), draw(N_IN)
    before = leaves_of(model)
    with pytest.raises(NotImplementedError, match='inside its own step; compile it before'):
        btf.compile_etrace_graph(model, x)
    assert_trees_close(leaves_of(model), before, 0)
    compiled(gru)


def in_thread(function):
    results = []

    def run():
        try:
            # Settings of brainstate are per thread.
            with brainstate.environ.context(precision=64):
                results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    return result


def test_other_threads_may_compile_meanwhile():
    model, x = build(gru), draw(N_IN)
    with compiler_context('outer'), diagnostic_context() as records:
        graph = in_thread(lambda: btf.compile_etrace_graph(model, x))
        with pytest.raises(NotImplementedError):
            btf.compile_etrace_graph(model, x)
    assert len(graph.hidden_param_op_relations) == 2
    assert graph.diagnostics and not records


def test_an_error_in_another_thread_does_not_touch_this_one():
    model, x = build(Recursive), draw(N_IN)
    with pytest.raises(NotImplementedError):
        in_thread(lambda: btf.compile_etrace_graph(model, x))
    with compiler_context('here'):
        pass


# Models with more than they need


class Untouched(Leaky):
    """A hidden state that the step neither reads nor writes."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.z = hidden(batch_size, 4)


def test_a_hidden_state_that_the_step_does_not_touch_is_in_no_group():
    model, graph, x = compiled(Untouched)
    assert list(graph.hid_path_to_group) == [('h',)]
    assert graph.hidden_perturb.perturb_hidden_paths == [('h',)]
    report = btf.CompilationReport(graph)
    assert report.dynamic_states == [('z',)]
    assert_step_gradient_is_exact(model, evaluate(graph, x), x)


class Refractory(Leaky):
    """A hidden state of whole numbers, which no derivative passes."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.wait = brainstate.HiddenState(jnp.arange(N))

    def leak(self, h):
        self.wait.value = jnp.maximum(self.wait.value - 1, 0) + 3 * (h > 1).astype(int)
        return jnp.where(self.wait.value > 1, 0.5, 0.9) * h


def test_a_hidden_state_of_whole_numbers_is_carried_only():
    model, graph, x = compiled(Refractory)
    assert list(graph.hid_path_to_group) == [('h',)]
    assert graph.hidden_perturb.perturb_hidden_paths == [('h',)]
    _, new, _, _ = graph.module_info.jaxpr_call(x)
    true = np.maximum(model.wait.value - 1, 0) + 3 * np.asarray(model.h.value > 1)
    assert np.array_equal(new[('wait',)], true)
    assert_step_gradient_is_exact(model, evaluate(graph, x), x)


def test_a_step_without_arguments_compiles():
    class Free(Leaky):
        def update(self):
            return super().update(jnp.ones(N_IN))

    model = build(Free)
    graph = btf.compile_etrace_graph(model)
    out, *_ = graph.call_hidden_perturb((), graph.hidden_perturb.init_perturb_data())
    xh = jnp.concatenate([jnp.ones(N_IN), model.h.value])
    assert_close(out, 0.8 * model.h.value + jnp.tanh(xh @ model.W.value))


def test_the_graph_runs_under_jit_grad_and_vmap():
    model, graph, _ = compiled(Leaky)
    xs = draw(3, N_IN)
    zeros = graph.exit_perturb.zeros()

    @jax.jit
    @jax.vmap
    def signals(x):
        def loss(y, exits):
            out, *_ = graph.call_exit_perturb((x,), y, exits, zeros[2])
            return jnp.sum(out**2)

        return jax.grad(loss, argnums=(0, 1))(*zeros[:2])

    (c,), (L,) = signals(xs)
    h = jnp.stack([graph.module_info.jaxpr_call(x)[0] for x in xs])
    assert_close(L, 2 * h)
    xh = jnp.concatenate([xs, jnp.broadcast_to(model.h.value, (3, N))], axis=-1)
    assert_close(c, 2 * h * (1 - jnp.tanh(xh @ model.W.value) ** 2))
    assert np.any(c != 0)
