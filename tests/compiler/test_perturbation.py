"""The perturbed steps: the seeds' one, with ``+ p`` at every state, and the runtime's own."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from tests.compiler.checks import assert_close, assert_trees_close, build, draw, leaves_of
from tests.models import N_IN, Leaky, N, ReadOnly, TwoPlanes, Units, hidden
from tests.oracles.compiled_step import (
    assert_step_gradient_is_exact,
    evaluate,
    loss_of,
    signal_of_the_past,
)
from tests.oracles.step import state_values, step_function

pytestmark = pytest.mark.usefixtures('x64')


class ReadsNew(Leaky):
    """``s`` reads the new ``h``, and the output reads the new values of both."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.s = hidden(batch_size, N)

    def update(self, x):
        h = super().update(x)
        self.s.value = 0.7 * self.s.value + jnp.sin(h)
        return jnp.cos(self.s.value) * h


def compiled(make):
    model, x = build(make), draw(N_IN)
    return model, btf.compile_etrace_graph(model, x), x


# HiddenPerturbation


def test_a_perturbation_has_the_fields_of_the_seeds():
    assert btf.HiddenPerturbation._fields == (
        'perturb_vars',
        'perturb_hidden_paths',
        'perturb_hidden_states',
        'perturb_jaxpr',
    )


def test_a_variable_is_added_for_every_hidden_state_in_its_order():
    model, graph, _ = compiled(ReadsNew)
    perturb, info = graph.hidden_perturb, graph.module_info
    assert perturb.perturb_hidden_paths == [('h',), ('s',)] == list(info.hidden_path_to_invar)
    assert perturb.perturb_hidden_states == [model.h, model.s]
    jaxpr = getattr(perturb.perturb_jaxpr, 'jaxpr', perturb.perturb_jaxpr)
    assert list(jaxpr.invars) == [*info.jaxpr.invars, *perturb.perturb_vars]
    assert list(jaxpr.outvars) == list(info.jaxpr.outvars)


def test_init_perturb_data_is_zero_in_the_shape_and_dtype_of_the_states():
    model, graph, _ = compiled(TwoPlanes)
    (zero,) = graph.hidden_perturb.init_perturb_data()
    assert zero.shape == (N, 2) and zero.dtype == model.h.value.dtype
    assert not zero.any()


def test_eval_jaxpr_adds_the_data_to_the_new_states():
    model, graph, x = compiled(ReadsNew)
    perturb, info = graph.hidden_perturb, graph.module_info
    p, q = draw(N, seed=1), draw(N, seed=2)
    outs = perturb.eval_jaxpr(info.flat_inputs((x,)), [p, q])
    values = dict(zip(info.jaxpr.outvars, outs, strict=True))
    _, new, _, _ = info.jaxpr_call(x)
    h = new[('h',)] + p
    s = 0.7 * model.s.value + jnp.sin(h) + q
    assert_close(values[info.hidden_path_to_outvar[('h',)]], h)
    assert_close(values[info.hidden_path_to_outvar[('s',)]], s)
    assert_close(outs[0], jnp.cos(s) * h)


def test_a_state_that_is_only_read_is_perturbed_too():
    model, graph, x = compiled(ReadOnly)
    assert graph.hidden_perturb.perturb_hidden_paths == [('h',), ('r',)]
    p = draw(N, seed=1)
    _, new, _, _ = graph.call_hidden_perturb((x,), [jnp.zeros(N), p])
    assert_close(new[('r',)], model.r.value + p)


def test_finders_agree():
    model, graph, x = compiled(ReadsNew)
    inputs = graph.module_info.flat_inputs((x,))
    data = [draw(N, seed=1), draw(N, seed=2)]
    outs = graph.hidden_perturb.eval_jaxpr(inputs, data)
    for found in (
        btf.add_hidden_perturbation_in_module(model, x),
        btf.add_hidden_perturbation_from_minfo(btf.extract_module_info(model, x)),
    ):
        assert found.perturb_hidden_paths == graph.hidden_perturb.perturb_hidden_paths
        again = found.eval_jaxpr(inputs, data)  # without the outputs that the graph hoists
        assert_trees_close(again, outs[: len(again)])


def test_dict_and_repr_show_every_field():
    _, graph, _ = compiled(Leaky)
    perturb = graph.hidden_perturb
    assert perturb.dict() == perturb._asdict()
    assert repr(perturb).startswith('HiddenPerturbation')
    assert all(name in repr(perturb) for name in perturb._fields)


class WithWideState(ReadsNew):
    """And a state of two planes, in a group of its own."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.wide = brainstate.HiddenGroupState(jnp.zeros((N, 2)))

    def update(self, x):
        self.wide.value = 0.5 * self.wide.value
        return super().update(x)


def test_values_per_perturbation_are_collected_per_group():
    _, graph, _ = compiled(WithWideState)
    assert [group.num_state for group in graph.hidden_groups] == [2, 2]
    perturb = graph.hidden_perturb
    data = [draw(*v.aval.shape, seed=i) for i, v in enumerate(perturb.perturb_vars)]
    by_path = dict(zip(perturb.perturb_hidden_paths, data, strict=True))
    found = perturb.perturb_data_to_hidden_group_data(data, graph.hidden_groups)
    for group, value in zip(graph.hidden_groups, found, strict=True):
        assert value.shape == (*group.varshape, group.num_state)
        assert_close(value, group.concat_hidden([by_path[path] for path in group.hidden_paths]))


def test_collecting_drops_units():
    model, x = build(Units), draw(N_IN) * u.mV
    graph = btf.compile_etrace_graph(model, x)
    data = [draw(N, seed=1) * u.nA, draw(N, seed=2) * u.mV]
    (found,) = graph.hidden_perturb.perturb_data_to_hidden_group_data(data, graph.hidden_groups)
    assert_close(found, jnp.stack([draw(N, seed=1), draw(N, seed=2)], axis=-1))


@pytest.mark.parametrize('number', [0, 1, 3])
def test_collecting_needs_one_value_per_perturbation(number):
    _, graph, _ = compiled(ReadsNew)
    data = [jnp.zeros(N)] * number
    with pytest.raises(ValueError, match=f'perturb data has {number} .* expected 2.*') as error:
        graph.hidden_perturb.perturb_data_to_hidden_group_data(data, graph.hidden_groups)
    assert "('h',)" in str(error.value) and "('s',)" in str(error.value)


def test_collecting_needs_a_perturbation_of_every_state():
    _, graph, _ = compiled(ReadsNew)
    perturb = graph.hidden_perturb._replace(perturb_hidden_paths=[('h',), ('other',)])
    with pytest.raises(ValueError, match=r"no perturbation of \[\('s',\)\], only of .*'other'"):
        perturb.perturb_data_to_hidden_group_data(perturb.init_perturb_data(), graph.hidden_groups)


def test_a_loop_that_the_policy_forbids_is_not_perturbed():
    class Relaxing(ReadsNew):
        def update(self, x):
            super().update(x)
            self.h.value = jax.lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.9 * c[1]), (0, self.h.value)
            )[1]
            return self.h.value

    model, x = build(Relaxing), draw(N_IN)
    btf.add_hidden_perturbation_in_module(model, x)
    policy = btf.ControlFlowPolicy(while_hidden='error')
    with pytest.raises(NotImplementedError, match='while loop'):
        btf.add_hidden_perturbation_in_module(model, x, control_flow=policy)


# call_hidden_perturb


def test_call_hidden_perturb_returns_what_the_step_returns():
    model, graph, x = compiled(ReadsNew)
    before = leaves_of(model)
    zeros = graph.hidden_perturb.init_perturb_data()
    found = graph.call_hidden_perturb((x,), zeros)
    assert_trees_close(found[:3], graph.module_info.jaxpr_call(x)[:3])
    assert set(found[3]) == set(graph.module_info.jaxpr_call(x)[3])
    assert_trees_close(leaves_of(model), before)
    others = [2 * state.value for state in graph.module_info.compiled_model_states]
    moved = graph.call_hidden_perturb((x,), zeros, others)
    assert_trees_close(moved[:3], graph.module_info.jaxpr_call(x, old_state_vals=others)[:3])


@pytest.mark.parametrize('make', [ReadsNew, lambda: btf.nn.LSTMCell(N_IN, N), TwoPlanes])
def test_the_gradient_by_a_perturbation_is_that_of_adding_to_the_state(make):
    """``dloss/dp`` against central differences, entry by entry, in float64."""
    _, graph, x = compiled(make)
    loss = loss_of(graph)

    @jax.jit
    def perturbed(*data):
        out, new, *_ = graph.call_hidden_perturb((x,), data)
        return loss(out, new)

    zeros = graph.hidden_perturb.init_perturb_data()
    gradient = jax.grad(perturbed, argnums=tuple(range(len(zeros))))(*zeros)
    eps = 1e-6
    for place, found in enumerate(gradient):
        for index in np.ndindex(found.shape):
            up, down = (
                perturbed(*(z.at[index].set(e) if i == place else z for i, z in enumerate(zeros)))
                for e in (eps, -eps)
            )
            assert abs((up - down) / (2 * eps) - found[index]) < 1e-7
        assert np.any(found != 0)


def test_everybody_sees_the_perturbed_state_and_the_exit_only_those_outside():
    """``L_p = (1 - N^T)^-1 L``: a plane of the group that reads ``h`` counts once, or twice."""
    model, graph, x = compiled(ReadsNew)
    step = evaluate(graph, x)
    loss = loss_of(graph)

    def perturbed(*data):
        out, new, *_ = graph.call_hidden_perturb((x,), data)
        return loss(out, new)

    zeros = graph.hidden_perturb.init_perturb_data()
    p_h, p_s = jax.grad(perturbed, argnums=(0, 1))(*zeros)
    L_h, L_s = step.L.values()
    assert_close(p_s, L_s)
    assert_close(p_h, L_h + jnp.cos(step.hidden[('h',)]) * L_s)
    assert np.any(np.abs(p_h - L_h) > 1e-3)
    assert_step_gradient_is_exact(model, step, x)


# The runtime's own perturbed step


class ReturnsOld(Leaky):
    """The output reads the state before it is written, beside the new one."""

    def update(self, x):
        old = self.h.value
        return jnp.sin(old) * super().update(x) + old**2


class ReturnsNothingElse(Leaky):
    """The output is the old state alone."""

    def update(self, x):
        old = self.h.value
        super().update(x)
        return jnp.sin(old)


class SpikesOnOld(ReadsNew):
    """Two states, of which the output reads one in its old value."""

    def update(self, x):
        old = self.s.value
        return super().update(x) + jnp.tanh(old)


def old_gradient(model, graph, x, *, keep_new):
    """The gradient of the loss by the old states, with new states kept fixed or not."""
    params, old, others = state_values(model)
    _, new, _ = step_function(model)(params, old, others, x)
    loss = loss_of(graph)

    def of_old(old):
        out, moved, _ = step_function(model)(params, old, others, x)
        return loss(out, new if keep_new else moved)

    return jax.grad(of_old)(old)


def test_an_output_that_reads_the_old_state_has_its_own_signal():
    model, graph, x = compiled(ReturnsNothingElse)
    (old,) = graph.exit_perturb.bypass_invars
    assert old is graph.module_info.hidden_path_to_invar[('h',)]
    step = evaluate(graph, x)
    true = old_gradient(model, graph, x, keep_new=True)
    assert_close(step.R[old], true[('h',)])
    assert np.any(step.R[old] != 0)
    assert_step_gradient_is_exact(model, step, x)


@pytest.mark.parametrize('make', [ReturnsOld, ReturnsNothingElse, SpikesOnOld])
def test_signals_of_new_and_of_old_states_add_up_to_the_gradient_by_the_old_ones(make):
    """``L D + R`` is ``dloss/dh(t-1)``; the recurrent matmul, which is cut, is taken out."""
    model, x = build(make), draw(N_IN)
    model.W.value = model.W.value.at[N_IN:].set(0.0)
    graph = btf.compile_etrace_graph(model, x)
    (signal,) = signal_of_the_past(evaluate(graph, x))
    true = old_gradient(model, graph, x, keep_new=False)
    (group,) = graph.hidden_groups
    assert_close(signal, group.concat_hidden([true[path] for path in group.hidden_paths]))
    assert graph.exit_perturb.bypass_invars


def test_nothing_bypasses_where_the_output_reads_new_states_only():
    _, graph, _ = compiled(ReadsNew)
    assert graph.exit_perturb.bypass_invars == ()


def test_zeros_have_the_shapes_of_outputs_exits_and_bypasses():
    _, graph, x = compiled(SpikesOnOld)
    perturb = graph.exit_perturb
    assert perturb.y_vars == tuple(r.y_var for r in graph.hidden_param_op_relations)
    news = tuple(new for group in graph.hidden_groups for new in group.hidden_outvars)
    assert perturb.hidden_outvars == news
    for zeros, variables in zip(
        perturb.zeros(), (perturb.y_vars, news, perturb.bypass_invars), strict=True
    ):
        assert [z.shape for z in zeros] == [v.aval.shape for v in variables]
        assert not any(z.any() for z in zeros)
    flat = perturb.eval_jaxpr(graph.module_info.flat_inputs((x,)), *perturb.zeros())
    plain = graph.module_info.jaxpr_call(x)
    assert_close(flat[0], plain[0])


def test_perturbing_an_output_of_an_op_moves_the_states_and_all_that_reads_it():
    model, graph, x = compiled(ReadsNew)
    y, exits, bypasses = graph.exit_perturb.zeros()
    delta = draw(N, seed=4)
    out, new, _, _ = graph.call_exit_perturb((x,), [delta], exits, bypasses)
    xh = jnp.concatenate([x, model.h.value])
    h = 0.8 * model.h.value + jnp.tanh(xh @ model.W.value + delta)
    s = 0.7 * model.s.value + jnp.sin(h)
    assert_close(new[('h',)], h)
    assert_close(new[('s',)], s)
    assert_close(out, jnp.cos(s) * h)


def test_perturbing_an_exit_is_not_seen_inside_the_group():
    model, graph, x = compiled(ReadsNew)
    y, (on_h, on_s), bypasses = graph.exit_perturb.zeros()
    delta = draw(N, seed=4)
    _, plain, _, _ = graph.module_info.jaxpr_call(x)
    out, new, _, _ = graph.call_exit_perturb((x,), y, [delta, on_s], bypasses)
    assert_close(new[('h',)], plain[('h',)] + delta)
    assert_close(new[('s',)], plain[('s',)])
    assert_close(out, jnp.cos(plain[('s',)]) * (plain[('h',)] + delta))
