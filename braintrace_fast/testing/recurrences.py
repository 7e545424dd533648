"""The recurrences of D-RTRL and pp-prop, on dense factors."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import numpy as np

from .._typing import Path
from .comparison import VacuousComparison
from .dense_step import DenseFactors, DenseStep, flat
from .pure_step import Gradients, PureStep, StepFn, Values, derivative, float64, length_of

__all__ = ['Recurrence', 'recurrence']


def recurrence(
    model: brainstate.nn.Module,
    *sequences: Any,
    step_fn: StepFn,
    decay: tuple[float, float] | None = None,
    chunk_size: int | None = None,
    groups: Sequence[Sequence[Path]] | None = None,
    forward_mode: bool = False,
) -> Gradients:
    """The gradient of D-RTRL or pp-prop, by brute force; :class:`Recurrence` has the formula.

    Parameters
    ----------
    model, *sequences, step_fn, forward_mode
        As for :func:`bptt`.
    decay : tuple of float, optional
        ``(a_x, a_f)`` of pp-prop; D-RTRL if not given.
    chunk_size : int, optional
        The steps of a chunk of a multi-step learner, fewer than the sequence has: within a chunk
        the gradient is exact, and the trace carries what was before it.
    groups : sequence of sequences of paths, optional
        The hidden states that drive each other position by position. By default, states of the
        same shape whose paths have the same integers are a group, which is right unless states of
        different layers drive each other without an op in between.

    Returns
    -------
    dict
        As for :func:`bptt`, with the same errors, and one if a chunk is the whole sequence.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> from braintrace_fast import testing
    >>> model = braintrace.nn.LSTMCell(2, 3)
    >>> learner = braintrace.compile(model, 'pp_prop', jnp.ones(2), decay_or_rank=0.9)
    >>> xs = jax.random.normal(jax.random.key(0), (4, 2))
    >>> true = testing.recurrence(model, xs, step_fn=lambda x: model(x).sum(), decay=(0.9, 0.9))
    >>> ours = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction='sum')
    >>> testing.compare(ours, true).check(rtol=1e-5)
    """
    oracle = Recurrence(
        model, *sequences, step_fn=step_fn, groups=groups, forward_mode=forward_mode
    )
    return oracle.gradient(decay, chunk_size)


class Recurrence:
    r"""The factors of a sequence, for several calls of :meth:`gradient`.

    Per step and op, from dense Jacobians of the whole step, restricted to the entries that connect
    a position with itself, where derivatives by the ops' inputs are cut:

    .. math::

        e_t = D_t e_{t-1} + f_t J_t, \qquad
        g_t = \nabla_\theta \ell_t + (L_t D_t + R_t) e_{t-1}

    with ``J`` the derivative of the op's output by the parameters. ``L`` is the derivative of the
    loss by a new state, the states of its group taken as independent: a shift of the new state that
    everything sees changes the loss by ``P^T L``, with ``P`` the influence of the group's states on
    each other within the step. The shift is put into the step's equations, so it makes no
    difference whether the model reads the state back or goes on with the value at hand. ``R`` is
    the derivative by old states on paths without a new state. pp-prop replaces the trace by its two
    smoothed sides, and corrects their bias.

    Parameters
    ----------
    model, *sequences, step_fn, groups, forward_mode
        As for :func:`recurrence`.

    Notes
    -----
    What mixes positions without an op of this library (a fixed matrix, a mean over the neurons) is
    not cut: the oracle is right only if it connects no position with itself. Memory grows with
    positions times parameters: use a few neurons. A batch must be in the model, because the oracle
    cannot see into ``brainstate``'s mapped modules.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        *sequences: Any,
        step_fn: StepFn,
        groups: Sequence[Sequence[Path]] | None = None,
        forward_mode: bool = False,
    ) -> None:
        self.length = length_of(sequences)
        self.forward_mode = forward_mode
        with brainstate.environ.context(precision=64):
            self.pure = PureStep(model, step_fn)
            self.sequences = float64(sequences)
            self.slices = [
                jax.tree.map(lambda a, t=t: a[t], self.sequences) for t in range(self.length)
            ]
            values = self.pure.values
            self.dense = DenseStep(self.pure, values, self.slices[0], groups, forward_mode)
            self.values: list[Values] = []
            self.factors: list[DenseFactors] = []
            self.spikes = np.zeros(len(self.pure.spiking))
            for at in self.slices:
                factors, new, spikes = self.dense.factors(values, at)
                self.values.append(values)
                self.factors.append(jax.tree.map(np.asarray, factors))
                self.spikes += np.asarray(spikes)
                values = new

    def gradient(
        self, decay: tuple[float, float] | None = None, chunk_size: int | None = None
    ) -> Gradients:
        """The gradient of D-RTRL or pp-prop, with arguments as for :func:`recurrence`."""
        if chunk_size is not None and not 1 <= chunk_size < self.length:
            raise VacuousComparison(
                f'chunk_size is {chunk_size} and the sequence has {self.length} steps: no trace '
                'would be read. Take a chunk of at least 1 step, shorter than the sequence.'
            )
        if chunk_size is not None and self.length % chunk_size:
            raise ValueError(f'chunk_size={chunk_size} does not divide the {self.length} steps.')
        trace: _Materialized | _Factorized = (
            _Materialized(self.dense) if decay is None else _Factorized(self.dense, decay)
        )
        total: Any = 0.0
        with brainstate.environ.context(precision=64):
            for t, (values, at, factors) in enumerate(
                zip(self.values, self.slices, self.factors, strict=True)
            ):
                if chunk_size is None:
                    total = total + trace.step_gradient(values, at, factors)
                elif t % chunk_size == 0:
                    part = jax.tree.map(lambda a, t=t: a[t : t + chunk_size], self.sequences)
                    gradient, entry = self._in_chunk(values, part)
                    total = total + gradient + trace.entry_gradient(values, at, entry)
                trace.advance(factors)
        return self.by_path(np.asarray(total))

    def by_path(self, gradient: np.ndarray) -> Gradients:
        """A flat gradient by the paths of the parameters; an error if it proves nothing."""
        leaves, tree = jax.tree.flatten(self.values[0].params)
        ends = list(itertools.accumulate(leaf.size for leaf in leaves))
        parts = zip(np.split(gradient, ends[:-1]), leaves, strict=True)
        shaped = [part.reshape(leaf.shape) for part, leaf in parts]
        return self.pure.result(jax.tree.unflatten(tree, shaped), self.spikes)

    @functools.cached_property
    def _in_chunk(self) -> Callable[[Values, Any], tuple[Any, Any]]:
        """The gradient of a chunk's loss by the parameters, and by the states at its start."""

        @jax.jit
        def gradients(values: Values, sequences: Any) -> tuple[Any, Any]:
            def loss(params: list[Any], hidden: list[Any]) -> Any:
                start = values._replace(params=params, hidden=hidden)
                return self.pure.over(start, sequences)[0]

            by_params, by_hidden = derivative(self.forward_mode)(loss, argnums=(0, 1))(
                values.params, values.hidden
            )
            return flat(by_params), self.dense.planes(jax.tree.leaves(by_hidden))

        return lambda *inputs: jax.tree.map(np.asarray, gradients(*inputs))


class _Materialized:
    """The trace as one dense array per group, ``(S, P, W)``."""

    def __init__(self, dense: DenseStep) -> None:
        self.dense = dense
        self.e: list[Any] = [np.zeros(()) for _ in dense.groups]

    def advance(self, factors: DenseFactors) -> None:
        for g, D in enumerate(factors.D):
            new = np.einsum('sqp,qpw->spw', D, self.e[g]) if self.e[g].ndim else 0.0
            for k, f in enumerate(factors.f):
                columns = self.dense.columns[k][g]
                if columns is not None:
                    new = new + f[g][..., None] * factors.J[k][columns]
            self.e[g] = np.asarray(new)

    def step_gradient(self, values: Values, slices: Any, factors: DenseFactors) -> Any:
        entry = [
            np.einsum('sp,sqp->qp', L, D) + R
            for L, D, R in zip(factors.L, factors.D, factors.R, strict=True)
        ]
        return factors.step_gradient + self.entry_gradient(values, slices, entry)

    def entry_gradient(self, values: Values, slices: Any, entry: Sequence[Any]) -> Any:
        pairs = zip(entry, self.e, strict=True)
        return sum(np.einsum('qp,qpw->w', signal, e) for signal, e in pairs if e.ndim)


class _Factorized:
    """The trace as smoothed inputs, and smoothed ``f`` per op and group."""

    def __init__(self, dense: DenseStep, decay: tuple[float, float]) -> None:
        self.dense, (self.a_x, self.a_f) = dense, decay
        self.steps = 0
        self.x: list[Any] = [0.0 for _ in dense.zeros]
        self.f: list[list[Any]] = [[0.0 for _ in dense.groups] for _ in dense.zeros]

    def advance(self, factors: DenseFactors) -> None:
        for k, x in enumerate(factors.x):
            self.x[k] = None if x is None else self.a_x * self.x[k] + x
            for g, f in enumerate(factors.f[k]):
                if f is not None:
                    old = np.broadcast_to(self.f[k][g], f.shape)
                    past = np.einsum('sqp,qp->sp', factors.D[g], old)
                    self.f[k][g] = self.a_f * past + (1 - self.a_f) * f
        self.steps += 1

    def step_gradient(self, values: Values, slices: Any, factors: DenseFactors) -> Any:
        total = factors.step_gradient + self.entry_gradient(values, slices, factors.R)
        now = self._signals(factors.f, factors.L)
        total = total - self.dense.pulled(values, slices, factors.x, now)
        after = _Factorized(self.dense, (self.a_x, self.a_f))
        after.x, after.f = list(self.x), [list(f) for f in self.f]
        after.steps = self.steps
        after.advance(factors)
        return total + after.entry_gradient(values, slices, factors.L)

    def entry_gradient(self, values: Values, slices: Any, entry: Sequence[Any]) -> Any:
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
