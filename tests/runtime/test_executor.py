"""The executors solve for the Jacobians of a step, in the layout of the reference."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.reference_api.executor import VjpResiduals
from tests.models import MODELS
from tests.oracles.dense import dense_factors
from tests.oracles.step import random_projection, state_values, step_function

pytestmark = pytest.mark.usefixtures('x64')

BATCH, STEPS = 2, 3


def build(name, vjp_method='single-step'):
    model, inputs = MODELS[name].build(BATCH)
    rng = np.random.default_rng(4)
    for state in model.states(brainstate.HiddenState).values():
        state.value = jax.tree.map(lambda a: a + 0.2 * rng.normal(size=a.shape), state.value)
    xs = inputs(0, STEPS)
    executor = btf.ETraceVjpGraphExecutor(model, vjp_method)
    executor.compile_graph(jax.tree.map(lambda a: a[0], xs))
    return model, executor, xs


def close(ours, true, rtol=1e-10):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_a_scope_decides_what_is_compiled():
    class Asked(btf.Scope):
        def follows(self, op, params):
            raise NotImplementedError('asked about an op')

    model, inputs = MODELS['gru'].build(BATCH)
    executor = btf.ETraceVjpGraphExecutor(model, scope=Asked())
    with pytest.raises(NotImplementedError, match='asked about an op'):
        executor.compile_graph(jax.tree.map(lambda a: a[0], inputs(0, STEPS)))


def test_the_method_is_one_of_two():
    model, _ = MODELS['gru'].build(BATCH)
    single = btf.ETraceVjpGraphExecutor(model)
    assert single.is_single_step_vjp and not single.is_multi_step_vjp
    multi = btf.ETraceVjpGraphExecutor(model, vjp_method='multi-step')
    assert multi.is_multi_step_vjp and not multi.is_single_step_vjp
    with pytest.raises(ValueError, match="'both'.*'single-step' or 'multi-step'"):
        btf.ETraceVjpGraphExecutor(model, vjp_method='both')


def test_a_graph_must_be_compiled_first():
    model, _ = MODELS['gru'].build(BATCH)
    executor = btf.ETraceVjpGraphExecutor(model)
    with pytest.raises(ValueError, match='not compiled yet'):
        executor.solve_h2w_h2h_jacobian(jnp.ones((BATCH, 3)))


@pytest.mark.parametrize('name', ['lstm', 'lif_expon', 'hidden_group_state', 'two_layers'])
def test_jacobians_are_those_of_dense_ones_at_each_position(name):
    model, executor, xs = build(name)
    before = state_values(model)
    out, hidden, others, (x_by_op, f), D, _ = executor.solve_h2w_h2h_jacobian(xs[0])
    true_out, true_hidden, _ = step_function(model)(*before, xs[0])
    close(out, true_out)
    close([hidden[path] for path in hidden], [true_hidden[path] for path in hidden])
    close(state_values(model)[:2], before[:2], rtol=0)
    groups = executor.graph.hidden_groups
    dense = dense_factors(model, xs[0], MODELS[name].expected.groups)
    for group, jacobian, rows in zip(groups, D, dense.D, strict=True):
        assert jacobian.shape == (*group.varshape, group.num_state, group.num_state)
        close(jacobian, jnp.stack([jnp.stack(row, -1) for row in rows], -2))
    calls = [f_of for f_of in dense.f]
    relations = executor.graph.hidden_param_op_relations
    assert set(x_by_op) == set(range(len(relations)))
    for (r, g), factor in f.items():
        assert factor.shape == (*groups[g].varshape, groups[g].num_state)
        assert r < len(relations)
        candidates = [jnp.stack(c[g], -1) for c in calls if c[g] is not None]
        assert any(np.allclose(factor, c, rtol=1e-10, atol=1e-12) for c in candidates)
    assert any(np.any(jacobian != 0) for jacobian in D)


def test_a_window_has_jacobians_with_a_time_axis():
    _, executor, xs = build('lstm')
    out, hidden, _, (x_by_op, f), D, _ = executor.solve_h2w_h2h_jacobian(btf.MultiStepData(xs))
    model, executor, _ = build('lstm')
    singly = []
    for x in xs:
        o, hidden_t, _, h2w, D_t, _ = executor.solve_h2w_h2h_jacobian(x)
        singly.append((o, h2w, D_t))
        for path, value in hidden_t.items():
            model.states()[path].value = value
    close((out, (x_by_op, f), D), jax.tree.map(lambda *a: jnp.stack(a), *singly))
    close(hidden, hidden_t)
    assert D[0].shape == (STEPS, BATCH, 5, 2, 2)


def test_single_step_residuals_give_the_learning_signal_of_every_hidden_state():
    """``dloss / dp`` with ``p`` added to a new state, for everybody who reads it."""
    model, executor, xs = build('lstm')
    paths = list(model.states(brainstate.HiddenState))

    def loss_of(out, hidden):
        return random_projection((out, [hidden[path] for path in paths]))

    *results, _, _, residuals, _ = executor.solve_h2w_h2h_l2h_jacobian(xs[0])
    assert isinstance(residuals, VjpResiduals)
    ct_out, ct_new = jax.grad(loss_of, argnums=(0, 1))(*results[:2])
    ct_args, ct_hidden, untraced, traced, _, ct_perturb = residuals((ct_out, ct_new, results[2]))
    assert traced == {} and untraced == {}

    def perturbed(perturbs, x):
        return loss_of(*executor.graph.call_hidden_perturb((x,), perturbs)[:2])

    zeros = executor.graph.hidden_perturb.init_perturb_data()
    by_perturb, by_x = jax.grad(perturbed, argnums=(0, 1))(zeros, xs[0])
    close((ct_perturb, ct_args[0]), (by_perturb, by_x))
    assert any(np.any(p != 0) for p in ct_perturb)
    values, step = state_values(model), step_function(model)

    def of_hidden(hidden):
        return loss_of(*step(values.params, hidden, values.others, xs[0])[:2])

    close(ct_hidden, jax.grad(of_hidden)(values.hidden))


def test_residuals_are_a_pytree_that_passes_jit():
    _, executor, xs = build('gru')

    @jax.jit
    def solve(x):
        *results, _, _, residuals, _ = executor.solve_h2w_h2h_l2h_jacobian(x)
        return tuple(results[:3]), residuals

    results, residuals = solve(xs[0])
    assert isinstance(residuals, VjpResiduals)
    leaves, tree = jax.tree.flatten(residuals)
    assert leaves and isinstance(jax.tree.unflatten(tree, leaves), VjpResiduals)
    jaxpr, in_tree, out_tree, consts = residuals
    assert len(consts) == len(leaves)
    ones = jax.tree.map(jnp.ones_like, results)
    *_, eager, _ = executor.solve_h2w_h2h_l2h_jacobian(xs[0])
    close(residuals(ones), eager(ones))


def test_multi_step_residuals_differentiate_the_whole_chunk():
    model, executor, xs = build('gru', 'multi-step')
    *results, _, _, residuals, _ = executor.solve_h2w_h2h_l2h_jacobian(btf.MultiStepData(xs))
    ct = jax.tree.map(jnp.zeros_like, tuple(results[:3]))
    ct = (jnp.ones_like(ct[0]), *ct[1:])
    _, ct_hidden, ct_untraced, ct_traced, _, ct_perturb = residuals(ct)
    assert list(ct_perturb) == []
    start, step = state_values(model), step_function(model)

    def loss(params, hidden):
        total = 0.0
        for x in xs:
            out, hidden, _ = step(params, hidden, start.others, x)
            total += out.sum()
        return total

    by_params, by_hidden = jax.grad(loss, argnums=(0, 1))(start.params, start.hidden)
    cotangents = {**ct_untraced, **ct_traced}
    assert set(cotangents) == set(by_params)
    for path, true in by_params.items():
        close(cotangents[path], true)
    close(ct_hidden, by_hidden)


@pytest.mark.parametrize('solve', ['solve_h2w_h2h_jacobian', 'solve_h2w_h2h_l2h_jacobian'])
def test_weights_and_states_are_as_they_were(solve):
    model, executor, xs = build('lif_expon')
    before = {path: state.value for path, state in model.states().items()}
    getattr(executor, solve)(xs[0])
    jax.jit(getattr(executor, solve))(xs[0])
    for path, state in model.states().items():
        assert not any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(state.value))
        close(state.value, before[path], rtol=0)


def test_jacobians_carry_no_gradient():
    model, executor, xs = build('lstm')

    def total():
        *_, (_, f), D, _ = executor.solve_h2w_h2h_jacobian(xs[0])
        return sum(jnp.sum(a) for a in jax.tree.leaves((f, D)))

    weights = model.states(brainstate.ParamState)
    grads, value = brainstate.transform.grad(total, weights, return_value=True)()
    assert value != 0
    assert not any(np.any(leaf != 0) for leaf in jax.tree.leaves(grads))


def test_mixing_is_a_positional_argument():
    """By the reference's order: what each neuron does to itself through a recurrent weight."""
    cell = btf.nn.ValinaRNNCell(3, 4, activation='tanh')
    brainstate.nn.init_all_states(cell)
    executor = btf.ETraceVjpGraphExecutor(cell, 'single-step', True)
    executor.compile_graph(jnp.ones(3))
    h, *_, D, trace = executor.solve_h2w_h2h_jacobian(jnp.ones(3))
    weight = cell.W.weight.value['weight'][3:]
    close(D[0][:, 0, 0], (1 - h**2) * jnp.diagonal(weight))
    assert trace is None


def test_a_neighbourhood_is_a_positional_argument():
    """Then ``D`` is between all neighbours of each position."""
    cell = btf.nn.ValinaRNNCell(3, 4, activation='tanh')
    brainstate.nn.init_all_states(cell)
    executor = btf.ETraceVjpGraphExecutor(cell, 'single-step', True, 2)
    executor.compile_graph(jnp.ones(3))
    h, *_, D, _ = executor.solve_h2w_h2h_jacobian(jnp.ones(3))
    weight = cell.W.weight.value['weight'][3:]
    at = executor.graph.hidden_groups[0].snap.neighbours
    J = (1 - h**2)[:, None] * weight.T
    close(D[0], jax.vmap(lambda row: J[row][:, row])(at))


def test_chunks_need_multi_step_and_equal_lengths():
    _, executor, xs = build('gru')
    with pytest.raises(NotImplementedError, match="MultiStepData.*'multi-step'"):
        executor.solve_h2w_h2h_l2h_jacobian(btf.MultiStepData(xs))
    _, executor, xs = build('gru', 'multi-step')
    for data in ((xs, xs[:2]), xs[:0]):
        with pytest.raises(ValueError, match='lengths'):
            executor.solve_h2w_h2h_l2h_jacobian(btf.MultiStepData(data))


def test_a_report_can_be_shown(capsys):
    _, executor, _ = build('gru')
    text = executor.show_graph(verbose=False, return_msg=True)
    assert 'Wz' in text and capsys.readouterr().out == ''
    assert executor.show_graph() is None
    assert 'Wz' in capsys.readouterr().out
