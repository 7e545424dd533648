"""One warning per compilation, for what the user can and should change, and for nothing else."""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace_fast as btf
from tests.compiler.checks import build, draw, param
from tests.models import MODELS, N_IN, Leaky, N, Normalised, PlainLeak, Pooled

WARNED = ('plain_leak', 'lateral', 'pooled', 'layer_norm')
"""Models of the table that are examples of what is not traced."""
CELLS = {
    'ValinaRNNCell': lambda: btf.nn.ValinaRNNCell(N_IN, N),
    'GRUCell': lambda: btf.nn.GRUCell(N_IN, N),
    'LSTMCell': lambda: btf.nn.LSTMCell(N_IN, N),
    'MinimalRNNCell': lambda: btf.nn.MinimalRNNCell(N_IN, N),
    'LeakyRateReadout': lambda: btf.nn.LeakyRateReadout(N_IN, N),
}


class Second(Leaky):
    """Another weight, used by a function of the input, the state and itself."""

    def __init__(self, second, shape=(N_IN, N), number=1):
        super().__init__()
        self.others = [param(*shape) for _ in range(number)]
        self.second = second

    def drive(self, x):
        y = super().drive(x)
        for other in self.others:
            y = y + self.second(x, self.h.value, other.value)
        return y


def plain(x, h, w):
    return x @ w


class Readout(Leaky):
    """A plain layer after the state, and one before the op."""

    def __init__(self):
        super().__init__()
        self.encoder = brainstate.nn.Linear(N_IN, N_IN)
        self.readout = brainstate.nn.Linear(N, 2)

    def update(self, x):
        return self.readout(super().update(jnp.tanh(self.encoder(x))))


class Tied(Leaky):
    """A traced weight that is also used as it is."""

    def leak(self, h):
        return 0.8 * h + jnp.tanh(h @ self.W.value[N_IN:])


def compiled(make, **options):
    learner = btf.D_RTRL(build(make), **options)
    learner.compile_graph(draw(N_IN))
    return learner


def message_of(make):
    with pytest.warns(btf.UntracedWarning) as caught:
        compiled(make)
    assert len(caught) == 1
    return str(caught[0].message)


@pytest.mark.parametrize('name', [name for name in MODELS if name not in WARNED])
def test_models_of_the_table_are_silent(name, silent):
    model, inputs = MODELS[name].build(2)
    x = jax.tree.map(lambda leaf: leaf[0], inputs(0, 1))
    btf.D_RTRL(model).compile_graph(x)


@pytest.mark.parametrize('name', WARNED)
def test_models_of_the_table_with_something_to_change_are_not(name):
    model, inputs = MODELS[name].build(2)
    with pytest.warns(btf.UntracedWarning, match=r'models.py:\d+'):
        btf.D_RTRL(model).compile_graph(inputs(0, 1)[0])


@pytest.mark.parametrize('name', CELLS)
def test_cells_of_the_library_are_silent(name, silent):
    btf.compile(CELLS[name](), 'd_rtrl', draw(N_IN))


def test_plain_layers_beside_the_hidden_states_are_silent(silent):
    compiled(Readout)


@pytest.mark.parametrize(
    ('make', 'weight', 'says'),
    [
        (lambda: Second(plain), ('others', 0), 'pass it through an op'),
        (PlainLeak, ('a',), 'pass it through an op'),
        (Tied, ('W',), 'also reaches hidden states through no ETP op'),
        (Pooled, ('P',), 'apply the op after them'),
        (Normalised, ('W',), 'apply it before the op'),
        (
            lambda: Second(lambda x, h, w: btf.matmul(x, w)[..., :N], (N_IN, N + 1)),
            ('others', 0),
            'use an op of its own',
        ),
    ],
    ids=['plain', 'plain leak', 'plain use', 'mixing', 'normalised', 'shape'],
)
def test_the_warning_names_the_weight_the_line_and_what_to_change(make, weight, says):
    message = message_of(make)
    assert message.startswith('1 weight is not traced, or only in part')
    assert str(weight) in message and says in message and '.py:' in message
    assert "warnings.filterwarnings('ignore', category=braintrace_fast.UntracedWarning)" in message


def test_weights_of_one_line_are_counted_together():
    message = message_of(lambda: Second(plain, number=3))
    assert message.startswith('3 weights are not traced')
    assert message.count('test_untraced.py:') == 1 and '(and 2 more weights)' in message


def test_what_is_left_out_comes_before_what_counts_in_part_and_the_rest_is_counted():
    class Bad(Normalised):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = param(N), param(N), param(N)

        def leak(self, h):
            h = h * self.a.value
            h = h * self.b.value
            return h * self.c.value

    message = message_of(Bad)
    shown = [line for line in message.splitlines() if line.startswith('  - ')]
    assert len(shown) == 4 and all('no ETP op' in line for line in shown[:3])
    assert shown[3] == '  - (and 1 more place)'
    assert message.startswith('4 weights are not traced')


@pytest.mark.parametrize('vmap', [False, True])
def test_the_warning_points_to_the_line_that_compiles(vmap):
    def caught_at(function):
        with pytest.warns(btf.UntracedWarning) as caught:
            function()
        assert caught[0].filename == __file__
        return caught[0].lineno

    options = {'batch_size': 2, 'vmap': True} if vmap else {}
    x = draw(2, N_IN) if vmap else draw(N_IN)
    here = caught_at.__code__.co_firstlineno
    assert caught_at(lambda: btf.compile(PlainLeak(), 'd_rtrl', x, **options)) > here
    learner = btf.D_RTRL(build(PlainLeak))
    assert caught_at(lambda: learner.compile_graph(draw(N_IN))) > here


def test_the_category_silences_it():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', category=btf.UntracedWarning)
        compiled(PlainLeak)
    assert issubclass(btf.UntracedWarning, UserWarning)


def test_a_weight_that_is_left_out_on_request_is_still_named():
    def long_scan(x, h, w):
        return jax.lax.scan(lambda c, _: (c + btf.matmul(x, w), None), jnp.zeros(N), length=17)[0]

    policy = btf.ControlFlowPolicy(etp_in_control_flow='exclude', scan_descent='off')
    with pytest.warns(btf.UntracedWarning, match='scan_unroll_limit'):
        compiled(lambda: Second(long_scan), control_flow=policy)


class Delayed(brainstate.nn.Module):
    """A state that is the old value of another one, read by a product in the same step."""

    def __init__(self, copy):
        super().__init__()
        self.copy = copy
        self.w, self.v = (brainstate.ParamState(0.5 + jnp.eye(3)) for _ in range(2))

    def init_state(self, **kwargs):
        self.h, self.delayed, self.last = (brainstate.HiddenState(jnp.zeros(3)) for _ in range(3))

    def update(self, x):
        self.delayed.value = jnp.array(self.h.value, copy=True) if self.copy else self.h.value
        self.h.value = 0.5 * self.h.value + btf.matmul(x, self.w.value)
        self.last.value = 0.5 * self.last.value + btf.matmul(self.delayed.value, self.v.value)
        return self.last.value


def test_a_state_that_is_anothers_old_value_is_named_where_a_product_reads_it():
    def gradient(copy):
        learner = btf.compile(Delayed(copy), 'd_rtrl', jnp.ones(3))
        xs = jnp.ones((4, 3))
        return learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x)))['w',]

    with pytest.warns(btf.UntracedWarning, match=r"'delayed'.* the old value .*'h'.*copy=True"):
        assert not gradient(copy=False).any()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert gradient(copy=True).any()
