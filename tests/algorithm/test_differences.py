"""The README's table of differences, a test per row, beside braintrace.

What the reference does is reproduced, so that a change on its side is noticed, and what we do is
compared with the truth. The table says against which versions a row holds: each test is given
whether it does against the one that is installed, 0.2.6 on Python 3.11 and 0.2.8 on later ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import testing
from tests.oracles.step import random_projection
from tests.promotion import promoting
from tests.reference_models import (
    BATCH,
    KAPPA,
    RULES,
    STEPS,
    N,
    build,
    by_name,
    chunk_gradient,
    eprop_gradients,
    flat,
    gradient,
    learner_of,
    ratio,
    relative_error,
    step_gradients,
    truth,
)

pytestmark = pytest.mark.usefixtures('x64')

README = (Path(__file__).parents[2] / 'README.md').read_text('utf-8')
TABLE = {
    case: versions.split(', ')
    for case, versions in re.findall(
        r'^\| (.*?) \| (0\.2\.\d(?:, 0\.2\.\d)*) \|', README, re.MULTILINE
    )
}
"""The versions against which each row holds."""
TESTED = []
"""The rows that have a test here."""


def row(beginning: str) -> pytest.MarkDecorator:
    """Of which row a test is; it gets, as ``differs``, whether the README says that it holds."""
    (case,) = (case for case in TABLE if case.startswith(beginning))
    TESTED.append(case)
    return pytest.mark.parametrize('differs', [case], indirect=True, ids=[beginning])


@pytest.fixture
def differs(request: pytest.FixtureRequest, reference: ModuleType) -> bool:
    return reference.__version__ in TABLE[request.param]


def test_every_row_of_the_table_is_tested():
    assert sorted(TESTED) == sorted(TABLE) and len(TABLE) > 20


@row("states that read each other's new value")
def test_states_that_read_each_others_new_value_count_once(reference, differs):
    ours, theirs, true = step_gradients(reference, 'lif_expon')
    assert ratio(theirs['comm'], true['comm']) == pytest.approx(2.0, rel=1e-9)
    assert ratio(ours['comm'], true['comm']) == pytest.approx(1.0, rel=1e-12)
    ours, theirs, true = step_gradients(reference, 'alif_expon')
    assert ratio(theirs['comm'], true['comm']) == pytest.approx(2.0, rel=0.1)
    assert relative_error(ours['comm'], true['comm']) < 1e-12
    ours, theirs, true = step_gradients(reference, 'lstm')
    for gate, deviation in {'Wi': 2.0, 'Wf': 2.0, 'Wg': 2.0, 'Wo': 1.0}.items():
        assert ratio(theirs[gate], true[gate]) == pytest.approx(deviation, rel=1e-9)
        assert ratio(ours[gate], true[gate]) == pytest.approx(1.0, rel=1e-12)
    assert differs


def check_step_gradient(reference: ModuleType, name: str, weight: str, wrong: bool) -> None:
    """Theirs is 0 where it is wrong."""
    ours, theirs, true = step_gradients(reference, name)
    if wrong:
        assert np.all(flat(theirs[weight]) == 0)
    else:
        assert relative_error(theirs[weight], true[weight]) < 1e-12
    assert relative_error(ours[weight], true[weight]) < 1e-12
    ours, true = by_name(gradient(btf, name)), by_name(truth(name))
    assert relative_error(ours[weight], true[weight]) < 1e-12


@row('parameter without a traced occurrence')
@pytest.mark.parametrize(
    'name, weight', [('plain_readout', 'R'), ('lru', 'C_re'), ('lru', 'C_im'), ('lru', 'D')]
)
def test_a_parameter_that_is_not_traced_has_its_step_gradient(reference, differs, name, weight):
    check_step_gradient(reference, name, weight, wrong=differs)


@row('op that another one reads')
def test_an_op_that_reaches_states_through_another_one_has_its_step_gradient(reference, differs):
    check_step_gradient(reference, 'gru', 'Wr', wrong=differs)
    ours, theirs, true = step_gradients(reference, 'minimal_rnn')
    assert (relative_error(theirs['phi'], true['phi']) > 0.05) == differs
    assert relative_error(ours['phi'], true['phi']) < 1e-12


@row('output that reads an op directly')
def test_an_output_that_reads_y_directly_counts(reference, differs):
    ours, theirs, true = step_gradients(reference, 'reads_output')
    check_errors(differs, theirs['W'], ours['W'], true['W'], deviation=0.3)


def check_errors(differs: bool, theirs: Any, ours: Any, true: Any, deviation: float) -> None:
    """Ours is right; theirs deviates by so much at least, or is right as well."""
    assert relative_error(ours, true) < 1e-10
    error = relative_error(theirs, true)
    assert error > deviation if differs else error < 1e-10


@row('output that reads the state of the step before')
def test_an_output_that_reads_the_state_of_the_step_before_counts(reference, differs):
    ours, theirs = (gradient(lib, 'reads_old') for lib in (btf, reference))
    check_errors(differs, theirs, ours, truth('reads_old'), deviation=0.1)


@row('output that reads a value before it is stored')
def test_an_output_that_reads_a_value_before_it_is_stored_counts(reference, differs):
    ours, theirs = (gradient(lib, 'reads_unstored') for lib in (btf, reference))
    check_errors(differs, theirs, ours, truth('reads_unstored'), deviation=0.1)


@row('state that only keeps')
def test_a_state_that_keeps_the_old_value_of_another_is_of_its_group(reference, differs):
    ours, theirs = (gradient(lib, 'remembers') for lib in (btf, reference))
    check_errors(differs, theirs, ours, bptt('remembers'), deviation=0.1)


@row('output that reads a `while`')
def test_an_output_that_reads_a_loop_of_the_states_counts(reference, differs):
    true = truth('output_loops')
    assert relative_error(gradient(btf, 'output_loops'), true) < 1e-10
    with pytest.raises(ValueError, match='Reverse-mode differentiation does not work'):
        gradient(reference, 'output_loops')
    assert differs


@row('long `scan` in a step, loss')
def test_a_loss_that_reads_all_substeps_counts(reference, differs):
    ours, theirs = (gradient(lib, 'substeps_stacked') for lib in (btf, reference))
    true = bptt('substeps_stacked')
    assert relative_error(ours, true) < 1e-10
    assert np.all(flat(theirs) == 0) if differs else relative_error(theirs, true) < 1e-10


def bptt(name: str) -> Any:
    model, xs = build(btf, name)
    return testing.bptt(model, xs, step_fn=lambda x: random_projection(model(x)))


@row('long `scan` in a step with')
@pytest.mark.parametrize(
    'name, rule',
    [
        ('substeps', 'pp_prop'),
        ('substeps_sliced', 'd_rtrl'),
        ('substeps_start', 'd_rtrl'),
        ('substeps_outside', 'd_rtrl'),
    ],
)
def test_long_scans_of_any_kind_are_learned(reference, differs, name, rule):
    with pytest.raises(NotImplementedError):
        gradient(reference, name, rule)
    assert differs
    found = gradient(btf, name, rule)
    if rule == 'd_rtrl':
        assert relative_error(found, bptt(name)) < 1e-10
    else:  # held against its recurrence in test_substeps.py
        assert np.any(flat(found))


@row('operation that mixes positions')
def test_an_operation_that_mixes_positions_before_the_state_is_differentiated(reference, differs):
    ours, theirs, true = step_gradients(reference, 'normalised')
    assert (np.abs(flat(theirs['W'])).max() < 1e-10 * np.abs(flat(true['W'])).max()) == differs
    assert relative_error(ours['W'], true['W']) < 1e-12
    learner, _ = learner_of(btf, 'normalised', 'd_rtrl')
    kind = btf.DiagnosticKind.TAIL_NOT_POSITION_WISE
    assert {record.weight_path for record in learner.graph.explain(kind=kind)} == {('W',)}


@row('order of hidden groups')
def test_groups_are_in_the_order_of_the_models_states(reference, differs):
    orders = [
        [group.hidden_paths for group in learner_of(lib, 'used_backwards', 'd_rtrl')[0].graph[1]]
        for lib in (btf, reference)
    ]
    states = build(btf, 'used_backwards')[0].states(brainstate.HiddenState)
    assert orders[0] == [[path] for path in states]
    assert (orders[1] == orders[0][::-1]) == differs


def loop_gradient(lib: ModuleType, name: str) -> Any:
    learner, xs = learner_of(lib, name, 'd_rtrl')

    def loss():
        return brainstate.transform.for_loop(lambda x: random_projection(learner(x)), xs).sum()

    return brainstate.transform.grad(loss, learner.param_states)()


@row('`grad` around a whole loop')
def test_grad_around_a_whole_loop_is_the_same_as_per_step(reference, differs):
    per_step, true = gradient(reference, 'leaky'), truth('leaky')
    assert relative_error(per_step, true) < 1e-10
    loops = (loop_gradient(lib, 'leaky') for lib in (reference, btf))
    check_errors(differs, *loops, true, deviation=0.1)


@row('weight processed before the op')
@pytest.mark.parametrize('name', ['doubled', 'masked', 'transposed'])
def test_a_weight_processed_before_the_op_has_the_gradient_of_the_parameter(
    reference, differs, name
):
    ours, theirs, true = step_gradients(reference, name)
    check_errors(differs, theirs['W'], ours['W'], true['W'], deviation=0.1)


@row('op under `jax.checkpoint`')
def test_an_op_under_checkpoint_is_traced(reference, differs):
    ours, theirs, true = step_gradients(reference, 'checkpoint')
    assert np.all(flat(theirs['W']) == 0) == differs
    assert relative_error(ours['W'], true['W']) < 1e-12
    assert relative_error(gradient(btf, 'checkpoint'), truth('checkpoint')) < 1e-12


@row('bias correction')
def test_bias_correction_of_chunks_counts_steps(reference, differs):
    """Two chunks of three steps: the trace is read once, at the entry of the second."""
    ours, theirs = (
        flat(chunk_gradient(lib, 'leaky', 'pp_prop', size=3)) for lib in (btf, reference)
    )
    model, xs = build(btf, 'leaky')
    decay = RULES['pp_prop'][1]['decay_or_rank']
    oracle = testing.Recurrence(model, xs, step_fn=lambda x: random_projection(model(x)))
    assert relative_error(ours, oracle.gradient(decay, chunk_size=3)) < 1e-10
    learner, _ = learner_of(btf, 'leaky', 'pp_prop', vjp_method='multi-step')
    without_trace = 0.0
    for chunk in (xs[:3], xs[3:]):
        learner.reset_state()
        grads = learner.etrace_grad(
            chunk,
            step_fn=lambda x: jax.vmap(random_projection)(learner(btf.MultiStepData(x))),
            chunk_size=3,
            reduction='sum',
        )
        without_trace = without_trace + flat(grads)
    # After three steps, but one call: the reference corrects for two.
    deviation = (1 - decay[1] ** 3) / (1 - decay[1] ** 2)
    found = ratio(theirs - without_trace, ours - without_trace)
    assert (found == pytest.approx(deviation)) == differs


@row('filter of `EProp`')
def test_the_filter_of_eprop_advances_without_a_gradient(reference, differs):
    """The loss is linear in the states: with ``g_r`` of D-RTRL, ``sum_r kappa^(t-r) g_r``."""
    evolved = 3
    sums = [0.0, *(flat(truth('vanilla', steps)) for steps in range(1, STEPS + 1))]
    g = [after - before for before, after in zip(sums, sums[1:], strict=False)]

    def filtered(since):
        return sum(
            KAPPA ** (t - r) * g[r] for t in range(evolved, STEPS) for r in range(since, t + 1)
        )

    ours, theirs = (
        sum(map(flat, eprop_gradients(lib, 'vanilla', 'filter', evolved)))
        for lib in (btf, reference)
    )
    np.testing.assert_allclose(ours, filtered(0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(theirs, filtered(evolved), rtol=1e-5, atol=1e-7)
    assert (np.linalg.norm(ours - theirs) > 0.1 * np.linalg.norm(ours)) == differs


@row('standing modulator')
def test_a_standing_modulator_that_is_set_anew_counts_under_jit(reference, differs):
    def gradients(lib):
        learner, xs = learner_of(lib, 'vanilla', 'modulator', modulator=1.0)
        start = [(state, state.value) for state in learner.states().values()]

        @brainstate.transform.jit
        def step():
            loss = lambda: random_projection(learner(xs[0]))  # noqa: E731
            with promoting(lib is not btf):
                return brainstate.transform.grad(loss, learner.param_states)()

        first = flat(step())
        for state, value in start:
            state.value = value
        learner.modulator = -2.0
        return first, flat(step())

    ours, theirs = gradients(btf), gradients(reference)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], -2 * ours[0], rtol=1e-6)
    assert np.allclose(theirs[1], theirs[0], rtol=1e-6) == differs


@row('`mask` with a modulator')
@pytest.mark.parametrize('rule', ['modulator', 'feedback'])
def test_a_mask_weighs_other_signals_too(reference, differs, rule):
    options = {'modulator': 1.0} if rule == 'modulator' else {}

    def gradient(lib, weight):
        learner, xs = learner_of(lib, 'vanilla', rule, **options)
        loss = lambda x: random_projection(learner(x))  # noqa: E731
        mask = jnp.full(STEPS, weight)
        with promoting(lib is not btf):
            return flat(learner.etrace_grad(xs, step_fn=loss, mask=mask, reduction='sum'))

    ours, theirs = gradient(btf, 1.0), gradient(reference, 1.0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient(btf, 0.5), 0.5 * ours, rtol=1e-5, atol=1e-7)
    assert np.allclose(gradient(reference, 0.5), theirs, rtol=1e-5, atol=1e-7) == differs
    learns_from_none = np.any(gradient(reference, 0.0))
    assert learns_from_none == (rule == 'modulator') and not np.any(gradient(btf, 0.0))


@row('`UORO`, single-step')
def test_uoro_counts_the_present_step_exactly(reference, differs):
    ours, theirs = (gradient(lib, 'vanilla', 'uoro', steps=1) for lib in (btf, reference))
    check_errors(differs, theirs, ours, truth('vanilla', steps=1), deviation=0.1)


def largest_array(jaxpr: Any) -> int:
    """The number of elements of the largest array that a program makes, in loops too."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, 'size')]
    inner = [
        largest_array(getattr(sub, 'jaxpr', sub))
        for eqn in jaxpr.eqns
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
        if is_jaxpr(sub)
    ]
    return max([0, *sizes, *inner])


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, 'eqns')


@row("`UORO`'s Jacobian between states")
def test_uoro_builds_no_jacobian_between_states(reference, differs):
    """A batch of states has 8 numbers, and nothing else of the step more than 56."""

    def largest(lib):
        learner, xs = learner_of(lib, 'vanilla', 'uoro')
        with promoting(lib is not btf):
            made = brainstate.transform.make_jaxpr(learner)(xs[0])
        return largest_array(made[0].jaxpr)

    assert (largest(reference) >= (BATCH * N) ** 2) == differs
    assert largest(btf) < (BATCH * N) ** 2


@row('`train_synthetic_gradient(reset=True)`')
def test_training_of_synthetic_gradients_starts_anew(reference, differs):
    def losses(lib):
        learner, xs = learner_of(lib, 'vanilla', 'dni')
        with promoting(lib is not btf):
            learner.init_etrace_state()
            shapes = learner.group_signal_shapes()
            learner.attach_synthesizer(lib.SyntheticGradient(shapes, scale=0.3))
            options = {'chunk_size': 2, 'lr': 0.0, 'batch_size': BATCH}
            return [lib.train_synthetic_gradient(learner, xs, **options) for _ in range(2)]

    ours, theirs = losses(btf), losses(reference)
    assert ours[0] == ours[1]
    assert (theirs[0] != theirs[1]) == differs


class Gained(brainstate.nn.Module):
    """A leaky sum of inputs, amplified by what the environment says."""

    def __init__(self, lib):
        super().__init__()
        self.lib = lib
        self.w = brainstate.ParamState(jnp.eye(2))
        self.h = brainstate.HiddenState(jnp.zeros(2))

    def update(self, x):
        gain = brainstate.environ.get('gain', 1.0)
        self.h.value = 0.5 * self.h.value + gain * self.lib.matmul(x, self.w.value)
        return self.h.value


def gained(lib: ModuleType) -> Any:
    learner = lib.D_RTRL(Gained(lib))
    learner.compile_graph(jnp.ones(2))
    return learner


@row('environment')
def test_the_environment_is_followed(reference, differs):
    ours, theirs = gained(btf), gained(reference)
    with brainstate.environ.context(gain=3.0):
        assert np.all(theirs(jnp.ones(2)) == 1) == differs
        np.testing.assert_array_equal(ours(jnp.ones(2)), 3 * jnp.ones(2))


@row('`step_fn` that writes')
def test_a_state_that_step_fn_writes_is_known_to_the_trace(reference, differs):
    """Two episodes of one step: each has the gradient 1."""
    done = jnp.asarray([0.0, 1.0])

    def writing(learner):
        def step(x, done):
            (state,) = learner.hidden_states.values()
            state.value = (1 - done) * state.value
            return learner(x).sum()

        return step

    ours, theirs = gained(btf), gained(reference)
    xs, options = jnp.ones((2, 2)), {'reduction': 'sum'}
    with promoting():
        found = theirs.etrace_grad(xs, done, step_fn=writing(theirs), **options)
    assert np.all(found['w',] == 2.5) == differs
    with pytest.raises(btf.NotSupportedError, match='reset=done'):
        ours.etrace_grad(xs, done, step_fn=writing(ours), **options)
    found = ours.etrace_grad(xs, done, step_fn=lambda x, d: ours(x, reset=d).sum(), **options)
    np.testing.assert_array_equal(found['w',], jnp.full((2, 2), 2.0))
