"""The code of ``docs/migration.md`` runs, and what it says of both libraries is so."""

import copy
import inspect
import pathlib
import pickle
import re
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf

PAGE = (pathlib.Path(__file__).parents[1] / 'docs' / 'migration.md').read_text('utf-8')
XS = jnp.ones((4, 2, 3))


@pytest.fixture
def both(reference, promotes):
    """Either library; what the reference warns of is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)
        yield reference, btf


def learner_of(lib, algorithm='d_rtrl', **options):
    brainstate.random.seed(0)
    model = lib.nn.GRUCell(3, 4)
    return lib.compile(model, algorithm, XS[0], batch_size=2, **options)


def gradient(learner, *sequences, **options):
    def loss(x, *_):
        return jnp.sum(learner(x) ** 2)

    return learner.etrace_grad(*(sequences or (XS,)), step_fn=loss, **options)


def test_the_code_of_the_page_runs():
    blocks = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
    assert len(blocks) == 3
    exec('\n'.join(blocks), {})


# Arguments and names


def test_new_arguments_of_etrace_grad_are_named_on_the_page(reference):
    ours, theirs = (
        inspect.signature(lib.D_RTRL.etrace_grad).parameters for lib in (btf, reference)
    )
    new = set(ours) - set(theirs)
    assert set(theirs) <= set(ours) and len(new) == 5
    assert all(f'`{name}=`' in PAGE for name in new)


def test_names_of_rules_as_people_write_them(both):
    reference, _ = both
    for name in ('D-RTRL', 'e-prop'):
        assert isinstance(learner_of(btf, name), btf.ETraceAlgorithm)
        with pytest.raises(ValueError, match='Unknown algorithm name'):
            learner_of(reference, name)
    with pytest.raises(ValueError, match="did you mean 'd_rtrl'"):
        learner_of(btf, 'd-rtrlx')


def test_raw_keys_of_uoro(both):
    def projected(lib):
        key = jax.random.PRNGKey(0)
        return gradient(learner_of(lib, 'uoro', projection_key=key, vjp_method='single-step'))

    with pytest.raises(TypeError, match='carry'):
        projected(both[0])
    assert np.any(projected(btf)['Wz', 'weight']['weight'])


# Return values


def test_gradients_and_losses_have_the_form_of_the_reference(both):
    forms = []
    for lib in both:
        grads, losses = gradient(learner_of(lib), return_value=True)
        assert losses.shape == (4,)
        forms.append({path: jax.tree.map(jnp.shape, grad) for path, grad in grads.items()})
    assert forms[0] == forms[1] and list(forms[0]) == list(forms[1])


def test_one_state_holds_all_traces_and_shows_them_in_the_layout_of_the_reference(both):
    found = []
    for lib in both:
        learner = learner_of(lib)
        learner(XS[0])
        (trace,) = learner.get_etrace_of(('Wz', 'weight')).values()
        found.append(jax.tree.map(jnp.shape, trace))
        held = [s for s in learner.states().values() if type(s).__name__ == 'EligibilityTrace']
        assert len(held) == (1 if lib is btf else 2)
    shapes = {'bias': (2, 4), 'weight': (2, 7, 4)}
    assert found == [{name: (*shape, 1) for name, shape in shapes.items()}] * 2


def test_a_report_is_a_text_when_it_is_called(both):
    for lib in both:
        assert isinstance(learner_of(lib).report, lib.CompilationReport)
    assert 'Wr' in learner_of(btf).report(2) and 'window' in learner_of(btf).report()


# Warnings and errors


def test_what_is_so_by_design_is_not_warned_of(reference, promotes, silent):
    learner_of(btf)
    with pytest.warns(UserWarning, match='Wr'):
        learner_of(reference)


def test_states_that_are_made_anew_are_refused(both):
    for lib in both:
        model = lib.nn.GRUCell(3, 4)
        learner = lib.compile(model, 'd_rtrl', XS[0], batch_size=2)
        before = learner(XS[0])
        brainstate.nn.reset_all_states(learner, batch_size=2)
        np.testing.assert_array_equal(learner(XS[0]), before)
        brainstate.nn.init_all_states(model, batch_size=2)
        if lib is btf:
            with pytest.raises(ValueError, match='reset_all_states'):
                learner(XS[0])
        else:
            assert np.any(learner(XS[0]) != before)


def test_copies_are_refused(both):
    for lib, error in zip(both, ('weakref', 'neither deep-copied nor pickled'), strict=True):
        with pytest.raises(TypeError, match=error):
            pickle.dumps(learner_of(lib))
    with pytest.raises(TypeError, match='save'):
        copy.deepcopy(learner_of(btf))
    model = both[0].nn.GRUCell(3, 4)
    learner = both[0].compile(model, 'd_rtrl', XS[0], batch_size=2)
    before = model.h.value
    copy.deepcopy(learner)(XS[0])
    assert np.any(model.h.value != before)


WRONG = {
    'ragged chunks': lambda lib: gradient(learner_of(lib, vjp_method='multi-step'), chunk_size=3),
    'several lengths': lambda lib: gradient(learner_of(lib), XS, XS[:2]),
    'no scalar': lambda lib: (one := learner_of(lib)).etrace_grad(XS, step_fn=lambda x: one(x)),
    'not compiled': lambda lib: lib.D_RTRL(lib.nn.GRUCell(3, 4))(XS[0]),
}


@pytest.mark.parametrize('call', WRONG.values(), ids=WRONG)
def test_errors_have_the_kind_of_the_reference(both, call):
    for lib in both:
        with pytest.raises(ValueError):
            call(lib)


class PlainCell(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = brainstate.nn.Linear(3, 4)
        self.h = brainstate.HiddenState(jnp.zeros((2, 4)))

    def update(self, x):
        self.h.value = jnp.tanh(self.h.value + self.linear(x))
        return self.h.value


def test_a_model_without_a_traced_weight_is_refused(both):
    for lib in both:
        with pytest.raises(lib.CompilationError):
            lib.compile(PlainCell(), 'd_rtrl', XS[0])


# States, traces, reset


def test_reset_state_leaves_the_states_of_the_model(both):
    for lib in both:
        learner = learner_of(lib)
        before = learner(XS[0])
        learner.reset_state(2)
        assert int(learner.running_index.value) == 0
        assert np.any(learner(XS[0]) != before)


def test_a_learner_starts_anew_within_a_sequence(both):
    with pytest.raises(TypeError, match='reset'):
        learner_of(both[0])(XS[0], reset=True)
    learner = learner_of(btf)
    first = learner(XS[0])
    found = learner(XS[0], reset=jnp.asarray([True, False]))
    np.testing.assert_allclose(found[0], first[0], rtol=1e-6)
    assert np.any(found[1] != first[1])


# Mapping and hooks


def test_a_mapped_learner_has_the_type_of_the_reference(both):
    for lib in both:
        assert isinstance(learner_of(lib, vmap=True), lib.ETraceVmap)


def test_a_hook_that_is_never_called_is_refused(reference):
    hook = {'_make_etrace_stepper': lambda self, *args: None}
    assert issubclass(type('Mine', (reference.D_RTRL,), hook), reference.D_RTRL)
    with pytest.raises(btf.NotSupportedError, match='make_engine'):
        type('Mine', (btf.D_RTRL,), hook)
