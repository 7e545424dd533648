"""Kinds of kernels are a registry: one can be added from outside, with public names only."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_fast.kernels.dispatch import (
    KINDS,
    Backend,
    FallbackError,
    Implementation,
    Kind,
    platforms,
    recording,
    register_kind,
    unregister_kind,
)
from braintrace_fast.kernels.factored_trace import smooth

OP = 'factored_trace.smooth'
CALLED = []


def toy(operands, *, interpret=False):
    """The op in a line of its own, that says so when it runs."""
    CALLED.append(interpret)
    steps = len(operands.x)
    ages = jnp.arange(steps)[:, None] - jnp.arange(steps)[None]
    weights = jnp.where(ages < 0, 0.0, operands.decay ** jnp.maximum(ages, 0).astype(float))
    xhat = weights @ operands.x
    return operands.decay * xhat[-1], xhat


def takes_three(operands):
    size = operands.x.shape[-1]
    return None if size == 3 else f'it takes three neurons, not {size}'


TOY = Kind('toy', 'cpu', implementations={OP: Implementation(toy, takes_three)})


@pytest.fixture
def register():
    """Register kinds, which are taken away again at the end."""
    names = []

    def add(kind):
        register_kind(kind)
        names.append(kind.name)

    CALLED.clear()
    yield add
    for name in names:
        unregister_kind(name)
    assert list(KINDS) == ['triton', 'mosaic']


def run(backend=None, neurons=3):
    with recording() as choices:
        _, xhat = smooth(jnp.ones((4, neurons)), None, 0.5, backend=backend or Backend('pallas'))
    np.testing.assert_allclose(xhat[:, 0], [1, 1.5, 1.75, 1.875])
    return {choice.platform: (choice.implementation, choice.reason) for choice in choices}


def test_a_kind_from_outside_is_chosen_and_runs(register):
    assert run()['cpu'] == ('jax', 'there are no kernels for CPUs')
    register(TOY)
    assert platforms() == ['cuda', 'tpu', 'cpu']
    assert run()['cpu'] == ('toy', 'asked for')
    assert CALLED == [False]
    run(Backend('pallas', frozenset({'cpu'})))


def test_it_is_gone_when_it_is_taken_away(register):
    register_kind(TOY)
    unregister_kind('toy')
    assert run()['cpu'][0] == 'jax' and not CALLED
    with pytest.raises(ValueError, match=r"no kind 'toy'.*'triton', 'mosaic'"):
        unregister_kind('toy')


def test_what_it_refuses_has_its_reason(register):
    register(TOY)
    assert run(neurons=2)['cpu'] == ('jax', 'it takes three neurons, not 2')
    with pytest.raises(FallbackError, match='no kernel on cpu: it takes three neurons, not 2'):
        run(Backend('pallas', frozenset({'cpu'})), neurons=2)
    assert not CALLED


def test_auto_leaves_out_what_is_redundant(register):
    redundant = Implementation(toy, takes_three, lambda operands: 'XLA does it as well')
    register(dataclasses.replace(TOY, implementations={OP: redundant}))
    assert run(Backend('pallas', auto=True))['cpu'] == ('jax', 'XLA does it as well')
    strict = Backend('pallas', frozenset({'cpu'}), auto=True)
    assert run(strict)['cpu'] == ('toy', 'asked for by strict=')


@pytest.mark.parametrize(('priority', 'chosen'), [(1, 'toy'), (-1, 'triton')])
def test_of_two_kinds_the_one_of_higher_priority_that_takes_the_operands_runs(
    register, priority, chosen
):
    register(dataclasses.replace(TOY, platform='cuda', priority=priority, interpreted=True))
    assert run()['cuda'] == (chosen, 'asked for')
    refused = {
        'toy': ('triton', 'asked for; not toy: it takes three neurons, not 2'),
        'triton': ('triton', 'asked for'),
    }
    assert run(neurons=2)['cuda'] == refused[chosen]
    assert run(Backend('interpret'))['interpret'][0] == chosen
    assert CALLED[-1:] == ([True] if chosen == 'toy' else [])


def test_an_op_without_an_implementation_has_no_such_kernel(register):
    register(Kind('none', 'rocm', implementations={}))
    assert run()['rocm'] == ('jax', 'no kind of kernel has it')


def test_a_name_is_taken_once(register):
    for name in ('triton', 'jax'):
        with pytest.raises(ValueError, match=f"kind '{name}' already"):
            register_kind(Kind(name, 'cuda'))
