"""Planes of a trace that are kept as filtered inputs of an op.

Where ``D[s,q]`` and ``f[s]`` are uniform, ``e[s]`` is what the op would make of an input that is
filtered by the same numbers, ``X[s]``, and of the output of a bias, ``b[s]``:

    X_t[s] = sum_q D[s,q] X_{t-1}[q] + f[s] x_t,          b_t[s] = sum_q D[s,q] b_{t-1}[q] + f[s]

For a convolution that is smaller than ``e[s]`` by the positions of its output times its kernel, and
for a sparse matrix by its entries per row. To the planes that are not uniform, ``X[s]`` is the
input of one more step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..kernels.planes import Plane, if_live
from ..op import TraceRules
from .factors import per_example
from .gradient import GradientSum
from .links import Link, group_plane, shared_axes, x_shape
from .op_rules import operand, plane_views

__all__ = [
    'InputPlane',
    'advanced',
    'expanded',
    'input_shape',
    'live_inputs',
    'read',
    'with_biases',
    'with_inputs',
    'without',
]

InputPlane = dict[str, jax.Array]
"""``'x'``, shaped like the op's input, and ``'one'``, ``b`` per example."""

InputPlanes = Mapping[int, InputPlane]
"""By the number of the plane."""


def input_shape(link: Link, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of one plane."""
    x = _input(link)
    types = dtype or jnp.result_type(x.dtype, group_plane(link.group).dtype)
    shapes = {'x': x.shape, 'one': _examples(link)}
    return {key: jax.ShapeDtypeStruct(shape, types) for key, shape in shapes.items()}


def without(inputs: Sequence[bool], planes: Sequence[Any]) -> tuple[Any, ...]:
    """The planes of a trace that are no inputs; None for those that are."""
    return tuple(None if is_input else e for is_input, e in zip(inputs, planes, strict=True))


def advanced(
    link: Link,
    old: InputPlanes,
    decay: Sequence[Sequence[Plane]],
    fresh: Sequence[Plane],
    x: Any,
) -> dict[int, InputPlane]:
    """The planes after steps, whose inputs and planes ``fresh`` have an axis of time in front."""

    def new(s: int) -> InputPlane:
        total = {key: jnp.zeros_like(a) for key, a in old[s].items()}
        for plane, e in ((decay[s][q], e) for q, e in old.items()):
            if plane is not None:
                numbers = _numbers(link, plane)
                total = {key: total[key] + per_example(numbers, a) * a for key, a in e.items()}
        if fresh[s] is not None:
            numbers = _numbers(link, fresh[s], len(x))
            added = {'x': _filtered(numbers, x), 'one': numbers.sum(0)}
            total = {key: total[key] + added[key] for key in total}
        return total

    return {s: new(s) for s in old}


def with_inputs(
    link: Link,
    old: InputPlanes,
    decay: Sequence[Sequence[Plane]],
    fresh: Sequence[Plane],
    x: Any,
) -> tuple[jax.Array, list[Plane]]:
    """The inputs of steps and planes ``fresh``, with a step in front for each plane of ``old``."""
    shape = group_plane(link.group).shape

    def steps(s: int) -> Plane:
        planes = [decay[s][q] for q in old]
        given = [plane for plane in (fresh[s], *planes) if plane is not None]
        if not given:
            return None
        zero = jnp.zeros((), given[0].dtype)
        first = [jnp.broadcast_to(zero if plane is None else plane, shape) for plane in planes]
        rest: Any = zero if fresh[s] is None else fresh[s]
        return jnp.concatenate([jnp.stack(first), jnp.broadcast_to(rest, (len(x), *shape))])

    inputs = jnp.stack([e['x'].astype(x.dtype) for e in old.values()])
    return jnp.concatenate([inputs, x]), [steps(s) for s in range(len(fresh))]


def with_biases(
    rules: TraceRules,
    old: Sequence[Any],
    inputs: InputPlanes,
    decay: Sequence[Sequence[Plane]],
    fresh: Sequence[Plane],
    new: Sequence[Any],
) -> tuple[Any, ...]:
    """A trace after steps, whose biases count ``b`` and not the ones of more steps.

    ``old`` is the trace before, zero if it does not count.
    """

    def bias(s: int, key: str) -> jax.Array:
        parts = [] if fresh[s] is None else [plane_views(rules, fresh[s]).sum(0)]
        for q, plane in enumerate(decay[s]):
            if plane is not None and q in inputs:
                parts.append(plane_views(rules, plane * per_example(inputs[q]['one'], plane)))
            elif plane is not None and old[q] is not None:
                parts.append(plane_views(rules, plane) * old[q][key].astype(plane.dtype))
        return sum(parts[1:], parts[0])

    def mended(s: int) -> Any:
        return new[s] and {
            key: e if key == 'weight' else bias(s, key).astype(e.dtype) for key, e in new[s].items()
        }

    return tuple(map(mended, range(len(new))))


def read(total: GradientSum, link: Link, old: InputPlanes, signal: Sequence[Plane]) -> None:
    """Add what a signal reads of the planes."""
    linear = link.relation.primitive.linear_in_x
    for q, e in old.items():
        plane = signal[q]
        if plane is not None:
            total.add_product(link.op, e['x'], plane, only=linear.__contains__)
            biased = plane * per_example(e['one'], plane)
            total.add_product(link.op, e['x'], biased, only=lambda key: key not in linear)


def expanded(link: Link, rules: TraceRules, e: InputPlane) -> dict[str, jax.Array]:
    """A plane as a trace."""
    ones = jnp.ones(group_plane(link.group).shape, e['x'].dtype)
    bias = plane_views(rules, ones * per_example(e['one'], ones))
    trace = rules.outer(operand(rules, e['x']), plane_views(rules, ones))
    return {key: leaf if key == 'weight' else bias for key, leaf in trace.items()}


def live_inputs(
    link: Link, inputs: Sequence[bool], trace: Sequence[Any], live: Any = None
) -> dict[int, InputPlane]:
    """The planes of a trace that are inputs, by their numbers; zero if they do not count."""
    dtype = group_plane(link.group).dtype
    return {
        q: if_live(live, {key: a.astype(dtype) for key, a in e.items()})
        for q, (is_input, e) in enumerate(zip(inputs, trace, strict=True))
        if is_input and e is not None
    }


def _examples(link: Link) -> tuple[int, ...]:
    """The sizes of the axes that an op's input and output have in common in front of the last."""
    x, y = _input(link).shape[:-1], group_plane(link.group).shape[:-1]
    return x[: shared_axes(x, y)]


def _input(link: Link) -> jax.ShapeDtypeStruct:
    x = x_shape(link.relation)
    if x is None:
        raise ValueError(f'{link.relation.primitive} has no input to filter.')
    return x


def _numbers(link: Link, plane: Any, *steps: int) -> jax.Array:
    """The numbers of a uniform plane, per example, which may have started anew."""
    shape, examples = group_plane(link.group).shape, _examples(link)
    whole = jnp.broadcast_to(plane, (*steps, *shape))
    return whole.reshape(*steps, *examples, math.prod(shape[len(examples) :]))[..., 0]


def _filtered(scales: jax.Array, x: jax.Array) -> jax.Array:
    """``sum_t scales[t] x[t]``."""
    examples = math.prod(scales.shape[1:])
    folded = x.astype(scales.dtype).reshape(len(x), examples, math.prod(x.shape[scales.ndim :]))
    numbers = scales.reshape(len(x), examples)
    total = jnp.einsum('te,tei->ei', numbers, folded, precision=lax.Precision.HIGHEST)
    return total.reshape(x.shape[1:])
