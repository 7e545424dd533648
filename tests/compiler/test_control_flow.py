"""Control flow inside a step: looked through where it can be, refused by name where it cannot.

A step with control flow is compared with its twin, the same step written without.
"""

import inspect
import re
from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast import ControlFlowPolicy, DiagnosticKind, DiagnosticLevel
from braintrace_fast.compiler import diagnostic_context
from tests.compiler.checks import assert_close, assert_trees_close, build, draw, param
from tests.models import N_IN, Leaky, N, Wrapped, hidden, spike_by_jvp, spike_by_vjp
from tests.oracles.compiled_step import (
    assert_same_factors,
    assert_step_gradient_is_exact,
    evaluate,
    factors,
    loss_of,
    signal_of_the_past,
)

pytestmark = pytest.mark.usefixtures('x64')

LIMIT = ControlFlowPolicy().scan_unroll_limit


class Driven(Leaky):
    """The leaky cell with its drive, a function of ``(x, h, W)``, given from outside."""

    def __init__(self, drive: Callable, shape: tuple[int, ...] = (N_IN + N, N)):
        super().__init__()
        self.W = param(*shape)
        self.given = drive

    def drive(self, x):
        return self.given(x, self.h.value, self.W.value)


class Leaking(Leaky):
    """The leaky cell with its leak given from outside."""

    def __init__(self, leak: Callable):
        super().__init__()
        self.leak = leak


def op(x, h, w):
    return btf.matmul(jnp.concatenate([x, h], axis=-1), w)


def compiled(make, **policy):
    model, x = build(make), draw(N_IN)
    graph = btf.compile_etrace_graph(model, x, control_flow=ControlFlowPolicy(**policy))
    return model, graph, x


def checked(model, graph, x, **mode):
    """One evaluated step whose gradient is exact."""
    step = evaluate(graph, x)
    assert_step_gradient_is_exact(model, step, x, **mode)
    return step


def assert_twins(make, make_twin):
    model, graph, x = compiled(make)
    _, twin, _ = compiled(make_twin)
    assert_same_factors(checked(model, graph, x), evaluate(twin, x))
    return graph


def only_D(step):
    ((((plane,),), _),) = step.jacobians
    return plane


def own_derivative(function, value):
    """The diagonal of the dense Jacobian."""
    return jnp.diagonal(jax.jacfwd(function)(value))


def primitives(graph):
    return [eqn.primitive.name for eqn in graph.module_info.jaxpr.eqns]


def kinds(graph):
    return [record.kind for record in graph.diagnostics]


def assert_names_a_line_of(message: str, function: Callable) -> None:
    lines, first = inspect.getsourcelines(function)
    (line,) = re.findall(r'^\S*test_control_flow\.py:(\d+) \(', message)
    assert first <= int(line) < first + len(lines)


# Calls


CALLS = {
    'jit': jax.jit,
    'nested jit': lambda f: jax.jit(lambda *a: 1.0 * jax.jit(f)(*a)),
    'checkpoint': jax.checkpoint,
    'nested checkpoint': lambda f: jax.checkpoint(lambda *a: 1.0 * jax.checkpoint(f)(*a)),
    'jit in checkpoint': lambda f: jax.checkpoint(jax.jit(f)),
    'checkpoint in jit': lambda f: jax.jit(jax.checkpoint(f)),
    'checkpoint with a policy': lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
}


@pytest.mark.parametrize('wrap', CALLS.values(), ids=CALLS)
def test_calls_around_an_op_are_looked_through(wrap):
    graph = assert_twins(lambda: Wrapped(wrap), Leaky)
    assert not {'jit', 'pjit', 'checkpoint', 'remat2'} & set(primitives(graph))


def test_a_jitted_function_called_twice_is_two_occurrences():
    def twice(function):
        def drive(x, h, w):
            return function(x, h, w) * jnp.cos(function(2 * x, h, w))

        return drive

    graph = assert_twins(lambda: Driven(twice(jax.jit(op))), lambda: Driven(twice(op)))
    first, second = graph.hidden_param_op_relations
    assert first.y_var is not second.y_var
    assert first.x_var is not second.x_var


class WholeCell(brainstate.nn.Module):
    """A cell that is called, states and all, inside a transformation."""

    def __init__(self, wrap: Callable):
        super().__init__()
        self.cell = btf.nn.LSTMCell(N_IN, N)
        self.wrap = wrap

    def update(self, x):
        return self.wrap(self.cell)(x)


def looped(cell):
    return lambda x: brainstate.transform.for_loop(cell, jnp.stack([x, -x, 0.5 * x]))[-1]


def looped_in_python(cell):
    return lambda x: [cell(step) for step in (x, -x, 0.5 * x)][-1]


def chosen(cell):
    return lambda x: brainstate.transform.cond(jnp.sum(x) > 1e6, lambda x: -cell(x), cell, x)


def chosen_in_python(cell):
    return cell


@pytest.mark.parametrize(
    'wrap, twin',
    [
        (brainstate.transform.jit, lambda cell: cell),
        (brainstate.transform.checkpoint, lambda cell: cell),
        (looped, looped_in_python),
    ],
    ids=['jit', 'checkpoint', 'for_loop'],
)
def test_a_whole_cell_inside_a_transformation_is_looked_through(wrap, twin):
    assert_twins(lambda: WholeCell(wrap), lambda: WholeCell(twin))


def test_a_whole_cell_inside_a_cond_takes_part_in_both_branches():
    model, graph, x = compiled(lambda: WholeCell(chosen))
    _, plain, _ = compiled(lambda: WholeCell(chosen_in_python))
    weights = [relation.path for relation in plain.hidden_param_op_relations]
    assert [relation.path for relation in graph.hidden_param_op_relations] == 2 * weights
    step, twin = checked(model, graph, x), evaluate(plain, x)
    found, true = factors(step), factors(twin)
    for name in ('f', 'c'):
        taken, other = found[name][:4], found[name][4:]  # the branch for False comes first
        assert_trees_close(taken, true[name])
        assert_trees_close(other, jax.tree.map(jnp.zeros_like, true[name]))
    assert_trees_close(found['D'], true['D'])
    # The output is selected beside the new states, not read from them.
    assert graph.exit_perturb.bypass_invars
    assert_trees_close(signal_of_the_past(step), signal_of_the_past(twin))


# Custom derivatives


@pytest.mark.parametrize('spike', [spike_by_jvp, spike_by_vjp], ids=['custom_jvp', 'custom_vjp'])
def test_a_custom_derivative_is_the_one_in_D(spike):
    model, graph, x = compiled(lambda: Leaking(lambda h: 0.8 * h - spike(h - 1)))
    h = model.h.value
    assert_close(only_D(checked(model, graph, x)), 0.8 - 1 / (1 + jnp.abs(h - 1)) ** 2)


def inside_custom_vjp(x, h, w):
    @jax.custom_vjp
    def function(x, w):
        return btf.matmul(x, w)

    function.defvjp(
        lambda x, w: (function(x, w), (x, w)),
        lambda kept, g: (g @ kept[1].T, 3 * jnp.outer(kept[0], g)),
    )
    return function(x, w)


def inside_custom_jvp(x, h, w):
    @jax.custom_jvp
    def function(x, w):
        return btf.matmul(x, w)

    @function.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return function(x, w), 3 * (x @ dw) + dx @ w

    return function(x, w)


class TwoDrives(Leaky):
    """Two weights; that of the second drive is under test."""

    def __init__(self, second: Callable):
        super().__init__()
        self.U = param(N_IN, N)
        self.second = second

    def drive(self, x):
        return super().drive(x) + self.second(x, self.h.value, self.U.value)


@pytest.mark.parametrize('second', [inside_custom_vjp, inside_custom_jvp])
def test_an_op_inside_a_custom_derivative_is_excluded_with_a_record(second):
    model, graph, x = compiled(lambda: TwoDrives(second))
    assert [relation.path for relation in graph.hidden_param_op_relations] == [('W',)]
    (record,) = graph.explain(weight_path=('U',))
    assert record.kind is DiagnosticKind.PRIMITIVE_INSIDE_CUSTOM_RULE
    assert 'Move the op out' in record.message
    assert_names_a_line_of(record.message, second)
    checked(model, graph, x)


# cond and switch


def branches(x, h, w):
    return lambda: op(x, h, w), lambda: jnp.sin(op(-x, h, w)), lambda: 0.1 * h


def by_cond(x, h, w):
    return jax.lax.cond(x[0] > 0, *branches(x, h, w)[:2])


def by_switch(x, h, w):
    return jax.lax.switch(jnp.int32(x[0] > 0) + jnp.int32(x[1] > 0), branches(x, h, w))


def by_select(x, h, w):
    index = jnp.int32(x[0] > 0) + jnp.int32(x[1] > 0)
    cases = [branch() for branch in branches(x, h, w)]
    return jax.lax.select_n(jnp.broadcast_to(index, (N,)), *cases)


def by_nested_cond(x, h, w):
    one, other, third = branches(x, h, w)
    return jax.lax.cond(x[0] > 0, one, lambda: jax.lax.cond(x[1] < 0, other, third))


def by_nested_where(x, h, w):
    one, other, third = branches(x, h, w)
    no = jnp.where(x[1] < 0, other(), third())
    return jnp.where(x[0] > 0, one(), no)


@pytest.mark.parametrize(
    'drive, twin',
    [(by_switch, by_select), (by_nested_cond, by_nested_where)],
    ids=['switch', 'nested cond'],
)
def test_branches_with_an_op_are_all_evaluated_and_selected(drive, twin):
    graph = assert_twins(lambda: Driven(drive), lambda: Driven(twin))
    assert 'cond' not in primitives(graph)
    assert DiagnosticKind.COND_IF_CONVERTED in kinds(graph)


@pytest.mark.parametrize('x0', [1.0, -1.0], ids=['taken', 'not taken'])
def test_the_branch_that_is_not_taken_gets_no_gradient(x0):
    model, graph, x = compiled(lambda: Driven(by_cond))
    x = x.at[0].set(x0)
    found = factors(checked(model, graph, x))
    taken, other = (1, 0) if x0 > 0 else (0, 1)  # the branch for False comes first
    assert np.any(found['c'][taken] != 0)
    assert_close(found['c'][other], jnp.zeros(N))
    assert_close(found['f'][other][0][0], jnp.zeros(N))


def cond_without_op(h):
    return jax.lax.cond(jnp.sum(h) > 0, lambda h: 0.9 * h, lambda h: h - 0.1 * h**3, h)


def test_a_cond_without_an_op_stays_a_cond_and_its_D_is_dense():
    model, graph, x = compiled(lambda: Leaking(cond_without_op))
    assert 'cond' in primitives(graph)
    assert not {DiagnosticKind.COND_IF_CONVERTED} & set(kinds(graph))
    true = own_derivative(cond_without_op, model.h.value)
    assert_close(only_D(checked(model, graph, x)), true)


def test_an_opaque_cond_with_an_op_is_refused_with_its_line_and_the_way_out():
    with pytest.raises(NotImplementedError, match='inside a cond that is not opened') as error:
        compiled(lambda: Driven(by_cond), cond='opaque')
    assert_names_a_line_of(str(error.value), by_cond)
    assert "cond='convert'" in str(error.value)
    assert "etp_in_control_flow='exclude'" in str(error.value)


def second_by_cond(x, h, u):
    return jax.lax.cond(x[0] > 0, lambda: btf.matmul(x, u), lambda: jnp.zeros(N))


def test_an_opaque_cond_can_be_excluded():
    model, graph, x = compiled(
        lambda: TwoDrives(second_by_cond), cond='opaque', etp_in_control_flow='exclude'
    )
    assert 'cond' in primitives(graph)
    assert [relation.path for relation in graph.hidden_param_op_relations] == [('W',)]
    (record,) = graph.explain(weight_path=('U',))
    assert record.kind is DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW
    (skipped,) = graph.explain(kind=DiagnosticKind.COND_CONVERSION_SKIPPED)
    assert "cond='opaque'" in skipped.message
    for x0 in (1.0, -1.0):
        checked(model, graph, x.at[0].set(x0))


# scan


GAINS = np.linspace(-1.0, 1.0, 3)


def scan_body(x, w):
    def body(carry, gain):
        y = op(gain * x, carry, w)
        return 0.5 * carry + jnp.tanh(y), gain * jnp.sin(y)

    return body


def scanned(reverse):
    def drive(x, h, w):
        carry, ys = jax.lax.scan(scan_body(x, w), h, jnp.asarray(GAINS), reverse=reverse)
        return carry + ys[0] + 2 * ys[-1]

    return drive


def looped_by_hand(reverse):
    def drive(x, h, w):
        carry, ys = h, [None] * len(GAINS)
        order = list(enumerate(GAINS))
        for i, gain in reversed(order) if reverse else order:
            carry, ys[i] = scan_body(x, w)(carry, gain)
        return carry + ys[0] + 2 * ys[-1]

    return drive


@pytest.mark.parametrize('reverse', [False, True], ids=['forward', 'reverse'])
def test_a_short_scan_with_an_op_is_unrolled(reverse):
    graph = assert_twins(lambda: Driven(scanned(reverse)), lambda: Driven(looped_by_hand(reverse)))
    assert 'scan' not in primitives(graph)
    (record,) = graph.explain(kind=DiagnosticKind.SCAN_UNROLLED)
    assert 'a scan of 3 steps' in record.message


def sliced_by_scan(x, h, w):
    return jax.lax.scan(lambda c, wi: (jnp.sin(c) + btf.matmul(x, wi), None), h, w)[0]


def sliced_by_index(x, h, w):
    return jax.lax.fori_loop(0, len(w), lambda i, c: jnp.sin(c) + btf.matmul(x, w[i]), h)


def sliced_by_hand(x, h, w):
    for wi in w:
        h = jnp.sin(h) + btf.matmul(x, wi)
    return h


@pytest.mark.parametrize('drive', [sliced_by_scan, sliced_by_index])
def test_a_weight_sliced_by_the_iteration_is_traced_slice_by_slice(drive):
    shape = (3, N_IN, N)
    graph = assert_twins(lambda: Driven(drive, shape), lambda: Driven(sliced_by_hand, shape))
    value = np.asarray(draw(*shape))
    for i, relation in enumerate(graph.hidden_param_op_relations):
        way = relation.weight_ways['weight']
        assert way.is_static
        assert_close(way([value]), value[i])
        (pulled,) = way.pull_back([value], jnp.ones((N_IN, N)))
        assert_close(pulled, np.eye(3)[i][:, None, None] * np.ones(shape))


def nested_scan(x, h, w):
    def outer(carry, gain):
        inner = jax.lax.scan(lambda c, _: (jnp.tanh(op(gain * x, c, w)), None), carry, length=2)
        return carry + inner[0], None

    return jax.lax.scan(outer, h, jnp.asarray(GAINS))[0]


def nested_loop(x, h, w):
    for gain in GAINS:
        c = h
        for _ in range(2):
            c = jnp.tanh(op(gain * x, c, w))
        h = h + c
    return h


def test_nested_scans_are_unrolled():
    graph = assert_twins(lambda: Driven(nested_scan), lambda: Driven(nested_loop))
    assert len(graph.hidden_param_op_relations) == 3
    # The first of each pair reaches the state through the second only.
    assert len(graph.explain(kind=DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT)) == 3


def scan_of(length):
    def drive(x, h, w):
        return jax.lax.scan(lambda c, g: (c + btf.matmul(g * x, w), None), h, jnp.ones(length))[0]

    return drive


def test_the_limit_of_unrolling_is_the_longest_scan_that_is_unrolled():
    _, graph, _ = compiled(lambda: TwoDrives(scan_of(LIMIT)))
    assert len(graph.hidden_param_op_relations) == LIMIT + 1
    _, graph, _ = compiled(lambda: TwoDrives(scan_of(1)))
    assert len(graph.hidden_param_op_relations) == 2


def long_scan(x, h, w):
    return scan_of(LIMIT + 1)(x, h, w)


def test_a_longer_scan_that_is_kept_is_refused_with_its_line_and_the_way_out():
    with pytest.raises(NotImplementedError, match='inside a scan that is not opened') as error:
        compiled(lambda: TwoDrives(long_scan), scan_descent='off')
    message = str(error.value)
    assert_names_a_line_of(message, scan_of)
    assert "[('U',)]" in message
    assert 'scan_unroll_limit' in message
    assert "etp_in_control_flow='exclude'" in message


def test_the_limit_of_unrolling_can_be_raised():
    model, graph, x = compiled(lambda: TwoDrives(long_scan), scan_unroll_limit=LIMIT + 1)
    assert len(graph.hidden_param_op_relations) == LIMIT + 2
    checked(model, graph, x)


def test_a_longer_scan_can_be_excluded():
    model, graph, x = compiled(
        lambda: TwoDrives(long_scan), etp_in_control_flow='exclude', scan_descent='off'
    )
    assert 'scan' in primitives(graph)
    assert [relation.path for relation in graph.hidden_param_op_relations] == [('W',)]
    (record,) = graph.explain(weight_path=('U',))
    assert record.kind is DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW
    (skipped,) = graph.explain(kind=DiagnosticKind.SCAN_UNROLL_SKIPPED)
    assert f'{LIMIT + 1} steps' in skipped.message
    checked(model, graph, x)


def relaxed_by_scan(h):
    def body(c, gain):
        c = c - 0.1 * gain * c**3
        return c, gain * jnp.cos(c)

    c, ys = jax.lax.scan(body, h, jnp.linspace(0.1, 1.0, 2 * LIMIT))
    return c + ys[3]


def test_a_scan_without_an_op_is_left_alone_and_its_D_is_dense():
    model, graph, x = compiled(lambda: Leaking(relaxed_by_scan))
    assert 'scan' in primitives(graph)
    assert graph.hidden_groups[0].is_position_wise
    true = own_derivative(relaxed_by_scan, model.h.value)
    assert_close(only_D(checked(model, graph, x)), true)


# while


class WithCurrent(Leaky):
    """A second state that relaxes in a ``while`` loop together with the first."""

    def __init__(self, relax: Callable):
        super().__init__()
        self.relax = relax

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.s = hidden(batch_size, N)

    def update(self, x):
        h, s = self.relax(self.h.value, self.s.value)
        self.h.value = h + jnp.tanh(self.drive(x))
        self.s.value = s
        return jnp.sin(self.h.value) + s


def relaxation(carry):
    step, h, s = carry
    return step + 1, 0.9 * h - 0.1 * s**2, 0.8 * s + 0.1 * jnp.sin(h)


def relaxed_by_while(h, s):
    return jax.lax.while_loop(lambda carry: carry[0] < 3, relaxation, (0, h, s))[1:]


def relaxed_until_small(h, s):
    def keep_on(carry):
        return (jnp.max(jnp.abs(carry[1])) > 0.5) & (carry[0] < 20)

    return jax.lax.while_loop(keep_on, relaxation, (0, h, s))[1:]


def relaxed_by_while_in_scan(h, s):
    def body(carry, _):
        return relaxed_by_while(*carry), None

    return jax.lax.scan(body, (h, s), length=2)[0]


def relaxed_by_while_in_cond(h, s):
    return jax.lax.cond(h[0] > 1e6, lambda h, s: (s, h), relaxed_by_while, h, s)


@pytest.mark.parametrize(
    'relax',
    [relaxed_by_while, relaxed_until_small, relaxed_by_while_in_scan, relaxed_by_while_in_cond],
)
def test_a_while_without_weights_is_taken_in_forward_mode(relax):
    model, graph, x = compiled(lambda: WithCurrent(relax))
    (group,), (transition,) = graph.hidden_groups, graph.transitions
    assert group.pattern == ((True, True), (True, True))
    assert transition.forward_only
    (record,) = graph.explain(kind=DiagnosticKind.CONTROL_FLOW_OPAQUE_FWD)
    assert record.hidden_paths == (('h',), ('s',))
    step = checked(model, graph, x, forward_mode=True)
    ((D, _),) = step.jacobians
    jacobian = group.diagonal_jacobian(
        [step.temps[v] for v in group.hidden_invars],
        [step.temps[v] for v in group.transition_jaxpr_constvars],
    )
    dense = jax.jacfwd(relax, argnums=(0, 1))(model.h.value, model.s.value)
    for s, row in enumerate(dense):
        for q, block in enumerate(row):
            true = jnp.diagonal(block)
            assert np.any(true != 0)
            assert_close(D[s][q], true)
            assert_close(jacobian[..., s, q], true)


def test_a_while_that_states_pass_through_can_be_forbidden():
    with pytest.raises(NotImplementedError, match="while_hidden='error' forbids") as error:
        compiled(lambda: WithCurrent(relaxed_by_while), while_hidden='error')
    assert_names_a_line_of(str(error.value), relaxed_by_while)
    assert "[('h',), ('s',)]" in str(error.value)
    assert 'lax.scan' in str(error.value)


def loop(body, start):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[1])), (0, start))[1]


def op_in_while(x, h, w):
    return loop(lambda c: c + btf.matmul(x, w), h)


def product_in_while(x, h, w):
    return loop(lambda c: c + x @ w, h)


def output_in_while(x, h, w):
    return loop(jnp.sin, btf.matmul(x, w))


def op_in_while_in_scan(x, h, w):
    return jax.lax.scan(lambda c, _: (op_in_while(x, c, w), None), h, length=2)[0]


def product_in_while_in_long_scan(x, h, w):
    return jax.lax.scan(lambda c, _: (product_in_while(x, c, w), None), h, length=2 * LIMIT)[0]


def weight_in_while_after_one_round(x, h, w):
    def body(carry, _):
        first, second = carry
        return (first, first + loop(jnp.sin, second)), None

    return jax.lax.scan(body, (x @ w, h), length=2)[0][1]


def op_in_while_in_cond(x, h, w):
    return jax.lax.cond(x[0] > 0, lambda: op_in_while(x, h, w), lambda: h)


def product_in_while_in_cond(x, h, w):
    return jax.lax.cond(x[0] > 0, lambda: product_in_while(x, h, w), lambda: h)


def op_in_while_in_while(x, h, w):
    return loop(lambda c: op_in_while(x, c, w), h)


@pytest.mark.parametrize(
    'second',
    [
        op_in_while,
        product_in_while,
        op_in_while_in_scan,
        product_in_while_in_long_scan,
        op_in_while_in_cond,
        product_in_while_in_cond,
        op_in_while_in_while,
    ],
)
def test_a_weight_inside_a_while_is_refused_with_its_line_and_the_way_out(second):
    for policy in ({}, {'etp_in_control_flow': 'exclude'}):
        with pytest.raises(NotImplementedError, match='inside a while loop') as error:
            compiled(lambda: TwoDrives(second), **policy)
        message = str(error.value)
        assert_names_a_line_of(message, loop)
        assert "('U',)" in message
        assert 'lax.scan' in message


def output_in_while_in_scan(x, h, w):
    return jax.lax.scan(lambda c, _: (output_in_while(x, c, w), None), h, length=2)[0]


def relaxed_sum(x, h, w):
    return loop(lambda c: 0.9 * c + 0.1 * jnp.sin(h), btf.matmul(x, w) + h)


@jax.custom_vjp
def fixed_point(v):
    return loop(lambda c: 0.5 * jnp.sin(c) + v, v)


fixed_point.defvjp(
    lambda v: (fixed_point(v), fixed_point(v)), lambda z, g: (g / (1 - 0.5 * jnp.cos(z)),)
)


def solved(x, h, w):
    return fixed_point(btf.matmul(x, w) + h)


@pytest.mark.parametrize(
    'second, custom',
    [
        (output_in_while, False),
        (weight_in_while_after_one_round, False),
        (output_in_while_in_scan, False),
        (relaxed_sum, False),
        (solved, True),
    ],
)
def test_what_a_weight_drives_may_pass_through_a_while_position_by_position(second, custom):
    model, graph, x = compiled(lambda: TwoDrives(second))
    assert ('U',) in [relation.path for relation in graph.hidden_param_op_relations] or (
        second is weight_in_while_after_one_round
    )
    step = checked(model, graph, x, forward_mode=not custom)
    assert any(np.any(np.asarray(c) != 0) for c in step.c)


class ReadsLoopOfOld(Leaky):
    """The output reads what a loop makes of the old state, past the new one."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def update(self, x):
        relaxed = loop(self.body, self.h.value)
        self.h.value = 0.5 * self.h.value + jnp.tanh(self.drive(x))
        return relaxed


def test_an_output_that_reads_a_loop_of_the_old_state_learns_from_the_past():
    model, graph, x = compiled(lambda: ReadsLoopOfOld(lambda c: c - 0.1 * c**3))
    step = checked(model, graph, x, forward_mode=True)
    (old,) = graph.hidden_groups[0].hidden_invars
    slope = jnp.diagonal(jax.jacfwd(lambda h: loop(lambda c: c - 0.1 * c**3, h))(model.h.value))
    by_out = jax.grad(lambda out: loss_of(graph)(out, step.hidden))(step.out)
    assert_close(step.R[old], slope * by_out)


def test_what_an_output_loses_by_a_loop_that_mixes_is_said():
    _, graph, _ = compiled(lambda: ReadsLoopOfOld(lambda c: c - 0.1 * c.mean()))
    (record,) = graph.explain(kind=DiagnosticKind.CONTROL_FLOW_OPAQUE_FWD)
    assert record.level is DiagnosticLevel.WARNING
    assert record.hidden_paths == (('h',),)
    assert_names_a_line_of(record.message, loop)
    assert 'mixes their positions' in record.message and 'lax.scan' in record.message


def test_a_loop_that_mixes_on_the_way_to_a_state_is_said_to_mix_there_only():
    _, graph, _ = compiled(lambda: Leaking(lambda h: loop(lambda c: c - 0.1 * c.mean(), h)))
    levels = [(record.kind, record.level) for record in graph.diagnostics]
    assert (DiagnosticKind.CONTROL_FLOW_RECURRENT_MIXING, DiagnosticLevel.WARNING) in levels
    assert (DiagnosticKind.CONTROL_FLOW_OPAQUE_FWD, DiagnosticLevel.WARNING) not in levels


def test_a_loop_that_mixes_what_a_weight_drives_is_refused_in_words_that_fit():
    def mixed(x, h, w):
        return loop(lambda c: c - 0.1 * c.mean(), btf.matmul(x, w))

    with pytest.raises(NotImplementedError, match='values computed from the weights') as error:
        compiled(lambda: TwoDrives(mixed))
    assert_names_a_line_of(str(error.value), loop)
    assert "('U',)" in str(error.value) and 'position by position' in str(error.value)


def test_a_refused_loop_leaves_an_error_record():
    model = build(lambda: TwoDrives(op_in_while))
    with diagnostic_context() as records, pytest.raises(NotImplementedError):
        btf.find_hidden_param_op_relations_from_module(model, draw(N_IN))
    record = records[-1]
    assert (record.kind, record.level, record.weight_path) == (
        DiagnosticKind.WEIGHT_IN_WHILE,
        DiagnosticLevel.ERROR,
        ('U',),
    )


# Scatters at a fixed place


@pytest.mark.parametrize(
    'leak, slope',
    [
        (lambda h: (0.8 * h).at[2:].add(-0.1 * h[2:]), [0.8, 0.8, 0.7, 0.7, 0.7]),
        (lambda h: (0.8 * h).at[1:3].set(0.5 * h[1:3]), [0.8, 0.5, 0.5, 0.8, 0.8]),
        (lambda h: (0.8 * h).at[-1:].set(0.5 * h[-1:]), [0.8, 0.8, 0.8, 0.8, 0.5]),
        (lambda h: (0.8 * h).at[:].add(h), [1.8] * 5),
    ],
)
def test_a_part_of_a_state_that_is_set_in_place_stays_position_wise(leak, slope):
    model, graph, x = compiled(lambda: Leaking(leak))
    assert graph.hidden_groups[0].is_position_wise
    assert_close(only_D(checked(model, graph, x)), np.asarray(slope))


def test_a_plane_that_is_set_no_longer_depends_on_itself():
    class Planes(Leaky):
        def init_state(self, batch_size=None, **_):
            self.h = brainstate.HiddenGroupState(jnp.zeros((N, 2)))

        def drive(self, x):
            return btf.matmul(x, self.W.value[:N_IN])

        def update(self, x):
            first, second = self.h.value[..., 0], self.h.value[..., 1]
            self.h.value = self.h.value.at[..., 0].set(0.5 * second + self.drive(x))
            self.h.value = self.h.value.at[..., 1].set(first + second)
            return self.h.value

    model, graph, x = compiled(Planes)
    assert graph.hidden_groups[0].pattern == ((False, True), (True, True))
    checked(model, graph, x)


# The policy itself


@pytest.mark.parametrize(
    'wrong',
    [
        {'cond': 'unknown'},
        {'while_hidden': 'fwd'},
        {'etp_in_control_flow': 'ignore'},
        {'scan_descent': 'always'},
    ],
)
def test_a_policy_refuses_what_it_does_not_know(wrong):
    ((field, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{field}='{value}'.*choose one of"):
        ControlFlowPolicy(**wrong)


@pytest.mark.parametrize('limit', [0, -1, 2.0, True, '64', None])
def test_the_limit_of_iterations_is_a_positive_int(limit):
    with pytest.raises(ValueError, match='fixpoint_iteration_limit=.*expected a positive int'):
        ControlFlowPolicy(fixpoint_iteration_limit=limit)


def handed_on(h):
    """What ``h`` is in the first of three numbers, it is in the last one two iterations later."""

    def body(carry, _):
        a, b, c = carry
        return (h, a, b), None

    return jax.lax.scan(body, (h, jnp.zeros(N), jnp.zeros(N)), length=2 * LIMIT)[0][2]


def test_a_loop_is_looked_through_as_often_as_the_policy_says():
    _, graph, _ = compiled(lambda: Leaking(handed_on))
    assert graph.hidden_groups[0].pattern == ((True,),)
    _, graph, _ = compiled(lambda: Leaking(handed_on), fixpoint_iteration_limit=1)
    assert not graph.hidden_groups[0].is_position_wise


def test_the_policy_is_kept_with_the_traced_model():
    policy = ControlFlowPolicy(scan_unroll_limit=3)
    model = build(Leaky)
    assert btf.extract_module_info(model, draw(N_IN)).control_flow == ControlFlowPolicy()
    info = btf.extract_module_info(model, draw(N_IN), control_flow=policy)
    assert info.control_flow is policy
