"""A policy that the compiler is given says which influence is kept; all of it with public names."""

from __future__ import annotations

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from tests.compiler.checks import draw, param
from tests.oracles.compiled_step import assert_step_gradient_is_exact, evaluate

N = 3
pytestmark = pytest.mark.usefixtures('x64')

gain_p = btf.register_primitive('test_scope_gain', lambda x, weight: x * weight)
open_gain_p = btf.register_primitive(
    'test_scope_open_gain', lambda x, weight: x * weight, gradient_enabled=True
)


class EveryOp(btf.Scope):
    def follows(self, op, params):
        return True


class NoOp(btf.Scope):
    def follows(self, op, params):
        return False


class AllCoupled(btf.Scope):
    def couples(self, path, other):
        return True


class Gained(brainstate.nn.Module):
    """The old state passes through an op that acts position by position."""

    def __init__(self, op):
        super().__init__()
        self.op, self.w, self.v = op, param(N), param(N, N)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(draw(N))

    def update(self, x):
        self.h.value = jnp.tanh(
            self.op.bind(self.h.value, self.w.value) + btf.matmul(x, self.v.value)
        )
        return self.h.value


def compiled(op, scope=None):
    model = Gained(op)
    brainstate.nn.init_all_states(model)
    return model, btf.compile_etrace_graph(model, draw(N), scope=scope)


@pytest.mark.parametrize(
    ('op', 'scope', 'is_kept'),
    [
        (gain_p, None, False),
        (gain_p, btf.Scope(), False),
        (gain_p, EveryOp(), True),
        (gain_p, NoOp(), False),
        (open_gain_p, None, True),
        (open_gain_p, btf.Scope(), True),
        (open_gain_p, NoOp(), False),
    ],
    ids=str,
)
def test_the_scope_says_through_which_ops_influence_is_kept(op, scope, is_kept):
    model, graph = compiled(op, scope)
    (group,) = graph.hidden_groups
    assert group.pattern == ((is_kept,),)
    assert_step_gradient_is_exact(model, evaluate(graph, draw(N)), draw(N))


def test_what_is_kept_is_the_derivative_of_the_op():
    model, graph = compiled(gain_p, EveryOp())
    x = draw(N)
    (group,) = graph.hidden_groups
    _, _, _, values = graph.module_info.jaxpr_call(x)
    jacobian = group.diagonal_jacobian(
        [model.h.value], [values[v] for v in group.transition_jaxpr_constvars]
    )
    new = jnp.tanh(model.h.value * model.w.value + x @ model.v.value)
    np.testing.assert_allclose(jacobian[..., 0, 0], (1 - new**2) * model.w.value, rtol=1e-12)


def test_influence_ends_at_an_op_that_mixes_positions_in_any_scope():
    rnn = btf.nn.ValinaRNNCell(N, N)
    brainstate.nn.init_all_states(rnn)
    (group,) = btf.compile_etrace_graph(rnn, draw(N), scope=EveryOp()).hidden_groups
    assert group.pattern == ((False,),)


class Layers(brainstate.nn.Module):
    """Two layers, the second of which is driven by the first, position by position."""

    def __init__(self):
        super().__init__()
        self.layers = [Gained(open_gain_p), Gained(open_gain_p)]

    def update(self, x):
        first, second = self.layers
        second.h.value = second.h.value + first.h.value
        first.update(x)
        return second.update(x)


@pytest.mark.parametrize(
    ('options', 'sizes'),
    [
        ({}, [1, 1]),
        ({'scope': btf.Scope()}, [1, 1]),
        ({'couple_layers': True}, [2]),
        ({'scope': btf.Scope(couple_layers=True)}, [2]),
        ({'scope': AllCoupled()}, [2]),
    ],
    ids=str,
)
def test_the_scope_says_which_layers_are_coupled(options, sizes):
    model = Layers()
    brainstate.nn.init_all_states(model)
    graph = btf.compile_etrace_graph(model, draw(N), **options)
    assert [group.num_state for group in graph.hidden_groups] == sizes
