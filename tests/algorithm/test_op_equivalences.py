"""Ops that are others in disguise: the same gradients and traces; and those of braintrace."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import testing
from tests.promotion import promoting

pytestmark = pytest.mark.usefixtures('x64')

STEPS, BATCH, INPUTS, OUTPUTS, RANK = 6, 3, 4, 5, 2
RULES = {'d_rtrl': {}, 'pp_prop': {'decay_or_rank': (0.8, 0.9)}}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


class Leaky(brainstate.nn.Module):
    """States driven by ``drive(x, params)``."""

    def __init__(self, drive: Any, params: dict[str, np.ndarray], *shape: int) -> None:
        super().__init__()
        self.drive, self.shape = drive, shape
        self.params = brainstate.ParamState(jax.tree.map(jnp.asarray, params))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.shape)))

    def update(self, x: Any) -> Any:
        y = self.drive(x, self.params.value)
        self.h.value = jnp.tanh(0.8 * self.h.value + y)
        return self.h.value


def loss(run: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(3 * run(x)))


def learned(drive: Any, params: Any, shape: Any, xs: Any, rule: str) -> tuple[Any, list[Any]]:
    """The gradient of two pieces in windows of two steps, and the arrays of the trace."""
    learner = btf.compile(
        Leaky(drive, params, *shape), rule, xs[0], batch_size=BATCH, **RULES[rule]
    )
    learn = partial(
        learner.etrace_grad, step_fn=partial(loss, learner), reduction='sum', trace_every=2
    )
    (first,), (second,) = (learn(part).values() for part in (xs[:3], xs[3:]))
    total = jax.tree.map(jnp.add, first, second)
    return total, [leaf for leaf in jax.tree.leaves(learner.trace.value) if leaf.ndim]


def assert_same_traces(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.ravel(), b.ravel(), rtol=1e-11, atol=1e-13)
        assert jnp.any(b != 0)


WEIGHT, XS = draw(INPUTS, OUTPUTS), draw(STEPS, BATCH, INPUTS, seed=1)
INDICES = np.random.default_rng(2).integers(-INPUTS, INPUTS, size=(STEPS, BATCH))
ONE_HOT = np.eye(INPUTS)[INDICES]
FULL = u.sparse.CSR.fromdense(jnp.ones((INPUTS, OUTPUTS)))
BY_MATMUL = {
    'einsum': (lambda x, p: btf.einsum('bk,kn->bn', x, p['w']), XS, XS),
    'embedding': (lambda x, p: btf.embedding(x, p['w']), INDICES, ONE_HOT),
    'sparse': (
        lambda x, p: btf.sparse_matmul(x, p['w'].reshape(-1), sparse_mat=FULL),
        XS,
        XS,
    ),
}


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', BY_MATMUL)
def test_an_op_that_is_matmul(name, rule):
    drive, xs, dense = BY_MATMUL[name]
    found, trace = learned(drive, {'w': WEIGHT}, (OUTPUTS,), xs, rule)
    expected = learned(lambda x, p: btf.matmul(x, p['w']), {'w': WEIGHT}, (OUTPUTS,), dense, rule)
    np.testing.assert_allclose(found['w'], expected[0]['w'], rtol=1e-11)
    assert_same_traces(trace, expected[1])


@pytest.mark.parametrize('rule', RULES)
def test_one_group_is_matmul(rule):
    found, trace = learned(
        lambda x, p: btf.grouped_matmul(x, p['w']),
        {'w': WEIGHT[None]},
        (1, OUTPUTS),
        XS[:, :, None],
        rule,
    )
    expected = learned(lambda x, p: btf.matmul(x, p['w']), {'w': WEIGHT}, (OUTPUTS,), XS, rule)
    np.testing.assert_allclose(found['w'][0], expected[0]['w'], rtol=1e-11)
    assert_same_traces(trace, expected[1])


@pytest.mark.parametrize('rule', RULES)
def test_a_convolution_with_a_kernel_of_one_is_matmul_at_every_position(rule):
    xs = draw(STEPS, BATCH, 3, INPUTS, seed=1)
    layout = ('NWC', 'WIO', 'NWC')
    found, trace = learned(
        lambda x, p: btf.conv(x, p['w'], dimension_numbers=layout),
        {'w': WEIGHT[None]},
        (3, OUTPUTS),
        xs,
        rule,
    )
    expected = learned(lambda x, p: btf.matmul(x, p['w']), {'w': WEIGHT}, (3, OUTPUTS), xs, rule)
    np.testing.assert_allclose(found['w'][0], expected[0]['w'], rtol=1e-11)
    assert_same_traces(trace, expected[1])


def test_lora_is_matmul_of_the_product():
    """For D-RTRL; pp_prop, too, whose input side is the same."""
    params = {'b': draw(INPUTS, RANK), 'a': draw(RANK, OUTPUTS, seed=1)}
    for rule in RULES:
        found, trace = learned(
            lambda x, p: btf.lora_matmul(x, p['b'], p['a'], alpha=0.5), params, (OUTPUTS,), XS, rule
        )
        expected = learned(
            lambda x, p: btf.matmul(x, 0.5 * p['b'] @ p['a']), params, (OUTPUTS,), XS, rule
        )
        for key in params:
            np.testing.assert_allclose(found[key], expected[0][key], rtol=1e-11)
        assert_same_traces(trace, expected[1])


def varying_mask(x: Any) -> Any:
    return (x[0, 0] > 0).astype(x.dtype) + 0.5 * jnp.tanh(x[1])


VARYING = {
    'grouped_matmul': (
        lambda x, p: btf.grouped_matmul(x, p['w'] * varying_mask(x[:, 0])[None, :, None]),
        {'w': draw(2, INPUTS, OUTPUTS)},
        (2, OUTPUTS),
        draw(STEPS, BATCH, 2, INPUTS, seed=1),
    ),
    'einsum': (
        lambda x, p: btf.einsum('btk,nk->bnt', x, p['w'] * varying_mask(x[:, 0])[None]),
        {'w': draw(OUTPUTS, INPUTS)},
        (OUTPUTS, 2),
        draw(STEPS, BATCH, 2, INPUTS, seed=1),
    ),
}


@pytest.mark.parametrize('name', VARYING)
def test_weights_that_vary_in_time_are_traced_element_by_element(name):
    drive, params, shape, xs = VARYING[name]
    model, xs = Leaky(drive, params, *shape), jnp.asarray(xs)
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=BATCH)
    true = testing.bptt(model, xs, step_fn=partial(loss, model))
    found = learner.etrace_grad(xs, step_fn=partial(loss, learner), reduction='sum')
    testing.compare(found, true).check(1e-11)


@pytest.mark.parametrize('side', ['b', 'a', 'fixed'])
def test_a_product_of_weights_that_varies_is_not_traced_and_said_so(side):
    params = {'b': draw(INPUTS, RANK), 'a': draw(RANK, OUTPUTS, seed=1), 'w': WEIGHT}

    def drive(x, p):
        b, a = p['b'], p['a']
        if side == 'b':
            b = b * varying_mask(x)[:, None]
        elif side == 'a':
            a = a * x[0, 0]
        else:
            b = jnp.tile(x[0][:, None], (1, RANK))
        return btf.lora_matmul(x, b, a) + btf.matmul(x, p['w'])

    model, xs = Leaky(drive, params, OUTPUTS), jnp.asarray(XS[:1])
    learner = btf.compile(model, 'd_rtrl', xs[0], batch_size=BATCH)
    assert [r.primitive.name for r in learner.graph.hidden_param_op_relations] == ['etp_mm']
    kinds = {record.kind for record in learner.graph.diagnostics}
    assert btf.DiagnosticKind.WEIGHT_VARIES_IN_TIME in kinds
    true = testing.bptt(model, xs, step_fn=partial(loss, model))
    found = learner.etrace_grad(xs, step_fn=partial(loss, learner), reduction='sum')
    testing.compare(found, true).check(1e-11)


# Beside the reference


LORA = {'b': draw(INPUTS, RANK), 'a': draw(RANK, OUTPUTS, seed=1), 'c': draw(OUTPUTS, seed=2)}
GROUPS = {'w': draw(2, INPUTS, OUTPUTS), 'c': draw(2, OUTPUTS)}
IN_BOTH = {
    'grouped_matmul': (
        lambda lib, x, p: lib.grouped_matmul(x, p['w'], p['c'], weight_fn=jnp.sin),
        GROUPS,
        (2, OUTPUTS),
        draw(STEPS, BATCH, 2, INPUTS, seed=1),
    ),
    'einsum': (
        lambda lib, x, p: lib.einsum('bgk,gkn->bgn', x, p['w'], weight_fn=jnp.sin),
        {'w': GROUPS['w']},
        (2, OUTPUTS),
        draw(STEPS, BATCH, 2, INPUTS, seed=1),
    ),
    'lora_matmul': (
        lambda lib, x, p: lib.lora_matmul(x, p['b'], p['a'], alpha=0.5, bias=p['c'], b_fn=jnp.sin),
        LORA,
        (OUTPUTS,),
        XS,
    ),
    'embedding': (
        lambda lib, x, p: lib.embedding(x, p['w'], weight_fn=jnp.sin),
        {'w': WEIGHT},
        (OUTPUTS,),
        INDICES % INPUTS,  # of negative ones, pp_prop of the reference smooths nothing
    ),
}


def by_library(lib: ModuleType, case: Any, rule: str, steps: int = STEPS) -> Any:
    drive, params, shape, xs = case
    model, xs = Leaky(partial(drive, lib), params, *shape), jnp.asarray(xs)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    name = {'d_rtrl': 'D_RTRL'}.get(rule, rule)
    learner = getattr(lib, name)(model, **RULES[rule])
    with promoting(lib is not btf):
        learner.compile_graph(xs[0])
        return learner.etrace_grad(xs[:steps], step_fn=partial(loss, learner), reduction='sum')


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', IN_BOTH)
def test_the_reference_gives_the_same_gradient(name, rule, reference):
    case = IN_BOTH[name]
    testing.compare(by_library(btf, case, rule), by_library(reference, case, rule)).check(1e-10)


def test_the_reference_is_wrong_where_an_axis_shares_the_weight(reference):
    """It sums over the axis what it should keep apart: the gradient of one step is too large."""
    case = (
        lambda lib, x, p: lib.einsum('btk,kn->btn', x, p['w']),
        {'w': WEIGHT},
        (2, OUTPUTS),
        draw(STEPS, BATCH, 2, INPUTS, seed=1),
    )
    model, xs = Leaky(partial(case[0], btf), case[1], *case[2]), jnp.asarray(case[3])
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    for steps in (1, STEPS):
        true = testing.bptt(model, xs[:steps], step_fn=partial(loss, model))
        testing.compare(by_library(btf, case, 'd_rtrl', steps), true).check(1e-11)
        theirs = by_library(reference, case, 'd_rtrl', steps)
        deviation = jnp.abs(theirs['params',]['w'] - true['params',]['w']).max()
        assert deviation > 0.3 * jnp.abs(true['params',]['w']).max()
