"""The layers are drop-in for those of braintrace: arguments, paths, numbers drawn and computed."""

import inspect
from types import ModuleType
from typing import Any

import brainevent
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_fast import nn
from tests.promotion import promoting

LAYERS = list(nn.__all__)
OWN_SIZES = {'GroupedLinear': (2, 3, 4), 'LoRA': (3, 2, 4), 'Embedding': (5, 3)}
"""Layers that are made from other sizes, and take other inputs, than the rest."""
OF_TWO_SIZES = [n for n in LAYERS if n not in OWN_SIZES and not n.startswith('Conv')]
"""Those that are made from a number of inputs and one of outputs."""


@pytest.fixture(scope='module', name='reference')
def layers(reference: ModuleType) -> ModuleType:
    brainevent.config.set_backend('cpu', 'jax_raw')
    return reference.nn


def random_csr(*sizes: int) -> Any:
    matrix = np.random.default_rng(1).normal(size=sizes).astype(brainstate.environ.dftype())
    return brainevent.CSR.fromdense(np.where(matrix > 0, matrix, 0))


ARGUMENTS = {'SparseLinear': lambda *sizes: (random_csr(*sizes),)}
"""Of layers that are not made from two sizes."""


def make(module: ModuleType, name: str, *sizes: int) -> Any:
    brainstate.random.seed(3)
    with promoting(module is not nn):
        layer = getattr(module, name)(*ARGUMENTS.get(name, lambda *sizes: sizes)(*sizes))
        if hasattr(layer, 'init_state'):
            layer.init_state(5)
    return layer


def make_both(reference: ModuleType, name: str, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The layer of either library, after a check that their states are the same."""
    ours, theirs = make(nn, name, *sizes), make(reference, name, *sizes)
    ours_states, theirs_states = ours.states(), theirs.states()
    assert list(ours_states) == list(theirs_states)
    for path in ours_states:
        found, expected = ours_states[path], theirs_states[path]
        assert type(found) is type(expected)
        assert jax.tree.structure(found.value) == jax.tree.structure(expected.value)
        if name == 'GroupedLinear' and braintools.__version_info__ >= (0, 4):
            # Their variance is since then one by the number of groups instead of outputs.
            weight = expected.value['weight'] * (sizes[0] / sizes[2]) ** 0.5
            expected.value = {**expected.value, 'weight': weight}
        for a, b in zip(jax.tree.leaves(found.value), jax.tree.leaves(expected.value), strict=True):
            assert a.dtype == b.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-15)
    return ours, theirs


@pytest.mark.parametrize('name', LAYERS)
def test_arguments_and_their_order(reference: ModuleType, name: str) -> None:
    ours, theirs = (
        inspect.signature(getattr(module, name).__init__).parameters for module in (nn, reference)
    )
    assert list(ours) == list(theirs)
    for key, parameter in ours.items():
        found, expected = parameter.default, theirs[key].default
        assert type(found).__name__ == type(expected).__name__
        if isinstance(expected, str | type):
            assert found == expected


@pytest.mark.usefixtures('x64')
@pytest.mark.parametrize('sizes', [(3, 4), (4, 3), (4, 4)], ids=['wide', 'tall', 'square'])
@pytest.mark.parametrize('name', OF_TWO_SIZES)
def test_the_same_seed_gives_the_same_states_and_outputs(
    reference: ModuleType, name: str, sizes: tuple[int, int]
) -> None:
    ours, theirs = make_both(reference, name, sizes)
    for x in jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, sizes[0]))):
        with promoting():
            expected = theirs(x)
        np.testing.assert_allclose(ours(x), expected, rtol=1e-12, atol=1e-14)


def test_deprecated_names_are_forwarded_with_a_warning(reference: ModuleType) -> None:
    names = set(dir(reference)) - set(reference.__all__)
    assert names <= set(dir(nn)) and not names & set(nn.__all__)
    assert set(dir(nn)) == names | set(nn.__all__)
    for name in sorted(names):
        with pytest.warns(DeprecationWarning) as caught:
            found, expected = getattr(nn, name), getattr(reference, name)
        assert found is expected
        ours, theirs = (str(warning.message) for warning in caught)
        successor = theirs.split('Use ')[1].split(' ')[0]
        assert ours.startswith(f'braintrace_fast.nn.{name} is deprecated') and successor in ours
        assert caught[0].filename == __file__  # where the name is used


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'braintrace_fast.nn' has no attribute 'NoLayer'"):
        _ = nn.NoLayer


@pytest.mark.usefixtures('x64')
@pytest.mark.parametrize('lead', [(), (4,), (2, 4)])
@pytest.mark.parametrize(('name', 'sizes'), OWN_SIZES.items())
def test_layers_of_other_sizes(reference, name, sizes, lead) -> None:
    ours, theirs = make_both(reference, name, sizes)
    rng = np.random.default_rng(0)
    inputs = {
        'GroupedLinear': rng.normal(size=(*lead, 2, 3)),
        'LoRA': rng.normal(size=(*lead, 3)),
        'Embedding': rng.integers(5, size=lead),
    }
    found = ours(jnp.asarray(inputs[name]))
    with promoting():
        expected = theirs(jnp.asarray(inputs[name]))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert (ours.in_size, ours.out_size) == (theirs.in_size, theirs.out_size)
    assert isinstance(ours, type(theirs).__mro__[1])


@pytest.mark.parametrize('name', OF_TWO_SIZES)
def test_the_same_seed_gives_the_same_float32_weights(reference: ModuleType, name: str) -> None:
    weights = [
        jax.tree.leaves(
            [
                state.value
                for state in make(module, name, 7, 20).states(brainstate.ParamState).values()
            ]
        )
        for module in (nn, reference)
    ]
    # The reference takes gamma_log of the LRU from a small difference of rounded numbers.
    rtol = 5e-6 if name == 'LRUCell' else 1e-6
    for ours, theirs in zip(*weights, strict=True):
        assert ours.dtype == theirs.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-7)
