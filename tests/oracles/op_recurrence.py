"""The rules on states that one op drives position by position, in plain JAX.

A trace is kept as what it is made of. Exact: per earlier step, its input and, per plane, how the
present trace depends on the op's output then. pp_prop: the two smoothed sides. Either is read by
pulling the resulting cotangents of the output back through the op's formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Weights = dict[str, Any]
Planes = list[Any]
Plain = Callable[[Any, Weights], Any]
Signal = Callable[[int, Planes], Planes]
"""``(t, L) -> L'``, the signals of a step in place of the loss's own."""


def losses_of(states: Sequence[Any]) -> Any:
    """The loss of a step, which reads every state."""
    rng = np.random.default_rng(3)
    return sum(jnp.sum(jnp.sin(h) * rng.normal(size=(1, *h.shape[1:]))) for h in states)


@dataclasses.dataclass
class Exact:
    """``e_t = D e_{t-1} + f (x) x`` and its filter ``ebar_t = kappa ebar_{t-1} + e_t``."""

    plain: Plain
    kappa: float = 0.0
    parts: list[tuple[Any, Planes, Planes]] = dataclasses.field(default_factory=list)

    def advance(self, D: Sequence[Planes], f: Planes, x: Any) -> None:
        parts = [(X, _applied(D, e), ebar) for X, e, ebar in self.parts]
        zeros = [jnp.zeros_like(plane) for plane in f]
        self.parts = [
            (X, e, [self.kappa * old + new for old, new in zip(ebar, e, strict=True)])
            for X, e, ebar in [*parts, (x, f, zeros)]
        ]

    def read(self, weights: Weights, signal: Planes) -> Weights:
        return _total([_pulled(self.plain, X, weights, ebar, signal) for X, _, ebar in self.parts])


@dataclasses.dataclass
class Factorized:
    """``xhat`` and ``fhat`` of pp_prop."""

    plain: Plain
    decay: tuple[float, float]
    xhat: Any = 0.0
    fhat: Planes | None = None
    steps: int = 0

    def advance(self, D: Sequence[Planes], f: Planes, x: Any) -> None:
        a_x, a_f = self.decay
        past = [jnp.zeros_like(p) for p in f] if self.fhat is None else _applied(D, self.fhat)
        self.xhat = a_x * self.xhat + x
        self.fhat = [a_f * old + (1 - a_f) * new for old, new in zip(past, f, strict=True)]
        self.steps += 1

    def read(self, weights: Weights, signal: Planes) -> Weights | None:
        if self.fhat is None:
            return None
        bias = 1 - self.decay[1] ** self.steps
        fhat = [plane / bias for plane in self.fhat]
        return _pulled(self.plain, self.xhat, weights, fhat, signal)


def learned(
    trace: Exact | Factorized,
    transition: Callable[[tuple[Any, ...], Any], tuple[Any, ...]],
    weights: Weights,
    xs: Sequence[Any],
    start: tuple[Any, ...],
    signal: Signal = lambda t, L: L,
    chunk: int | None = None,
) -> Weights:
    """The gradient of a sequence by a rule, per step or in chunks that are differentiated."""
    total, states = [], start
    for t, x in enumerate(xs):
        if chunk is not None and t % chunk == 0:
            by_weights, entry = jax.grad(_through(trace.plain, transition), (0, 1))(
                weights, states, xs[t : t + chunk]
            )
            total += [by_weights, trace.read(weights, signal(t, list(entry)))]
        D, f, states = _step(transition, states, trace.plain(x, weights))
        trace.advance(D, f, x)
        if chunk is None:
            total.append(trace.read(weights, signal(t, list(jax.grad(losses_of)(states)))))
    return _total([part for part in total if part])


def bptt(plain: Plain, transition: Any, weights: Weights, xs: Any, start: Any) -> Weights:
    """The gradient of the losses of all steps."""
    return jax.grad(_through(plain, transition))(weights, start, xs)


def _through(plain: Plain, transition: Any) -> Callable[..., Any]:
    def loss(weights: Weights, states: Any, xs: Any) -> Any:
        total = 0.0
        for x in xs:
            states = transition(states, plain(x, weights))
            total = total + losses_of(states)
        return total

    return loss


def _step(transition: Any, states: tuple[Any, ...], y: Any) -> tuple[Any, Planes, Any]:
    """``D[s][q]``, ``f[s]`` and the new states; what acts element by element has such tangents."""
    ones = jnp.ones_like(y)
    new, f = jax.jvp(lambda y: transition(states, y), (y,), (ones,))
    columns = []
    for q in range(len(states)):
        tangents = tuple(ones if s == q else jnp.zeros_like(ones) for s in range(len(states)))
        columns.append(jax.jvp(lambda h: transition(h, y), (states,), (tangents,))[1])
    D = [[column[s] for column in columns] for s in range(len(states))]
    return D, list(f), new


def _applied(D: Sequence[Planes], planes: Planes) -> Planes:
    return [sum(d * p for d, p in zip(row, planes, strict=True)) for row in D]


def _pulled(plain: Plain, x: Any, weights: Weights, planes: Planes, signal: Planes) -> Weights:
    cotangent = sum(p * L for p, L in zip(planes, signal, strict=True))
    return jax.vjp(lambda w: plain(x, w), weights)[1](cotangent)[0]


def _total(parts: Sequence[Weights]) -> Weights:
    return jax.tree.map(lambda *leaves: sum(leaves), *parts) if parts else {}
