"""An op, a rule, a kernel kind and a scope, each added from outside with public names only."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.kernels import dispatch
from braintrace_fast.kernels.adjoint_scan import reference
from braintrace_fast.runtime import Engine, GradientSum, Steps

STEPS, BATCH, SIZE = 6, 2, 3
XS = np.random.default_rng(0).normal(size=(STEPS, BATCH, SIZE))


def scaled(x, weight):
    """The toy op: every input has a weight of its own."""
    return toy_op.bind(x, weight)


def over_batch(a):
    return a.reshape(-1, SIZE).sum(0)


toy_op = btf.register_primitive(
    'toy_scaled',
    lambda x, weight: x * weight[None],
    batched=True,
    trace_rules=btf.TraceRules(
        outer=lambda x, plane: {'weight': plane * x},
        outer_sum=lambda x, plane: {'weight': (plane * x).sum(0)},
        decay=lambda plane, trace: {'weight': plane * trace['weight']},
        contract=lambda plane, trace: {'weight': over_batch(plane * trace['weight'])},
    ),
)


class Leaky(brainstate.nn.Module):
    """Neurons that know nothing of each other, so that a trace per neuron is exact."""

    def __init__(self, op=scaled):
        super().__init__()
        self.op = op
        self.w = brainstate.ParamState(jnp.linspace(0.5, 1.5, SIZE))
        self.h = brainstate.HiddenState(jnp.zeros((BATCH, SIZE)))

    def update(self, x):
        self.h.value = jnp.tanh(0.8 * self.h.value + self.op(x, self.w.value))
        return self.h.value


def step(w, h, x):
    """The same model by hand."""
    return jnp.tanh(0.8 * h + x * w)


def gradient(learner, **options):
    (grad,) = learner.etrace_grad(
        jnp.asarray(XS), step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction='sum', **options
    ).values()
    return grad


def through_time(w):
    def body(h, x):
        h = step(w, h, x)
        return h, jnp.sum(h**2)

    return jax.lax.scan(body, jnp.zeros((BATCH, SIZE)), jnp.asarray(XS))[1].sum()


@pytest.mark.parametrize('options', [{'trace_every': 1}, {'trace_every': 4}, {'trace': 'fresh'}])
def test_an_op(options, x64):
    learner = btf.compile(Leaky(), 'd_rtrl', jnp.asarray(XS[0]))
    true = jax.grad(through_time)(learner.param_states['w',].value)
    np.testing.assert_allclose(gradient(learner, **options), true, rtol=1e-12)
    assert np.abs(true).min() > 0.1


class NoMemory:
    """The toy engine: it carries nothing, and learns from each step alone."""

    is_small = True

    def __init__(self, graph):
        self.ops = range(len(graph.hidden_param_op_relations))

    def refuses_windows(self):
        return 'it looks at one step at a time'

    def refuses_carry(self):
        return None

    def refuses_restarts(self):
        return None

    def trace_shape(self):
        return ()

    def stored_shapes(self):
        return [()]

    def fit(self, trace):
        return trace

    def advance(self, step: Steps):
        return ()

    def gradients(self, total: GradientSum, step: Steps, trace):
        for op in self.ops:
            total.add_present(op, step.factors, step.signals.c[op], None)

    def entry_gradients(self, total, entry, signals, elapsed):
        pass

    def window(self, total, steps, overwrite=True):
        raise AssertionError('not called: windows are refused')

    def trace_of(self, trace, ops):
        return {}


class Instant(btf.ETraceVjpAlgorithm):
    """The toy rule."""

    def make_engine(self, graph) -> Engine:
        return NoMemory(graph)


def test_a_rule(x64, tmp_path):
    learner = btf.compile(Leaky(), Instant, jnp.asarray(XS[0]))
    w, h, true = learner.param_states['w',].value, jnp.zeros((BATCH, SIZE)), 0.0
    for x in XS:
        true = true + jax.grad(lambda w, h=h, x=x: jnp.sum(step(w, h, x) ** 2))(w)
        h = step(w, h, x)
    np.testing.assert_allclose(gradient(learner), true, rtol=1e-12)
    assert np.abs(true).min() > 0.1
    assert learner.plan is None and 'Windows' not in learner.report.to_str()
    learner.save(tmp_path / 'file')
    learner.load(tmp_path / 'file')
    learner.reset_state()
    learner.etrace_evolve(jnp.asarray(XS))
    assert int(learner.running_index.value) == STEPS


def test_a_rule_whose_engine_refuses_restarts_says_why():
    class Refusing(NoMemory):
        def refuses_restarts(self):
            return 'it is a toy.'

    class Rule(btf.ETraceVjpAlgorithm):
        def make_engine(self, graph):
            return Refusing(graph)

    learner = btf.compile(Leaky(), Rule, jnp.asarray(XS[0]))
    with pytest.raises(btf.NotSupportedError, match='Rule cannot start anew in .*: it is a toy.'):
        learner(jnp.asarray(XS[0]), reset=True)


def test_a_kernel_kind(x64):
    seen = []

    def run(operands):
        seen.append(type(operands).__name__)
        return reference.adjoint_scan(operands)

    kind = dispatch.Kind(
        'toy',
        'cpu',
        implementations={'adjoint_scan': dispatch.Implementation(run, supports=lambda _: None)},
    )
    dispatch.register_kind(kind)
    try:
        learner = btf.compile(Leaky(), 'd_rtrl', jnp.asarray(XS[0]), backend='pallas')
        true = jax.grad(through_time)(learner.param_states['w',].value)
        np.testing.assert_allclose(gradient(learner, trace='fresh'), true, rtol=1e-12)
        assert seen and any(choice.implementation == 'toy' for choice in learner.choices)
    finally:
        dispatch.unregister_kind('toy')


class Everywhere(btf.Scope):
    """The toy scope: influence passes through every op that acts position by position."""

    def follows(self, op, params):
        return True


CHAINS = {
    'op of op': lambda op, h, x, w: 0.8 * h + op(op(x, w), w),
    'op of the state': lambda op, h, x, w: op(h, w) + x,
    'both': lambda op, h, x, w: op(op(h, w) + x, w) + op(x, w),
}


class Chained(Leaky):
    """Influence passes through ops that act position by position."""

    def __init__(self, drive):
        super().__init__()
        self.drive = drive

    def update(self, x):
        self.h.value = jnp.tanh(self.drive(scaled, self.h.value, x, self.w.value))
        return self.h.value


@pytest.mark.parametrize('drive', CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize('options', [{'trace_every': 1}, {'trace_every': 4}, {'trace': 'fresh'}])
def test_a_scope(drive, options, x64):
    def learned(**scope):
        return gradient(
            btf.compile(Chained(drive), 'd_rtrl', jnp.asarray(XS[0]), **scope), **options
        )

    def loss(w):
        def body(h, x):
            h = jnp.tanh(drive(jnp.multiply, h, x, w))
            return h, jnp.sum(h**2)

        return jax.lax.scan(body, jnp.zeros((BATCH, SIZE)), jnp.asarray(XS))[1].sum()

    true = jax.grad(loss)(jnp.linspace(0.5, 1.5, SIZE))
    np.testing.assert_allclose(learned(scope=Everywhere()), true, rtol=1e-11)
    assert np.abs(learned() - true).max() > 0.01


LEAKS = np.linspace(0.5, 0.9, SIZE)[None]


def adapting(op, v, a, x, w):
    """Two states, with a leak per neuron; both are driven through ops that read the first."""
    return jnp.tanh(LEAKS * v - 0.3 * a + op(op(v, w) + x, w)), 0.9 * a + 0.1 * op(v, w)


class Adapting(Leaky):
    def __init__(self):
        super().__init__()
        self.a = brainstate.HiddenState(jnp.zeros((BATCH, SIZE)))

    def update(self, x):
        states = self.h.value, self.a.value
        self.h.value, self.a.value = adapting(scaled, *states, x, self.w.value)
        return self.h.value


@pytest.mark.parametrize('backend', ['jax', 'interpret'])
def test_a_scope_over_several_states(backend, x64):
    def loss(w):
        def body(states, x):
            states = adapting(jnp.multiply, *states, x, w)
            return states, jnp.sum(states[0] ** 2)

        return jax.lax.scan(body, (jnp.zeros((BATCH, SIZE)),) * 2, jnp.asarray(XS))[1].sum()

    learner = btf.compile(
        Adapting(), 'd_rtrl', jnp.asarray(XS[0]), scope=Everywhere(), backend=backend
    )
    true = jax.grad(loss)(learner.param_states['w',].value)
    np.testing.assert_allclose(gradient(learner, trace_every=4), true, rtol=1e-11)
    assert len(learner.graph.hidden_param_op_relations) == 3 and np.abs(true).min() > 0.1
