"""``compile`` finds a learning rule by its name, however it is written."""

import jax.numpy as jnp
import pytest

import braintrace_fast as btf
from braintrace_fast.learner import ALGORITHMS

WRITTEN = {
    btf.D_RTRL: ['D-RTRL', 'd-rtrl', 'D_RTRL', 'DRTRL', 'D RTRL', 'D\N{EN DASH}RTRL'],
    btf.pp_prop: ['pp-prop', 'PP Prop', 'ppprop', 'ES-D-RTRL', 'esd_rtrl'],
    btf.EProp: ['e-prop', 'E-Prop', 'eprop', 'EProp', ' e_prop '],
    btf.ThreeFactor: ['three-factor', 'ThreeFactor', 'three factor'],
}


def compiled(name, **options):
    return btf.compile(btf.nn.ValinaRNNCell(1, 1), name, jnp.ones(1), **options)


@pytest.mark.parametrize('rule', WRITTEN, ids=lambda rule: rule.__name__)
def test_only_letters_and_digits_of_a_name_count(rule):
    options = {'decay_or_rank': 0.9} if rule is btf.pp_prop else {}
    for name in WRITTEN[rule]:
        assert type(compiled(name, **options)) is rule


def test_rules_whose_names_are_written_alike_are_the_same():
    by_letters = {}
    for name, rule in ALGORITHMS.items():
        assert by_letters.setdefault(name.replace('_', ''), rule) is rule


@pytest.mark.parametrize(
    ('name', 'nearest'),
    [('d-rtl', 'd_rtrl'), ('RTRL', 'd_rtrl'), ('pp-pop', 'pp_prop'), ('3 factor', 'three_factor')],
)
def test_an_unknown_name_is_told_the_nearest_and_all_others(name, nearest):
    with pytest.raises(ValueError, match=f'{name!r} is not known; did you mean {nearest!r}?') as e:
        compiled(name)
    assert all(known in str(e.value) for known in ALGORITHMS)


@pytest.mark.parametrize('name', ['', '-', 'backpropagation through time'])
def test_a_name_that_is_like_none_is_told_all(name):
    with pytest.raises(ValueError, match=f'{name!r} is not known. Choose one of .*d_rtrl'):
        compiled(name)
