"""What the factors of a step promise each other, over the table of models."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.runtime.factors import Signals, without_zeros
from tests.algorithm.learning import at, begin, learning, live_values
from tests.models import MODELS
from tests.oracles.step import random_projection

BYPASSING = {'minimal_rnn', 'output_reads_y', 'lateral', 'pooled', 'layer_norm'}
"""Models with an op whose output reaches the loss past the states, or mixed."""


@pytest.mark.parametrize('case', MODELS.values(), ids=MODELS)
def test_c_is_f_times_l_unless_something_bypasses_the_states(case, x64):
    learned = learning(case, 'd_rtrl')
    begin(learned, live_values(case))
    executor = learned.learner.graph_executor
    perturb = executor.graph.exit_perturb
    hidden = list(learned.model.states(brainstate.HiddenState))
    x = at(learned.xs, 0)

    @jax.jit
    def factors_and_signals():
        runner = executor.runner
        results, vjp, factors = runner.run_with_vjp((x,), *executor.values())

        def loss(results):
            return random_projection((results[0], [results[1][path] for path in hidden]))

        cotangents = jax.grad(loss, allow_int=True)(results)
        return factors, runner.signals(vjp, cotangents)[2]

    factors, signals = factors_and_signals()
    links = executor.runner.links
    for r, relation in enumerate(executor.graph.hidden_param_op_relations):
        c, expected = signals.c[r], jnp.zeros(())
        for link in (link for link in links if link.op == r):
            reached = zip(factors.f[link.index], signals.L[link.group.index], strict=True)
            for plane, signal in reached:
                if plane is not None and signal is not None:
                    expected = expected + plane * signal
        expected = expected.sum(tuple(range(expected.ndim - c.ndim)))
        same = np.allclose(c, expected, rtol=1e-9, atol=1e-12)
        assert same or perturb.y_bypasses[r], relation.path


def test_an_ordinary_layer_has_nothing_that_bypasses_its_states():
    for name in ('lif_expon', 'lstm', 'gru', 'two_layers', 'plain_readout'):
        graph = learning(MODELS[name], 'd_rtrl').learner.graph
        traced = graph.hidden_param_op_relations
        assert graph.exit_perturb.y_bypasses == (False,) * len(traced), name


def test_an_output_that_reads_y_bypasses_them():
    graph = learning(MODELS['output_reads_y'], 'd_rtrl').learner.graph
    assert any(graph.exit_perturb.y_bypasses)
    assert isinstance(graph, btf.ETraceGraph)


def test_planes_that_are_zero_are_left_out():
    signals = Signals(c=(1.0,), L=((1.0, 2.0), (3.0,)), R=((None, 4.0), (None,)))
    zero = Signals(c=(True,), L=((False, True), (True,)), R=((None, False), (None,)))
    expected = Signals(c=(1.0,), L=((1.0, None), (None,)), R=((None, 4.0), (None,)))
    assert without_zeros(signals, zero) == expected
