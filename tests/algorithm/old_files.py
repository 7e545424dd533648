"""Learners of which files of format version 1 are kept, and what they compute when they go on.

A file was written after ``begun(rule)`` with the gradient that ``continued`` then gives.
"""

from pathlib import Path

import brainstate
import jax.numpy as jnp

import braintrace_fast as btf

FILES = Path(__file__).parent / 'files'
RULES = {
    'd_rtrl': {},
    'eprop': {'kappa_filter_decay': 0.8},
    'pp_prop': {'decay_or_rank': 0.9},
}


class TwoGroups(brainstate.nn.Module):
    """An op that reaches two groups, one that reaches one of them, and a state of two planes."""

    def __init__(self):
        super().__init__()
        self.first = brainstate.ParamState(brainstate.random.normal(size=(3, 4)))
        self.second = brainstate.ParamState(brainstate.random.normal(size=(4, 4)))
        self.v = brainstate.HiddenState(jnp.zeros(4))
        self.a = brainstate.HiddenState(jnp.zeros(4))
        self.slow = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        y = btf.matmul(x, self.first.value)
        z = btf.matmul(jnp.tanh(self.slow.value), self.second.value)
        v, a = self.v.value, self.a.value
        self.v.value = jnp.tanh(0.7 * v - 0.3 * a + y + z)
        self.a.value = 0.9 * a + 0.1 * v
        self.slow.value = 0.8 * self.slow.value + jnp.sin(y)
        return self.v.value + self.slow.value


def begun(rule):
    """A learner of that rule, after three steps."""
    brainstate.random.seed(0)
    learner = btf.compile(TwoGroups(), rule, jnp.ones(3), **RULES[rule])
    learner.etrace_evolve(inputs(3))
    return learner


def continued(learner):
    """The gradient of five steps more, the trace going on."""
    return learner.etrace_grad(
        jnp.flip(inputs(5)), step_fn=lambda x: jnp.sum(learner(x) ** 2), trace_every=2
    )


def inputs(steps):
    return jnp.sin(jnp.arange(3.0 * steps)).reshape(steps, 3)
