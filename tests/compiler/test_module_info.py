"""One step as a flat jaxpr: its inputs, its outputs, and the tables of its variables."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import DiagnosticKind, DiagnosticLevel
from braintrace_fast.compiler import diagnostic_context
from tests.compiler.checks import (
    assert_close,
    assert_trees_close,
    build,
    draw,
    leaves_of,
    numbers,
    param,
)
from tests.models import N_IN, Counting, DropConnect, Leaky, N, Noisy, ReadOnly, hidden
from tests.oracles.step import state_values, step_function

pytestmark = pytest.mark.usefixtures('x64')

FIELDS = (
    'stateful_model',
    'closed_jaxpr',
    'retrieved_model_states',
    'compiled_model_states',
    'state_id_to_path',
    'state_tree_invars',
    'state_tree_outvars',
    'hidden_path_to_invar',
    'hidden_path_to_outvar',
    'invar_to_hidden_path',
    'outvar_to_hidden_path',
    'hidden_outvar_to_invar',
    'weight_invars',
    'weight_path_to_invars',
    'invar_to_weight_path',
    'num_var_out',
    'num_var_state',
    'control_flow',
)


def extract(make, *args):
    model = build(make)
    args = args or (draw(N_IN),)
    return model, btf.extract_module_info(model, *args), args


# The fields


def test_a_module_info_has_the_fields_of_the_reference():
    assert btf.ModuleInfo._fields[: len(FIELDS)] == FIELDS


def test_the_jaxpr_takes_arguments_then_states_and_returns_results_then_states():
    model, info, (x,) = extract(lambda: btf.nn.LSTMCell(N_IN, N))
    values = [state.value for state in info.compiled_model_states]
    inputs = [x, *jax.tree.leaves(values)]
    assert [v.aval.shape for v in info.jaxpr.invars] == [v.shape for v in inputs]
    assert info.num_var_out == 1
    assert info.num_var_state == len(jax.tree.leaves(values))
    assert len(info.jaxpr.outvars) == info.num_var_out + info.num_var_state
    assert jax.tree.leaves(info.state_tree_invars) == list(info.jaxpr.invars[1:])
    assert jax.tree.leaves(info.state_tree_outvars) == list(info.jaxpr.outvars[1:])
    assert len(info.consts) == len(info.jaxpr.constvars)


def test_states_are_known_by_path():
    model, info, _ = extract(lambda: btf.nn.LSTMCell(N_IN, N))
    assert dict(info.retrieved_model_states) == dict(model.states())
    for state in info.compiled_model_states:
        assert info.state_of(info.state_id_to_path[id(state)]) is state


def test_hidden_tables_are_inverses_in_the_order_of_the_model():
    model, info, _ = extract(lambda: btf.nn.LSTMCell(N_IN, N))
    order = list(model.states(brainstate.HiddenState))
    assert list(info.hidden_path_to_invar) == list(info.hidden_path_to_outvar) == order
    for path in order:
        old, new = info.hidden_path_to_invar[path], info.hidden_path_to_outvar[path]
        assert info.invar_to_hidden_path[old] == path
        assert info.outvar_to_hidden_path[new] == path
        assert info.hidden_outvar_to_invar[new] is old
    assert [info.outvar_to_hidden_path[new] for new in info.hidden_outvar_to_invar] == order


def test_weight_tables_hold_every_leaf_of_every_parameter():
    model, info, _ = extract(lambda: btf.nn.LSTMCell(N_IN, N))
    weights = model.states(brainstate.ParamState)
    assert list(info.weight_path_to_invars) == list(weights)
    for path, state in weights.items():
        leaves = info.weight_path_to_invars[path]
        assert [v.aval.shape for v in leaves] == [v.shape for v in jax.tree.leaves(state.value)]
        assert {info.invar_to_weight_path[v] for v in leaves} == {path}
    assert info.weight_invars == [v for vs in info.weight_path_to_invars.values() for v in vs]


def test_state_outvars_are_split_by_kind():
    _, info, _ = extract(Counting)
    weights, hiddens, others = info.split_state_outvars()
    assert list(weights) == [('W',)]
    assert list(hiddens) == [('h',)]
    assert list(others) == [('count',)]
    assert hiddens[('h',)] is info.hidden_path_to_outvar[('h',)]


def test_dict_and_repr_show_every_field():
    _, info, _ = extract(Leaky)
    assert info.dict() == info._asdict()
    assert repr(info).startswith('ModuleInfo')
    assert all(name in repr(info) for name in FIELDS)


# Running the step


@pytest.mark.parametrize('make', [lambda: btf.nn.LSTMCell(N_IN, N), Counting, Noisy, DropConnect])
def test_jaxpr_call_is_the_step_and_leaves_the_states_alone(make):
    model, info, (x,) = extract(make)
    values, before = state_values(model), leaves_of(model)
    out, hiddens, others = step_function(model)(*values, x)
    found_out, found_hidden, found_others, temps = info.jaxpr_call(x)
    assert_trees_close(found_out, out)
    assert_trees_close(found_hidden, hiddens)
    for path, value in found_others.items():
        true = others.get(path, others[('brainstate.random.DEFAULT',)])
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(true), strict=True):
            assert np.array_equal(numbers(a), numbers(b))
    assert set(temps) == {v for v in info.jaxpr.outvars if not hasattr(v, 'val')}
    assert_trees_close(leaves_of(model), before)


class Gained(Leaky):
    def update(self, x, *, gain, offset=0.0):
        return super().update(gain * x + offset)


def test_jaxpr_call_takes_inputs_by_name_as_they_were_traced():
    model, x = build(Gained), draw(N_IN)
    named = {'offset': draw(N_IN), 'gain': jnp.asarray(2.0)}
    info = btf.extract_module_info(model, x, **named)
    out, hiddens, *_ = info.jaxpr_call(x, **named)
    true, new, *_ = extract(Leaky)[1].jaxpr_call(2.0 * x + draw(N_IN))
    assert_trees_close([out, hiddens], [true, new])
    with pytest.raises(ValueError, match='differ in structure'):
        info.jaxpr_call(x)


def test_jaxpr_call_runs_from_given_values_and_inside_jit():
    model, info, (x,) = extract(Leaky)
    olds = [state.value for state in info.compiled_model_states]
    place = [info.state_id_to_path[id(s)] for s in info.compiled_model_states].index(('h',))
    olds[place] = jnp.zeros(N)
    out, *_ = jax.jit(lambda x, olds: info.jaxpr_call(x, old_state_vals=olds)[:3])(x, olds)
    xh = jnp.concatenate([x, jnp.zeros(N)])
    assert_close(out, jnp.tanh(xh @ model.W.value))


def test_appended_outputs_are_returned_with_the_values():
    model, info, (x,) = extract(Leaky)
    (op,) = [eqn for eqn in info.jaxpr.eqns if isinstance(eqn.primitive, btf.ETPPrimitive)]
    more = info.add_jaxpr_outs([op.outvars[0]])
    assert len(more.jaxpr.outvars) == len(info.jaxpr.outvars) + 1
    assert (more.num_var_out, more.num_var_state) == (info.num_var_out, info.num_var_state)
    out, hiddens, _, temps = more.jaxpr_call(x)
    xh = jnp.concatenate([x, model.h.value])
    assert_close(temps[op.outvars[0]], xh @ model.W.value)
    assert_close(out, hiddens[('h',)])
    assert op.outvars[0] not in info.jaxpr_call(x)[3]


class Trees(Leaky):
    """Inputs and outputs in containers, an output that is an input, and one that is a number."""

    def update(self, inputs, gain):
        out = super().update(gain * inputs['x'])
        return {'h': out, 'x': inputs['x']}, (1.0, None)


def test_inputs_and_outputs_keep_their_structure():
    model, info, args = extract(Trees, {'x': draw(N_IN)}, jnp.asarray(2.0))
    out, *_ = info.jaxpr_call(*args)
    true, *_ = step_function(lambda_model(model, *args))(*state_values(model), None)
    assert_trees_close(out, true)
    assert info.num_var_out == 3


def lambda_model(model, *args):
    """The model as one of a single input, which it does not use."""

    class OfOneInput:
        def states(self):
            return model.states()

        def __call__(self, _):
            return model(*args)

    return OfOneInput()


# Every new hidden state has an equation of its own


class Assigned(brainstate.nn.Module):
    """States set to an input, a constant, the output of an op, each other's value, and not at all.

    ``old`` is also read, ``kept`` is not touched.
    """

    names = ('input', 'constant', 'output', 'same', 'again', 'old', 'kept')

    def __init__(self):
        super().__init__()
        self.W = param(N, N)

    def init_state(self, batch_size=None, **_):
        for name in self.names:
            setattr(self, name, hidden(batch_size, N))

    def update(self, x):
        self.input.value = x
        self.constant.value = jnp.ones(N)
        self.output.value = btf.matmul(x, self.W.value)
        self.same.value = self.again.value = jnp.sin(self.old.value)
        return x + self.old.value


def test_every_new_hidden_state_has_a_variable_of_its_own():
    model, info, (x,) = extract(Assigned, draw(N))
    news = list(info.hidden_outvar_to_invar)
    touched = [(name,) for name in Assigned.names if name != 'kept']
    assert sorted(info.outvar_to_hidden_path.values()) == sorted(touched)
    assert len(set(news)) == len(touched)
    made = {v for eqn in info.jaxpr.eqns for v in eqn.outvars}
    assert set(news) <= made
    ops = [eqn for eqn in info.jaxpr.eqns if isinstance(eqn.primitive, btf.ETPPrimitive)]
    assert not set(news) & {v for eqn in ops for v in eqn.outvars}
    _, hiddens, _, _ = info.jaxpr_call(x)
    _, true, _ = step_function(model)(*state_values(model), x)
    assert_trees_close(hiddens, {path: true[path] for path in hiddens})


class OpIsState(Leaky):
    """The output of an op is a new state, which the other state and the result read."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.y = hidden(batch_size, N)

    def update(self, x):
        self.y.value = self.drive(x)
        self.h.value = self.leak(self.h.value) + self.y.value
        return self.y.value


def test_whoever_reads_an_op_that_a_state_is_set_to_reads_the_state():
    _, info, _ = extract(OpIsState)
    new = info.hidden_path_to_outvar[('y',)]
    (op,) = [eqn for eqn in info.jaxpr.eqns if isinstance(eqn.primitive, btf.ETPPrimitive)]
    (copy,) = [eqn for eqn in info.jaxpr.eqns if op.outvars[0] in eqn.invars]
    assert copy.outvars == [new]
    assert any(new in eqn.invars for eqn in info.jaxpr.eqns)
    assert info.jaxpr.outvars[0] is new


def test_a_state_that_is_only_read_is_carried_with_a_record():
    with diagnostic_context() as records:
        model, info, (x,) = extract(ReadOnly)
    (record,) = [r for r in records if r.kind is DiagnosticKind.HIDDEN_STATE_READ_ONLY]
    assert record.hidden_paths == (('r',),)
    assert record.level is DiagnosticLevel.INFO
    _, hiddens, _, _ = info.jaxpr_call(x)
    assert_close(hiddens[('r',)], model.r.value)


# States that are no hidden states, and states outside the model


def test_a_random_state_is_carried():
    _, info, (x,) = extract(DropConnect)
    *_, others, _ = info.jaxpr_call(x)
    ((path, new),) = others.items()
    assert isinstance(info.state_of(path), brainstate.random.RandomState)
    old = info.state_of(path).value
    assert not np.array_equal(numbers(new), numbers(old))


RANDOM = brainstate.random.RandomState(0)


class Unseeded(Leaky):
    """Draws from generators of three owners: brainstate, the model, and nobody it knows of."""

    def __init__(self):
        super().__init__()
        self.random = brainstate.random.RandomState()

    def leak(self, h):
        sources = brainstate.random, self.random, RANDOM
        return 0.8 * h + sum(source.normal(size=h.shape) for source in sources)


def test_a_random_state_may_be_unread_when_the_step_is_compiled():
    RANDOM.seed()
    brainstate.random.seed()  # as in a process where nothing drew before
    model, info, (x,) = extract(Unseeded)
    states = brainstate.random.DEFAULT, model.random, RANDOM
    keys = [numbers(state.value) for state in states]
    out, *_ = info.jaxpr_call(x)
    assert all(np.array_equal(numbers(s.value), k) for s, k in zip(states, keys, strict=True))
    assert_close(model(x), out)
    for state in states:
        state.seed()
    info.jaxpr_call(x)


class Outside(Leaky):
    """Uses a weight, a counter and two coupled hidden states that are not part of the module."""

    def __init__(self, states):
        super().__init__()
        self.get_states = lambda: states

    def update(self, x):
        weight, counter, first, second = self.get_states()
        counter.value = counter.value + 1
        first.value = 0.9 * first.value + btf.matmul(x, weight.value)
        second.value = 0.8 * second.value + jnp.sin(first.value)
        return super().update(x) + second.value * counter.value


def outside_states():
    return (
        brainstate.ParamState(jnp.ones((N_IN, N))),
        brainstate.ShortTermState(jnp.zeros(())),
        brainstate.HiddenState(jnp.ones(N)),
        brainstate.HiddenState(jnp.ones(N)),
    )


def test_states_outside_the_model_are_carried_with_a_record():
    states = outside_states()
    model = build(lambda: Outside(states))
    x = draw(N_IN)
    graph = btf.compile_etrace_graph(model, x)
    records = graph.explain(kind=DiagnosticKind.STATE_MISMATCH)
    assert len(records) == len(states)
    assert all('not part of the model' in record.message for record in records)
    levels = [record.level for record in records]
    assert levels.count(DiagnosticLevel.WARNING) == 3  # all but the counter could be learned
    path_of = {id(s): p for p, s in graph.module_info.retrieved_model_states.items()}
    weight, counter, first, second = (path_of[id(state)] for state in states)
    assert weight in [relation.path for relation in graph.hidden_param_op_relations]
    assert graph.hid_path_to_group[first].hidden_paths == [first, second]
    _, hiddens, others, _ = graph.module_info.jaxpr_call(x)
    assert_close(others[counter], 1.0)
    assert_close(hiddens[first], 0.9 + x @ jnp.ones((N_IN, N)))
