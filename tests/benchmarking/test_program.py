"""A program runs what it was made from, and its work and memory are those of one run."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import benchmarking
from braintrace_fast.benchmarking import count_work


def loss(run, x):
    return jnp.mean(run(x) ** 2)


@pytest.fixture
def learner():
    return btf.compile(btf.nn.GRUCell(3, 4), 'd_rtrl', jnp.ones((2, 3)), batch_size=2)


XS = jnp.linspace(-1, 1, 36).reshape(6, 2, 3)


def close(found, true):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, true)


def test_a_program_gives_the_gradient_every_time_and_leaves_the_states_alone(learner):
    program = benchmarking.online(learner, XS, step_fn=loss)
    before = [np.asarray(s.value) for s in learner.hidden_states.values()]
    first, second = program(), program()
    close([s.value for s in learner.hidden_states.values()], before)
    close(second, first)
    close(first, learner.etrace_grad(XS, step_fn=lambda x: loss(learner, x)))


def test_bptt_is_the_gradient_of_the_mean_loss(learner):
    cell = learner.model
    found = benchmarking.bptt(cell, XS, step_fn=loss)()
    weights = cell.states(brainstate.ParamState)

    def total():
        return jnp.stack([loss(cell, x) for x in XS]).mean()

    close(found, brainstate.transform.grad(total, weights)())


def test_of_the_branches_of_a_condition_the_heaviest_counts():
    def run(flag, x):
        return jax.lax.cond(flag, lambda x: x + 1, lambda x: (x @ x) @ x, x)

    x = jnp.ones((8, 8))
    text = jax.jit(run).lower(True, x).compile().as_text()
    assert ' conditional(' in text
    assert count_work(text).flops >= 2 * 2 * 8**3


def test_updating_changes_the_weights_in_every_step(learner):
    start = {path: state.value for path, state in learner.param_states.items()}
    losses, weights = benchmarking.updating(learner, XS, step_fn=loss, rate=0.1)()
    assert losses.shape == (6,)
    fixed = learner.etrace_grad(XS, step_fn=lambda x: loss(learner, x), reduction='sum')
    moved = jax.tree.map(lambda a, b: (a - b) / 0.1, start, weights)
    sizes = [float(jnp.abs(a).max()) for a in jax.tree.leaves(moved)]
    assert all(size > 0 for size in sizes)
    differ = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), moved, fixed)
    assert max(jax.tree.leaves(differ)) > 1e-4  # the gradient of weights that have moved


def test_memory_counts_arguments_and_states(learner):
    program = benchmarking.online(learner, XS, step_fn=loss)
    weights = sum(a.nbytes for s in learner.param_states.values() for a in s.value.values())
    assert program.memory['argument_bytes'] >= XS.nbytes + weights
    trace = sum(leaf.nbytes for leaf in jax.tree.leaves(learner.trace.value))
    assert program.state_bytes >= trace + 2 * 4 * 4
    assert program.seconds > 0


def test_the_peak_of_a_fresh_process_is_that_of_the_program():
    def grow(x):
        return jnp.cumsum(jnp.broadcast_to(x, (20_000_000, 1)), axis=0)

    program = benchmarking.Program(grow, jnp.ones(()), steps=1)
    assert 0.9 * 80e6 < program.peak_bytes() < 400e6


def compiled_text(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


@pytest.fixture
def optimised():
    """What is counted is the optimised program, which tests do without otherwise."""
    jax.config.update('jax_disable_most_optimizations', False)
    yield
    jax.config.update('jax_disable_most_optimizations', True)


@pytest.mark.parametrize('length', [3, 300])
def test_work_counts_the_body_of_a_loop_as_often_as_it_runs(optimised, length):
    def run(x, w):
        def body(h, x):
            h = jnp.tanh(h @ w + x)
            return h, h

        return jax.lax.scan(body, jnp.zeros((8, 16)), x)[1]

    text = compiled_text(run, jnp.ones((length, 8, 16)), jnp.ones((16, 16)))
    work = count_work(text)
    product = 2 * 8 * 16 * 16 * length
    assert product <= work.flops <= 1.5 * product
    plane, weights = 8 * 16 * 4, 16 * 16 * 4
    # The weights, the state and the slices; at most a few planes more, and no array as a whole.
    assert length * (weights + 3 * plane) <= work.bytes <= length * (weights + 16 * plane) + 1e4
    assert work.loop_ops * length <= work.ops <= work.loop_ops * length + 10


def test_text_of_something_else_is_refused():
    with pytest.raises(ValueError, match='ENTRY'):
        count_work('nothing')
