"""Truth for a program by brute force, from its own text and dense Jacobians in float64.

The text is run with other ops, plain formulas that know their inputs and outputs, with control flow
taken apart, and with the new value of each state (``new_h = ...``) passed through ``written``. All
hidden states are one vector of ``M`` numbers, all parameters one of ``W``; per step::

    D (M, M), f_k (M, Y_k)   new states by old ones and by outputs of ops, inputs of ops cut,
                             restricted to equal positions within a group
    J_k (Y_k, W)             outputs of ops by parameters, inputs cut
    L, R (M,)                loss by new states, those of a group taken as independent, and by old
                             states past all new ones
    ell (W,)                 loss by parameters, at fixed old states

Nothing of the library runs here, nor any reading of jaxprs.
"""

import ast
import contextlib
import itertools
import math
import re
import types
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from jax import lax
from jax.flatten_util import ravel_pytree

__all__ = ['Oracle', 'load']


def load(text: str, path: str) -> types.ModuleType:
    """Run a program as a module of its own."""
    module = types.ModuleType('program')
    module.__file__ = path
    exec(compile(text, path, 'exec'), module.__dict__)
    return module


class Factors(NamedTuple):
    reaches: Any
    ell: Any
    D: Any
    L: Any
    R: Any
    c: list[Any]
    f: list[Any]
    J: list[Any]
    x: list[Any]


class Step(NamedTuple):
    params: Any
    hidden: Any
    others: Any
    slices: Any


class Oracle:
    """The factors of all steps of a program, and gradients of learning rules from them."""

    def __init__(self, text: str, path: str, groups: Any = None) -> None:
        text = ast.unparse(ast.parse(text))  # a statement per line, no comments
        written = re.sub(r'(?m)^( +new_(\w+) = )(.*)$', r'\1written(self.\2, \3)', text)
        self.program = load(written, path)
        self.program.__dict__.update(
            written=self._written,
            matmul=self._matmul,
            element_wise=self._element_wise,
            checkpoint=lambda function: function,
            jit=lambda function: function,
            lax=_plain_control_flow(),
        )
        self.net, self.outside = self.program.make()
        brainstate.nn.init_all_states(self.net, batch_size=self.program.BATCH)
        states = self.net.states()
        kinds = (brainstate.ParamState, brainstate.HiddenState)
        self.params = {p: s for p, s in states.items() if isinstance(s, kinds[0])}
        self.params |= {(name,): state for name, state in self.outside.items()}
        self.hidden = {p: s for p, s in states.items() if isinstance(s, kinds[1])}
        others = [s for s in states.values() if not isinstance(s, kinds)]
        self.others = [*others, brainstate.random.DEFAULT]
        self._reset()
        jax.eval_shape(self._run, self._present())
        self.shapes = [y.shape for y in self.ys]
        self._own, self._columns = self._positions(groups)
        self._compiled = jax.jit(self._factors)
        beside = np.ones(len(self.shapes))
        for factors in self._trajectory(beside):  # an op that reaches a state does so in some step
            beside *= ~np.asarray(factors.reaches)
        self.factors = self._trajectory(beside)
        self._pull = jax.jit(self._pulled)
        self._chunk = jax.jit(jax.grad(self._chunk_loss, argnums=(0, 1)))

    # The program, with hooks

    def _reset(self, *, added=None, exits=None, follow=None, inputs=None, stop_new=False) -> None:
        self.added, self.exits, self.follow = added, exits, follow
        self.inputs, self.stop_new = inputs, stop_new
        self.xs, self.ys, self.probes = [], [], []

    def _op(self, x: Any, forward: Any) -> Any:
        k = len(self.ys)
        if x is not None and self.follow is not None:
            fixed = lax.stop_gradient(x)
            x = fixed + self.follow[k] * (x - fixed)
        y = forward(x)
        if self.inputs is not None:
            self.probes.append(forward(self.inputs[k]))
        self.xs.append(x)
        self.ys.append(y if self.added is None else y + self.added[k])
        return self.ys[-1]

    def _matmul(self, x, weight, bias=None, *, weight_fn=lambda w: w, bias_fn=lambda b: b):
        (x, x_unit), (weight, unit) = u.split_mantissa_unit(x), u.split_mantissa_unit(weight)
        offset = 0.0 if bias is None else bias_fn(bias)
        y = self._op(x * 1.0, lambda x: x @ weight_fn(weight) + offset)
        return u.maybe_decimal(y * (x_unit * unit))

    def _element_wise(self, weight, *, weight_fn=lambda w: w):
        return self._op(None, lambda x: weight_fn(weight))

    def _written(self, state: Any, new: Any) -> Any:
        if self.stop_new:
            new = lax.stop_gradient(new)
        place = [id(s) for s in self.hidden.values()].index(id(state))
        return new if self.exits is None else new + self.exits[place]

    def _run(self, step: Step, **hooks: Any) -> tuple[Any, Any, Any]:
        """The loss with its aux, the new mantissas of hidden states, and other states."""
        kinds = ([*self.params.values()], [*self.hidden.values()], self.others)
        states = list(itertools.chain(*kinds))
        before = [state.value for state in states]
        self._reset(**hooks)
        units = [u.get_unit(s.value) for s in kinds[1]]
        hidden = [
            h if unit.is_unitless else h * unit for h, unit in zip(step.hidden, units, strict=True)
        ]
        with brainstate.StateTraceStack():
            try:
                for state, value in zip(states, [*step.params, *hidden, *step.others], strict=True):
                    state.restore_value(value)
                loss = self.program.loss(self.net, self.net, self.outside, *step.slices)
                new = [u.get_mantissa(state.value) for state in kinds[1]]
                others = [state.value for state in self.others]
            finally:
                for state, value in zip(states, before, strict=True):
                    state.restore_value(value)
        return loss, new, others

    def _slices(self, t: int) -> Any:
        return tuple(a[t] for a in self.program.sequences())

    def _present(self) -> Step:
        return Step(
            [state.value for state in self.params.values()],
            [u.get_mantissa(state.value) for state in self.hidden.values()],
            [state.value for state in self.others],
            self._slices(0),
        )

    def _trajectory(self, beside: Any) -> list['Factors']:
        """The factors of all steps; steps, losses, outputs and the last states are kept."""
        brainstate.random.seed(0)
        self.steps, self.losses, self.outs, found = [], [], [], []
        step = self._present()
        for t in range(len(self.program.sequences()[0])):
            step = step._replace(slices=self._slices(t))
            (loss, aux), hidden, others, factors = self._compiled(step, beside)
            self.steps.append(step)
            self.losses.append(loss)
            self.outs.append(aux['out'])
            found.append(jax.tree.map(np.asarray, factors))
            step = step._replace(hidden=hidden, others=others)
        self.last = step.hidden
        return found

    # Factors

    def _positions(self, groups: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        """Which entries of dense Jacobians connect equal positions: states, and states by ops."""
        rows: list[tuple[Any, tuple[int, ...], Any]] = []
        for path, state in self.hidden.items():
            shape = np.shape(u.get_mantissa(state.value))
            wide = isinstance(state, brainstate.HiddenGroupState)
            layer = tuple(key for key in path if isinstance(key, int))
            if groups is not None:
                layer = next(i for i, group in enumerate(groups) if path in group)
            for index in np.ndindex(*shape):
                space = shape[:-1] if wide else shape
                rows.append(((layer, space), index[: len(space)], None))
        own = np.array([[a[:2] == b[:2] for b in rows] for a in rows])
        columns = []
        for source in (np.arange(math.prod(shape)).reshape(shape) for shape in self.shapes):
            match = np.zeros((len(rows), source.size))
            for m, ((_, space), index, _) in enumerate(rows):
                with contextlib.suppress(ValueError):
                    if np.broadcast_shapes(source.shape, space) == space:
                        match[m, np.broadcast_to(source, space)[index]] = 1
            columns.append(match)
        return own, columns

    def _factors(self, step: Step, beside: Any) -> tuple[Any, Any, Any, Factors]:
        zeros = [jnp.zeros(shape) for shape in self.shapes]
        cut = jnp.zeros(len(zeros))

        def new(old: Any, added: Any, exits: Any) -> Any:
            at = step._replace(hidden=old)
            return _flat(self._run(at, added=added, exits=exits, follow=cut)[1])

        def loss(params: Any = None, old: Any = None, **hooks: Any) -> Any:
            at = step._replace(params=params or step.params, hidden=old or step.hidden)
            return self._run(at, **hooks)[0][0]

        def outputs(params: Any) -> Any:
            self._run(step._replace(params=params), follow=cut)
            return [y.ravel() for y in self.ys]

        none = [jnp.zeros(h.shape) for h in step.hidden]
        by_old, by_y, by_exit = jax.jacrev(new, argnums=(0, 1, 2))(step.hidden, zeros, none)
        A, P = (jnp.concatenate([b.reshape(len(b), -1) for b in by], 1) for by in (by_old, by_exit))
        past = jax.grad(lambda old: loss(old=old, follow=beside, stop_new=True))(step.hidden)
        seen = _flat(jax.grad(lambda e: loss(exits=e))(none))
        J = jax.jacrev(outputs)(step.params)
        reached = jax.jacrev(lambda a: _flat(self._run(step, added=a)[1]))(zeros)
        results = self._run(step)
        xs = self.xs
        factors = Factors(
            reaches=jnp.asarray([jnp.any(jac != 0) for jac in reached]),
            ell=_flat(jax.grad(loss)(step.params)),
            D=jnp.where(self._own, A, 0.0),
            L=jnp.linalg.solve(jnp.where(self._own, P, 0.0).T, seen),
            R=_flat(past),
            c=[c.ravel() for c in jax.grad(lambda a: loss(added=a))(zeros)],
            f=[F.reshape(len(F), -1) * own for F, own in zip(by_y, self._columns, strict=True)],
            J=[_rows(jac, y.size) for jac, y in zip(J, zeros, strict=True)],
            x=xs,
        )
        return *results, factors

    def _pulled(self, step: Step, inputs: Any, cotangents: Any) -> Any:
        """Cotangents of the ops' outputs pulled back to the parameters, for other inputs."""

        def product(params: Any) -> Any:
            self._run(step._replace(params=params), inputs=inputs)
            pairs = zip(self.probes, cotangents, strict=True)
            return sum((jnp.sum(y.ravel() * c) for y, c in pairs), start=jnp.zeros(()))

        return _flat(jax.grad(product)(step.params))

    def _chunk_loss(self, params: Any, hidden: Any, steps: list[Step], mask: Any) -> Any:
        total, others = 0.0, steps[0].others
        for step, weight in zip(steps, mask, strict=True):
            at = Step(params, hidden, others, step.slices)
            (loss, _), hidden, others = self._run(at)
            total = total + weight * loss
        return total

    # Learning rules

    def gradient(self, case: dict) -> Any:
        """The gradient of all parameters, by path, as the rule of a case defines it."""
        length = sum(case['pieces'])
        mask = np.ones(length) if case['mask'] is None else np.asarray(case['mask'])[:length]
        rule, options = case['rule'], case['options']
        starts = {0, *np.cumsum(case['pieces']).tolist()}
        total = 0.0
        for t, (step, F) in enumerate(zip(self.steps[:length], self.factors, strict=False)):
            if t == 0 or (t in starts and case['trace'] == 'fresh'):
                e = ebar = np.zeros((len(F.D), len(F.ell)))
                sides = _Sides(self, *options.get('decay_or_rank', (0.0, 0.0)))
            past = F.D @ e
            now = sum((f @ J for f, J in zip(F.f, F.J, strict=True)), start=np.zeros_like(e))
            if case['way'] == 'chunks':
                if t % 2 == 0:
                    pair = self.steps[t : t + 2], mask[t : t + 2]
                    ell, entry = self._chunk(step.params, step.hidden, *pair)
                    total = total + _flat(ell) + np.asarray(_flat(entry)) @ e
            elif rule == 'd_rtrl':
                total = total + mask[t] * (F.ell + F.L @ past + F.R @ e)
            elif rule == 'eprop':
                kappa = options['kappa_filter_decay']
                now_only = F.ell + F.L @ past
                total = total + mask[t] * (now_only + (kappa * F.L + F.R) @ ebar)
            elif rule == 'three_factor':
                direct = [
                    c @ J
                    for c, J, is_traced in zip(F.c, F.J, self._traced(), strict=True)
                    if is_traced
                ]
                m = float(self.modulators[t])
                total = total + mask[t] * (F.ell - sum(direct) + m * (past + now).sum(0))
            else:
                total = total + mask[t] * sides.gradient(step, F)
                sides.advance(F)
            e = past + now
            ebar = options.get('kappa_filter_decay', 0.0) * ebar + e
        values = [state.value for state in self.params.values()]
        flat, unravel = ravel_pytree(values)
        return dict(zip(self.params, unravel(jnp.asarray(total)), strict=True))

    @property
    def past_matters(self) -> bool:
        """Whether a gradient comes from traces, and all are finite."""
        case = dict(pieces=[len(self.steps)], mask=None, rule='d_rtrl', options={}, way='steps')
        total = jax.tree.leaves(self.gradient(case | dict(trace='carry')))
        now = sum(F.ell for F in self.factors)
        past = np.concatenate([np.ravel(g) for g in total]) - now
        return bool(np.isfinite(past).all() and np.abs(past).max() > 1e-6 * np.abs(now).max())

    modulators = np.array([0.7, -1.1, 0.4, 1.3, -0.6])

    def _traced(self) -> list[bool]:
        return [any(np.any(F.f[k]) for F in self.factors) for k in range(len(self.shapes))]


class _Sides:
    """pp-prop's trace: smoothed inputs of ops, and smoothed ``f``."""

    def __init__(self, oracle: Oracle, a_x: float, a_f: float) -> None:
        self.oracle, self.a_x, self.a_f = oracle, a_x, a_f
        self.x = [0.0 for _ in oracle.shapes]
        self.f = [np.zeros(own.shape) for own in oracle._columns]
        self.steps = 0

    def advance(self, F: Factors) -> None:
        self.x = [
            None if x is None else self.a_x * old + x for old, x in zip(self.x, F.x, strict=True)
        ]
        self.f = [
            self.a_f * F.D @ old + (1 - self.a_f) * f for old, f in zip(self.f, F.f, strict=True)
        ]
        self.steps += 1

    def gradient(self, step: Step, F: Factors) -> Any:
        after = _Sides(self.oracle, self.a_x, self.a_f)
        after.x, after.f, after.steps = self.x, self.f, self.steps
        after.advance(F)
        now = [f.T @ F.L for f in F.f]
        direct = self.oracle._pull(step, F.x, now)
        return F.ell - direct + self._read(step, F.R) + after._read(step, F.L)

    def _read(self, step: Step, signal: Any) -> Any:
        if not self.steps:
            return 0.0
        bias = 1 - self.a_f**self.steps
        return self.oracle._pull(step, self.x, [f.T @ signal / bias for f in self.f])


def _flat(tree: Any) -> Any:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _rows(tree: Any, length: int) -> Any:
    return jnp.concatenate([leaf.reshape(length, -1) for leaf in jax.tree.leaves(tree)], 1)


def _plain_control_flow() -> types.SimpleNamespace:
    """What ``lax`` means, in plain loops; both branches run."""

    def cond(predicate, true, false, *operands):
        return jax.tree.map(
            lambda a, b: jnp.where(predicate, a, b), true(*operands), false(*operands)
        )

    def switch(index, branches, *operands):
        results = [branch(*operands) for branch in branches]
        return jax.tree.map(lambda *r: lax.select_n(index, *r), *results)

    def scan(body, carry, xs):
        stacked = []
        for x in xs:
            carry, y = body(carry, x)
            stacked.append(y)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stacked)

    def fori_loop(lower, upper, body, value):
        for i in range(lower, upper):
            value = body(i, value)
        return value

    def while_loop(going_on, body, value):
        for _ in range(12):  # more than any loop of the grammar takes
            value = cond(going_on(value), body, lambda v: v, value)
        return value

    return types.SimpleNamespace(
        cond=cond,
        switch=switch,
        scan=scan,
        fori_loop=fori_loop,
        while_loop=while_loop,
        stop_gradient=lax.stop_gradient,
    )
