"""Long scans inside a step: what is learned over their substeps.

Oracles are written by hand: loops over steps and substeps, differentiated in full, or the
recurrence of pp-prop over substeps. What is traced in a scan that is divided is what is traced in
one that is unrolled, also where the model mixes positions.
"""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace_fast as btf
from braintrace_fast import ControlFlowPolicy, DiagnosticKind, testing
from braintrace_fast.runtime import planner
from tests.compiler.checks import param
from tests.models import hidden
from tests.op_models import OP_MODELS
from tests.promotion import promoting

pytestmark = pytest.mark.usefixtures('x64')

N_IN, N, BATCH, STEPS, LONG = 3, 4, 2, 5, 20
GAINS = np.linspace(0.5, 1.5, LONG)
TRANSITIONS = {
    1: lambda y, h: (jnp.tanh(0.8 * h + y),),
    2: lambda y, g, h: (g := 0.9 * g + y, jnp.tanh(0.8 * h + 0.2 * g - 0.1 * g * h)),
}
"""By the number of states, the states after a substep."""


def readout(stack):
    """A loss that reads all substeps."""
    return jnp.tensordot(jnp.asarray(GAINS**2), stack, 1)


class Substeps(brainstate.nn.Module):
    """States that go through many substeps per step, with a weight inside the scan."""

    def __init__(self, size=2, output='last', weight_inside=True, reverse=False):
        super().__init__()
        self.W, self.b = param(N_IN, N), param(N)
        self.output, self.weight_inside, self.reverse = output, weight_inside, reverse
        self.size = size

    def init_state(self, batch_size=None, **_):
        for place in range(self.size):
            setattr(self, f'h{place}', hidden(batch_size, N))

    def update(self, x):
        states = [getattr(self, f'h{place}') for place in range(self.size)]
        outside = None if self.weight_inside else btf.matmul(x, self.W.value, self.b.value)

        def substep(carry, gain):
            if outside is None:
                y = btf.matmul(gain * x, self.W.value, self.b.value)
            else:
                y = gain * outside
            carry = TRANSITIONS[self.size](y, *carry)
            return carry, carry[-1]

        carry, stack = lax.scan(
            substep, tuple(s.value for s in states), jnp.asarray(GAINS), reverse=self.reverse
        )
        for state, value in zip(states, carry, strict=True):
            state.value = value
        return {'last': carry[-1], 'stacked': readout(stack)}[self.output]


def inputs(batch=BATCH, steps=STEPS):
    shape = (steps, N_IN) if batch is None else (steps, batch, N_IN)
    return jnp.asarray(np.random.default_rng(1).normal(size=shape))


def loss_of(run):
    return lambda x: jnp.sum(jnp.sin(run(x)) ** 2)


def learn(model, algorithm='d_rtrl', batch=BATCH, example=None, **options):
    example = inputs(batch)[0] if example is None else example
    return btf.compile(model, algorithm, example, batch_size=batch, **options)


def gradient(learner, xs, **options):
    return learner.etrace_grad(xs, step_fn=loss_of(learner), reduction='sum', **options)


def by_steps(learner, xs):
    @brainstate.transform.jit
    def step(x):
        return brainstate.transform.grad(lambda: loss_of(learner)(x), learner.param_states)()

    return jax.tree.map(lambda *parts: sum(parts), *map(step, xs))


def start(size, batch):
    return [jnp.zeros((N,) if batch is None else (batch, N)) for _ in range(size)]


def reverse_mode(model, xs, batch=BATCH):
    """The loops by hand, differentiated in full."""

    def loss(weights):
        carry, total = start(model.size, batch), 0.0
        gains = GAINS[::-1] if model.reverse else GAINS
        for x in xs:
            stack = []
            for gain in gains:
                bias = weights['b'] if model.weight_inside else gain * weights['b']
                y = gain * x @ weights['W'] + jnp.broadcast_to(bias, carry[0].shape)
                carry = TRANSITIONS[model.size](y, *carry)
                stack.append(carry[-1])
            stack = jnp.stack(stack[::-1] if model.reverse else stack)
            out = {'last': carry[-1], 'stacked': readout(stack)}[model.output]
            total += jnp.sum(jnp.sin(out) ** 2)
        return total

    grads = jax.grad(loss)({'W': model.W.value, 'b': model.b.value})
    return {('W',): grads['W'], ('b',): grads['b']}


WINDOWS = {
    'carry': {},
    'carry, every step': {'trace_every': 1},
    'carry, odd windows': {'trace_every': 3},
    'fresh': {'trace': 'fresh'},
    'fresh, last to first': {'trace': 'fresh', 'trace_every': 2},
}
MODELS = {
    'one state': {'size': 1},
    'two states': {},
    'stacked': {'output': 'stacked'},
    'weight outside': {'weight_inside': False},
    'reverse': {'reverse': True, 'output': 'stacked'},
}


QUICKLY = 'carry, odd windows', 'fresh'


@pytest.mark.parametrize(
    ('options', 'windows'),
    [
        pytest.param(
            MODELS[model],
            WINDOWS[windows],
            id=f'{model}-{windows}',
            marks=() if model == 'two states' or windows in QUICKLY else pytest.mark.slow,
        )
        for model in MODELS
        for windows in WINDOWS
    ],
)
def test_windows_give_the_gradient_of_all_substeps(options, windows):
    model, xs = Substeps(**options), inputs()
    found = gradient(learn(model), xs, **windows)
    testing.compare(found, reverse_mode(model, xs)).check(1e-12)


@pytest.mark.parametrize('batch', [BATCH, None], ids=['batch', 'one example'])
@pytest.mark.parametrize('output', ['last', 'stacked'])
def test_single_steps_give_the_gradient_of_all_substeps(output, batch):
    model, xs = Substeps(output=output), inputs(batch)
    found = by_steps(learn(model, batch=batch), xs)
    testing.compare(found, reverse_mode(model, xs, batch)).check(1e-12)


def test_a_chunk_is_differentiated_in_full():
    model, xs = Substeps(output='stacked'), inputs(steps=6)
    learner = learn(model, vjp_method='multi-step')

    def loss(chunk):
        return jnp.sum(jnp.sin(learner(btf.MultiStepData(chunk))) ** 2)

    grad = brainstate.transform.grad(loss, learner.param_states)
    found = jax.tree.map(jnp.add, grad(xs[:2]), grad(xs[2:]))
    testing.compare(found, reverse_mode(model, xs)).check(1e-12)


# pp-prop


def pp_prop(model, xs, a_x, a_f):
    """The recurrence over substeps, with signals at the last substep of every step."""
    transition, size = TRANSITIONS[model.size], model.size
    W, b = model.W.value, model.b.value
    states = start(size, BATCH)
    xhat, fhat = jnp.zeros((BATCH, N_IN)), [jnp.zeros((BATCH, N))] * size
    total, count = {('W',): 0.0, ('b',): 0.0}, 0
    jacobians = jax.vmap(jax.vmap(jax.jacrev(transition, argnums=range(size + 1))))
    for x in xs:
        for gain in GAINS:
            y = gain * x @ W + jnp.broadcast_to(b, (BATCH, N))
            rows = jacobians(y, *states)
            states, count = transition(y, *states), count + 1
            xhat = a_x * xhat + gain * x
            fhat = [
                a_f * sum(d * old for d, old in zip(row[1:], fhat, strict=True))
                + (1 - a_f) * row[0]
                for row in rows
            ]
        signal = jax.grad(lambda h: jnp.sum(jnp.sin(h) ** 2))(states[-1])
        told = signal * fhat[-1] / (1 - a_f**count)
        total[('W',)] += xhat.T @ told
        total[('b',)] += told.sum(0)
    return total


@pytest.mark.parametrize('windows', WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize('size', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_pp_prop_counts_substeps(size, windows):
    model, xs = Substeps(size), inputs()
    found = gradient(learn(model, 'pp_prop', decay_or_rank=0.9), xs, **windows)
    testing.compare(found, pp_prop(model, xs, 0.9, 0.9)).check(1e-12)


def test_pp_prop_counts_substeps_step_by_step():
    model, xs = Substeps(), inputs()
    found = by_steps(learn(model, 'pp_prop', decay_or_rank=0.8), xs)
    testing.compare(found, pp_prop(model, xs, 0.8, 0.8)).check(1e-12)


@pytest.mark.parametrize('output', ['last', 'stacked'])
def test_pp_prop_in_windows_is_pp_prop_step_by_step(output):
    model, xs = Substeps(output=output), inputs()
    true = by_steps(learn(model, 'pp_prop', decay_or_rank=0.8), xs)
    found = gradient(learn(model, 'pp_prop', decay_or_rank=0.8), xs, trace_every=3)
    testing.compare(found, true).check(1e-12)


# What is divided, and what is unrolled

SHORT = 4
DIVIDED, UNROLLED = ControlFlowPolicy(scan_unroll_limit=2), ControlFlowPolicy()


class Given(brainstate.nn.Module):
    """A step that is given from outside, as a function of the model and the input."""

    def __init__(self, step):
        super().__init__()
        self.W, self.V = param(N_IN, N), param(N, N)
        self.stack, self.leak = param(SHORT, N_IN, N), param(N)
        self.M = jnp.asarray(np.random.default_rng(3).normal(size=(N, N)) / 4)
        self.step = step

    def init_state(self, batch_size=None, **_):
        self.h, self.g = hidden(batch_size, N), hidden(batch_size, N)

    def update(self, x):
        return self.step(self, x)


def scanned(substep, **options):
    """A step that scans ``(net, x, h, g, i) -> (h, g)``, and puts out ``h``."""

    def step(net, x):
        def body(carry, i):
            return substep(net, x, *carry, i), None

        carry = net.h.value, net.g.value
        (net.h.value, net.g.value), _ = lax.scan(body, carry, jnp.arange(1.0, SHORT + 1), **options)
        return net.h.value

    return step


def recurrent(net, x, h, g, i):
    g = 0.9 * g + btf.matmul(i * x, net.W.value) + btf.matmul(h, net.V.value)
    return jnp.tanh(0.5 * h + 0.1 * g), g


def processed(net, x, h, g, i):
    return jnp.tanh(0.5 * h + btf.matmul(x, 2 * jnp.tanh(net.W.value)) / i), 0.5 * g + h


def own_product(net, x, h, g, i):
    return jnp.tanh(h @ net.M + btf.matmul(i * x, net.W.value)), 0.5 * g + h


def gated(net, x, h, g, i):
    """The first op reaches the state through the second one alone."""
    gate = jax.nn.sigmoid(btf.matmul(i * x, net.W.value))
    return jnp.tanh(0.5 * h + btf.matmul(gate * (1 + h), net.V.value)), 0.5 * g + h


def learned_leak(net, x, h, g, i):
    y = btf.matmul(i * x, net.W.value)
    leak = btf.element_wise(net.leak.value, weight_fn=jax.nn.sigmoid)
    return jnp.tanh(y + jnp.broadcast_to(leak, h.shape) * h), 0.5 * g + h


def other_start(net, x):
    def body(h, i):
        return jnp.tanh(0.7 * h + btf.matmul(i * x, net.W.value)), None

    h, _ = lax.scan(body, jnp.sin(net.h.value), jnp.arange(1.0, SHORT + 1))
    net.h.value = 0.5 * h + 0.1 * net.g.value
    net.g.value = 0.9 * net.g.value + btf.matmul(x, net.stack.value[0])
    return net.h.value


def op_outside_too(net, x):
    y = btf.matmul(x, net.stack.value[1])

    def body(h, i):
        return jnp.tanh(0.7 * h + y / i + btf.matmul(h, net.V.value)), None

    net.h.value, _ = lax.scan(body, net.h.value, jnp.arange(1.0, SHORT + 1))
    net.g.value = 0.9 * net.g.value + 0.1 * net.h.value
    return net.g.value


def counted(net, x):
    """The output adds up what the substeps do."""

    def body(carry, i):
        h, total = carry
        h = jnp.tanh(0.7 * h + btf.matmul(i * x, net.W.value))
        return (h, total + h**2), None

    zeros = jnp.zeros_like(net.h.value)
    (net.h.value, total), _ = lax.scan(body, (net.h.value, zeros), jnp.arange(1.0, SHORT + 1))
    return total


CAN_BE_DIVIDED = {
    'recurrent': scanned(recurrent),
    'reverse': scanned(recurrent, reverse=True),
    'processed weight': scanned(processed),
    'gated': scanned(gated),
    'learned leak': scanned(learned_leak),
    'another start': other_start,
    'an op outside too': op_outside_too,
    'counted': counted,
}


def sliced(net, x):
    def body(h, w):
        return jnp.tanh(0.7 * h + btf.matmul(x, w)), None

    net.h.value, _ = lax.scan(body, net.h.value, net.stack.value)
    return net.h.value


def scaled(net, x, h, g, i):
    """The op passes influence on, position by position."""
    y = btf.matmul(i * x, net.W.value) + EVERY.bind(h, net.leak.value)
    return jnp.tanh(0.5 * h + y), 0.5 * g + h


def rolled(net, x, h, g, i):
    return jnp.tanh(jnp.roll(h, 1, -1) + btf.matmul(i * x, net.W.value)), 0.5 * g + h


EVERY = btf.register_primitive(
    'test_substeps_gain',
    lambda x, weight: x * jnp.broadcast_to(weight, x.shape),
    batched=True,
    gradient_enabled=True,
    trace_rules=None,
)
MUST_BE_UNROLLED = {
    'sliced weight': (sliced, 'vary inside it'),
    'followed op': (scanned(scaled), 'influence passes through'),
    'a product of its own': (scanned(own_product), 'moves or mixes'),
    'moved positions': (scanned(rolled), 'moves or mixes'),
}


def compiled(step, policy, algorithm='d_rtrl', **options):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', btf.UntracedWarning)
        return learn(Given(step), algorithm, control_flow=policy, **options)


def substeps(learner):
    return [relation.substeps for relation in learner.graph.hidden_param_op_relations]


@pytest.mark.parametrize('step', CAN_BE_DIVIDED.values(), ids=CAN_BE_DIVIDED)
def test_a_scan_that_is_divided_teaches_what_an_unrolled_one_does(step):
    xs = inputs()
    divided, unrolled = compiled(step, DIVIDED), compiled(step, UNROLLED)
    assert SHORT in substeps(divided) and SHORT not in substeps(unrolled)
    true = gradient(unrolled, xs, trace_every=2)
    testing.compare(gradient(divided, xs, trace_every=2), true).check(1e-12)
    by_step = by_steps(compiled(step, DIVIDED), xs)
    testing.compare(by_step, true).check(1e-12)


@pytest.mark.parametrize(('step', 'reason'), MUST_BE_UNROLLED.values(), ids=MUST_BE_UNROLLED)
def test_a_scan_that_cannot_be_divided_is_unrolled(step, reason):
    learner, xs = compiled(step, DIVIDED), inputs()
    (record,) = learner.graph.explain(kind=DiagnosticKind.SCAN_DESCENT_SKIPPED)
    assert reason in record.message and 'unrolled' in record.message
    assert not any(substeps(learner))
    fresh = gradient(learner, xs, trace='fresh')
    testing.compare(fresh, gradient(compiled(step, UNROLLED), xs, trace='fresh')).check(1e-12)


@pytest.mark.parametrize('options', [{'kappa_filter_decay': 0.7}])
def test_other_rules_learn_over_substeps_as_over_an_unrolled_scan(options):
    xs, step, options = inputs(), CAN_BE_DIVIDED['recurrent'], {'algorithm': 'eprop', **options}
    true = gradient(compiled(step, UNROLLED, **options), xs, trace_every=2)
    found = gradient(compiled(step, DIVIDED, **options), xs, trace_every=2)
    testing.compare(found, true).check(1e-12)
    testing.compare(by_steps(compiled(step, DIVIDED, **options), xs), true).check(1e-12)


@pytest.mark.parametrize(
    'options',
    [
        {'algorithm': 'eprop', 'feedback': 'random', 'random_feedback_key': jax.random.PRNGKey(0)},
        {'algorithm': 'three_factor'},
        {'algorithm': 'ostl_recurrent'},
        {'algorithm': btf.SnAp},
    ],
    ids=['random feedback', 'modulator', 'coupled', 'sparse_n'],
)
def test_rules_that_would_be_wrong_over_substeps_are_refused(options):
    with pytest.raises(btf.NotSupportedError, match='scan_unroll_limit'):
        compiled(CAN_BE_DIVIDED['recurrent'], DIVIDED, **options)


QUICK = {'conv', 'embedding', 'einsum_shared', 'sparse_matmul'}
"""Ops that differ; the others are their relatives, or of the models above."""


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in OP_MODELS]
)
def test_every_op_learns_over_substeps(name):
    op_model = OP_MODELS[name]

    class Inside(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = brainstate.ParamState(op_model.parameters())

        def init_state(self, batch_size=None, **_):
            self.h = hidden(batch_size, *op_model.y)

        def update(self, x):
            def body(h, gain):
                return jnp.tanh(0.8 * h + gain * op_model.op(x, self.weights.value)), None

            self.h.value, _ = lax.scan(body, self.h.value, jnp.linspace(0.5, 1.0, SHORT))
            return self.h.value

    xs = op_model.inputs(3, BATCH)
    for algorithm, options in (('d_rtrl', {}), ('pp_prop', {'decay_or_rank': 0.9})):
        model = Inside()
        learner = learn(model, algorithm, example=xs[0], control_flow=DIVIDED, **options)
        assert SHORT in substeps(learner)
        if algorithm == 'd_rtrl':
            true = testing.bptt(model, xs, step_fn=loss_of(model))  # from where the states are
            found = gradient(learner, xs, trace_every=2)
        else:
            found = gradient(learner, xs, trace_every=2)
            again = learn(model, algorithm, example=xs[0], control_flow=DIVIDED, **options)
            true = by_steps(again, xs)
        testing.compare(found, true).check(1e-12)


def test_examples_start_anew():
    xs, flags = inputs(), np.random.default_rng(4).random((STEPS, BATCH)) < 0.4
    assert flags.any() and not flags.all()
    grads = []
    for policy in (UNROLLED, DIVIDED):
        learner = compiled(CAN_BE_DIVIDED['recurrent'], policy)

        def step(x, done, learner=learner):
            return jnp.sum(jnp.sin(learner(x, reset=done)))

        grads.append(
            learner.etrace_grad(
                xs, jnp.asarray(flags), step_fn=step, trace_every=2, reduction='sum'
            )
        )
    testing.compare(*reversed(grads)).check(1e-12)


def test_windows_from_the_last_to_the_first_need_no_trace(monkeypatch):
    monkeypatch.setattr(planner, 'CHEAP', 0)
    model, xs = Substeps(output='stacked'), inputs()
    learner = learn(model)
    found = gradient(learner, xs, trace='fresh', trace_every=2)
    assert learner.plan.backwards
    testing.compare(found, reverse_mode(model, xs)).check(1e-12)


def test_kernels_give_the_same():
    model, xs = Substeps(), inputs()
    for rule in ('d_rtrl', 'pp_prop'):
        options = {'decay_or_rank': 0.9} if rule == 'pp_prop' else {}
        plain = gradient(learn(model, rule, backend='jax', **options), xs, trace_every=3)
        found = gradient(learn(model, rule, backend='interpret', **options), xs, trace_every=3)
        testing.compare(found, plain).check(1e-10)


def test_a_long_scan_has_one_op_and_one_trace():
    learner = learn(Substeps())
    (relation,) = learner.graph.hidden_param_op_relations
    assert relation.substeps == LONG
    assert relation.y_var.aval.shape == (LONG, BATCH, N)
    kinds = [record.kind for record in learner.graph.diagnostics]
    assert DiagnosticKind.SCAN_UNROLL_SKIPPED in kinds
    assert DiagnosticKind.SCAN_DESCENT_APPLIED in kinds


def test_a_scan_that_is_kept_is_refused():
    policy = ControlFlowPolicy(scan_descent='off')
    with pytest.raises(NotImplementedError, match="scan_descent='auto'"):
        learn(Substeps(), control_flow=policy)
    learn(Substeps(weight_inside=False), control_flow=policy)


# Beside braintrace


def test_the_reference_agrees_where_it_is_right(reference, monkeypatch):
    xs = inputs()
    true = gradient(learn(Substeps(1)), xs)
    monkeypatch.setattr(btf, 'matmul', reference.matmul)
    model = Substeps(1)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    with promoting():
        learner = reference.D_RTRL(model)
        learner.compile_graph(xs[0])
        found = by_steps_of(learner, model, xs)
    testing.compare(found, true).check(1e-10)


def by_steps_of(learner, model, xs):
    weights = model.states(brainstate.ParamState)
    grads = [brainstate.transform.grad(lambda x=x: loss_of(learner)(x), weights)() for x in xs]
    return jax.tree.map(lambda *parts: sum(parts), *grads)
