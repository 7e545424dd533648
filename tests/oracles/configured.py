"""A layer of two states per neuron, and by hand what every configuration learns of it.

i' = a i + y,   v' = b tanh(v) + i',   y = x W + bias
loss = sum(k out),   out = sin(v') (1 + i' / 2) + skip (y + v)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import brainstate
import jax.numpy as jnp
import numpy as np

import braintrace_fast as btf

SIZE = BATCH, INPUTS, NEURONS = 2, 3, 4
STEPS = 5


class Layer(brainstate.nn.Module):
    """The layer; with ``skip``, its output reads the op and an old state past the new states."""

    def __init__(self, skip: float = 0.0, uniform: bool = False, tanh: bool = True) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.a: Any = 0.7 if uniform else rng.uniform(0.3, 0.9, NEURONS)
        self.b: Any = 0.6 if uniform else rng.uniform(0.3, 0.9, NEURONS)
        self.skip, self.tanh = skip, tanh
        self.weight = brainstate.ParamState(
            {
                'weight': jnp.asarray(rng.normal(size=(INPUTS, NEURONS))),
                'bias': jnp.asarray(rng.normal(size=NEURONS)),
            }
        )
        self.i, self.v = (
            brainstate.HiddenState(jnp.asarray(rng.normal(size=(BATCH, NEURONS)))) for _ in range(2)
        )

    def update(self, x: Any) -> Any:
        y = btf.matmul(x, self.weight.value['weight'], self.weight.value['bias'])
        old = self.v.value
        a, b = (c if isinstance(c, float) else jnp.asarray(c)[None] for c in (self.a, self.b))
        self.i.value = a * self.i.value + y
        self.v.value = b * (jnp.tanh(old) if self.tanh else old) + self.i.value
        out = jnp.sin(self.v.value) * (1 + self.i.value / 2)
        return out + self.skip * (y + old) if self.skip else out


class Step(NamedTuple):
    """The factors of a step: ``x`` with a one for the bias, planes with the states in front."""

    x: np.ndarray
    f: np.ndarray
    D: np.ndarray
    c: np.ndarray
    L: np.ndarray
    R: np.ndarray


def sequences(seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, what the outputs count, and modulators."""
    rng = np.random.default_rng(seed)
    xs = rng.normal(size=(STEPS, BATCH, INPUTS))
    return xs, rng.normal(size=(STEPS, BATCH, NEURONS)), rng.normal(size=STEPS)


def factors(layer: Layer, xs: np.ndarray, ks: np.ndarray) -> list[Step]:
    """The factors of all steps, from the layer's present states."""
    W, bias = (np.asarray(layer.weight.value[key], np.float64) for key in ('weight', 'bias'))
    i, v = np.asarray(layer.i.value, np.float64), np.asarray(layer.v.value, np.float64)
    a, b = layer.a, layer.b
    steps = []
    for x, k in zip(xs, ks, strict=True):
        slope = b * (1 - np.tanh(v) ** 2 if layer.tanh else np.ones_like(v))
        i = a * i + x @ W + bias
        v = b * (np.tanh(v) if layer.tanh else v) + i
        one, zero = np.ones_like(v), np.zeros_like(v)
        L = np.stack([k * np.sin(v) / 2, k * np.cos(v) * (1 + i / 2)])
        steps.append(
            Step(
                np.concatenate([x, np.ones((BATCH, 1))], 1),
                np.stack([one, one]),
                np.stack([np.stack([a * one, zero]), np.stack([a * one, slope])]),
                L.sum(0) + layer.skip * k,
                L,
                np.stack([zero, layer.skip * k]),
            )
        )
    return steps


def gradient(
    config: btf.ETraceConfig, steps: list[Step], modulators: np.ndarray, matrix: Any = None
) -> dict[tuple[str], dict[str, np.ndarray]]:
    """The sum of the steps' gradients, from a zero trace."""
    steps = [_signals(config, *pair, matrix) for pair in zip(steps, modulators, strict=True)]
    total = (_factorized if config.is_factorized else _whole)(config, steps)
    return {('weight',): {'weight': total[:-1], 'bias': total[-1]}}


def _signals(config: btf.ETraceConfig, step: Step, modulator: float, matrix: Any) -> Step:
    def project(planes: np.ndarray) -> np.ndarray:
        return planes / (np.linalg.norm(planes, axis=-1, keepdims=True) + 1e-8) @ matrix

    if config.learning_signal == 'symmetric':
        return step
    L, R = np.full_like(step.L, modulator), np.zeros_like(step.R)
    if config.learning_signal == 'random_feedback':
        L, R = project(step.L), project(step.R)
    return step._replace(L=L, R=R, c=(step.f * L).sum(0))


def _recursion(kind: str, decay: Any, D: np.ndarray) -> np.ndarray:
    eye = np.eye(len(D)).reshape(*D.shape[:2], 1, 1) * np.ones_like(D)
    return {'jacobian': D, 'scalar_leak': (decay or 0.0) * eye, 'none': 0 * eye}[kind]


def _whole(config: btf.ETraceConfig, steps: list[Step]) -> np.ndarray:
    e = ebar = np.zeros((2, BATCH, INPUTS + 1, NEURONS))
    kappa = config.kappa or 0.0
    total = np.zeros(e.shape[2:])
    for x, f, D, c, L, R in steps:
        D = _recursion(str(config.temporal_recursion), config.decay, D)
        past = np.einsum('sqbo,qbio->sbio', D, e)
        total += np.einsum('bo,bi->io', c, x) + np.einsum('sbo,sbio->io', L, past)
        total += np.einsum('sbo,sbio->io', kappa * L + R, ebar if kappa else e)
        e = past + np.einsum('sbo,bi->sbio', f, x)
        ebar = kappa * ebar + e
    return total


def _factorized(config: btf.ETraceConfig, steps: list[Step]) -> np.ndarray:
    a_x, a_f = config.decay_x, config.decay_f
    xhat, fhat = np.zeros((BATCH, INPUTS + 1)), np.zeros((2, BATCH, NEURONS))
    total = np.zeros((INPUTS + 1, NEURONS))
    for n, (x, f, D, c, L, R) in enumerate(steps):
        if n:
            total += np.einsum('bi,sbo->io', xhat, fhat * R) / (1 - a_f**n)
        D = _recursion(config.recursion_f, 1.0, D)
        xhat = a_x * xhat + x
        xhat[:, -1] = 1.0  # a bias has no input to smooth
        fhat = a_f * np.einsum('sqbo,qbo->sbo', D, fhat) + (1 - a_f) * f
        total += np.einsum('bi,sbo->io', xhat, fhat * L) / (1 - a_f ** (n + 1))
        total += np.einsum('bi,bo->io', x, c - (f * L).sum(0))
    return total
