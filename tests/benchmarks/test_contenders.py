"""Gradients are held against the oracle before they are timed, on every workload."""

import brainstate
import jax
import pytest
import saiunit as u

from benchmarks import contenders
from benchmarks.contenders import build, gradient_errors
from benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.usefixtures('promotes')  # brainstate's readouts broadcast their biases


@pytest.fixture(autouse=True)
def _step():
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


FIRST = 'lif'


@pytest.mark.parametrize(
    'workload', [FIRST, *(pytest.param(w, marks=pytest.mark.slow) for w in WORKLOADS if w != FIRST)]
)
def test_gradients_of_a_workload_are_live_and_right(workload):
    assert gradient_errors(workload, 'd_rtrl carry')['all'] < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize('contender', ['bptt', 'd_rtrl fresh', 'pp_prop', 'eprop'])
def test_gradients_of_a_contender_are_right(contender):
    assert gradient_errors('lif_expon', contender)['all'] < 1e-9


def test_updates_in_every_step_add_up_to_the_gradient():
    assert gradient_errors('lif', 'd_rtrl carry', update=1e-6)['all'] < 1e-5


def test_a_wrong_gradient_is_refused(monkeypatch):
    exact = contenders.truth
    doubled = lambda *args: jax.tree.map(lambda g: 2 * g, exact(*args))  # noqa: E731
    monkeypatch.setattr(contenders, 'truth', doubled)
    with pytest.raises(AssertionError, match='relative error'):
        gradient_errors('lif', 'd_rtrl fresh')


def test_the_deviation_of_the_reference_is_reported_and_not_refused(reference):
    errors = gradient_errors('lif', 'braintrace D_RTRL')
    if reference.__version_info__ < (0, 2, 7):
        assert errors['all'] == 1.0  # it has no gradient for a plain readout
    else:
        assert errors['all'] < 1e-9
    assert errors['traced'] < 1e-9


def test_full_sizes_are_those_of_the_tasks():
    sizes = {name: workload.sized(full=True) for name, workload in WORKLOADS.items()}
    assert (sizes['wide']['inputs'], sizes['wide']['layers'], sizes['wide']['size']) == (
        32768,
        3,
        512,
    )
    assert (sizes['gif']['size'], sizes['gif']['batch']) == (200, 128)
    assert (sizes['conv']['side'], sizes['conv']['size']) == (32, 32)
    assert (sizes['coba']['inputs'], sizes['coba']['size']) == (100, 800)
    radlif = sizes['radlif']
    assert (radlif['inputs'], radlif['layers'], radlif['size'], radlif['steps']) == (
        700,
        2,
        1024,
        100,
    )


def test_a_program_of_a_workload_has_the_sizes_asked_for():
    program = build('gru', 'd_rtrl fresh', WORKLOADS['gru'].small_copy() | {'steps': 5})
    assert program.steps == 5
    assert program()['readout', 'weight']['weight'].shape == (10, 3)
