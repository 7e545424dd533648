"""The compiler finds in every model of the table what a reader would write down by hand."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.marks import slow_if_one_of_many
from tests.models import MODELS, ModelCase
from tests.oracles.dense import factor_oracle, plain_ops
from tests.oracles.exit_signal import exit_signal_oracle
from tests.oracles.step import random_projection, run, state_values, step_function

STEPS = 6
REASONS = {
    'plain': 'weight_without_etp_op',
    'weight_to_weight': 'relation_excluded_weight_to_weight',
    'readout': 'relation_excluded_non_temporal',
    'mixing': 'relation_excluded_position_mixing',
}

every_model = pytest.mark.parametrize('case', MODELS.values(), ids=MODELS)
every_batch = pytest.mark.parametrize('batch', [None, 2], ids=['unbatched', 'batched'])
# Values hardly depend on the batch axis: without it, a few models stand for all.
UNBATCHED = ['lstm', 'gif_expon', 'units', 'learned_leak', 'hidden_group_state', 'scan']
every_model_and_some_unbatched = pytest.mark.parametrize(
    'case, batch',
    [
        *(
            pytest.param(case, 2, id=f'{name}-batched', marks=slow_if_one_of_many(name))
            for name, case in MODELS.items()
        ),
        *(pytest.param(MODELS[name], None, id=f'{name}-unbatched') for name in UNBATCHED),
    ],
)


def compile_case(case: ModelCase, batch: int | None):
    return _compile_case(case.name, batch, brainstate.environ.get_precision())


@functools.cache  # tests leave the model's states as they are, so they may share them
def _compile_case(name: str, batch: int | None, precision: int):
    model, inputs = MODELS[name].build(batch)
    xs = inputs(0, STEPS)
    return model, xs, btf.compile_etrace_graph(model, jax.tree.map(lambda x: x[0], xs))


@functools.cache
def compiled_step(model):
    return jax.jit(step_function(model))


def trajectory_of(model, xs):
    """Pairs of the model's values and the input, step by step."""
    _, trajectory = run(compiled_step(model), state_values(model), xs)
    steps = [jax.tree.map(lambda x, t=t: x[t], xs) for t in range(STEPS)]
    return list(zip(trajectory[:-1], steps, strict=True))


def compiled_values(graph, values):
    """Values by path in the order in which the compiled step takes them."""
    by_path = {**values.params, **values.hidden, **values.others}
    external = values.others[('brainstate.random.DEFAULT',)]
    paths = graph.module_info.state_id_to_path
    states = graph.module_info.compiled_model_states
    return [by_path.get(paths[id(state)], external) for state in states]


def assert_close(found, true, rtol=1e-10):
    found, true = np.asarray(found), np.asarray(true)
    np.testing.assert_allclose(found, true, rtol=rtol, atol=rtol * max(1.0, np.abs(true).max()))


@every_batch
@every_model
def test_groups_patterns_and_relations_are_what_a_reader_writes_down(case, batch):
    _, _, graph = compile_case(case, batch)
    expected = case.expected
    assert tuple(tuple(group.hidden_paths) for group in graph.hidden_groups) == expected.groups
    patterns = tuple(tuple(tuple(map(int, row)) for row in g.pattern) for g in graph.hidden_groups)
    assert patterns == expected.patterns
    relations = tuple(
        (relation.path, group.index, tuple(map(int, pattern)))
        for relation in graph.hidden_param_op_relations
        for group, pattern in zip(relation.hidden_groups, relation.f_patterns, strict=True)
    )
    assert relations == expected.relations


@every_model
def test_every_weight_has_a_record_that_says_why_it_is_or_is_not_traced(case):
    model, _, graph = compile_case(case, 2)
    report = btf.CompilationReport(graph)
    reasons = {path: REASONS[why] for path, why in case.expected.untraced.items()}
    assert dict(report.excluded_weights) == reasons
    traced = {path for path, _ in report.etrace_weights}
    assert traced | set(reasons) == set(model.states(brainstate.ParamState))
    for path in reasons:
        assert reasons[path] in [record.kind for record in graph.explain(weight_path=path)]


@every_model
def test_mixing_of_positions_is_found_and_reported(case):
    _, _, graph = compile_case(case, 2)
    mixing = {g.index for g in graph.hidden_groups if not g.is_position_wise}
    assert mixing == case.expected.mixing_transitions
    relations = graph.hidden_param_op_relations
    tails = {i for i, relation in enumerate(relations) if not relation.is_position_wise}
    assert tails == case.expected.mixing_tails
    kinds = [record.kind for record in graph.diagnostics]
    assert (btf.DiagnosticKind.TRANSITION_NOT_POSITION_WISE in kinds) == bool(mixing)
    assert (btf.DiagnosticKind.TAIL_NOT_POSITION_WISE in kinds) == bool(tails)


def compiled_jacobians(graph):
    """The compiled function that gives, per group, ``D`` and, by the output of an op, ``f``."""

    @jax.jit
    def run_step(x, old):
        *_, temps = graph.module_info.jaxpr_call(x, old_state_vals=old)
        found = [transition.jacobians(temps) for transition in graph.transitions]
        return [(D, list(f.values())) for D, f in found]

    def jacobians(x, old):
        found = zip(run_step(x, old), graph.transitions, strict=True)
        return [(D, dict(zip(transition.y_vars, f, strict=True))) for (D, f), transition in found]

    return jacobians


@every_model_and_some_unbatched
def test_D_and_f_equal_dense_jacobians_restricted_to_positions(case, batch, x64):
    if case.expected.mixing_transitions or case.expected.mixing_tails:
        pytest.skip('the dense Jacobian does not cut what mixes positions without an op')
    model, xs, graph = compile_case(case, batch)
    oracle = factor_oracle(model, case.expected.groups, forward_mode=case.forward_mode)
    jacobians = compiled_jacobians(graph)
    alive = 0
    found_f = {relation.y_var: [] for relation in graph.hidden_param_op_relations}
    true_f = []
    for values, x in trajectory_of(model, xs):
        dense = oracle(values, x)
        for group, (D, f) in enumerate(jacobians(x, compiled_values(graph, values))):
            present = [[plane is not None for plane in row] for row in D]
            assert present == [list(row) for row in graph.hidden_groups[group].pattern]
            for row, true_row in zip(D, dense.D[group], strict=True):
                for plane, true in zip(row, true_row, strict=True):
                    assert_close(0 if plane is None else plane, true)
                    alive += bool(jnp.any(true != 0))
            zero = jnp.zeros(graph.hidden_groups[group].varshape)
            for y, planes in f.items():
                filled = [zero if plane is None else plane for plane in planes]
                found_f[y].append((group, jnp.stack(filled)))
        true_f.append(dense.f)
    assert alive or not any(any(map(any, p)) for p in case.expected.patterns)
    calls = list(range(len(true_f[0])))
    for found in found_f.values():
        groups = [group for group, _ in found]
        steps = [t for t in range(STEPS) for _ in range(len(found) // STEPS)]
        matches = [
            call
            for call in calls
            if all(
                true_f[t][call][g] is not None
                and np.allclose(planes, jnp.stack(true_f[t][call][g]), rtol=1e-10, atol=1e-12)
                for t, g, (_, planes) in zip(steps, groups, found, strict=True)
            )
        ]
        assert matches, 'no op call of the model has these f'
        assert any(np.any(planes != 0) for _, planes in found)
        calls.remove(matches[0])


@every_model_and_some_unbatched
def test_seeds_jacobian_has_the_planes_along_its_last_axes(case, batch, x64):
    model, xs, graph = compile_case(case, batch)
    values, x = trajectory_of(model, xs)[-1]
    *_, temps = graph.module_info.jaxpr_call(x, old_state_vals=compiled_values(graph, values))
    for group, transition in zip(graph.hidden_groups, graph.transitions, strict=True):
        D, _ = transition.jacobians(temps)
        hidden = [temps[v] for v in group.hidden_invars]
        jacobian = group.diagonal_jacobian(
            hidden, [temps[v] for v in group.transition_jaxpr_constvars]
        )
        assert jacobian.shape == (*group.varshape, group.num_state, group.num_state)
        for s, row in enumerate(D):
            for q, plane in enumerate(row):
                assert_close(jacobian[..., s, q], 0 if plane is None else plane)


def flat(tree):
    return jax.tree.leaves(tree)


@every_model_and_some_unbatched
def test_perturbed_steps_with_zeros_equal_the_step(case, batch, x64):
    model, xs, graph = compile_case(case, batch)
    step = step_function(model)
    for values, x in trajectory_of(model, xs)[-2:]:
        old = compiled_values(graph, values)
        out, hidden, _ = step(*values, x)
        plain = graph.module_info.jaxpr_call(x, old_state_vals=old)
        zeros = graph.hidden_perturb.init_perturb_data()
        perturbed = graph.call_hidden_perturb((x,), zeros, old)
        exits = graph.call_exit_perturb((x,), *graph.exit_perturb.zeros(), old)
        for found in (plain, perturbed, exits):
            for a, b in zip(flat(found[0]), flat(out), strict=True):
                assert_close(a, b, 1e-13)
            for path in found[1]:
                assert_close(flat(found[1][path])[0], flat(hidden[path])[0], 1e-13)
            for v, value in found[3].items():
                if jnp.issubdtype(value.dtype, jnp.number):
                    assert_close(value, plain[3][v], 1e-13)


def cotangents(graph, x, old, loss):
    """Gradients of the exit-perturbed step by the states, the ys and the exits; and its values."""

    def run_step(old, *zeros):
        out, hidden, _, temps = graph.call_exit_perturb((x,), *zeros, old)
        return loss(out, hidden), list(temps.values())

    floating = [all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in flat(v)) for v in old]

    def of_floats(floats, *zeros):
        values = iter(floats)
        filled = [next(values) if f else v for f, v in zip(floating, old, strict=True)]
        return run_step(filled, *zeros)

    floats = [v for f, v in zip(floating, old, strict=True) if f]
    grads, temps = jax.grad(of_floats, argnums=(0, 1, 2, 3), has_aux=True)(
        floats, *graph.exit_perturb.zeros()
    )
    by_state = iter(grads[0])
    outvars = dict.fromkeys(v for v in graph.module_info.jaxpr.outvars if not hasattr(v, 'val'))
    temps = dict(zip(outvars, temps, strict=True))
    return [next(by_state) if f else None for f in floating], *grads[1:], temps


def projection_loss(graph):
    """A loss that reads the output and every hidden state, and the paths of the states."""
    paths = [path for group in graph.hidden_groups for path in group.hidden_paths]

    def loss(out, hidden):
        return random_projection((out, {path: hidden[path] for path in paths}))

    return loss, paths


def planes_of(group, variables, values):
    """The values of the group's variables (zero where there is none), plane by plane."""
    filled = [values.get(v, jnp.zeros(v.aval.shape, v.aval.dtype)) for v in variables]
    planes = group.concat_hidden(filled)
    return [planes[..., s] for s in range(group.num_state)]


def pulled_per_example(relation, leaves, trace):
    """A trace in the coordinates of the only parameter of each way."""
    return {
        key: jax.vmap(lambda g, way=way: pull_back(way, leaves, g)[0])(trace[key])
        for key, way in relation.weight_ways.items()
    }


def pull_back(way, leaves, cotangent):
    params, varying = ([leaves[v] for v in vs] for vs in (way.param_vars, way.varying_vars))
    return way.pull_back(params, cotangent, varying)


def add_weights(total, relation, leaves, grads, walk=True):
    """Add gradients in the op's coordinates, pulled back to the parameters, to the total."""
    for key, way in relation.weight_ways.items():
        pulled = pull_back(way, leaves, grads[key]) if walk else [grads[key]]
        for path, index, g in zip(way.paths, way.leaf_indices, pulled, strict=True):
            total[path] = [a + g if i == index else a for i, a in enumerate(total[path])]


def compiled_accumulation(graph, loss, *, over_time):
    """``(traces, total), x, old -> (traces, total)`` after a step, compiled."""

    @jax.jit
    def accumulate(carried, x, old):
        traces, total = dict(carried[0]), dict(carried[1])
        accumulate_step(graph, x, old, loss, traces, total, over_time)
        return traces, total

    return accumulate


def accumulate_step(graph, x, old, loss, traces, total, over_time):
    """One step of the recurrence of DESIGN's section 3, in the coordinates of the parameters."""
    by_state, c, L, R, temps = cotangents(graph, x, old, loss)
    info = graph.module_info
    leaves = dict(zip(info.jaxpr.invars, flat(((x,), tuple(old))), strict=True)) | temps
    exits = dict(zip(graph.exit_perturb.hidden_outvars, L, strict=True))
    bypasses = dict(zip(graph.exit_perturb.bypass_invars, R, strict=True))
    for state, grad in zip(info.compiled_model_states, by_state, strict=True):
        path = info.state_id_to_path[id(state)]
        if isinstance(state, brainstate.ParamState):
            total[path] = [a + b for a, b in zip(total[path], flat(grad), strict=True)]
    for index, (relation, cotangent) in enumerate(
        zip(graph.hidden_param_op_relations, c, strict=True)
    ):
        op, params = relation.primitive, relation.eqn_params
        x_op = None if relation.x_var is None else temps[relation.x_var]
        for group in relation.hidden_groups:
            transition = graph.transitions[group.index]
            D, f = transition.jacobians(temps)
            signal = planes_of(group, group.hidden_outvars, exits)
            bypass = planes_of(group, group.hidden_invars, bypasses)
            size = range(group.num_state)
            old_trace = traces.get((index, group.index), [None] * len(signal))
            decayed = [
                tree_sum(
                    op.trace_rules.decay(D[s][q], old_trace[q], **params)
                    for q in size
                    if D[s][q] is not None and old_trace[q] is not None
                )
                for s in size
            ]
            f_planes = f[relation.y_var]
            fresh = [
                None if plane is None else op.trace_rules.outer(x_op, plane, **params)
                for plane in f_planes
            ]
            if over_time and not relation.is_static:  # the way differs in every step: walk it now
                fresh = [plane and pulled_per_example(relation, leaves, plane) for plane in fresh]
            for plane, trace in zip([*signal, *bypass], [*decayed, *old_trace], strict=True):
                if trace is not None:
                    grads = op.trace_rules.contract(plane, trace, **params)
                    add_weights(total, relation, leaves, grads, walk=relation.is_static)
            traces[index, group.index] = [
                tree_sum(part for part in pair if part is not None)
                for pair in zip(decayed, fresh, strict=True)
            ]
        if relation.is_static:
            ways = relation.weight_ways
            weights = {k: way([leaves[v] for v in way.param_vars]) for k, way in ways.items()}
            add_weights(total, relation, leaves, op.weight_vjp(x_op, cotangent, weights, **params))


def tree_sum(trees):
    trees = list(trees)
    return jax.tree.map(lambda *leaves: sum(leaves), *trees) if trees else None


@every_model_and_some_unbatched
def test_c_gives_exactly_the_gradient_of_the_step_for_every_parameter(case, batch, x64):
    """DESIGN's first test: ``c (x) x`` and the untraced rest are ``jax.grad`` of the step."""
    model, xs, graph = compile_case(case, batch)
    step = step_function(model)
    loss, _ = projection_loss(graph)

    def true_loss(params, hidden, others, x):
        out, new, _ = step(params, hidden, others, x)
        return loss(out, new)

    true_gradient = jax.jit((jax.jacfwd if case.forward_mode else jax.grad)(true_loss))
    accumulate = compiled_accumulation(graph, loss, over_time=False)
    for values, x in trajectory_of(model, xs)[-2:]:
        true = true_gradient(*values, x)
        zeros = {path: [jnp.zeros_like(leaf) for leaf in flat(g)] for path, g in true.items()}
        _, found = accumulate(({}, zeros), x, compiled_values(graph, values))
        for path in true:
            for a, b in zip(found[path], flat(true[path]), strict=True):
                assert_close(a, b)
        assert any(np.any(leaf != 0) for leaf in flat(true))


# The oracle adds to a state when it is written: states that are never written, and those whose
# neuron goes on with the value at hand instead of reading the state, are out of its sight.
SEEN_BY_WRITES = [
    case
    for name, case in MODELS.items()
    if name not in ('read_only', 'rate_readout', 'three_layers', 'stp', 'coba_ei', 'gif_expon')
    and not name.startswith('lif')
]


@pytest.mark.parametrize('case', SEEN_BY_WRITES, ids=repr)
def test_L_takes_the_planes_of_a_group_as_independent(case, x64):
    model, xs, graph = compile_case(case, 2)
    oracle = exit_signal_oracle(model, case.expected.groups, forward_mode=case.forward_mode)
    loss, paths = projection_loss(graph)
    signals = jax.jit(lambda x, old: cotangents(graph, x, old, loss)[2])
    true_signals = jax.jit(lambda values, x: oracle(values, x, paths))
    for values, x in trajectory_of(model, xs)[-2:]:
        L = signals(x, compiled_values(graph, values))
        signal = dict(zip(graph.exit_perturb.hidden_outvars, L, strict=True))
        true = true_signals(values, x)
        for group, planes in zip(graph.hidden_groups, true, strict=True):
            found = group.concat_hidden([signal[new] for new in group.hidden_outvars])
            assert_close(found, jnp.stack(planes, axis=-1))
        assert any(np.any(plane != 0) for planes in true for plane in planes)


# Where an op feeds another op in the same step, cutting the ops' inputs also cuts paths that c has.
CHAINED = ('minimal_rnn', 'scan', 'stp', 'two_layers', 'three_layers', 'rate_readout')
# The product with a fixed matrix is no op: it is cut in D, but not in BPTT.
UNCHAINED = [
    pytest.param(case, id=name, marks=slow_if_one_of_many(name))
    for name, case in MODELS.items()
    if name not in (*CHAINED, 'reservoir')
]


@pytest.mark.parametrize('case', UNCHAINED)
def test_factors_over_time_give_the_gradient_of_the_model_without_mixing(case, x64):
    """``g_t = c_t (x) x_t + L_t D_t e_{t-1}``, summed, is BPTT with the ops' inputs cut."""
    if case.expected.mixing_transitions or case.expected.mixing_tails:
        pytest.skip('BPTT does not cut what mixes positions without an op')
    model, xs, graph = compile_case(case, 2)
    loss, _ = projection_loss(graph)
    start, step = state_values(model), step_function(model)
    steps = trajectory_of(model, xs)

    def sequence_loss(params):
        total, values = 0.0, start._replace(params=params)
        with plain_ops():
            for _, x in steps:
                out, hidden, others = step(*values, x)
                total += loss(out, hidden)
                values = values._replace(hidden=hidden, others=others)
        return total

    differentiate = jax.jacfwd if case.forward_mode else jax.grad
    true = jax.jit(differentiate(sequence_loss))(start.params)
    zeros = jax.tree.map(jnp.zeros_like, true)
    carried = {}, {path: flat(value) for path, value in zeros.items()}
    accumulate = compiled_accumulation(graph, loss, over_time=True)
    for values, x in steps:
        carried = accumulate(carried, x, compiled_values(graph, values))
    found = carried[1]
    traced = {path for path, _ in btf.CompilationReport(graph).etrace_weights}
    assert traced
    for path in traced:
        for a, b in zip(found[path], flat(true[path]), strict=True):
            assert_close(a, b)
            assert np.any(b != 0)
