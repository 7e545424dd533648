"""A learner with a sparse op: by kernels, in plain JAX and as back-propagation says, it is one."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import testing
from braintrace_fast.kernels import dispatch
from tests.algorithm.test_backends import kernels_in
from tests.op_models.model import TRANSITIONS, Driven, OpModel
from tests.oracles import op_recurrence as oracle
from tests.promotion import promoting

INPUTS, OUTPUTS, STEPS, EVERY = 9, 7, 7, 3
PIECES = slice(0, 4), slice(4, STEPS)


def model_of(entries: int, bias: bool) -> OpModel:
    """An op with entries at random places, of which some may be the same."""
    rng = np.random.default_rng(entries)
    rows, cols = (rng.integers(0, size, entries) for size in (INPUTS, OUTPUTS))
    data = np.ones(entries, np.float32)
    matrix = u.sparse.COO((data, rows, cols), shape=(INPUTS, OUTPUTS))

    def plain(x: Any, weights: dict[str, Any]) -> Any:
        empty = jnp.zeros((INPUTS, OUTPUTS), weights['weight'].dtype)
        return x @ empty.at[rows, cols].add(weights['weight']) + weights.get('bias', 0.0)

    def op(x: Any, weights: dict[str, Any]) -> Any:
        return btf.sparse_matmul(x, weights['weight'], sparse_mat=matrix, bias=weights.get('bias'))

    shapes = {'weight': (entries,)} | ({'bias': (OUTPUTS,)} if bias else {})
    return OpModel('sparse', op, plain, x=(INPUTS,), y=(OUTPUTS,), weights=shapes)


def differing(states: Any, y: Any) -> Any:
    """Two states, with a leak per neuron, so that no plane is uniform."""
    leaks = jnp.broadcast_to(jnp.linspace(0.3, 0.9, OUTPUTS, dtype=y.dtype), y.shape)
    return TRANSITIONS['two'][0]((leaks * states[0], states[1]), y)


FOLLOW = {'differing': differing, 'uniform': TRANSITIONS['two'][0]}


class Net(Driven):
    def __init__(self, model: OpModel, neurons: str) -> None:
        super().__init__(model, 'two')
        self.transition = FOLLOW[neurons]


def truth(model: OpModel, xs: Any, neurons: str) -> dict[str, Any]:
    """In float64, by back-propagation through all steps."""
    with jax.enable_x64(True), promoting():
        follow, size = FOLLOW[neurons], 2
        xs = jnp.asarray(np.asarray(xs, np.float64))
        start = (jnp.zeros((xs.shape[1], OUTPUTS)),) * size
        weights = {k: jnp.asarray(np.asarray(v, np.float64)) for k, v in given(model).items()}
        return oracle.bptt(model.plain, follow, weights, [*xs], start)


def given(model: OpModel) -> dict[str, Any]:
    return {key: value.astype(jnp.float32) for key, value in model.parameters().items()}


def compiled(
    model: OpModel, batch: int | None, neurons: str = 'differing', **options: Any
) -> tuple[Any, Any]:
    """A learner, and inputs with an axis of examples."""
    xs = model.inputs(STEPS, batch or 1).astype(jnp.float32)
    x = xs[0] if batch else xs[0, 0]
    return btf.compile(Net(model, neurons), 'd_rtrl', x, batch_size=batch, **options), xs


def loss_of(states: Any) -> Any:
    """Of states with an axis of examples or without."""
    with promoting():
        return oracle.losses_of([h.reshape(-1, OUTPUTS) for h in states])


def found(learner: Any, xs: Any, batch: int | None, way: str) -> dict[str, Any]:
    xs = xs if batch else xs[:, 0]

    def loss(x: Any) -> Any:
        return loss_of(learner(x))

    if way == 'per step':
        gradient = brainstate.transform.grad(loss, learner.param_states)
        parts = [*map(brainstate.transform.jit(gradient), xs)]
    else:
        options: Any = dict(step_fn=loss, reduction='sum', trace_every=EVERY)
        parts = [learner.etrace_grad(xs[piece], **options) for piece in PIECES]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    return {path[-1]: value for path, value in total.items()}


CASES = {
    'few': (5, 3, True, 'differing'),
    'past a block': (300, 3, True, 'differing'),
    'no batch': (270, None, True, 'differing'),
    'uniform': (40, 3, True, 'uniform'),
    'many examples': (40, 17, False, 'differing'),
    'one example': (300, 1, False, 'differing'),
}
QUICK = [*CASES][:4]


@pytest.mark.parametrize('way', ['per step', 'windows'])
@pytest.mark.parametrize(
    ('entries', 'batch', 'bias', 'neurons'),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_kernels_learn_as_plain_jax_and_back_propagation(entries, batch, bias, neurons, way):
    model = model_of(entries, bias)
    learner, xs = compiled(model, batch, neurons)
    plain = found(learner, xs, batch, way)
    expected = truth(model, xs, neurons)
    testing.compare(plain, expected).check(1e-5)
    kernels, xs = compiled(model, batch, neurons, backend='interpret')
    with dispatch.recording() as choices:
        testing.compare(found(kernels, xs, batch, way), expected).check(1e-5)
    ran = {choice.op: choice.implementation for choice in choices}
    # A filtered input is one more step.
    single = way == 'per step' and neurons == 'differing'
    assert ran['sparse_step' if single else 'sparse_carry'] == 'triton'
    assert not {'trace_step', 'trace_carry'} & set(ran)


def test_the_kernels_are_in_what_is_lowered_for_gpus_alone():
    learner, xs = compiled(model_of(40, True), 3, backend='pallas')

    def run(xs: Any) -> Any:
        return learner.etrace_grad(xs, step_fn=lambda x: loss_of(learner(x)))

    found = kernels_in(run, xs)
    assert 'sparse_carry' in found['cuda'] and 'trace_carry' not in found['cuda']
    assert 'adjoint_scan' in found['tpu'] and not {'sparse_carry', 'trace_carry'} & found['tpu']
    text = learner.report.to_str()
    assert 'sparse_carry on cuda: triton, asked for' in text
    assert 'sparse_carry on tpu: jax, the entries of a sparse weight are gathered by index' in text
    assert 'sparse_step on cpu: jax, there are no kernels for CPUs' in text


def test_a_trace_in_bfloat16_is_rounded_alike():
    model, options = model_of(40, True), {'trace_dtype': jnp.bfloat16, 'stochastic_rounding': True}

    def trace_of(backend: str, **options: Any) -> np.ndarray:
        learner, xs = compiled(model, 3, backend=backend, **options)
        learner.etrace_evolve(xs)
        return np.asarray(jax.tree.leaves(learner.trace.value)[-1], np.float32)

    drawn = trace_of('jax', **options)
    np.testing.assert_allclose(trace_of('interpret', **options), drawn, rtol=2**-7)
    assert np.mean(trace_of('interpret', **options) != drawn) < 0.02
    assert np.mean(trace_of('jax', trace_dtype=jnp.bfloat16) != drawn) > 0.1
