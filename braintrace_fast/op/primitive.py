"""What makes a JAX primitive an ETP op: where its weights are, and how traces pass through it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .example_rules import ExampleRules
from .trace_rules import TraceRules, Weights

__all__ = ['ETPPrimitive', 'TraceRules', 'register_primitive']

Places = Callable[[dict[str, Any]], dict[str, int]]
"""From the parameters of an equation to the positions of some of its operands, by name."""


class ETPPrimitive(Primitive):
    """A JAX primitive whose weights can be traced. Made by :func:`register_primitive`.

    Attributes
    ----------
    forward : Callable
        The op in plain JAX: ``(*inputs, **params) -> y``.
    batched : bool
        Whether ``x`` may have any number of leading batch axes, which ``y`` keeps. Then the op
        survives ``jax.vmap`` over ``x``. Otherwise, and where other inputs are mapped, vmap
        replaces it by plain JAX, which computes the same and is not traced.
    gradient_enabled : bool
        Whether a path from a weight to a hidden state may lead through this op.
    x_invar_index : int or None
        Which input is ``x``; None for an op of weights alone.
    y_outvar_index : int
        Which output is ``y``.
    trace_rules : TraceRules or None
        How to carry this op's trace; without them only fresh windows can be learned.
    needs_weights : bool
        Whether ``weight_vjp`` and ``weight_view`` need the values of all trainable inputs, also of
        those that are not trained. Then the op is traced only if none of them varies in time.
    linear_in_x : tuple of str
        The trainable inputs whose gradients are linear in ``x``. If there are any, those of the
        others must not depend on it.
    x_total : Callable or None
        ``(x, scales, **params) -> sum_t scales[t] X[t]``, for an op whose gradients are linear in
        something else than ``x`` itself (the one-hot code of an index). ``weight_vjp`` must take
        such a sum, which consists of floating-point numbers, in place of ``x``.
    diagonal : Callable or None
        ``(weights, sources, **params)``: with ``sources[p]`` the element of an example's ``x`` that
        belongs to element ``p`` of its ``y``, both counted in flat order, or -1 if there is none:
        ``d y[p] / d x[sources[p]]`` per ``p``, or zero. It must depend on neither ``x`` nor the
        example; all examples have the same. None in place of a result means that it is not known.
    example_rules : ExampleRules or None
        The rules that were registered by the methods below.

    Notes
    -----
    Instead of ``weight_vjp`` and ``trace_rules``, rules of braintrace's own form may be registered
    after the op is made: :meth:`register_xy_to_dw` and :meth:`register_dt_to_t`, or all at once by
    :meth:`register_etp_rules`. They are called for one example at a time, under ``jax.vmap``: with
    ``batched=True`` the op's input and output have one axis of examples in front.
    """

    forward: Callable[..., jax.Array]
    batched: bool
    gradient_enabled: bool
    x_invar_index: int | None
    y_outvar_index: int
    trace_rules: TraceRules | None
    needs_weights: bool
    linear_in_x: tuple[str, ...]
    x_total: Callable[..., jax.Array] | None
    diagonal: Callable[..., jax.Array | None] | None
    example_rules: ExampleRules | None
    _trainable_invars: Places | None
    _aux_invars: Places | None
    _weight_vjp: Callable[..., Weights] | None

    def trainable_invars(self, params: dict[str, Any]) -> dict[str, int]:
        """Which inputs are trained: their names and positions, for these equation parameters."""
        return {'weight': 1} if self._trainable_invars is None else self._trainable_invars(params)

    def aux_invars(self, params: dict[str, Any]) -> dict[str, int]:
        """Which inputs are auxiliary: their names and positions, for these parameters."""
        return {} if self._aux_invars is None else self._aux_invars(params)

    def weight_vjp(
        self,
        x: jax.Array | None,
        cotangent: jax.Array,
        weights: Weights,
        *,
        leading_axes: int = 0,
        **params: Any,
    ) -> Weights:
        """Pull a cotangent of ``y`` back to every trainable input, summed over all batch axes.

        Parameters
        ----------
        x : jax.Array or None
            The op's input.
        cotangent : jax.Array
            The cotangent of ``y``.
        weights : dict of jax.Array
            The trainable inputs by name, as the op receives them.
        leading_axes : int
            How many axes (time, for a window) ``x`` and ``cotangent`` have in front of those that
            the op was called with. Only an op with an ``x`` and ``batched=False`` must be told.
        **params
            The parameters of the op's equation, and its auxiliary operands by name.

        Returns
        -------
        dict of jax.Array
            Arrays shaped like ``weights``.
        """
        if self.example_rules is not None and 'xy_to_dw' in self.example_rules.given:
            return self.example_rules.weight_vjp(x, cotangent, weights, leading_axes, **params)
        sums_over_all = self.batched or self.x_invar_index is None or leading_axes == 0
        if self._weight_vjp is not None and sums_over_all:
            return self._weight_vjp(x, cotangent, weights, **params)
        positions = self.trainable_invars(params)
        aux = {place: params.pop(name) for name, place in self.aux_invars(params).items()}

        def forward(weights: Weights, x: jax.Array | None) -> jax.Array:
            inputs = {**aux, **{positions[name]: value for name, value in weights.items()}}
            if self.x_invar_index is not None:
                inputs[self.x_invar_index] = x
            return self.forward(*(inputs[i] for i in range(len(inputs))), **params)

        if self.x_invar_index is not None:
            for _ in range(leading_axes):
                forward = jax.vmap(forward, in_axes=(None, 0))
        y, pull_back = jax.vjp(lambda weights: forward(weights, x), weights)
        return pull_back(cotangent.sum(tuple(range(cotangent.ndim - y.ndim))))[0]

    def register_xy_to_dw(self, fn: Callable[..., Weights]) -> None:
        """Register what a plane makes of the weights, for one example.

        Parameters
        ----------
        fn : Callable
            ``(x, plane, weights, **params) -> {name: plane * d y / d weight}``.
        """
        self.register_etp_rules(xy_to_dw=fn)

    def register_dt_to_t(self, fn: Callable[..., Weights]) -> None:
        """Register how a trace is multiplied by a plane, for one example.

        Parameters
        ----------
        fn : Callable
            ``(plane, trace, **params) -> trace``.
        """
        self.register_etp_rules(dt_to_t=fn)

    def register_init_drtrl(self, fn: Callable[..., Any]) -> None:
        """Take note of what makes a zero trace for D-RTRL; its shape is that of ``xy_to_dw``."""
        self.register_etp_rules(init_drtrl=fn)

    def register_init_pp(self, fn: Callable[..., Any]) -> None:
        """Take note of what makes a zero trace for pp-prop; its shape is that of the states."""
        self.register_etp_rules(init_pp=fn)

    def register_etp_rules(
        self,
        *,
        dt_to_t: Callable[..., Weights] | None = None,
        xy_to_dw: Callable[..., Weights] | None = None,
        init_drtrl: Callable[..., Any] | None = None,
        init_pp: Callable[..., Any] | None = None,
        fast_path: Any = None,
        pp_x_repr: Callable[..., jax.Array] | None = None,
        snap_anchor: Callable[..., bool] | None = None,
        snap_adjacency: Callable[..., Any] | None = None,
    ) -> None:
        """Register several rules; those that are None stay as they are.

        Parameters
        ----------
        dt_to_t, xy_to_dw : Callable, optional
            See :meth:`register_dt_to_t` and :meth:`register_xy_to_dw`.
        pp_x_repr : Callable, optional
            ``(x, weight_shapes) -> X``: what the op is linear in, where that is not ``x`` itself,
            such as the one-hot code of indices. pp-prop smooths it in place of ``x``, and
            ``xy_to_dw`` is then given it.
        init_drtrl, init_pp, fast_path : optional
            Kept in ``example_rules.given`` and not needed: a zero trace has the shape of what
            ``xy_to_dw`` returns, and a closed form gives the same as the two rules.
        snap_anchor, snap_adjacency : Callable, optional
            Kept likewise, for rules that follow influence from position to position.

        Raises
        ------
        ValueError
            If the op has rules of this library's form, or no input.

        Examples
        --------
        >>> import braintrace_fast as braintrace, jax.numpy as jnp
        >>> op = braintrace.register_primitive('docs_mm', lambda x, w: x @ w, batched=True)
        >>> op.register_etp_rules(
        ...     xy_to_dw=lambda x, plane, weights: {'weight': jnp.outer(x, plane)},
        ...     dt_to_t=lambda plane, trace: {'weight': trace['weight'] * plane[None, :]},
        ... )
        >>> op.example_rules.missing()
        []
        """
        rules = dict(
            dt_to_t=dt_to_t,
            xy_to_dw=xy_to_dw,
            init_drtrl=init_drtrl,
            init_pp=init_pp,
            fast_path=fast_path,
            pp_x_repr=pp_x_repr,
            snap_anchor=snap_anchor,
            snap_adjacency=snap_adjacency,
        )
        if self.example_rules is None:
            _check_takes_example_rules(self)
            self.example_rules = ExampleRules(self.name, int(self.batched))
        own = self.example_rules
        own.given |= {name: rule for name, rule in rules.items() if rule is not None}
        if 'xy_to_dw' in own.given:
            self.needs_weights = True
        self._install_trace_rules()

    def _install_trace_rules(self) -> None:
        own = self.example_rules
        if own is not None and not own.missing():
            self.trace_rules = TraceRules(
                own.outer, own.outer_sum, own.decay, own.contract, takes_weights=True
            )


def weight_and_bias(params: dict[str, Any]) -> dict[str, int]:
    """Where an op has its weight and, if ``has_bias`` says so, its bias."""
    return {'weight': 1, 'bias': 2} if params['has_bias'] else {'weight': 1}


_registered: dict[str, ETPPrimitive] = {}


def register_primitive(
    name: str,
    impl_fn: Callable[..., Any],
    *,
    batched: bool = False,
    gradient_enabled: bool = False,
    trainable_invars_fn: Places | None = None,
    aux_invars_fn: Places | None = None,
    x_invar_index: int | None = 0,
    y_outvar_index: int = 0,
    weight_vjp: Callable[..., Weights] | None = None,
    trace_rules: TraceRules | None = None,
    needs_weights: bool = False,
    linear_in_x: tuple[str, ...] = (),
    x_total: Callable[..., jax.Array] | None = None,
    diagonal: Callable[..., jax.Array | None] | None = None,
) -> ETPPrimitive:
    """Make an ETP op out of a function in plain JAX.

    The result is a full JAX primitive, with every transformation. Under a derivative the op itself
    stays visible; its tangents are plain JAX.

    Parameters
    ----------
    name : str
        The name of the primitive; one that is taken is a ``ValueError``.
    impl_fn : Callable
        ``(*inputs, **params) -> y``: one array, with hashable keyword parameters.
    batched, gradient_enabled, x_invar_index, y_outvar_index, trace_rules : optional
    needs_weights, linear_in_x, x_total, diagonal : optional
        The attributes of :class:`ETPPrimitive` of the same names. An op has one output, so
        ``y_outvar_index`` is 0.
    trainable_invars_fn, aux_invars_fn : Callable, optional
        ``params -> {name: position}`` of the trainable inputs (``{'weight': 1}`` if not given), and
        of auxiliary ones: arrays that are the same in every step, such as indices.
    weight_vjp : Callable, optional
        See :meth:`ETPPrimitive.weight_vjp`; derived from ``impl_fn`` if not given. With
        ``batched=True``, or without an ``x``, it must sum over every leading axis.

    Returns
    -------
    ETPPrimitive
        To be called by ``bind(*inputs, **params)``.

    Examples
    --------
    >>> import braintrace_fast as braintrace, jax.numpy as jnp
    >>> gain = braintrace.register_primitive('docs_gain', lambda x, weight: x * weight)
    >>> gain.bind(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])).tolist()
    [3.0, 8.0]
    """
    _check_new(name, y_outvar_index)
    primitive = ETPPrimitive(name)
    primitive.forward = impl_fn
    primitive.batched = batched
    primitive.gradient_enabled = gradient_enabled
    primitive.x_invar_index = x_invar_index
    primitive.y_outvar_index = y_outvar_index
    primitive.trace_rules = trace_rules
    primitive.needs_weights = needs_weights
    primitive.linear_in_x = linear_in_x
    primitive.x_total = x_total
    primitive.diagonal = diagonal
    primitive.example_rules = None
    primitive._trainable_invars = trainable_invars_fn
    primitive._aux_invars = aux_invars_fn
    primitive._weight_vjp = weight_vjp
    _install_jax_rules(primitive)
    _registered[name] = primitive
    return primitive


def _check_new(name: str, y_outvar_index: int) -> None:
    if name in _registered:
        raise ValueError(
            f'register_primitive: an ETP op named {name!r} exists already. '
            'Choose another name, or reuse the primitive that the first call returned.'
        )
    if y_outvar_index != 0:
        raise ValueError(
            f'register_primitive: {name!r} has y_outvar_index={y_outvar_index}, expected 0. '
            'An ETP op has one output; return only y from impl_fn.'
        )


def _check_takes_example_rules(primitive: ETPPrimitive) -> None:
    if primitive.trace_rules is not None or primitive._weight_vjp is not None:
        raise ValueError(
            f"{primitive.name!r} has its weight_vjp or trace_rules already, which braintrace's "
            'rules would take the place of only in part. Register either these or those, with a '
            'primitive of its own.'
        )
    if primitive.x_invar_index is None:
        raise ValueError(
            f"{primitive.name!r} has no input x, for which braintrace's rules have no form. Use "
            'register_primitive(..., trace_rules=TraceRules(...)).'
        )


def _install_jax_rules(primitive: ETPPrimitive) -> None:
    """Derive every rule of JAX from the op's forward.

    A model calls an op with few parameters and shapes, but often: hence the caches.
    """
    forward = primitive.forward

    @functools.lru_cache(maxsize=1024)
    def jitted(**params: Any) -> Any:
        return jax.jit(functools.partial(forward, **params))

    def impl(*args: Any, **params: Any) -> Any:
        return jitted(**params)(*args)

    @functools.lru_cache(maxsize=1024)
    def abstract_eval(*avals: Any, **params: Any) -> Any:
        # unlike eval_shape, the trace keeps what shard_map knows of the arrays
        out_avals = jitted(**params).trace(*avals).jaxpr.out_avals
        if len(out_avals) != 1:
            raise TypeError(
                f'The ETP op {primitive.name!r} returned {len(out_avals)} arrays, expected one. '
                'Return only y from its impl_fn.'
            )
        return out_avals[0]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        y = primitive.bind(*primals, **params)
        moving = [i for i, tangent in enumerate(tangents) if _moves(tangent)]
        moving_forward = _function_of(moving, forward, primals, params)
        _, dy = jax.jvp(moving_forward, [primals[i] for i in moving], [tangents[i] for i in moving])
        return y, dy

    def transpose(cotangent: Any, *args: Any, **params: Any) -> list[Any]:
        unknown = [i for i, arg in enumerate(args) if ad.is_undefined_primal(arg)]
        results: list[Any] = [None] * len(args)
        if type(cotangent) is ad.Zero:
            cotangents = [ad.Zero(args[i].aval) for i in unknown]
        else:
            linear_forward = _function_of(unknown, forward, args, params)
            pull_back = jax.linear_transpose(linear_forward, *(args[i].aval for i in unknown))
            cotangents = pull_back(cotangent)
        for i, value in zip(unknown, cotangents, strict=True):
            results[i] = value
        return results

    def batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        mapped = [i for i, axis in enumerate(axes) if axis is not None]
        by_example = primitive.example_rules is not None
        if (primitive.batched or by_example) and mapped == [primitive.x_invar_index]:
            (i,) = mapped
            inputs = [*args[:i], jnp.moveaxis(args[i], axes[i], 0), *args[i + 1 :]]
            op = _over_examples(primitive) if by_example else primitive
            return op.bind(*inputs, **params), 0
        mapped_forward = jax.vmap(functools.partial(forward, **params), in_axes=tuple(axes))
        return mapped_forward(*args), 0

    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(forward, multiple_results=False))


@functools.cache
def _over_examples(primitive: ETPPrimitive) -> ETPPrimitive:
    """The op with one more axis of examples in front, for rules that see one example."""
    x_index = primitive.x_invar_index

    def forward(*inputs: Any, **params: Any) -> Any:
        axes = tuple(0 if i == x_index else None for i in range(len(inputs)))
        return jax.vmap(functools.partial(primitive.forward, **params), in_axes=axes)(*inputs)

    op = ETPPrimitive(f'{primitive.name}_mapped')
    for key, value in vars(primitive).items():
        setattr(op, key, value)
    op.name, op.forward, op.trace_rules = f'{primitive.name}_mapped', forward, None
    rules = primitive.example_rules
    op.example_rules = None if rules is None else rules.with_axis()
    op._install_trace_rules()
    _install_jax_rules(op)
    return op


def _moves(tangent: Any) -> bool:
    """Whether a tangent may differ from zero; that of an integer is of the empty type float0."""
    return type(tangent) is not ad.Zero and jnp.result_type(tangent) != jax.dtypes.float0


def _function_of(
    free: Sequence[int], forward: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]
) -> Callable[..., Any]:
    """The forward as a function of the arguments at the positions ``free``, the others fixed."""

    def function(*values: Any) -> Any:
        inputs = list(args)
        for i, value in zip(free, values, strict=True):
            inputs[i] = value
        return forward(*inputs, **params)

    return function
