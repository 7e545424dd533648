"""Learn a program in several ways, and compare each with the oracle."""

import functools
import gc
import traceback
import warnings
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace_fast as bt
from tests.fuzz.oracle import Oracle, load

__all__ = ['Vacuous', 'failures', 'show']

TOLERANCE = 1e-9


class Vacuous(Exception):
    """The program proves little: no gradient comes from the past, or some are not finite."""


def failures(path: str) -> list[str]:
    """What is wrong with each way of learning the program in a file; empty if all is well."""
    text = Path(path).read_text()
    with brainstate.environ.context(precision=64), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        program = load(text, path)
        with program.environment(0.0):
            oracle = Oracle(text, path)
            if not oracle.past_matters:
                raise Vacuous('the trace is never read, or nothing is finite')
            return [
                f'{case}\n{wrong}'
                for case in program.CASES
                if (wrong := _wrong(program, oracle, case, text, path))
            ]


def _wrong(program: Any, oracle: Oracle, case: dict, text: str, path: str) -> str:
    try:
        learner, grads, losses, outs, hidden = _learn(program, case)
    except Exception:
        return traceback.format_exc(limit=-6)
    if case['options'].get('feedback') == 'random':  # no oracle knows the matrices
        true = _learn(program, case | dict(way='steps'))[1]
    elif case['rule'] == 'eprop':  # which weighs states of a group otherwise than other paths
        groups = [group.hidden_paths for group in learner.graph.hidden_groups]
        true = Oracle(text, path, groups).gradient(case)
    else:
        true = oracle.gradient(case)
    length = sum(case['pieces'])
    values = [np.concatenate([np.ravel(leaf) for leaf in _leaves(g)]) for g in true.values()]
    scale = max(np.abs(v).max() for v in values)
    lines = []
    for key, value in zip(true, values, strict=True):
        found = np.zeros(value.shape)
        if key in grads:
            found = np.concatenate([np.ravel(leaf) for leaf in _leaves(grads[key])])
        error = np.abs(found - value).max() / scale
        if not error < TOLERANCE:
            lines.append(
                f'gradient of {key}: {error:.2e} off\nfound {found[:6]}\ntrue  {value[:6]}'
            )
    pairs = {
        'losses': (losses, oracle.losses[:length]),
        'outputs': (outs, oracle.outs[:length]),
    }
    if length == len(oracle.losses):
        pairs['states'] = (hidden, oracle.last)
    for name, (found, value) in pairs.items():
        both = [np.concatenate([np.ravel(a) for a in jax.tree.leaves(t)]) for t in (found, value)]
        error = np.abs(both[0] - both[1]).max() / (1 + np.abs(both[1]).max())
        if not error < TOLERANCE:
            lines.append(f'{name}: {error:.2e} off')
    return '\n'.join(lines)


def _leaves(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _learn(program: Any, case: dict) -> Any:
    net, outside = program.make()
    xs, targets, ks = program.sequences()
    options = dict(case['options'])
    if options.get('feedback') == 'random':
        options['random_feedback_key'] = jax.random.key(0)
    learner: Any = bt.compile(net, case['rule'], xs[0], batch_size=program.BATCH, **options)
    weights = {**learner.param_states, **{(name,): state for name, state in outside.items()}}
    has_modulator = case['rule'] == 'three_factor'

    def loss(x: Any, target: Any, k: Any, modulator: Any) -> Any:
        run = (lambda x: learner(x, modulator=modulator)) if has_modulator else learner
        return program.loss(run, net, outside, x, target, k)

    def chunk_loss(x: Any, target: Any, k: Any, modulator: Any) -> Any:
        outs = learner(bt.MultiStepData(x))
        results = [
            program.loss(lambda _, t=t: outs[t], net, outside, x[t], target[t], k[t])
            for t in range(len(x))
        ]
        return jnp.stack([r[0] for r in results]), dict(out=outs)

    total, losses, outs, start = None, [], [], 0
    brainstate.random.seed(0)
    for length in case['pieces']:
        place = slice(start, start + length)
        sequences = xs[place], targets[place], ks[place], jnp.asarray(Oracle.modulators[place])
        mask = None if case['mask'] is None else jnp.asarray(case['mask'][place])
        if case['way'] in ('chunks', 'windows'):
            chunks = case['way'] == 'chunks'
            gradient = functools.partial(
                learner.etrace_grad,
                step_fn=chunk_loss if chunks else loss,
                mask=mask,
                weights=weights,
                trace=case['trace'],
                reduction=case['reduction'],
                return_value=True,
                has_aux=True,
                **(dict(chunk_size=2) if chunks else dict(trace_every=case['trace_every'])),
            )
            gradient = brainstate.transform.jit(gradient) if case['jit'] else gradient
            grads, values, aux = gradient(*sequences)
            if case['reduction'] == 'mean':
                share = length if mask is None else max(mask.sum(), 1)
                grads = jax.tree.map(lambda g, s=share: g * s, grads)
        else:
            if case['trace'] == 'fresh':
                learner.reset_state()
            way = _by_steps if case['way'] == 'steps' else _around_a_loop
            ones = jnp.ones(length) if mask is None else mask
            sequences = (*sequences[:3], sequences[3] * ones)  # a modulator is weighed alike
            grads, values, aux = way(loss, weights, sequences, ones)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        losses.append(values)
        outs.append(aux['out'])
        start += length
    hidden = [u.get_mantissa(s.value) for s in net.states(brainstate.HiddenState).values()]
    return learner, total, losses, outs, hidden


def _by_steps(loss: Any, weights: Any, sequences: Any, mask: Any) -> Any:
    @brainstate.transform.jit
    def step(slices: Any, weight: Any) -> Any:
        def weighed() -> Any:
            value, aux = loss(*slices)
            return weight * value, (value, aux)

        return brainstate.transform.grad(weighed, weights, has_aux=True)()

    total, results = None, []
    for t, weight in enumerate(mask):
        grads, result = step([a[t] for a in sequences], weight)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        results.append(result)
    return total, *jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def _around_a_loop(loss: Any, weights: Any, sequences: Any, mask: Any) -> Any:
    @brainstate.transform.jit
    def gradient() -> Any:
        def weighed() -> Any:
            values, aux = brainstate.transform.for_loop(loss, *sequences)
            return jnp.sum(mask * values), (values, aux)

        return brainstate.transform.grad(weighed, weights, has_aux=True)()

    grads, (values, aux) = gradient()
    return grads, values, aux


def show(path: str) -> None:
    """Print what is wrong with a program; the end of every program."""
    jax.config.update('jax_disable_most_optimizations', True)
    found = failures(path)
    print('\n\n'.join(found) or 'All ways of learning agree with the oracle.')
    raise SystemExit(bool(found))


def clear() -> None:
    """Drop compiled programs."""
    jax.clear_caches()
    gc.collect()
