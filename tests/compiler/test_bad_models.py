"""Models and inputs that cannot be compiled or run: a clear error, and nothing changed."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import CompilationError, NotSupportedError
from tests.compiler.checks import assert_close, build, draw, leaves_of, numbers, param
from tests.models import N_IN, Leaky, N, Units, hidden

pytestmark = pytest.mark.usefixtures('x64')


class NoHiddenState(brainstate.nn.Module):
    """What carries over is a short-term state, which is not traced."""

    def __init__(self):
        super().__init__()
        self.W = param(N_IN + N, N)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.ShortTermState(jnp.zeros(N))

    def update(self, x):
        xh = jnp.concatenate([x, self.h.value], axis=-1)
        self.h.value = jnp.tanh(btf.matmul(xh, self.W.value))
        return self.h.value


class NoTracedWeight(Leaky):
    """The weight passes through a plain product."""

    def drive(self, x):
        return jnp.concatenate([x, self.h.value], axis=-1) @ self.W.value


class OnlyReadout(NoTracedWeight):
    """The only op is on the way to the output."""

    def __init__(self):
        super().__init__()
        self.R = param(N, 2)

    def update(self, x):
        return btf.matmul(super().update(x), self.R.value)


class NoWeight(Leaky):
    def __init__(self):
        brainstate.nn.Module.__init__(self)

    def drive(self, x):
        return jnp.sum(x)


class WritesWeight(Leaky):
    """Decays its weight in the step."""

    def update(self, x):
        out = super().update(x)
        self.W.value = 0.9 * self.W.value
        return out


class WeightInWhile(Leaky):
    def drive(self, x):
        w, xh = self.W.value, jnp.concatenate([x, self.h.value], axis=-1)

        def body(carry):
            return carry[0] + 1, jnp.tanh(carry[1] + btf.matmul(xh, w))

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, self.h.value))[1]


class LongScan(Leaky):
    def drive(self, x):
        def body(carry, gain):
            return btf.matmul(jnp.concatenate([x, carry], axis=-1), gain * self.W.value), None

        return jax.lax.scan(body, self.h.value, jnp.ones(300))[0]


class ChangesShape(Leaky):
    """The state grows a batch axis in the step."""

    def update(self, x):
        super().update(x)
        self.h.value = self.h.value[None]
        return x


class ChangesType(Leaky):
    def update(self, x):
        super().update(x)
        self.h.value = self.h.value.astype(jnp.float32)
        return x


class ComplexState(Leaky):
    """A damped rotation, as of a linear recurrent unit."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.z = brainstate.HiddenState(jnp.zeros(N, complex))

    def leak(self, h):
        self.z.value = 0.9j * self.z.value + h.astype(complex)
        return 0.8 * h + self.z.value.real


class ComplexOp(Leaky):
    def __init__(self):
        super().__init__()
        self.turn = brainstate.ParamState(jnp.full(N, 0.5 + 0.5j))

    def leak(self, h):
        return (btf.element_wise(self.turn.value) * h.astype(complex)).real


class NotInitialised(Leaky):
    def init_state(self, batch_size=None, **_):
        pass


class PartlyInitialised(Leaky):
    """One of two layers has no states yet."""

    def __init__(self):
        super().__init__()
        self.below = NotInitialised()

    def update(self, x):
        return super().update(x) + self.below(x)


class Fails(Leaky):
    """An error of the user's own, after states have been written."""

    def update(self, x):
        super().update(x)
        raise LookupError('an error of the model')


# Per model: the error, what was found, and what to do.
BAD = [
    (NoHiddenState, CompilationError, ['no brainstate.HiddenState', 'Make what carries over']),
    (
        NoTracedWeight,
        CompilationError,
        ['No weight of the model can be traced', "('W',) passes through no ETP op", 'matmul'],
    ),
    (
        OnlyReadout,
        CompilationError,
        ["('R',) is not traced", 'reaches no hidden state', "('W',) passes through no ETP op"],
    ),
    (NoWeight, CompilationError, ['uses no ParamState at all', 'an op of this library']),
    (
        WritesWeight,
        NotSupportedError,
        ["writes the ParamState at ('W',)", 'update them after it', 'ShortTermState'],
    ),
    (
        WeightInWhile,
        NotImplementedError,
        ['test_bad_models.py:', "[('W',)]", 'inside a while loop', 'lax.scan'],
    ),
    (
        LongScan,
        NotImplementedError,
        ['test_bad_models.py:', "[('W',)]", 'inside a scan', 'scan_unroll_limit'],
    ),
    (
        ChangesShape,
        CompilationError,
        ["hidden state at ('h',)", f'shape ({N},) to', f'shape (1, {N})', 'initialise it as'],
    ),
    (
        ChangesType,
        CompilationError,
        ["hidden state at ('h',)", 'from float64', 'to float32', 'initialise it as'],
    ),
    (
        ComplexState,
        NotSupportedError,
        ["hidden state at ('z',) is complex128", 'two hidden states', 'jax.lax.complex'],
    ),
    (
        ComplexOp,
        NotSupportedError,
        ['test_bad_models.py:', "('turn',)", 'complex128', 'real and imaginary part'],
    ),
    (
        NotInitialised,
        CompilationError,
        ["'h' of a NotInitialised", 'found in the model: none', 'brainstate.nn.init_all_states'],
    ),
    (
        PartlyInitialised,
        CompilationError,
        ["'h' of a NotInitialised", "[('h',)]", 'brainstate.nn.init_all_states'],
    ),
    (Fails, LookupError, ['an error of the model']),
]


def snapshot(model):
    """All that could have changed: states, values (the very objects), and flags."""
    states = dict(model.states())
    flags = {
        path: {name: value for name, value in vars(state).items()} for path, state in states.items()
    }
    return states, flags, set(vars(model))


def assert_unchanged(model, before):
    states, flags, attributes = snapshot(model)
    assert list(states) == list(before[0]) and attributes == before[2]
    for path, state in states.items():
        assert state is before[0][path]
        assert set(flags[path]) == set(before[1][path])
        for name, value in flags[path].items():
            assert value is before[1][path][name], (path, name)


@pytest.mark.parametrize('make, error, says', BAD, ids=[make.__name__ for make, *_ in BAD])
def test_a_bad_model_is_refused_with_what_was_found_and_what_to_do(make, error, says):
    model = build(make)
    with pytest.raises(error) as caught:
        btf.D_RTRL(model).compile_graph(draw(N_IN))
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize('make', [NoTracedWeight, OnlyReadout, NoWeight])
def test_a_model_of_which_nothing_is_traced_can_be_looked_at(make):
    model, x = build(make), draw(N_IN)
    graph = btf.compile_etrace_graph(model, x)
    assert not graph.hidden_param_op_relations and btf.CompilationReport(graph).etrace_weights == []
    assert list(graph.hid_path_to_group) == [('h',)]
    zeros = graph.hidden_perturb.init_perturb_data()
    assert np.array_equal(graph.call_hidden_perturb([x], zeros)[0], model(x))


@pytest.mark.parametrize('make', [make for make, *_ in BAD])
def test_a_refused_model_is_as_it_was(make):
    model, x = build(make), draw(N_IN)
    for state in model.states().values():
        state._been_writen = False  # as after brainstate's own transformations
    before, values, random = snapshot(model), leaves_of(model), brainstate.random.DEFAULT.value
    with pytest.raises(Exception):  # noqa: B017, the test above says which
        btf.D_RTRL(model).compile_graph(x)
    assert_unchanged(model, before)
    for path, leaves in leaves_of(model).items():
        for a, b in zip(leaves, values[path], strict=True):
            assert np.array_equal(a, b)
    assert np.array_equal(numbers(brainstate.random.DEFAULT.value), numbers(random))
    # Nothing stays behind in the compiler either.
    good = build(Leaky)
    assert len(btf.compile_etrace_graph(good, x).hidden_param_op_relations) == 1


def test_a_model_is_as_it_was_after_a_good_compilation():
    model, x = build(Leaky), draw(N_IN)
    for state in model.states().values():
        state._been_writen = False
    before = snapshot(model)
    graph = btf.compile_etrace_graph(model, x)
    graph.call_hidden_perturb((x,), graph.hidden_perturb.init_perturb_data())
    graph.call_exit_perturb((x,), *graph.exit_perturb.zeros())
    assert_unchanged(model, before)


def test_an_attribute_that_is_missing_elsewhere_is_an_error_of_the_model():
    class Typo(Leaky):
        def update(self, x):
            return super().update(x).sun()

    with pytest.raises(AttributeError, match='sun'):
        btf.compile_etrace_graph(build(Typo), draw(N_IN))


def test_a_mended_model_compiles():
    model, x = build(WritesWeight), draw(N_IN)
    with pytest.raises(NotSupportedError):
        btf.compile_etrace_graph(model, x)
    model.update = lambda x: Leaky.update(model, x)
    assert btf.compile_etrace_graph(model, x).hidden_param_op_relations[0].path == ('W',)


def test_states_of_different_shapes_in_one_group_are_refused():
    states = [hidden(None, N), hidden(None, N, 2)]
    group = btf.HiddenGroup(0, [('a',), ('b',)], states, [], [], None, [])
    values = [state.value for state in states]
    with pytest.raises(NotSupportedError) as error:
        group.check_consistent_varshape()
    message = str(error.value)
    assert f"('a',): ({N},)" in message and f"('b',): ({N}, 2)" in message
    assert 'give them the same shape, or keep them in groups of their own' in message
    assert all(state.value is value for state, value in zip(states, values, strict=True))


# Inputs that are not like those that the step was compiled with


@pytest.fixture
def graph():
    return btf.compile_etrace_graph(build(Leaky), draw(N_IN))


def calls(graph):
    """Every way to run the compiled step."""
    zeros, exits = graph.hidden_perturb.init_perturb_data(), graph.exit_perturb.zeros()
    return [
        lambda *args, **kw: graph.module_info.jaxpr_call(*args, **kw),
        lambda *args, **kw: graph.call_hidden_perturb(args, zeros, **kw),
        lambda *args, **kw: graph.call_exit_perturb(args, *exits, **kw),
    ]


@pytest.mark.parametrize(
    'args',
    [
        (),
        (jnp.ones(N_IN), jnp.ones(N_IN)),
        ([jnp.ones(N_IN)],),
        ({'x': jnp.ones(N_IN)},),
        (None,),
    ],
    ids=['none', 'two', 'list', 'dict', 'None'],
)
def test_inputs_of_another_structure_are_refused(graph, args):
    for call in calls(graph):
        with pytest.raises(ValueError, match='differ in structure or unit') as error:
            call(*args)
        assert 'compile again with inputs like these' in str(error.value)


@pytest.mark.parametrize('shape', [(N_IN + 1,), (2, N_IN), ()])
def test_inputs_of_another_shape_are_refused(graph, shape):
    for call in calls(graph):
        with pytest.raises(ValueError) as error:
            call(jnp.ones(shape))
        message = str(error.value)
        assert str(shape) in message and f'({N_IN},)' in message
        assert 'Compile again' in message


def test_states_of_another_shape_or_number_are_refused(graph):
    states = [state.value for state in graph.module_info.compiled_model_states]
    x = jnp.ones(N_IN)
    for call in calls(graph):
        with pytest.raises(ValueError, match='has shape .* compiled for'):
            call(x, old_state_vals=[value[:-1] for value in states])
        with pytest.raises(ValueError, match='differ in structure'):
            call(x, old_state_vals=states[:-1])


def test_inputs_in_another_unit_are_refused():
    model = build(Units)
    graph = btf.compile_etrace_graph(model, draw(N_IN) * u.mV)
    out, *_ = graph.module_info.jaxpr_call(draw(N_IN) * u.mV)
    assert u.get_unit(out) == u.mV
    for wrong in (draw(N_IN), draw(N_IN) * u.volt, draw(N_IN) * u.mA):
        for call in calls(graph):
            with pytest.raises(ValueError, match='differ in structure or unit') as error:
                call(wrong)
            assert 'Convert them' in str(error.value)


def test_a_wrong_number_of_perturbations_is_refused(graph):
    x, zero = jnp.ones(N_IN), jnp.zeros(N)
    for wrong in ([], [zero, zero]):
        with pytest.raises((TypeError, ValueError)):
            graph.call_hidden_perturb((x,), wrong)
        with pytest.raises((TypeError, ValueError)):
            graph.call_exit_perturb((x,), [zero], wrong, [])


def test_a_refused_call_leaves_the_model_as_it_was():
    model = build(Leaky)
    graph = btf.compile_etrace_graph(model, draw(N_IN))
    before = snapshot(model)
    with pytest.raises(ValueError):
        graph.module_info.jaxpr_call(jnp.ones(N_IN + 1))
    assert_unchanged(model, before)
    out, *_ = graph.module_info.jaxpr_call(jnp.zeros(N_IN))
    assert_close(out, 0.8 * model.h.value + jnp.tanh(model.h.value @ model.W.value[N_IN:]))
