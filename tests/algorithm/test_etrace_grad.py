"""What ``etrace_grad`` and ``etrace_evolve`` mean, argument by argument."""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing

pytestmark = pytest.mark.usefixtures('x64')

STEPS, BATCH = 6, 2
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(STEPS, BATCH, 3))
TARGETS = RNG.normal(size=(STEPS, BATCH, 4))
RULES = {'d_rtrl': {}, 'pp_prop': {'decay_or_rank': 0.9}}

both_rules = pytest.mark.parametrize('rule', RULES)


def new_learner(rule='d_rtrl', **options):
    brainstate.random.seed(3)
    model = btf.nn.GRUCell(3, 4)
    return btf.compile(model, rule, jnp.asarray(XS[0]), batch_size=BATCH, **(RULES[rule] | options))


def step_of(learner):
    return lambda x, target: jnp.mean((learner(x) - target) ** 2)


def grads_of(learner, steps=slice(None), **options):
    return learner.etrace_grad(
        jnp.asarray(XS[steps]), jnp.asarray(TARGETS[steps]), step_fn=step_of(learner), **options
    )


def per_step(learner):
    """Gradients and losses of all steps, by ``brainstate.transform.grad`` per step."""

    @brainstate.transform.jit
    def step(x, target):
        loss = step_of(learner)
        return brainstate.transform.grad(
            lambda: loss(x, target), learner.param_states, return_value=True
        )()

    results = [step(jnp.asarray(x), jnp.asarray(t)) for x, t in zip(XS, TARGETS, strict=True)]
    return [r[0] for r in results], np.asarray([r[1] for r in results])


def model_outputs(model):
    return brainstate.transform.for_loop(model, jnp.asarray(XS))


def weighted(trees, weights):
    return jax.tree.map(lambda *g: sum(w * a for w, a in zip(weights, g, strict=True)), *trees)


def same(found, true, rtol=1e-12):
    testing.compare(found, true).check(rtol)


@both_rules
def test_mask_and_reduction_weigh_the_gradients_of_the_steps(rule):
    grads, losses = per_step(new_learner(rule))
    np.testing.assert_allclose(
        grads_of(new_learner(rule), return_value=True)[1], losses, rtol=1e-12
    )
    masks = {None: np.ones(STEPS), 'binary': np.array([0, 1, 0, 1, 1, 0.0]), 'small': None}
    masks['small'] = np.array([0.0, 0.1, 0.0, 0.2, 0.0, 0.3])
    masks['real'] = np.array([0.5, 2.0, 0.0, 1.5, 0.0, 3.0])
    for name, mask in masks.items():
        given = None if name is None else mask
        same(grads_of(new_learner(rule), mask=given, reduction='sum'), weighted(grads, mask))
        scale = max(mask.sum(), 1)
        same(grads_of(new_learner(rule), mask=given), weighted(grads, mask / scale))


def test_loss_output_has_aux_and_return_value_choose_what_is_returned():
    mask = np.array([0.5, 2.0, 0.0, 1.5, 0.0, 3.0])
    true, losses = per_step(new_learner())
    expected = {
        'per_step': losses,
        'masked': losses * mask,
        'scalar': (losses * mask).sum() / mask.sum(),
    }
    gradient = weighted(true, mask / mask.sum())
    for loss_output, value in expected.items():
        for has_aux in (False, True):
            for return_value in (False, True):
                learner = new_learner()
                loss = step_of(learner)

                def step_fn(x, target, has_aux=has_aux, loss=loss):
                    found = loss(x, target)
                    return (found, {'twice': 2 * found}) if has_aux else found

                result = learner.etrace_grad(
                    jnp.asarray(XS),
                    jnp.asarray(TARGETS),
                    step_fn=step_fn,
                    mask=mask,
                    loss_output=loss_output,
                    has_aux=has_aux,
                    return_value=return_value,
                )
                grads, *rest = result if has_aux or return_value else (result,)
                assert len(rest) == has_aux + return_value
                same(grads, gradient)
                if return_value:
                    np.testing.assert_allclose(rest[0], value, rtol=1e-12)
                if has_aux:
                    np.testing.assert_allclose(rest[-1]['twice'], 2 * losses, rtol=1e-12)


@both_rules
def test_grad_per_step_around_a_loop_and_etrace_grad_agree(rule):
    grads, _ = per_step(new_learner(rule))
    total = weighted(grads, np.ones(STEPS))
    same(grads_of(new_learner(rule), reduction='sum'), total)
    learner = new_learner(rule)
    loss = step_of(learner)

    def loop():
        return brainstate.transform.for_loop(loss, jnp.asarray(XS), jnp.asarray(TARGETS)).sum()

    same(brainstate.transform.grad(loop, learner.param_states)(), total)


def test_weights_may_be_an_external_readout_and_some_of_the_learners():
    learner = new_learner()
    readout = brainstate.ParamState(jnp.asarray(np.random.default_rng(1).normal(size=(4, 2))))

    def loss(x, run):
        return jnp.sum((run(x) @ readout.value) ** 2)

    weights = {('readout',): readout, **learner.param_states}
    found = learner.etrace_grad(
        jnp.asarray(XS), step_fn=lambda x: loss(x, learner), weights=weights, reduction='sum'
    )
    learner = new_learner()
    model = learner.model
    true = testing.recurrence(model, jnp.asarray(XS), step_fn=lambda x: loss(x, model))
    same({path: found[path] for path in true}, true, 1e-10)

    outputs = model_outputs(model)
    exact = jax.grad(lambda value: jnp.sum((outputs @ value) ** 2))(readout.value)
    np.testing.assert_allclose(found['readout',], exact, rtol=1e-10)


def test_keys_of_weights_may_be_of_types_that_do_not_sort_together():
    learner = new_learner()
    readout = brainstate.ParamState(jnp.ones((4, 2)))
    weights = {'readout': readout, 7: learner.model.Wz.weight, **learner.param_states}
    found = learner.etrace_grad(
        jnp.asarray(XS),
        step_fn=lambda x: jnp.sum((learner(x) @ readout.value) ** 2),
        weights=weights,
    )
    assert list(found) == list(weights)
    for name in ('weight', 'bias'):
        assert np.any(found[7][name] != 0)
        np.testing.assert_array_equal(found[7][name], found['Wz', 'weight'][name])
    assert np.any(found['readout'] != 0)


@both_rules
def test_penalties_on_weights_and_hidden_states_in_step_fn_are_exact(rule):
    learner = new_learner(rule)

    def loss(run, model, x):
        penalty = jnp.sum(model.Wz.weight.value['weight'] ** 2)
        return jnp.sum(run(x)) + 0.3 * penalty + 0.2 * jnp.sum(model.h.value**2)

    model = learner.model
    true = testing.recurrence(
        model,
        jnp.asarray(XS),
        step_fn=lambda x: loss(model, model, x),
        decay=None if rule == 'd_rtrl' else (0.9, 0.9),
    )
    found = learner.etrace_grad(
        jnp.asarray(XS), step_fn=lambda x: loss(learner, model, x), reduction='sum'
    )
    same(found, true, 1e-10)


@both_rules
def test_evolving_carries_states_and_trace_like_a_run_with_gradients(rule):
    whole, parts = new_learner(rule), new_learner(rule)
    mask = np.array([0, 0, 0, 1, 1, 1.0])
    true = grads_of(whole, mask=mask, reduction='sum')
    assert parts.etrace_evolve(jnp.asarray(XS[:3])) is None
    same(grads_of(parts, slice(3, None), reduction='sum'), true)
    for a, b in zip(
        jax.tree.leaves((whole.trace.value, whole.model.h.value, whole.running_index.value)),
        jax.tree.leaves((parts.trace.value, parts.model.h.value, parts.running_index.value)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_evolving_returns_the_outputs_if_asked():
    outputs = new_learner().etrace_evolve(jnp.asarray(XS), return_outputs=True)
    learner = new_learner()
    singly = [learner(jnp.asarray(x)) for x in XS]
    np.testing.assert_allclose(outputs, jnp.stack(singly), rtol=1e-12)
    learner = new_learner()
    shifted = learner.etrace_evolve(
        jnp.asarray(XS), step_fn=lambda x: learner(x) + 1, return_outputs=True
    )
    np.testing.assert_allclose(shifted, outputs + 1, rtol=1e-12)


@both_rules
def test_several_calls_equal_one(rule):
    learner = new_learner(rule)
    parts = [grads_of(learner, s, reduction='sum') for s in (slice(0, 2), slice(2, 6))]
    same(weighted(parts, [1, 1]), grads_of(new_learner(rule), reduction='sum'))


@both_rules
def test_reset_state_zeroes_trace_and_counter(rule):
    learner = new_learner(rule)
    true = grads_of(learner)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(learner.trace.value))
    assert int(learner.running_index.value) == STEPS
    learner.reset_state()
    assert not any(np.any(leaf != 0) for leaf in jax.tree.leaves(learner.trace.value))
    assert int(learner.running_index.value) == 0
    brainstate.nn.reset_all_states(learner.model, batch_size=BATCH)
    same(grads_of(learner), true)


def recurrence_in_chunks(model, size):
    def step(x, target):
        return jnp.mean((model(x) - target) ** 2)

    xs, targets = jnp.asarray(XS), jnp.asarray(TARGETS)
    return testing.recurrence(model, xs, targets, step_fn=step, chunk_size=size)


@both_rules
def test_a_plain_step_of_a_multi_step_learner_is_a_chunk_of_one(rule):
    learner = new_learner(rule, vjp_method='multi-step')
    found = grads_of(learner, reduction='sum')
    other = new_learner(rule, vjp_method='multi-step')

    def chunk(x, target):
        return jnp.mean((other(btf.MultiStepData(x[None])) - target[None]) ** 2)

    same(
        found,
        other.etrace_grad(jnp.asarray(XS), jnp.asarray(TARGETS), step_fn=chunk, reduction='sum'),
    )
    same(weighted(per_step(new_learner(rule, vjp_method='multi-step'))[0], np.ones(STEPS)), found)
    if rule == 'd_rtrl':
        same(found, recurrence_in_chunks(new_learner().model, 1))
    single = grads_of(new_learner(rule), reduction='sum')
    assert testing.compare(found, single).worst > 0.01


def test_chunks_of_one_are_single_steps_and_others_are_multi_step_data():
    same(grads_of(new_learner(), chunk_size=1), grads_of(new_learner()))
    learner = new_learner(vjp_method='multi-step')
    seen = []

    def losses(x, target):
        seen.append(x.shape)
        return jnp.mean((learner(btf.MultiStepData(x)) - target) ** 2, axis=(1, 2))

    true = recurrence_in_chunks(learner.model, 3)
    found, value = learner.etrace_grad(
        jnp.asarray(XS),
        jnp.asarray(TARGETS),
        step_fn=losses,
        chunk_size=3,
        reduction='sum',
        return_value=True,
    )
    assert value.shape == (STEPS,)
    assert set(seen) == {(3, BATCH, 3)}
    same(found, true, 1e-10)


def test_single_step_data_is_seen_by_every_step_of_a_chunk():
    class Gated(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = btf.nn.GRUCell(3, 4)

        def update(self, x, gain):
            return self.cell(x * gain)

    def learner_of():
        brainstate.random.seed(3)
        gain = jnp.asarray(0.5)
        return btf.compile(
            Gated(), 'd_rtrl', jnp.asarray(XS[0]), gain, batch_size=BATCH, vjp_method='multi-step'
        )

    learner, plain = learner_of(), learner_of()
    chunk = learner(btf.MultiStepData(jnp.asarray(XS)), btf.SingleStepData(jnp.asarray(0.5)))
    singly = [plain(btf.SingleStepData(jnp.asarray(x)), jnp.asarray(0.5)) for x in XS]
    np.testing.assert_allclose(chunk, jnp.stack(singly), rtol=1e-12)


def test_traces_stored_in_bfloat16_give_nearly_the_same_gradient():
    with brainstate.environ.context(precision=32):
        xs, targets = jnp.asarray(XS, jnp.float32), jnp.asarray(TARGETS, jnp.float32)

        def run(**options):
            brainstate.random.seed(3)
            learner = btf.compile(
                btf.nn.GRUCell(3, 4), 'd_rtrl', xs[0], batch_size=BATCH, **options
            )
            return learner, learner.etrace_grad(
                xs, targets, step_fn=step_of(learner), trace_every=1
            )

        _, exact = run()
        learner, found = run(trace_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(learner.trace.value)} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype('float32')}
    assert 0 < testing.compare(found, exact).worst < 0.02


def bar_counts(run, capsys):
    """What a progress bar printed: the counts that it showed, and its end."""
    capsys.readouterr()
    run()
    jax.effects_barrier()
    shown = re.findall(r'(\d+)/(\d+) \[', capsys.readouterr().err)
    return [int(count) for count, _ in shown], {int(end) for _, end in shown}


def test_a_progress_bar_advances_to_the_number_of_steps(capsys):
    learner = new_learner()
    xs, targets = (jnp.tile(jnp.asarray(a), (4, 1, 1)) for a in (XS, TARGETS))
    # A message per update, because a bar alone redraws only ten times a second.
    bar = brainstate.transform.ProgressBar(freq=5, desc=('step {i}', lambda d: {'i': d['i']}))
    with_bar = []

    def grad():
        with_bar.append(learner.etrace_grad(xs, targets, step_fn=step_of(learner), pbar=bar))

    counts, ends = bar_counts(grad, capsys)
    assert ends == {24}
    assert counts == sorted(counts) and set(counts) >= {0, 5, 10, 15, 20, 24}
    plain = new_learner()
    same(with_bar[0], plain.etrace_grad(xs, targets, step_fn=step_of(plain)))

    counts, ends = bar_counts(lambda: learner.etrace_evolve(xs, pbar=6), capsys)
    assert ends == {24} and counts[-1] == 24


def test_a_progress_bar_counts_windows(capsys):
    learner = new_learner(vjp_method='multi-step')

    def losses(x, target):
        return jnp.mean((learner(btf.MultiStepData(x)) - target) ** 2, axis=(1, 2))

    arguments = {'step_fn': losses, 'chunk_size': 2, 'pbar': 1}
    counts, ends = bar_counts(
        lambda: learner.etrace_grad(jnp.asarray(XS), jnp.asarray(TARGETS), **arguments), capsys
    )
    assert ends == {3} and counts[-1] == 3


class LeakyTanh(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.W = brainstate.ParamState(brainstate.random.normal(size=(3, 4)))
        self.R = brainstate.ParamState(brainstate.random.normal(size=(4, 2)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(btf.matmul(x, self.W.value))
        return self.h.value @ self.R.value


def leaky_learner(rule, **options):
    brainstate.random.seed(0)
    learner = btf.compile(
        LeakyTanh(), rule, jnp.asarray(XS[0]), batch_size=BATCH, **(RULES[rule] | options)
    )
    learner.etrace_evolve(jnp.asarray(XS))
    slopes = 1 - np.tanh(XS @ np.asarray(learner.model.W.value)) ** 2
    return learner, slopes


def test_the_trace_of_a_weight_can_be_looked_at():
    learner, slopes = leaky_learner('d_rtrl')
    trace = 0.0
    for x, f in zip(XS, slopes, strict=True):
        trace = 0.8 * trace + x[:, :, None] * f[:, None, :]
    for weight in (('W',), learner.model.W):
        ((key, found),) = learner.get_etrace_of(weight).items()
        assert key == (id(learner.graph.hidden_param_op_relations[0].y_var), 0)
        np.testing.assert_allclose(found['weight'], trace[..., None], rtol=1e-12)

    learner, slopes = leaky_learner('pp_prop')
    x_side, f_side = 0.0, 0.0
    for x, f in zip(XS, slopes, strict=True):
        x_side = 0.9 * x_side + x
        f_side = 0.9 * 0.8 * f_side + (1 - 0.9) * f
    xs, fs = learner.get_etrace_of(('W',))
    (relation,) = learner.graph.hidden_param_op_relations
    np.testing.assert_allclose(xs[id(relation.x_var)], x_side, rtol=1e-12)
    found = fs[id(relation.y_var), 'hidden_group_0']
    np.testing.assert_allclose(found, f_side[..., None], rtol=1e-12)


@both_rules
def test_a_weight_without_a_trace_has_none_to_look_at(rule):
    learner, _ = leaky_learner(rule)
    for weight in (('R',), learner.model.R, ('no', 'such'), brainstate.ParamState(jnp.ones(2))):
        with pytest.raises(ValueError, match=r"no trace of .*traced weights are \[\('W',\)\]"):
            learner.get_etrace_of(weight)


def test_etrace_grad_can_be_jitted():
    learner = new_learner()
    jitted = brainstate.transform.jit(lambda: grads_of(learner, reduction='sum'))()
    same(jitted, grads_of(new_learner(), reduction='sum'))
