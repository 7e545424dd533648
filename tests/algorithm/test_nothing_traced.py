"""A rule that is constructed by itself takes a model of which no weight is traced.

Its steps are learned one by one, and its chunks in full.
"""

import brainstate
import jax.numpy as jnp
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from tests.compiler.checks import draw, param
from tests.models import hidden

pytestmark = pytest.mark.usefixtures('x64')

N_IN, GROUPS, SIZE, STEPS = 3, 2, 2, 4
RULES = {
    'D_RTRL': {},
    'EProp': {},
    'OSTLRecurrent': {},
    'SnAp': {},
    'UORO': {},
    'pp_prop': {'decay_or_rank': 0.9},
}


class Flattened(brainstate.nn.Module):
    """An op whose output has other axes than the state that it drives."""

    def __init__(self):
        super().__init__()
        self.W, self.U = param(GROUPS, SIZE, SIZE), param(N_IN, GROUPS * SIZE)

    def init_state(self, batch_size=None, **_):
        self.h = hidden(batch_size, GROUPS * SIZE)

    def update(self, x):
        groups = self.h.value.reshape(GROUPS, SIZE)
        drive = btf.grouped_matmul(groups, self.W.value).reshape(-1)
        self.h.value = jnp.tanh(drive + x @ self.U.value + 0.3)
        return self.h.value


def learner_of(rule, **options):
    model = Flattened()
    brainstate.nn.init_all_states(model)
    learner = getattr(btf, rule)(model, **RULES[rule], **options)
    with pytest.warns(btf.UntracedWarning, match=r"\('W',\) is not traced"):
        learner.compile_graph(draw(N_IN))
    assert not learner.graph.hidden_param_op_relations
    return model, learner


@pytest.mark.parametrize('rule', RULES)
def test_a_chunk_has_the_gradient_of_backpropagation_through_time(rule):
    model, learner = learner_of(rule, vjp_method='multi-step')
    xs = draw(STEPS, N_IN)
    true = testing.bptt(model, xs, step_fn=lambda x: jnp.sum(jnp.sin(model(x))))
    found = brainstate.transform.grad(
        lambda: jnp.sum(jnp.sin(learner(btf.MultiStepData(xs)))),
        model.states(brainstate.ParamState),
    )()
    testing.compare(found, true).check(1e-12)


@pytest.mark.parametrize('rule', RULES)
def test_a_step_has_its_own_gradient_alone(rule):
    model, learner = learner_of(rule)
    xs = draw(STEPS, N_IN)
    found = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(jnp.sin(learner(x))))
    brainstate.nn.init_all_states(model)
    steps = []
    for x in xs:
        old = model.h.value

        def loss(x=x, old=old):
            model.h.value = old
            return jnp.sum(jnp.sin(model(x)))

        steps.append(brainstate.transform.grad(loss, model.states(brainstate.ParamState))())
    true = {path: sum(step[path] for step in steps) / STEPS for path in found}
    testing.compare(found, true).check(1e-12)
