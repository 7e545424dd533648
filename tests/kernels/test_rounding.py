"""Stochastic rounding: right on average, one of the two neighbours, no two draws alike."""

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_fast.kernels.rounding import keys, round_to

rounded = jax.jit(lambda values, key: round_to(values, jnp.bfloat16, key))
DRAWS = 4096


def drawn(values, seed=1, draws=DRAWS):
    values = jnp.asarray(values, 'float32')
    return np.asarray(jax.vmap(rounded, in_axes=(None, 0))(values, keys(seed, draws)), 'float64')


def test_it_is_unbiased():
    normal = np.random.default_rng(0).normal(size=60)
    values = np.float32([*normal, 0, 1, -1, 3e38, 1e-30]).astype('float64')
    found = drawn(values)
    low, high = found.min(0), found.max(0)
    assert np.all((low <= values) & (values <= high)) and np.sum(low < high) > 60
    share = (values - low) / np.where(low < high, high - low, 1)
    error = np.abs((found == high).mean(0) - share)[low < high]
    assert np.all(error < 4 * np.sqrt(share * (1 - share) / DRAWS)[low < high])
    assert np.all(high - low <= 2**-7 * np.abs(values))


def test_a_sum_of_small_parts_does_not_stall():
    def total(keys):
        def step(total, key):
            return round_to(total.astype(jnp.float32) + 2**-11, jnp.bfloat16, key), None

        return jax.lax.scan(step, jnp.ones(256, jnp.bfloat16), keys, length=1024)[0]

    assert abs(np.asarray(total(keys(3, 1024)), 'float64').mean() - 1.5) < 0.01
    assert np.all(np.asarray(total(None), 'float64') == 1)


def test_what_is_exact_or_not_finite_stays():
    payload = np.uint32(0x7FFFFFFF).view('float32')
    values = np.float32([np.inf, -np.inf, 0, -0.0, 1.5, payload])
    for found in drawn(values, draws=8):
        np.testing.assert_array_equal(found, values)


def test_draws_differ_between_elements_planes_and_steps():
    half = jnp.full(4096, 1 + 2**-8)  # between two neighbours: a coin each
    coins = np.concatenate([drawn(half, seed, 4) > 1 for seed in range(6)]) * 2.0 - 1
    bound = 5 / np.sqrt(half.size)
    assert np.abs(coins @ coins.T / half.size - np.eye(len(coins))).max() < bound
    for shift in (1, 2, 64, 1000):
        assert np.abs((coins * np.roll(coins, shift, 1)).mean(1)).max() < bound
