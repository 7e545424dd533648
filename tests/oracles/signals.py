"""The rules with other signals and filters, step by step in numpy, from dense Jacobians.

With ``ell_t`` the gradient of the step at fixed states and ``c J`` the part of it that passes the
output of a traced op, per step::

    e_t    = D_t e_{t-1} + f_t J_t
    ebar_t = kappa ebar_{t-1} + e_t
    g_t    = ell_t + L_t D_t e_{t-1} + (kappa L_t + R_t) ebar_{t-1}       the loss's own signal
    g_t    = ell_t - c_t J_t + L'_t ebar_t + R'_t ebar_{t-1}              any other
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import brainstate
import jax
import numpy as np

from tests.models import ModelCase
from tests.oracles.recurrence import STEPS, oracle_of

Signal = Callable[[int, int, Any, Any], tuple[Any, Any]]
"""``(t, g, L, R) -> (L', R')`` with planes of shape ``(S, *varshape)``."""


def gradients_per_step(
    case: ModelCase, kappa: float = 0.0, signal: Signal | None = None, steps: int = STEPS
) -> Iterator[Any]:
    """The gradient of each step by all parameters, flat, with the trace from zero."""
    oracle = oracle_of(case, steps=steps)
    dense, all_factors = oracle.dense, oracle.factors
    size = all_factors[0].step_gradient.size
    varshapes = [dense.varshape(oracle.values[0], g) for g in range(len(dense.groups))]
    traced = [
        [
            columns is not None and any(np.any(F.f[k][g]) for F in all_factors)
            for g, columns in enumerate(by_group)
        ]
        for k, by_group in enumerate(dense.columns)
    ]
    loss_by_outputs = jax.jit(
        dense.jacobian(lambda added, values, at: dense.run(values, at, added).loss)
    )
    e = [np.zeros((*F.shape, size)) for F in all_factors[0].L]
    ebar = [np.zeros_like(trace) for trace in e]
    for t, (values, at, F) in enumerate(
        zip(oracle.values, oracle.slices, all_factors, strict=True)
    ):
        with brainstate.environ.context(precision=64):
            c = jax.tree.map(np.asarray, loss_by_outputs(dense.zeros, values, at))
        gradient = np.asarray(F.step_gradient)
        if signal is not None:
            for k, groups in enumerate(traced):
                if any(groups):
                    gradient = gradient - c[k].ravel() @ F.J[k]
        for g, D in enumerate(F.D):
            past = np.einsum('sqp,qpw->spw', D, e[g])
            now = sum(
                F.f[k][g][..., None] * F.J[k][dense.columns[k][g]]
                for k in range(len(traced))
                if traced[k][g]
            )
            L, R = F.L[g], F.R[g]
            if signal is not None:
                shaped = (plane.reshape(-1, *varshapes[g]) for plane in (L, R))
                L, R = (plane.reshape(len(D), -1) for plane in signal(t, g, *shaped))
                gradient = gradient + np.einsum('sp,spw->w', L, np.broadcast_to(now, past.shape))
            gradient = gradient + np.einsum('sp,spw->w', L, past + kappa * ebar[g])
            gradient = gradient + np.einsum('sp,spw->w', R, ebar[g] if kappa else e[g])
            e[g] = past + now
            ebar[g] = kappa * ebar[g] + e[g]
        yield gradient


def as_parameters(case: ModelCase, flat: np.ndarray) -> Any:
    """A flat gradient by path; an error if it is zero."""
    oracle = oracle_of(case)
    leaves, tree = jax.tree.flatten(oracle.values[0].params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = zip(np.split(flat, ends), leaves, strict=True)
    shaped = jax.tree.unflatten(tree, [part.reshape(leaf.shape) for part, leaf in parts])
    return oracle.pure.result(shaped, oracle.spikes)


def plane_groups(case: ModelCase, groups: Any) -> list[list[int | None]]:
    """Per dense group and plane, the index of the compiled group that its state is in."""
    oracle = oracle_of(case)
    paths = list(oracle.pure.hidden)
    owner = {path: group.index for group in groups for path in group.hidden_paths}
    return [
        [owner.get(paths[i]) for i in members for _ in range(oracle.dense.widths[i] or 1)]
        for members in oracle.dense.groups
    ]


def feedback_signal(case: ModelCase, groups: Any, matrices: dict[int, Any]) -> Signal:
    """Random feedback, with the matrices of a learner by compiled group."""
    owners = plane_groups(case, groups)

    def project(plane: Any, owner: int | None) -> Any:
        if owner not in matrices:
            return plane
        length = np.sqrt((plane**2).sum(-1, keepdims=True))
        return (plane / (length + 1e-8)) @ np.asarray(matrices[owner], np.float64)

    def signal(t: int, g: int, L: Any, R: Any) -> tuple[Any, Any]:
        both = [
            np.stack([project(p, o) for p, o in zip(planes, owners[g], strict=True)])
            for planes in (L, R)
        ]
        return both[0], both[1]

    return signal


def modulator_signal(values: Any) -> Signal:
    """A modulator per step: a number, or an array of the shape of the states."""

    def signal(t: int, g: int, L: Any, R: Any) -> tuple[Any, Any]:
        return np.broadcast_to(np.asarray(values[t], np.float64), L.shape), np.zeros_like(R)

    return signal
