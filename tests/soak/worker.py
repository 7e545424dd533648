"""Learns from a stream in pieces, and goes on from a file if there is one.

Prints a line for every piece and before every save, and the memory of the process at the end. Where
to save and to go back is random and not repeated; what comes out must not depend on it.
"""

import argparse
import gc
import os
import random

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace_fast as btf

N_IN, N, BATCH = 5, 24, 3
LENGTHS = (10, 25, 60)
"""Of pieces; few, for each is compiled."""
WARM_UP = 15
"""Pieces after which all is compiled and memory may not grow."""
RULES = {'d_rtrl': {}, 'pp_prop': {'decay_or_rank': 0.9}, 'eprop': {'kappa_filter_decay': 0.5}}


class Noisy(brainstate.nn.Module):
    """Leaky units with noise, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = btf.nn.Linear(N_IN + N, N)
        self.readout = btf.nn.Linear(N, 1)

    def init_state(self, batch_size=None, **_):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, N)))

    def update(self, x):
        noise = brainstate.random.normal(size=self.v.value.shape)
        seen = jnp.concatenate([x, jnp.tanh(self.v.value)], axis=-1)
        self.v.value = 0.8 * self.v.value + self.recurrent(seen) + 0.1 * noise
        return self.readout(jnp.tanh(self.v.value))


def pieces(steps: int) -> list[tuple[int, int]]:
    """Where pieces start, and their lengths; the same in all processes."""
    rng, found, start = np.random.default_rng(1), [], 0
    while start < steps:
        length = int(rng.choice(LENGTHS))
        found.append((start, length))
        start += length
    return found


def stream(start: int, length: int) -> jax.Array:
    rng = np.random.default_rng([2, start])
    return jnp.asarray(rng.normal(size=(length, BATCH, N_IN)), jnp.float32)


class Session:
    """A learner with an optimiser and their file."""

    def __init__(self, rule: str, path: str | None) -> None:
        brainstate.random.seed(0)
        self.path = path
        x = stream(0, 1)[0]
        options = RULES[rule]
        self.learner = btf.compile(
            Noisy(), rule, x, batch_size=BATCH, memory_budget='1MB', **options
        )
        self.optimiser = braintools.optim.Adam(1e-2)
        self.optimiser.register_trainable_weights(self.learner.param_states)
        self.train = brainstate.transform.jit(self._train)

    def _train(self, xs: jax.Array) -> None:
        def loss(x):
            return jnp.mean((self.learner(x) - x.sum(-1, keepdims=True)) ** 2)

        self.optimiser.update(self.learner.etrace_grad(xs, step_fn=loss))

    @property
    def others(self) -> dict:
        return {'optimiser': self.optimiser}

    @property
    def position(self) -> int:
        return int(self.learner.running_index.value)

    def save(self) -> None:
        print('saving', flush=True)
        self.learner.save(self.path, others=self.others)

    def load(self) -> None:
        self.learner.load(self.path, others=self.others)

    def everything(self) -> list[np.ndarray]:
        learner = self.learner
        states = {**learner.graph_executor.states, **brainstate.graph.states(self.optimiser)}
        values = [s.value for s in (*states.values(), *learner.own_states)]
        return [_as_numpy(leaf) for leaf in jax.tree.leaves(values)]


def _as_numpy(leaf) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def resident_bytes() -> int:
    gc.collect()
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def run(rule: str, steps: int, path: str | None, seed: int, result: str) -> None:
    """Learn to the end; with a path, save and go back at random."""
    session, rng = Session(rule, path), random.Random(seed)
    if path and os.path.exists(path):
        session.load()
    starts, done, memory = dict(pieces(steps)), 0, 0
    while session.position in starts:
        start = session.position
        session.train(stream(start, starts[start]))
        done += 1
        print(f'at {session.position}', flush=True)
        if path and rng.random() < 0.4:
            session.save()
            if rng.random() < 0.3:
                session.load()
        elif path and os.path.exists(path) and rng.random() < 0.1:
            session.load()  # some steps back
        if done == WARM_UP:
            memory = resident_bytes()
    grown = resident_bytes() - memory if done > WARM_UP else 0
    np.savez(result, *session.everything())
    print(f'grown {grown}', flush=True)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rule', choices=RULES, required=True)
    parser.add_argument('--steps', type=int, required=True)
    parser.add_argument('--path')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--result', required=True)
    args = parser.parse_args()
    with brainstate.environ.context(dt=0.1 * u.ms):
        run(args.rule, args.steps, args.path, args.seed, args.result)
