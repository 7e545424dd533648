"""Learning rules of the user's own: which hooks they may override, and which are refused."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.algorithm.reference_hooks import REPLACEMENTS, SERVED
from braintrace_fast.errors import NotSupportedError

BASES = (
    btf.ETraceAlgorithm,
    btf.ETraceVjpAlgorithm,
    btf.ParamDimVjpAlgorithm,
    btf.IODimVjpAlgorithm,
    btf.EProp,
    btf.ThreeFactor,
    btf.UORO,
    btf.DNI,
)


@pytest.mark.parametrize('hook', REPLACEMENTS)
@pytest.mark.parametrize('base', BASES, ids=lambda base: base.__name__)
def test_hooks_that_nothing_calls_are_refused_when_the_class_is_made(base, hook):
    if hook in SERVED and issubclass(base, btf.ParamDimVjpAlgorithm | btf.IODimVjpAlgorithm):
        pytest.skip('It is called.')
    with pytest.raises(NotSupportedError, match=f'Mine overrides(.|\n)*{hook}; override here: '):
        type('Mine', (base,), {hook: lambda self, *args: None})


def test_hooks_of_a_mixin_are_refused():
    class Mixin:
        def _compute_learning_signal(self, *args):
            return {}

    with pytest.raises(NotSupportedError, match='_compute_learning_signal'):
        type('Mine', (Mixin, btf.D_RTRL), {})


def test_what_is_named_for_a_hook_exists():
    names = {text.split(',')[0].split(';')[0] for text in REPLACEMENTS.values()}
    assert all(hasattr(btf.ETraceVjpAlgorithm, name) for name in names - {'nothing'})


def test_a_rule_may_replace_the_signals():
    class Doubled(btf.D_RTRL):
        def learning_signals(self, factors, signals, modulator):
            return jax.tree.map(lambda a: 2 * a, signals)

    def gradient(rule):
        brainstate.random.seed(0)
        learner = btf.compile(btf.nn.ValinaRNNCell(3, 4, activation='tanh'), rule, jnp.ones(3))
        return learner.etrace_grad(
            jnp.ones((5, 3)), step_fn=lambda x: jnp.sum(learner(x)), reduction='sum'
        )

    found, plain = gradient(Doubled), gradient(btf.D_RTRL)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, 2 * b, rtol=1e-6)
        assert np.any(b)


class Recording(btf.D_RTRL):
    """Overrides what braintrace's own documentation lets a rule add to: states of its own."""

    def init_etrace_state(self, *args):
        super().init_etrace_state(*args)
        self.calls = brainstate.ShortTermState(jnp.zeros((), int))

    def reset_state(self, batch_size=None, **kwargs):
        super().reset_state(batch_size, **kwargs)
        self.calls.value = jnp.zeros((), int)

    def update(self, *args, **kwargs):
        self.calls.value = self.calls.value + 1
        return super().update(*args, **kwargs)

    def get_etrace_of(self, weight):
        return {'mine': super().get_etrace_of(weight)}


def test_a_rule_may_have_states_of_its_own():
    cell = btf.nn.ValinaRNNCell(3, 4, activation='tanh')
    learner = btf.compile(cell, Recording, jnp.ones(3))
    learner.etrace_evolve(jnp.ones((5, 3)))
    learner(jnp.ones(3))
    assert int(learner.calls.value) == 6
    (trace,) = learner.get_etrace_of(cell.W.weight).values()
    assert all(np.any(a) for a in jax.tree.leaves(trace))
    learner.reset_state()
    assert int(learner.calls.value) == 0 == int(learner.running_index.value)


class StepGradient(btf.ETraceAlgorithm):
    """A rule on the bare base class: the gradient of every step by itself."""

    def init_etrace_state(self, *args):
        self.calls = brainstate.ShortTermState(jnp.zeros((), int))

    def update(self, x):
        self.calls.value = self.calls.value + 1
        return self.model(x)


def test_a_rule_on_the_bare_base_class_learns_sequences_step_by_step():
    def gradient(make):
        brainstate.random.seed(0)
        cell = btf.nn.ValinaRNNCell(3, 4, activation='tanh')
        brainstate.nn.init_all_states(cell)
        learner = make(cell)
        learner.compile_graph(jnp.ones(3))
        return learner, learner.etrace_grad(
            jnp.ones((5, 3)), step_fn=lambda x: jnp.sum(learner(x) ** 2)
        )

    mine, found = gradient(lambda cell: StepGradient(cell, btf.ETraceGraphExecutor(cell)))
    plain = btf.ETraceConfig(temporal_recursion='none')
    _, expected = gradient(lambda cell: btf.D_RTRL(cell, config=plain))
    assert int(mine.calls.value) == 5
    assert found.keys() == expected.keys() == mine.param_states.keys()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert np.any(b)


def test_the_bare_base_class_compiles_once_and_shows_states_by_kind():
    cell = btf.nn.LSTMCell(3, 4)
    brainstate.nn.init_all_states(cell)
    mine = StepGradient(cell, btf.ETraceGraphExecutor(cell))
    assert not mine.is_compiled
    mine.compile_graph(jnp.ones(3))
    graph, calls = mine.graph, mine.calls
    mine.compile_graph(jnp.ones(3))
    assert mine.graph is graph and mine.calls is calls
    assert list(mine.hidden_states.to_nest()) == ['c', 'h']
    assert mine.param_states is mine.param_states
    kinds = (mine.param_states, mine.hidden_states, mine.other_states)
    assert sorted(p for kind in kinds for p in kind) == sorted(mine.path_to_states)
    assert mine.model4compile is cell


def test_what_the_bare_base_class_needs_is_asked_for():
    cell = btf.nn.LSTMCell(3, 4)
    brainstate.nn.init_all_states(cell)
    executor = btf.ETraceGraphExecutor(cell)
    with pytest.raises(ValueError, match='brainstate.nn.Module'):
        btf.ETraceAlgorithm('no model', 'no executor')
    with pytest.raises(ValueError, match="ETraceGraphExecutor.*|class 'list'"):
        btf.ETraceAlgorithm(cell, [1])
    bare = btf.ETraceAlgorithm(cell, executor)
    with pytest.raises(NotImplementedError, match='which states'):
        bare.compile_graph(jnp.ones(3))
    with pytest.raises(NotImplementedError, match='what its traces are'):
        bare.get_etrace_of(('Wi', 'weight'))
    with pytest.raises(RuntimeError, match='not compiled yet'):
        _ = StepGradient(cell, btf.ETraceGraphExecutor(cell)).report
