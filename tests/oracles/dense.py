"""The factors of a step by brute force, from dense Jacobians.

Nothing here knows the compiler. For factors, the ETP ops are replaced by plain formulas that stop
the gradient of their input, which cuts the mixing of positions by weights, and add a zero to their
output, which is a place to differentiate by. Dense Jacobians of that whole step, restricted to the
entries that connect a position with itself, are ``D`` and ``f``. Other operations that mix
positions are not cut: there the restriction is what the compiler promises only if such an operation
connects no position with itself.

State values may carry units: factors are those of the mantissas, each state in its own unit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace_fast as btf
from tests.oracles.step import (
    Path,
    StateValues,
    Values,
    random_projection,
    state_values,
    states_by_kind,
    step_function,
)

Planes = list[jax.Array]


class DenseFactors(NamedTuple):
    """Factors of one step; each plane has the shape of its group's positions.

    Attributes
    ----------
    D
        ``D[group][s][q]``: new plane ``s`` by old plane ``q``.
    f
        ``f[call][group][s]``: new plane ``s`` by the output of an op, calls in the order of the
        program; ``None`` in place of the planes of a group to which the output does not broadcast.
    """

    D: list[list[Planes]]
    f: list[list[Planes | None]]


def factor_oracle(
    model: brainstate.nn.Module, groups: Sequence[Sequence[Path]], *, forward_mode: bool = False
) -> Callable[[Values, Any], DenseFactors]:
    """The function that gives the dense factors of one step, compiled at its first call.

    Parameters
    ----------
    model
        A model whose ETP ops are ``matmul`` and ``element_wise``.
    groups
        The paths of the hidden states of each group.
    forward_mode
        Differentiate in forward mode, the only one of a ``while`` loop; a ``custom_vjp`` has none.
    """
    jacobian = jax.jacfwd if forward_mode else jax.jacrev
    states = states_by_kind(model)[1]

    def split(path: Path, value: Any, like: Any) -> Planes:
        mantissa = u.Quantity(value).to_decimal(u.get_unit(like))
        if isinstance(states[path], brainstate.HiddenGroupState):
            return [mantissa[..., i] for i in range(states[path].num_state)]
        return [mantissa]

    def join(path: Path, planes: Iterator[jax.Array], like: Any) -> Any:
        if isinstance(states[path], brainstate.HiddenGroupState):
            mantissa = jnp.stack([next(planes) for _ in range(states[path].num_state)], axis=-1)
        else:
            mantissa = next(planes)
        return u.Quantity(mantissa, unit=like.unit) if isinstance(like, u.Quantity) else mantissa

    @jax.jit
    def factors(values: Values, x: Any) -> DenseFactors:
        def all_planes(hidden: StateValues) -> list[Planes]:
            return [
                [p for path in paths for p in split(path, hidden[path], values.hidden[path])]
                for paths in groups
            ]

        def new_planes(old: list[Planes], added: list[jax.Array]) -> list[Planes]:
            hidden = dict(values.hidden)
            for paths, planes in zip(groups, map(iter, old), strict=True):
                for path in paths:
                    hidden[path] = join(path, planes, values.hidden[path])
            with plain_ops(added=added):
                _, hidden, _ = step_function(model)(values.params, hidden, values.others, x)
            return all_planes(hidden)

        old, added = all_planes(values.hidden), _zeros_for_ops(model, values, x)
        jac = jacobian(new_planes, argnums=(0, 1))(old, added)
        return DenseFactors(
            D=[
                [
                    [own_positions(row[0][g][q], p.shape, p.shape) for q, p in enumerate(planes)]
                    for row in jac[g]
                ]
                for g, planes in enumerate(old)
            ],
            f=[
                [
                    [own_positions(row[1][k], planes[0].shape, y.shape) for row in jac[g]]
                    if _broadcasts(y.shape, planes[0].shape)
                    else None
                    for g, planes in enumerate(old)
                ]
                for k, y in enumerate(added)
            ],
        )

    return factors


def dense_factors(
    model: brainstate.nn.Module,
    x: Any,
    groups: Sequence[Sequence[Path]],
    *,
    forward_mode: bool = False,
) -> DenseFactors:
    """The dense factors of the step from the model's present state."""
    return factor_oracle(model, groups, forward_mode=forward_mode)(state_values(model), x)


def weight_oracle(model: brainstate.nn.Module) -> Callable[[Values, Any], list[set[Path]]]:
    """The function that gives, per op call of a step, the parameters that its weights come from.

    A call is passed over, with an empty set, in steps in which nothing depends on it.
    """

    @jax.jit
    def gradients(values: Values, x: Any) -> StateValues:
        def projection(params: StateValues, open_gates: jax.Array) -> jax.Array:
            with plain_ops(gates=open_gates):
                output, hidden, _ = step_function(model)(params, values.hidden, values.others, x)
            return random_projection((output, hidden))

        calls = len(_zeros_for_ops(model, values, x))
        # The first row has all gates closed: what flows beside the ops.
        open_gates = jnp.concatenate([jnp.zeros((1, calls)), jnp.eye(calls)])
        return jax.vmap(jax.grad(projection), in_axes=(None, 0))(values.params, open_gates)

    def sources(values: Values, x: Any) -> list[set[Path]]:
        found: list[set[Path]] = []
        for path, gradient in gradients(values, x).items():
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
            calls = len(leaves[0]) - 1
            found = found or [set() for _ in range(calls)]
            for k in range(calls):
                if any((leaf[k + 1] != leaf[0]).any() for leaf in leaves):
                    found[k].add(path)
        return found

    return sources


def _broadcasts(source: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(source, shape) == shape
    except ValueError:
        return False


def own_positions(
    jacobian: jax.Array, shape: tuple[int, ...], source: tuple[int, ...]
) -> jax.Array:
    """From ``(*shape, *source)``, the entry of each position for that it broadcasts from."""
    column = np.broadcast_to(np.arange(math.prod(source)).reshape(source), shape).ravel()
    rows = jacobian.reshape(math.prod(shape), math.prod(source))
    return rows[np.arange(len(column)), column].reshape(shape)


def _zeros_for_ops(model: brainstate.nn.Module, values: Values, x: Any) -> list[jax.Array]:
    """A zero of the shape of each op's output, in the order of the program."""
    outputs: list[jax.Array] = []
    with plain_ops(outputs=outputs):
        jax.eval_shape(step_function(model), *values, x)
    return [jnp.zeros(y.shape, y.dtype) for y in outputs]


@contextlib.contextmanager
def plain_ops(
    *,
    added: Sequence[jax.Array] | None = None,
    gates: jax.Array | None = None,
    outputs: list[jax.Array] | None = None,
) -> Iterator[None]:
    """Replace the ETP ops, wherever the library looks them up, and ``jax.lax.scan`` by a loop.

    The k-th call adds ``added[k]`` to its output, scales the gradient of its weights by
    ``gates[k]``, and appends its output to ``outputs``, each if given.
    """
    calls = itertools.count()

    def replacement(plain: Callable) -> Callable:
        def op(*args: Any, **kwargs: Any) -> Any:
            k = next(calls)

            def gate(w: jax.Array) -> jax.Array:
                stopped = jax.lax.stop_gradient(w)
                return w if gates is None else stopped + gates[k] * (w - stopped)

            y, unit = plain(gate, *args, **kwargs)
            if outputs is not None:
                outputs.append(y)
            return u.maybe_decimal((y if added is None else y + added[k]) * unit)

        return op

    with contextlib.ExitStack() as patches:
        for name, plain in _PLAIN.items():
            _patch(patches, getattr(btf, name), replacement(plain))
        patches.callback(setattr, jax.lax, 'scan', jax.lax.scan)
        jax.lax.scan = _unrolled_scan
        yield


def _patch(patches: contextlib.ExitStack, original: Any, new: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.split('.')[0] == btf.__name__:
            for attribute in [a for a, value in vars(module).items() if value is original]:
                patches.callback(setattr, module, attribute, original)
                setattr(module, attribute, new)


def _unrolled_scan(f, init, xs=None, length=None):
    """What ``jax.lax.scan`` means; each op call of each iteration is one of its own."""
    steps = length if xs is None else len(jax.tree.leaves(xs)[0])
    carry, ys = init, []
    for i in range(steps):
        carry, y = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        ys.append(y)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def _plain_matmul(gate, x, weight, bias=None, *, weight_fn=None, bias_fn=None):
    (x, x_unit), (w, w_unit) = u.split_mantissa_unit(x), u.split_mantissa_unit(weight)
    w = gate(w)
    y = jax.lax.stop_gradient(x) @ (w if weight_fn is None else weight_fn(w))
    if bias is not None:
        b = gate(u.Quantity(bias).to_decimal(x_unit * w_unit))
        y = y + jnp.broadcast_to(b if bias_fn is None else bias_fn(b), y.shape)
    return y, x_unit * w_unit


def _plain_element_wise(gate, weight, *, weight_fn=None):
    w, unit = u.split_mantissa_unit(weight)
    w = gate(w)
    return (w if weight_fn is None else weight_fn(w)), unit


_PLAIN = {'matmul': _plain_matmul, 'element_wise': _plain_element_wise}
