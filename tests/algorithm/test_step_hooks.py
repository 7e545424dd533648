"""Subclasses may change the trace and the gradient of every step by braintrace's two hooks."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.algorithm.step_hooks import HookedAlgorithm

XS = jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)
RULES = {
    'd_rtrl': (btf.D_RTRL, {}),
    'pp_prop': (btf.pp_prop, {'decay_or_rank': 0.9}),
    'eprop': (btf.EProp, {}),
    'ostl': (btf.OSTLRecurrent, {}),
}


def learner_of(rule, options, cell=btf.nn.GRUCell, **more):
    brainstate.random.seed(0)
    return btf.compile(cell(3, 4), rule, XS[0], **options, **more)


def gradient(learner, xs=XS):
    return learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction='sum')


def assert_same(found, expected, scale=1.0):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, scale * b, rtol=2e-5, atol=1e-6)
    assert any(np.any(b) for b in expected)


def extended(base):
    """A rule that overrides both hooks, and changes nothing."""

    class Extended(base):
        def _update_etrace_data(self, *args):
            return super()._update_etrace_data(*args)

        def _solve_weight_gradients(self, *args):
            return super()._solve_weight_gradients(*args)

    return Extended


@pytest.mark.parametrize('method', ['single-step', 'multi-step'])
@pytest.mark.parametrize('name', RULES)
def test_hooks_that_change_nothing_leave_the_gradient_as_it_is(name, method):
    rule, options = RULES[name]
    options = {**options, 'vjp_method': method}
    found = gradient(learner_of(extended(rule), options))
    assert_same(found, gradient(learner_of(rule, options)))


def test_a_changed_gradient_is_returned():
    class Halved(btf.D_RTRL):
        def _solve_weight_gradients(self, *args):
            return jax.tree.map(lambda g: g / 2, super()._solve_weight_gradients(*args))

    assert_same(gradient(learner_of(Halved, {})), gradient(learner_of(btf.D_RTRL, {})), 0.5)


def test_a_changed_trace_is_carried_and_read():
    class Forgetful(btf.D_RTRL):
        def _update_etrace_data(self, index, old, *args):
            return super()._update_etrace_data(index, jax.tree.map(jnp.zeros_like, old), *args)

    learner = learner_of(Forgetful, {})
    learner.etrace_evolve(XS[:4])
    last = gradient(learner, XS[4:])
    plain = learner_of(btf.D_RTRL, {})
    plain.etrace_evolve(XS[:4])
    with_past = plain.trace.value
    plain.reset_state()
    assert_same(last, gradient(plain, XS[4:]))
    assert any(np.any(a) for a in jax.tree.leaves(with_past))


def test_the_gradient_of_a_step_is_read_off_the_changed_trace():
    """Also where no state of the step before is read: then the trace is that of one step."""

    class Silent(btf.D_RTRL):
        def _update_etrace_data(self, *args):
            return jax.tree.map(jnp.zeros_like, super()._update_etrace_data(*args))

    def of_weight(rule):
        grads = gradient(learner_of(rule, {}, btf.nn.ValinaRNNCell))
        return jax.tree.leaves({path: g for path, g in grads.items() if 'W' in path})

    assert not any(np.any(a) for a in of_weight(Silent))
    assert any(np.any(a) for a in of_weight(btf.D_RTRL))


def test_hooks_see_the_recurrence_itself():
    """With ``D`` set to zero by the hook, only the step itself is in the trace."""

    class Cut(btf.D_RTRL):
        def _update_etrace_data(self, index, old, sides, D, *args):
            zero = jax.tree.map(jnp.zeros_like, D)
            return super()._update_etrace_data(index, old, sides, zero, *args)

    def trace(rule, forgets=False):
        learner = learner_of(rule, {})
        for x in XS[:-1]:
            learner(x)
        if forgets:
            learner.reset_state()
        learner(XS[-1])
        return learner.get_etrace_of(learner.model.Wh.weight)

    found = trace(Cut)
    assert_same(found, trace(btf.D_RTRL, forgets=True))
    with pytest.raises(AssertionError):
        assert_same(found, trace(btf.D_RTRL))


def test_hooks_count_steps():
    seen = []

    class Counting(btf.D_RTRL):
        def _update_etrace_data(self, index, *args):
            seen.append(int(index))
            return super()._update_etrace_data(index, *args)

    learner = learner_of(Counting, {})
    with jax.disable_jit():
        for x in XS[:3]:
            learner(x)
    assert seen[-3:] == [0, 1, 2]


def test_what_needs_every_step_is_not_learned_in_windows():
    learner = learner_of(extended(btf.D_RTRL), {})
    assert 'called in every step' in learner.engine.refuses_windows()
    assert learner_of(btf.D_RTRL, {}).engine.refuses_windows() is None


def test_gradients_of_other_parameters_are_refused():
    class Wrong(btf.D_RTRL):
        def _solve_weight_gradients(self, *args):
            return {}

    with pytest.raises(ValueError, match='expected'):
        gradient(learner_of(Wrong, {}))


def test_hooks_are_not_to_be_called():
    learner = learner_of(btf.D_RTRL, {})
    assert isinstance(learner, HookedAlgorithm)
    with pytest.raises(TypeError, match='for subclasses to extend'):
        learner._update_etrace_data(0, (), (), (), {}, False)
    hooked = learner_of(extended(btf.D_RTRL), {})
    with pytest.raises(ValueError, match='not to be called'):
        hooked._solve_weight_gradients(0, (), (), {}, {}, {})
