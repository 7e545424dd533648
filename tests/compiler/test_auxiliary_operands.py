"""Ops with static operands that are neither input nor weight: their rules see them."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.compiler.checks import draw, param
from tests.models import of_rank
from tests.op import sparse

STEPS, BATCH = 7, 3
pytestmark = pytest.mark.usefixtures('x64')


class Layer(brainstate.nn.Module):
    """A leaky layer: no position reads another, so that traces are exact."""

    def __init__(self, op):
        super().__init__()
        self.op = op
        self.w = param(len(sparse.ROWS))
        self.leak = param(sparse.OUTPUTS)
        self.rows, self.cols = self.operands()

    def operands(self):
        return sparse.ROWS, jnp.asarray(sparse.COLS)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(draw(batch_size, sparse.OUTPUTS))

    def drive(self, x):
        return self.op.bind(x, 2 * self.w.value, self.rows, self.cols, size=sparse.OUTPUTS)

    def update(self, x):
        decay = of_rank(self.h.value.ndim, jnp.tanh(btf.element_wise(self.leak.value)))
        self.h.value = jnp.tanh(decay * self.h.value + self.drive(x))
        return self.h.value


class Computed(Layer):
    """Its indices are computed in the step, from constants."""

    def drive(self, x):
        rows = jnp.concatenate([self.rows[:3], self.rows[3:]])
        return self.op.bind(x, 2 * self.w.value, rows, self.cols * 1, size=sparse.OUTPUTS)


class Plain(Layer):
    def __init__(self):
        super().__init__(None)

    def drive(self, x):
        return x @ sparse.dense(2 * self.w.value)


class Moving(Layer):
    """Its indices come from the input, or from a parameter."""

    def __init__(self, source):
        super().__init__(sparse.with_rules)
        self.source = source
        self.kept = brainstate.ParamState(jnp.asarray(sparse.COLS))

    def drive(self, x):
        moved = (x[0, :1] * 0).astype(jnp.int32) if self.source == 'input' else 0 * self.kept.value
        cols = self.cols + moved
        return self.op.bind(x, 2 * self.w.value, self.rows, cols, size=sparse.OUTPUTS)


def inputs():
    return draw(STEPS, BATCH, sparse.INPUTS, seed=1)


def targets():
    return draw(STEPS, BATCH, sparse.OUTPUTS, seed=2)


def compiled(model, algorithm='d_rtrl', **options):
    learner = btf.compile(model, algorithm, inputs()[0], batch_size=BATCH, **options)
    model.h.value = draw(BATCH, sparse.OUTPUTS)
    return learner


def loss(run, x, target):
    return jnp.sum((run(x) - target) ** 2)


def backprop():
    """The gradients of all steps, by reverse mode through the loop."""
    model = Plain()
    brainstate.nn.init_all_states(model, batch_size=BATCH)

    def total():
        pairs = zip(inputs(), targets(), strict=True)
        return sum(loss(model, x, target) for x, target in pairs)

    return brainstate.transform.grad(total, model.states(brainstate.ParamState))()


def check(gradients, expected):
    for path, true in expected.items():
        assert np.abs(true).max() > 1e-2
        np.testing.assert_allclose(gradients[path], true, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('layer', [Layer, Computed])
@pytest.mark.parametrize('every', [1, 3, STEPS])
def test_windows_give_the_gradient_of_backpropagation(layer, every):
    learner = compiled(layer(sparse.with_rules))
    gradients = learner.etrace_grad(
        inputs(),
        targets(),
        step_fn=lambda x, target: loss(learner, x, target),
        reduction='sum',
        trace_every=every,
    )
    check(gradients, backprop())


def test_steps_add_up_to_the_gradient_of_backpropagation():
    learner = compiled(Layer(sparse.with_rules))

    @brainstate.transform.jit
    def step(x, target):
        return brainstate.transform.grad(lambda: loss(learner, x, target), learner.param_states)()

    by_step = [step(x, target) for x, target in zip(inputs(), targets(), strict=True)]
    check(jax.tree.map(lambda *parts: sum(parts), *by_step), backprop())


@pytest.mark.parametrize('op', [sparse.with_rules, sparse.without_rules], ids=str)
def test_fresh_windows_need_no_trace_rules(op):
    learner = compiled(Layer(op))
    gradients = learner.etrace_grad(
        inputs(),
        targets(),
        step_fn=lambda x, target: loss(learner, x, target),
        reduction='sum',
        trace='fresh',
    )
    check(gradients, backprop())


def test_factored_traces_agree_with_those_of_the_dense_weight():
    class Dense(Layer):
        def drive(self, x):
            return btf.matmul(x, sparse.dense(2 * self.w.value))

    def gradients(model):
        learner = compiled(model, 'pp_prop', decay_or_rank=0.9)
        step = lambda x, target: loss(learner, x, target)  # noqa: E731
        return learner.etrace_grad(inputs(), targets(), step_fn=step, trace_every=3)

    check(gradients(Layer(sparse.without_rules)), gradients(Dense(None)))


def test_a_relation_has_the_values_of_its_auxiliary_operands():
    (relation, _) = sorted(
        compiled(Computed(sparse.with_rules)).graph.hidden_param_op_relations,
        key=lambda relation: relation.path != ('w',),
    )
    assert relation.eqn_params == {'size': sparse.OUTPUTS}
    assert set(relation.aux) == {'rows', 'cols'}
    assert set(relation.rule_params) == {'size', 'rows', 'cols'}
    np.testing.assert_array_equal(relation.aux['rows'], sparse.ROWS)
    np.testing.assert_array_equal(relation.aux['cols'], sparse.COLS)


def test_a_model_can_be_compiled_while_a_function_is_traced():
    model = Computed(sparse.with_rules)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    graphs = []
    jax.jit(lambda: graphs.append(btf.compile_etrace_graph(model, inputs()[0])))()
    aux = [relation.aux for relation in graphs[0].hidden_param_op_relations]
    assert not any(isinstance(a, jax.core.Tracer) for values in aux for a in values.values())


def test_constants_may_be_traced_by_a_function_around_the_compilation():
    model = Computed(sparse.with_rules)
    brainstate.nn.init_all_states(model, batch_size=BATCH)

    def columns(cols):
        model.cols = cols
        graph = btf.compile_etrace_graph(model, inputs()[0])
        return [r.aux['cols'] for r in graph.hidden_param_op_relations if r.aux]

    (cols,) = jax.jit(columns)(jnp.asarray(sparse.COLS))
    np.testing.assert_array_equal(cols, sparse.COLS)


@pytest.mark.parametrize('source', ['input', 'parameter'])
def test_an_auxiliary_operand_that_may_change_is_refused(source):
    with pytest.raises(btf.NotSupportedError, match="'cols' of test_sparse may change"):
        compiled(Moving(source))
