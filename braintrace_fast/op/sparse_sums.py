"""The two sums behind a sparse weight, as JAX primitives.

With entries ``p`` that lead from a source to a target,

    spread   y[a, o] = sum_{p: target p = o} x[a, source p] w[p]
    sample   g[p]    = sum_a x[a, source p] y[a, target p]

Both are bilinear, and each is what the other becomes when it is transposed. JAX would derive
these rules too, but from a gather it makes a scatter and a sum over a last axis, which take several
times as long on a CPU, and it would keep an array of all entries and examples for every step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._compat import varying_alike
from ..kernels.promotion import common_type
from .outer import outer_total

__all__ = ['computed', 'in_blocks', 'one_batch', 'sample', 'spread', 'take', 'zeros_for']

EXAMPLES = 8
"""How many examples are taken at a time on a CPU: one cache line holds 16 numbers."""

ENTRIES = 1 << 17
"""How many entries are taken at a time there: their terms stay in the cache."""

DENSE = 1 / 32
"""Above this density the whole product of many examples is cheaper than samples of it."""


def spread(
    x: jax.Array, w: jax.Array, sources: jax.Array, targets: jax.Array, *, size: int
) -> jax.Array:
    """``y[..., o] = sum of x[..., source p] w[p]`` over the entries ``p`` with target ``o``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.op.sparse_sums import spread
    >>> sources, targets = jnp.array([0, 1, 1]), jnp.array([2, 0, 2])
    >>> x, w = jnp.array([1.0, 10.0]), jnp.array([2.0, 3.0, 4.0])
    >>> spread(x, w, sources, targets, size=3).tolist()
    [30.0, 0.0, 42.0]
    """
    x, w = _of_one_type(x, w)
    y = spread_p.bind(one_batch(x), w, sources, targets, size=size)
    return y.reshape(*x.shape[:-1], size)


def sample(x: jax.Array, y: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """``g[p] = sum x[..., source p] y[..., target p]`` over all axes in front.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace_fast.op.sparse_sums import sample
    >>> sources, targets = jnp.array([0, 1, 1]), jnp.array([2, 0, 2])
    >>> sample(jnp.array([1.0, 10.0]), jnp.array([2.0, 3.0, 4.0]), sources, targets).tolist()
    [4.0, 20.0, 40.0]
    """
    x, y = _of_one_type(x, y)
    return sample_p.bind(one_batch(x), one_batch(y), sources, targets)


def _of_one_type(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    dtype = common_type(a, b)
    return varying_alike(a.astype(dtype), b.astype(dtype))


def zeros_for(shape: tuple[int, ...], *summed: jax.Array) -> jax.Array:
    """What a sum of products of arrays starts from, inside ``shard_map`` too."""
    return varying_alike(jnp.zeros(shape, common_type(*summed)), *summed)[0]


def one_batch(a: jax.Array) -> jax.Array:
    """All axes but the last folded into one, which may be empty."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def take(a: jax.Array, places: jax.Array) -> jax.Array:
    """The values at places of the last axis, all of which are there."""
    return a.at[..., places].get(mode='promise_in_bounds', wrap_negative_indices=False)


def computed(a: jax.Array) -> jax.Array:
    """The same array, which is there as a whole before anything is gathered from it.

    XLA for CPUs would compute a value again for every entry that reads it. It drops barriers before
    it fuses, but not a branch that no compiler can know not to be taken.
    """
    return lax.platform_dependent(a, cpu=_behind_a_branch, default=lambda a: a) if a.size else a


def _behind_a_branch(a: jax.Array) -> jax.Array:
    never = jnp.abs(a[(0,) * a.ndim]) > jnp.inf
    return lax.cond(never, jnp.negative, lambda a: a, a)


def in_blocks(body: Callable[[Any, Any, int], Any], total: Any, num: int, size: int) -> Any:
    """``body(total, first, size)`` for blocks of ``num`` things one after the other, the rest last.

    Examples
    --------
    >>> from braintrace_fast.op.sparse_sums import in_blocks
    >>> in_blocks(lambda total, first, size: total + size, 0, 7, 5)
    7
    """
    blocks, rest = divmod(num, size)
    if blocks == 1:
        total = body(total, 0, size)
    elif blocks:
        total = lax.fori_loop(0, blocks, lambda i, t: body(t, i * size, size), total)
    return body(total, blocks * size, rest) if rest else total


def _spread(
    x: jax.Array, w: jax.Array, sources: jax.Array, targets: jax.Array, *, size: int
) -> jax.Array:
    on_cpu = functools.partial(_spread_in_blocks, size=size)
    at_once = functools.partial(_spread_examples, size=size)
    return lax.platform_dependent(x, w, sources, targets, cpu=on_cpu, default=at_once)


def _spread_examples(
    x: jax.Array, w: jax.Array, sources: jax.Array, targets: jax.Array, *, size: int
) -> jax.Array:
    """A few examples; they come last, so that an entry reads and writes neighbouring numbers."""
    start = zeros_for((size, len(x)), x, w)
    return _add_entries(start, x.T, w, sources, targets).T


def _add_entries(
    y: jax.Array, x: jax.Array, w: jax.Array, sources: jax.Array, targets: jax.Array
) -> jax.Array:
    promise: Any = dict(mode='promise_in_bounds', wrap_negative_indices=False)
    return y.at[targets].add(x.at[sources].get(**promise) * w[:, None], **promise)


def _spread_in_blocks(
    x: jax.Array, w: jax.Array, sources: jax.Array, targets: jax.Array, *, size: int
) -> jax.Array:
    """The same for CPUs, where XLA writes the terms to memory before it adds them."""

    def add_examples(y: jax.Array, first: Any, examples: int) -> jax.Array:
        block = computed(lax.dynamic_slice_in_dim(x, first, examples).T)

        def add_entries(y: jax.Array, first: Any, entries: int) -> jax.Array:
            some = (lax.dynamic_slice_in_dim(a, first, entries) for a in (w, sources, targets))
            return _add_entries(y, block, *some)

        start = zeros_for((size, examples), x, w)
        some = in_blocks(add_entries, start, len(w), ENTRIES).T
        return some if examples == len(x) else lax.dynamic_update_slice_in_dim(y, some, first, 0)

    return in_blocks(add_examples, zeros_for((len(x), size), x, w), len(x), EXAMPLES)


def _sample(x: jax.Array, y: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    if len(x) >= 4 * EXAMPLES and len(sources) > DENSE * x.shape[1] * y.shape[1]:
        whole = outer_total(x, y, precision=lax.Precision.HIGHEST)
        return whole.at[sources, targets].get(mode='promise_in_bounds', wrap_negative_indices=False)
    return _sample_examples(x, y, sources, targets)


def _sample_examples(
    x: jax.Array, y: jax.Array, sources: jax.Array, targets: jax.Array
) -> jax.Array:
    """One example after the other: XLA is slow at sums over an axis of what it gathers."""
    if len(x) < 2 * EXAMPLES:  # of more there is a loop, which has its operands computed
        x, y = computed(x), computed(y)

    def add_examples(total: jax.Array, first: Any, examples: int) -> jax.Array:
        some = [lax.dynamic_slice_in_dim(a, first, examples) for a in (x, y)]
        terms = (take(a, sources) * take(b, targets) for a, b in zip(*some, strict=True))
        return sum(terms, total)

    return in_blocks(add_examples, zeros_for(sources.shape, x, y), len(x), EXAMPLES)


def _primitive(
    name: str, impl: Callable[..., jax.Array], transposed: Sequence[Callable]
) -> Primitive:
    """A primitive that is linear in each of its first two operands.

    ``transposed[i](cotangent, other operand, sources, targets, size of operand i)`` is the
    cotangent of operand ``i``.
    """
    primitive = Primitive(name)

    @functools.lru_cache(maxsize=1024)
    def jitted(**params: Any) -> Any:
        return jax.jit(functools.partial(impl, **params))

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        (aval,) = jitted(**params).trace(*avals).jaxpr.out_avals
        return aval

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        y = primitive.bind(*primals, **params)
        dy = jnp.zeros_like(y)
        for i in (0, 1):
            if type(tangents[i]) is not ad.Zero:
                inputs = [*primals[:i], tangents[i], *primals[i + 1 :]]
                dy = dy + primitive.bind(*inputs, **params)
        return y, dy

    def transpose(cotangent: Any, a: Any, b: Any, *places: Any, **params: Any) -> list[Any]:
        which = 0 if ad.is_undefined_primal(a) else 1
        unknown, known = (a, b) if which == 0 else (b, a)
        result: list[Any] = [None] * 4
        if type(cotangent) is ad.Zero:
            result[which] = ad.Zero(unknown.aval)
        else:
            result[which] = transposed[which](cotangent, known, *places, unknown.aval.shape[-1])
        return result

    def batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        return jax.vmap(functools.partial(impl, **params), in_axes=tuple(axes))(*args), 0

    primitive.def_impl(lambda *args, **params: jitted(**params)(*args))
    primitive.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(impl, multiple_results=False))
    return primitive


spread_p = _primitive(
    'sparse_spread',
    _spread,
    [
        lambda y, w, sources, targets, size: spread(y, w, targets, sources, size=size),
        lambda y, x, sources, targets, size: sample(x, y, sources, targets),
    ],
)
sample_p = _primitive(
    'sparse_sample',
    _sample,
    [
        lambda g, y, sources, targets, size: spread(y, g, targets, sources, size=size),
        lambda g, x, sources, targets, size: spread(x, g, sources, targets, size=size),
    ],
)
