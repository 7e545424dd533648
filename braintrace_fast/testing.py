r"""Oracles for online gradients, to point at a model of your own.

=============================== ====================================================================
oracle                          truth of
=============================== ====================================================================
:func:`bptt`                    the loss of the whole sequence
:func:`recurrence`              D-RTRL and pp-prop: their recurrence, by brute force
:func:`finite_differences`      the loss of the whole sequence, without any derivative
=============================== ====================================================================

All start from the present states of the model and leave them as they are, run in float64 whatever
the model's type, sum over the steps, and return gradients by the path of the ``ParamState``, as
``learner.etrace_grad(..., reduction='sum')`` does. Compare with :func:`compare`. An oracle that
would agree with anything raises :class:`VacuousComparison` instead: all gradients are zero, a
spiking layer is silent, or the only window of a multi-step learner is the whole sequence.

Examples
--------
>>> import brainstate, jax, jax.numpy as jnp
>>> import braintrace_fast as braintrace
>>> from braintrace_fast import testing
>>> model = braintrace.nn.GRUCell(2, 3)
>>> learner = braintrace.compile(model, 'd_rtrl', jnp.ones(2))
>>> xs = jax.random.normal(jax.random.key(0), (5, 2))
>>> true = testing.recurrence(model, xs, step_fn=lambda x: jnp.sum(model(x) ** 2))
>>> found = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction='sum')
>>> testing.compare(found, true).check(rtol=1e-5)
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import Literal, equation_function, jaxprs_in_params, open_jaxpr, scan_split
from ._typing import Path
from .op import ETPPrimitive

__all__ = [
    'Agreement',
    'Comparison',
    'Recurrence',
    'VacuousComparison',
    'bptt',
    'compare',
    'finite_differences',
    'recurrence',
]

Gradients = dict[Path, Any]
StepFn = Callable[..., Any]


class VacuousComparison(ValueError):
    """The comparison would succeed whatever is compared."""


# Comparing


@dataclass(frozen=True)
class Agreement:
    """How near two gradients of one parameter are.

    Attributes
    ----------
    relative_error : float
        ``|found - true| / |true|``, in the Euclidean norm.
    cosine : float
        Of the angle between them.
    norm_ratio : float
        ``|found| / |true|``.
    """

    relative_error: float
    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Comparison:
    """Agreements by parameter; see :func:`compare`.

    Attributes
    ----------
    agreements : dict
        The :class:`Agreement` of every parameter, by path.
    """

    agreements: dict[Path, Agreement]

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max(a.relative_error for a in self.agreements.values())

    def check(self, rtol: float) -> None:
        """Raise an ``AssertionError`` with the whole table if any relative error is above."""
        if not self.worst <= rtol:
            raise AssertionError(f'A relative error is above {rtol:g}.\n{self}')

    def __str__(self) -> str:
        width = max(len(str(path)) for path in self.agreements)
        rows = [f'{"parameter":{width}}  relative error    cosine  norm ratio']
        for path, a in self.agreements.items():
            rows.append(
                f'{path!s:{width}}  {a.relative_error:14.3e}  {a.cosine:8.5f}  {a.norm_ratio:10.5f}'
            )
        return '\n'.join(rows)


def compare(found: Mapping[Path, Any], true: Mapping[Path, Any]) -> Comparison:
    """How near gradients are, parameter by parameter.

    Parameters
    ----------
    found, true : dict
        Gradients by path; units are not looked at. The paths must be the same.

    Returns
    -------
    Comparison
        Its ``str`` is a table; ``check(rtol)`` raises if an error is too large.

    Raises
    ------
    VacuousComparison
        If all of ``true`` is zero.

    Examples
    --------
    >>> import numpy as np
    >>> from braintrace_fast import testing
    >>> result = testing.compare({('w',): np.array([3.0, 3.0])}, {('w',): np.array([3.0, 4.0])})
    >>> result.agreements['w',].relative_error
    0.2
    >>> print(result)
    parameter  relative error    cosine  norm ratio
    ('w',)          2.000e-01   0.98995     0.84853
    """
    if set(found) != set(true):
        raise ValueError(
            f'The gradients are of {sorted(map(str, found))} and of {sorted(map(str, true))}; '
            'compare gradients of the same parameters.'
        )
    _refuse_zero(true)
    return Comparison({path: _agreement(_ravel(found[path]), _ravel(true[path])) for path in true})


def _agreement(found: np.ndarray, true: np.ndarray) -> Agreement:
    if found.shape != true.shape:
        raise ValueError(f'The gradients have {found.size} and {true.size} elements.')
    norm, true_norm = np.linalg.norm(found), np.linalg.norm(true)
    if norm == 0 == true_norm:
        return Agreement(0.0, 1.0, 1.0)
    with np.errstate(divide='ignore', invalid='ignore'):
        error = np.linalg.norm(found - true) / true_norm
        cosine = found @ true / (norm * true_norm)
    return Agreement(float(error), float(cosine), float(norm / true_norm))


def _ravel(gradient: Any) -> np.ndarray:
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)]
    return np.concatenate(leaves)


def _refuse_zero(gradients: Mapping[Path, Any]) -> None:
    if not any(np.any(_ravel(g) != 0) for g in gradients.values()):
        raise VacuousComparison(
            f'The gradients of all parameters ({list(gradients)}) are zero: everything agrees with '
            'them that does nothing. Does the loss depend on the output, and the output on the '
            'input? Start from another state, or use other inputs or more steps.'
        )


# The step as a pure function


class _Values(NamedTuple):
    """Values of a model's states, in the order of their paths."""

    params: list[Any]
    hidden: list[Any]
    others: list[Any]


class _Model:
    """A model and the loss of its step as pure functions of its states."""

    def __init__(self, model: brainstate.nn.Module, step_fn: StepFn) -> None:
        states: Any = model.states()
        nodes: Any = model.nodes()
        param, hid = brainstate.ParamState, brainstate.HiddenState
        self.step_fn = step_fn
        self.params = {p: s for p, s in states.items() if isinstance(s, param)}
        self.hidden = {p: s for p, s in states.items() if isinstance(s, hid)}
        self.others = [s for s in states.values() if not isinstance(s, param | hid)]
        self.others.append(brainstate.random.DEFAULT)
        self.spiking = {p: n for p, n in nodes.items() if hasattr(n, 'get_spike')}

    @property
    def values(self) -> _Values:
        kinds = (self.params.values(), self.hidden.values(), self.others)
        return _Values(*([_float64(state.value) for state in kind] for kind in kinds))

    def step(self, values: _Values, slices: Any) -> tuple[jax.Array, _Values, list[jax.Array]]:
        """The loss, the new values and the spikes of each layer; no state is changed."""
        states = [*self.params.values(), *self.hidden.values(), *self.others]
        before = [state.value for state in states]
        with brainstate.StateTraceStack():
            try:
                for state, value in zip(states, itertools.chain(*values), strict=True):
                    state.restore_value(value)
                loss = self.step_fn(*slices)
                new = [state.value for state in states]
                spikes = [jnp.sum(jnp.abs(n.get_spike())) for n in self.spiking.values()]
            finally:
                for state, value in zip(states, before, strict=True):
                    state.restore_value(value)
        if jnp.shape(loss) != ():
            raise ValueError(f'step_fn returned a loss of shape {jnp.shape(loss)}, not a scalar.')
        ends = list(itertools.accumulate(map(len, values)))
        hidden, others = new[ends[0] : ends[1]], new[ends[1] :]
        return loss, _Values(values.params, hidden, others), spikes

    def over(self, values: _Values, sequences: Any) -> tuple[Any, _Values, Any]:
        """The sum of the losses, the last values and all spikes."""

        def body(carry: Any, slices: Any) -> Any:
            hidden, others = carry
            loss, new, spikes = self.step(_Values(values.params, hidden, others), slices)
            return (new.hidden, new.others), (loss, spikes)

        carry, (losses, spikes) = lax.scan(body, (values.hidden, values.others), sequences)
        return losses.sum(), _Values(values.params, *carry), [s.sum() for s in spikes]

    def result(self, gradients: Any, spikes: Any) -> Gradients:
        """Gradients by path, unless they prove nothing."""
        for path, count in zip(self.spiking, spikes, strict=True):
            if not count > 0:
                raise VacuousComparison(
                    f'The layer {path} has not spiked once: its recurrence is not seen. Use '
                    'stronger inputs, more steps, or initial voltages around the threshold.'
                )
        found = jax.tree.map(np.asarray, dict(zip(self.params, gradients, strict=True)))
        _refuse_zero(found)
        return found


def _float64(tree: Any) -> Any:
    def convert(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(convert, tree)


def _length(sequences: Any) -> int:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(sequences)]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(f'The sequences have shapes {shapes}; give some of a common length.')
    return shapes[0][0]


def _derivative(forward_mode: bool) -> Callable[..., Any]:
    return jax.jacfwd if forward_mode else jax.jacrev


# The oracles of the sequence's loss


def bptt(
    model: brainstate.nn.Module, *sequences: Any, step_fn: StepFn, forward_mode: bool = False
) -> Gradients:
    """The gradient of the loss of a sequence, by reverse mode through the model itself.

    Parameters
    ----------
    model : brainstate.nn.Module
        A model with initialised states whose ``update`` is one time step.
    *sequences
        Trees of arrays with a common leading length; their slices are passed to ``step_fn``.
    step_fn : callable
        Calls the model (not a learner) once and returns the loss of the step, a scalar.
    forward_mode : bool
        Whether to differentiate in forward mode, the only one of a ``while`` loop.

    Returns
    -------
    dict
        Gradients by path, in float64.

    Raises
    ------
    VacuousComparison
        If all gradients are zero, or a layer with a ``get_spike`` is silent.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> from braintrace_fast import testing
    >>> cell = braintrace.nn.GRUCell(2, 3)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> grads = testing.bptt(cell, jnp.ones((4, 2)), step_fn=lambda x: cell(x).sum())
    >>> grads['Wz', 'weight']['weight'].dtype
    dtype('float64')
    """
    _length(sequences)
    with brainstate.environ.context(precision=64):
        pure = _Model(model, step_fn)
        values, sequences = pure.values, _float64(sequences)

        def loss(params: list[Any]) -> Any:
            total, _, spikes = pure.over(values._replace(params=params), sequences)
            return total, spikes

        gradients, spikes = jax.jit(_derivative(forward_mode)(loss, has_aux=True))(values.params)
        return pure.result(gradients, spikes)


def finite_differences(
    model: brainstate.nn.Module, *sequences: Any, step_fn: StepFn, step: float = 1e-5
) -> Gradients:
    """The gradient of the loss of a sequence by central differences, element by element.

    Only for smooth models: with spikes the loss is piecewise constant, and a surrogate gradient is
    not its derivative.

    Parameters
    ----------
    model, *sequences, step_fn
        As for :func:`bptt`.
    step : float
        The length of a difference, relative to the size of the parameter's elements.

    Returns
    -------
    dict
        Gradients by path, in float64; their relative error is about ``1e-7``.

    Raises
    ------
    ValueError
        If differences of another length give another gradient: the model is not smooth.
    VacuousComparison
        If all gradients are zero, or a layer with a ``get_spike`` is silent.

    Examples
    --------
    >>> import brainstate, jax, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> from braintrace_fast import testing
    >>> cell = braintrace.nn.GRUCell(2, 3)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> xs = jax.random.normal(jax.random.key(0), (4, 2))
    >>> task = dict(step_fn=lambda x: jnp.sum(cell(x) ** 2))
    >>> differences = testing.finite_differences(cell, xs, **task)
    >>> testing.compare(differences, testing.bptt(cell, xs, **task)).check(rtol=1e-6)
    """
    _length(sequences)
    with brainstate.environ.context(precision=64):
        pure = _Model(model, step_fn)
        values, sequences = pure.values, _float64(sequences)
        leaves, tree = jax.tree.flatten(values.params)

        @jax.jit
        def loss(leaves: list[jax.Array]) -> Any:
            total, _, spikes = pure.over(
                values._replace(params=jax.tree.unflatten(tree, leaves)), sequences
            )
            return total, spikes

        @jax.jit
        def differences(length: jax.Array) -> list[jax.Array]:
            found = []
            for place, leaf in enumerate(leaves):
                size = length * jnp.maximum(jnp.abs(leaf).max(), 1e-3)

                def slope(index: jax.Array, place: int = place, size: jax.Array = size) -> Any:
                    step = size * (jnp.arange(leaves[place].size) == index)
                    step = step.reshape(leaves[place].shape)
                    moved = [
                        loss([*leaves[:place], leaves[place] + sign * step, *leaves[place + 1 :]])
                        for sign in (1, -1)
                    ]
                    return (moved[0][0] - moved[1][0]) / (2 * size)

                slopes = lax.map(slope, jnp.arange(leaf.size))
                found.append(slopes.reshape(leaf.shape))
            return found

        result, other = ([np.asarray(g) for g in differences(step * k)] for k in (1.0, 2.0))
        scale = max(np.abs(g).max() for g in other)
        if any(np.abs(a - b).max() > 1e-4 * scale for a, b in zip(result, other, strict=True)):
            raise ValueError(
                'Differences of two lengths do not agree, so the model is not smooth here. '
                'Compare spiking models with bptt or recurrence instead.'
            )
        return pure.result(jax.tree.unflatten(tree, result), loss(leaves)[1])


# The step's equations, with the places at which factors are defined

_CALLS = ('jit', 'pjit', 'closed_call', 'core_call', 'remat', 'remat2', 'checkpoint')


def _has_op(eqn: Any) -> bool:
    inner = [open_jaxpr(j)[0] for j in jaxprs_in_params(eqn.params)]
    return isinstance(eqn.primitive, ETPPrimitive) or any(_has_op(e) for j in inner for e in j.eqns)


def _evaluate(
    closed: Any,
    args: Sequence[Any],
    on_op: Callable[[ETPPrimitive, list[Any], dict[str, Any]], Any],
    on_write: Mapping[Any, Callable[[Any], Any]],
) -> list[Any]:
    """Run a jaxpr with every ETP op, and every variable named, passed through a function."""
    jaxpr, consts = open_jaxpr(closed)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        pending = {v: on_write[v] for v in eqn.outvars if v in on_write}
        if isinstance(eqn.primitive, ETPPrimitive):
            results = [on_op(eqn.primitive, operands, eqn.params)]
        elif eqn.primitive.name in _CALLS:
            inner = eqn.params['jaxpr'] if 'jaxpr' in eqn.params else eqn.params['call_jaxpr']
            made = {v for e in open_jaxpr(inner)[0].eqns for v in e.outvars}
            pairs = zip(open_jaxpr(inner)[0].outvars, eqn.outvars, strict=True)
            moved = {
                v: pending.pop(out)
                for v, out in pairs
                if out in pending and not isinstance(v, Literal) and v in made
            }
            results = _evaluate(inner, operands, on_op, moved)
        elif not _has_op(eqn):
            results = equation_function(eqn)(*operands)
        elif eqn.primitive.name == 'cond':
            branches = [_evaluate(b, operands[1:], on_op, {}) for b in eqn.params['branches']]
            results = [lax.select_n(operands[0], *values) for values in zip(*branches, strict=True)]
        elif eqn.primitive.name == 'scan':
            results = _evaluate_scan(eqn, operands, on_op)
        else:
            raise ValueError(f'The oracle cannot see ETP ops inside {eqn.primitive.name}.')
        for v, value in zip(eqn.outvars, results, strict=True):
            env[v] = pending[v](value) if v in pending else value
    return [read(v) for v in jaxpr.outvars]


def _evaluate_scan(eqn: Any, operands: list[Any], on_op: Any) -> list[Any]:
    num_consts, num_carry = scan_split(eqn)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    order = range(eqn.params['length'])
    stacked = []
    for i in reversed(order) if eqn.params['reverse'] else order:
        slices = [x[i] for x in operands[num_consts + num_carry :]]
        results = _evaluate(eqn.params['jaxpr'], [*consts, *carry, *slices], on_op, {})
        carry = results[:num_carry]
        stacked.append(results[num_carry:])
    if eqn.params['reverse']:
        stacked.reverse()
    return [*carry, *(jnp.stack(ys) for ys in zip(*stacked, strict=True))]


class _Run(NamedTuple):
    """One evaluation of a step: results, and inputs and outputs of its ops in order."""

    loss: jax.Array
    hidden: list[jax.Array]
    x: list[Any]
    y: list[jax.Array]
    probes: list[jax.Array]


class _DenseFactors(NamedTuple):
    """All that the recurrence needs of a step, dense; positions and parameters are flat.

    ``D[g]`` is ``(S, S, P)``, ``L[g]`` and ``R[g]`` ``(S, P)``, ``f[k][g]`` ``(S, P)``, ``J[k]``
    ``(Y, W)`` with ``W`` the elements of all parameters; ``x[k]`` is the input of op ``k``.
    """

    step_gradient: Any
    D: list[Any]
    L: list[Any]
    R: list[Any]
    f: list[list[Any]]
    J: list[Any]
    x: list[Any]


class _DenseStep:
    """The factors of a step by brute force, from its equations."""

    def __init__(
        self, pure: _Model, values: _Values, slices: Any, groups: Any, forward_mode: bool
    ) -> None:
        self.jacobian = _derivative(forward_mode)

        def step(values: _Values, slices: Any) -> Any:
            loss, new, _ = pure.step(values, slices)
            return loss, new.hidden

        self.closed, shapes = jax.make_jaxpr(step, return_shape=True)(values, slices)
        before: Any = jax.tree.structure(values.hidden)
        if before != jax.tree.structure(shapes[1]):
            raise ValueError('The step changes the structure or the unit of a hidden state.')
        states = list(pure.hidden.items())
        grouped = _grouped([p for p, _ in states], values.hidden, pure.hidden, groups)
        self.groups = [[list(pure.hidden).index(p) for p in group] for group in grouped]
        self.widths = [
            s.num_state if isinstance(s, brainstate.HiddenGroupState) else 0 for _, s in states
        ]
        y = jax.eval_shape(lambda v, s: self.run(v, s).y, values, slices)
        self.zeros = [np.zeros(a.shape, a.dtype) for a in y]
        self.columns = [
            [_columns(a.shape, self.varshape(values, g)) for g in range(len(self.groups))]
            for a in y
        ]
        self.factors = jax.jit(lambda v, s: (self._factors(v, s), *pure.step(v, s)[1:]))
        self.pulled = jax.jit(self._pulled)

    def varshape(self, values: _Values, group: int) -> tuple[int, ...]:
        index = self.groups[group][0]
        shape = jnp.shape(jax.tree.leaves(values.hidden[index])[0])
        return shape[:-1] if self.widths[index] else shape

    def run(
        self,
        values: _Values,
        slices: Any,
        added: Sequence[Any] | None = None,
        exits: Sequence[Any] | None = None,
        follow: Any = None,
        inputs: Sequence[Any] | None = None,
        stop_new: bool = False,
    ) -> _Run:
        """Evaluate the step.

        ``added`` is added to the ops' outputs; ``exits`` to the new states, for everybody who
        reads them. Derivatives pass the input of op ``k`` scaled by ``follow[k]``, and with
        ``stop_new`` no new state. ``probes`` are the ops' outputs for other ``inputs``.
        """
        x: list[Any] = []
        y: list[Any] = []
        probes: list[Any] = []

        def on_op(primitive: ETPPrimitive, operands: list[Any], params: dict[str, Any]) -> Any:
            k, place, operands = len(y), primitive.x_invar_index, list(operands)
            x.append(None if place is None else operands[place])
            if inputs is not None:
                other = list(operands)
                if place is not None:
                    other[place] = inputs[k]
                probes.append(primitive.forward(*other, **params))
            if place is not None and follow is not None:
                fixed = lax.stop_gradient(operands[place])
                operands[place] = fixed + follow[k] * (operands[place] - fixed)
            out = primitive.forward(*operands, **params)
            y.append(out if added is None else out + added[k])
            return y[-1]

        jaxpr, _ = open_jaxpr(self.closed)
        news = jaxpr.outvars[1:]
        made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        on_write: dict[Any, Any] = {}
        for place, v in enumerate(news):
            if not isinstance(v, Literal) and v in made:
                if v in on_write:
                    raise ValueError('Two hidden states are the same value; keep one of them.')
                shift = None if exits is None else exits[place]
                on_write[v] = lambda new, shift=shift: _written(new, shift, stop_new)
        loss, *hidden = _evaluate(self.closed, jax.tree.leaves((values, slices)), on_op, on_write)
        if exits is not None:  # a state that is only read passes through
            hidden = [
                new if v in on_write else new + shift
                for v, new, shift in zip(news, hidden, exits, strict=True)
            ]
        return _Run(loss, hidden, x, y, probes)

    def planes(self, hidden: Sequence[Any]) -> list[jax.Array]:
        """Per group, the planes of its states, ``(S, P)``."""
        return [
            jnp.stack([p for i in group for p in _split(hidden[i], self.widths[i])])
            for group in self.groups
        ]

    def _factors(self, values: _Values, slices: Any) -> _DenseFactors:
        hidden, tree = jax.tree.flatten(values.hidden)
        none = [jnp.zeros_like(h) for h in hidden]
        cut = jnp.zeros(len(self.zeros))

        def with_hidden(hidden: list[Any]) -> _Values:
            return values._replace(hidden=jax.tree.unflatten(tree, hidden))

        def new_planes(old: Any, added: Any, exits: Any) -> list[jax.Array]:
            return self.planes(self.run(with_hidden(old), slices, added, exits, cut).hidden)

        def mixed(added: Any) -> jax.Array:
            return _projection(self.run(values, slices, added).hidden)

        # An op is recurrent if it reaches a new state, be it by way of other ops.
        reaches = [jnp.any(g != 0) for g in self.jacobian(mixed)(self.zeros)]
        beside = 1.0 - jnp.asarray(reaches, float)
        by_exits = self.jacobian(lambda e: self.run(values, slices, exits=e).loss)(none)
        by_old = self.jacobian(
            lambda h: self.run(with_hidden(h), slices, follow=beside, stop_new=True).loss
        )(hidden)
        jac = self.jacobian(new_planes, argnums=(0, 1, 2))(hidden, self.zeros, none)
        D = [self._own(jac[g][0], g) for g in range(len(self.groups))]
        influence = [self._own(jac[g][2], g) for g in range(len(self.groups))]
        seen = self.planes(by_exits)
        L = [
            jnp.linalg.solve(jnp.moveaxis(P, (0, 1), (-1, -2)), signal.T[..., None])[..., 0].T
            for P, signal in zip(influence, seen, strict=True)
        ]
        f = [
            [
                None
                if columns is None
                else jac[g][1][k].reshape(len(D[g]), len(columns), -1)[
                    :, np.arange(len(columns)), columns
                ]
                for g, columns in enumerate(by_group)
            ]
            for k, by_group in enumerate(self.columns)
        ]

        def outputs(params: list[Any]) -> list[jax.Array]:
            return self.run(values._replace(params=params), slices, follow=cut).y

        J = [
            jnp.concatenate([a.reshape(y.size, -1) for a in jax.tree.leaves(rows)], axis=1)
            for y, rows in zip(self.zeros, self.jacobian(outputs)(values.params), strict=True)
        ]
        step_gradient = self.jacobian(
            lambda params: self.run(values._replace(params=params), slices).loss
        )(values.params)
        x = self.run(values, slices).x
        return _DenseFactors(_flat(step_gradient), D, L, self.planes(by_old), f, J, x)

    def _own(self, by_state: list[Any], group: int) -> jax.Array:
        """From ``(S, P, *state)`` per state, the derivatives of each position by itself."""
        columns = []
        for i in self.groups[group]:
            jac, width = by_state[i], self.widths[i] or 1
            jac = jac.reshape(*jac.shape[:2], jac.shape[1], width)
            own = jnp.diagonal(jac, axis1=1, axis2=2)  # (S, width, P)
            columns += [own[:, plane] for plane in range(width)]
        return jnp.stack(columns, axis=1)

    def _pulled(
        self, values: _Values, slices: Any, inputs: Sequence[Any], cotangents: Sequence[Any]
    ) -> jax.Array:
        """Cotangents of the ops' outputs pulled back to the parameters, for other inputs."""

        def product(params: list[Any]) -> jax.Array:
            found = self.run(values._replace(params=params), slices, inputs=inputs).probes
            return sum(
                (jnp.sum(y * c.reshape(y.shape)) for y, c in zip(found, cotangents, strict=True)),
                start=jnp.zeros(()),
            )

        return _flat(self.jacobian(product)(values.params))


def _written(new: Any, shift: Any, stop: bool) -> Any:
    new = lax.stop_gradient(new) if stop else new
    return new if shift is None else new + shift


def _split(value: jax.Array, width: int) -> Iterator[jax.Array]:
    for plane in range(width or 1):
        yield (value[..., plane] if width else value).ravel()


def _flat(tree: Any) -> jax.Array:
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def _projection(arrays: Sequence[jax.Array]) -> jax.Array:
    rng = np.random.default_rng(0)
    return sum((jnp.sum(a * rng.normal(size=a.shape)) for a in arrays), start=jnp.zeros(()))


def _columns(source: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray | None:
    """Which element each position broadcasts from, or None if shapes do not fit."""
    try:
        if np.broadcast_shapes(source, shape) != shape:
            return None
    except ValueError:
        return None
    return np.broadcast_to(np.arange(math.prod(source)).reshape(source), shape).ravel()


def _grouped(
    paths: list[Path], hidden: list[Any], states: Mapping[Path, Any], groups: Any
) -> list[list[Path]]:
    """States of one shape and layer, unless groups are given."""
    if groups is not None:
        return [list(group) for group in groups]
    found: dict[Any, list[Path]] = {}
    for path, value in zip(paths, hidden, strict=True):
        shape = jnp.shape(jax.tree.leaves(value)[0])
        shape = shape[:-1] if isinstance(states[path], brainstate.HiddenGroupState) else shape
        layer = tuple(path[: i + 1] for i, key in enumerate(path) if isinstance(key, int))
        found.setdefault((shape, layer), []).append(path)
    return list(found.values())


# The recurrence


def recurrence(
    model: brainstate.nn.Module,
    *sequences: Any,
    step_fn: StepFn,
    decay: tuple[float, float] | None = None,
    window: int | None = None,
    groups: Sequence[Sequence[Path]] | None = None,
    forward_mode: bool = False,
) -> Gradients:
    r"""The gradient of D-RTRL or pp-prop, by brute force.

    Per step and op, from dense Jacobians of the whole step, restricted to the entries that connect
    a position with itself, where derivatives by the ops' inputs are cut:

    .. math::

        e_t = D_t e_{t-1} + f_t J_t, \qquad
        g_t = \nabla_\theta \ell_t + (L_t D_t + R_t) e_{t-1}

    with ``J`` the derivative of the op's output by the parameters. ``L`` is the derivative of the
    loss by a new state, the states of its group taken as independent: a shift of the new state that
    everybody sees gives the loss ``P^T L`` more, with ``P`` the influence of the group's states on
    each other within the step. The shift is put into the step's equations, so it makes no
    difference whether the model reads the state back or goes on with the value at hand. ``R`` is
    the derivative by old states on paths without a new state. pp-prop replaces the trace by its two
    smoothed sides, and corrects their bias.

    Parameters
    ----------
    model, *sequences, step_fn
        As for :func:`bptt`.
    decay : tuple of float, optional
        ``(a_x, a_f)`` of pp-prop; D-RTRL if not given.
    window : int, optional
        The window of a multi-step learner, shorter than the sequence: within it, the gradient is
        exact, and the trace carries what was before it.
    groups : sequence of sequences of paths, optional
        The hidden states that drive each other position by position. By default all of the same
        shape whose paths have the same integers are one group, which is right unless states of
        different layers drive each other without an op in between.
    forward_mode : bool
        Whether to differentiate in forward mode, the only one of a ``while`` loop.

    Returns
    -------
    dict
        Gradients by path, in float64.

    Raises
    ------
    VacuousComparison
        If all gradients are zero, a layer with a ``get_spike`` is silent, or the window is the
        whole sequence.

    Notes
    -----
    What mixes positions without an op of this library (a fixed matrix, a mean over the neurons) is
    not cut: the oracle is right only if it connects no position with itself. Memory grows with
    positions times parameters: use a few neurons. A batch must be in the model: ``brainstate``'s
    mapped modules are out of the oracle's sight.

    Examples
    --------
    >>> import brainstate, jax, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> from braintrace_fast import testing
    >>> model = braintrace.nn.LSTMCell(2, 3)
    >>> learner = braintrace.compile(model, 'pp_prop', jnp.ones(2), decay_or_rank=0.9)
    >>> xs = jax.random.normal(jax.random.key(0), (4, 2))
    >>> true = testing.recurrence(model, xs, step_fn=lambda x: model(x).sum(), decay=(0.9, 0.9))
    >>> found = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction='sum')
    >>> testing.compare(found, true).check(rtol=1e-5)
    """
    oracle = Recurrence(
        model, *sequences, step_fn=step_fn, groups=groups, forward_mode=forward_mode
    )
    return oracle.gradient(decay, window)


class Recurrence:
    """The factors of a sequence, for several calls of :meth:`gradient`.

    Parameters
    ----------
    model, *sequences, step_fn, groups, forward_mode
        As for :func:`recurrence`.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        *sequences: Any,
        step_fn: StepFn,
        groups: Sequence[Sequence[Path]] | None = None,
        forward_mode: bool = False,
    ) -> None:
        self.length = _length(sequences)
        self.forward_mode = forward_mode
        with brainstate.environ.context(precision=64):
            self.pure = _Model(model, step_fn)
            self.sequences = _float64(sequences)
            self.slices = [
                jax.tree.map(lambda a, t=t: a[t], self.sequences) for t in range(self.length)
            ]
            values = self.pure.values
            self.dense = _DenseStep(self.pure, values, self.slices[0], groups, forward_mode)
            self.values: list[_Values] = []
            self.factors: list[_DenseFactors] = []
            self.spikes = np.zeros(len(self.pure.spiking))
            for at in self.slices:
                factors, new, spikes = self.dense.factors(values, at)
                self.values.append(values)
                self.factors.append(jax.tree.map(np.asarray, factors))
                self.spikes += np.asarray(spikes)
                values = new

    def gradient(
        self, decay: tuple[float, float] | None = None, window: int | None = None
    ) -> Gradients:
        """The gradient of D-RTRL or pp-prop, with arguments as for :func:`recurrence`."""
        if window is not None and not 1 <= window < self.length:
            raise VacuousComparison(
                f'The window is {window} and the sequence has {self.length} steps: no trace would '
                'be read. Take a window of at least 1, shorter than the sequence.'
            )
        if window is not None and self.length % window:
            raise ValueError(f'The window {window} does not divide the {self.length} steps.')
        trace: _Materialized | _Factorized = (
            _Materialized(self.dense) if decay is None else _Factorized(self.dense, decay)
        )
        total: Any = 0.0
        with brainstate.environ.context(precision=64):
            for t, (values, at, factors) in enumerate(
                zip(self.values, self.slices, self.factors, strict=True)
            ):
                if window is None:
                    total = total + trace.step_gradient(values, at, factors)
                elif t % window == 0:
                    part = jax.tree.map(lambda a, t=t: a[t : t + window], self.sequences)
                    gradient, entry = self._in_window(values, part)
                    total = total + gradient + trace.entry_gradient(values, at, entry)
                trace.advance(factors)
            leaves, tree = jax.tree.flatten(self.values[0].params)
            ends = list(itertools.accumulate(leaf.size for leaf in leaves))
            parts = np.split(np.asarray(total), ends[:-1])
            shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
            return self.pure.result(jax.tree.unflatten(tree, shaped), self.spikes)

    @functools.cached_property
    def _in_window(self) -> Callable[[_Values, Any], tuple[Any, Any]]:
        """The gradient of a window's loss by the parameters, and by the states at its start."""

        @jax.jit
        def gradients(values: _Values, sequences: Any) -> tuple[Any, Any]:
            def loss(params: list[Any], hidden: list[Any]) -> Any:
                start = values._replace(params=params, hidden=hidden)
                return self.pure.over(start, sequences)[0]

            by_params, by_hidden = _derivative(self.forward_mode)(loss, argnums=(0, 1))(
                values.params, values.hidden
            )
            return _flat(by_params), self.dense.planes(jax.tree.leaves(by_hidden))

        return lambda *inputs: jax.tree.map(np.asarray, gradients(*inputs))


class _Materialized:
    """The trace as one dense array per group, ``(S, P, W)``."""

    def __init__(self, dense: _DenseStep) -> None:
        self.dense = dense
        self.e: list[Any] = [np.zeros(()) for _ in dense.groups]

    def advance(self, factors: _DenseFactors) -> None:
        for g, D in enumerate(factors.D):
            new = np.einsum('sqp,qpw->spw', D, self.e[g]) if self.e[g].ndim else 0.0
            for k, f in enumerate(factors.f):
                columns = self.dense.columns[k][g]
                if columns is not None:
                    new = new + f[g][..., None] * factors.J[k][columns]
            self.e[g] = np.asarray(new)

    def step_gradient(self, values: _Values, slices: Any, factors: _DenseFactors) -> Any:
        entry = [
            np.einsum('sp,sqp->qp', L, D) + R
            for L, D, R in zip(factors.L, factors.D, factors.R, strict=True)
        ]
        return factors.step_gradient + self.entry_gradient(values, slices, entry)

    def entry_gradient(self, values: _Values, slices: Any, entry: Sequence[Any]) -> Any:
        pairs = zip(entry, self.e, strict=True)
        return sum(np.einsum('qp,qpw->w', signal, e) for signal, e in pairs if e.ndim)


class _Factorized:
    """The trace as smoothed inputs, and smoothed ``f`` per op and group."""

    def __init__(self, dense: _DenseStep, decay: tuple[float, float]) -> None:
        self.dense, (self.a_x, self.a_f) = dense, decay
        self.steps = 0
        self.x: list[Any] = [0.0 for _ in dense.zeros]
        self.f: list[list[Any]] = [[0.0 for _ in dense.groups] for _ in dense.zeros]

    def advance(self, factors: _DenseFactors) -> None:
        for k, x in enumerate(factors.x):
            self.x[k] = None if x is None else self.a_x * self.x[k] + x
            for g, f in enumerate(factors.f[k]):
                if f is not None:
                    old = np.broadcast_to(self.f[k][g], f.shape)
                    past = np.einsum('sqp,qp->sp', factors.D[g], old)
                    self.f[k][g] = self.a_f * past + (1 - self.a_f) * f
        self.steps += 1

    def step_gradient(self, values: _Values, slices: Any, factors: _DenseFactors) -> Any:
        total = factors.step_gradient + self.entry_gradient(values, slices, factors.R)
        now = self._signals(factors.f, factors.L)
        total = total - self.dense.pulled(values, slices, factors.x, now)
        after = _Factorized(self.dense, (self.a_x, self.a_f))
        after.x, after.f = list(self.x), [list(f) for f in self.f]
        after.steps = self.steps
        after.advance(factors)
        return total + after.entry_gradient(values, slices, factors.L)

    def entry_gradient(self, values: _Values, slices: Any, entry: Sequence[Any]) -> Any:
        if not self.steps:
            return 0.0
        bias = max(1 - self.a_f**self.steps, 1e-8) if self.steps <= 1000 else 1.0
        signals = [signal / bias for signal in self._signals(self.f, entry)]
        return np.asarray(self.dense.pulled(values, slices, self.x, signals))

    def _signals(self, f: Sequence[Sequence[Any]], L: Sequence[Any]) -> list[Any]:
        """Per op, ``sum_s f[s] L[s]`` over the groups, at the elements of its output."""
        result = []
        for k, zero in enumerate(self.dense.zeros):
            signal = np.zeros(zero.size)
            for g, columns in enumerate(self.dense.columns[k]):
                if columns is not None:
                    np.add.at(signal, columns, (f[k][g] * L[g]).sum(0))
            result.append(signal)
        return result
