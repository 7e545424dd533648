"""Which configurations there are, beside the reference's."""

import dataclasses
import itertools

import numpy as np
import pytest

import braintrace_fast as btf
from braintrace_fast.algorithm.axes import VALUES

RECURSIONS = (*VALUES['temporal_recursion'], ('scalar_leak', 'jacobian'), ['none', 'scalar_leak'])
DECAYS = (None, 0.0, 0.5, (0.0, 0.5), [0.25, None])
COEFFICIENTS = ({}, {'kappa': 0.0}, {'kappa': 0.5}, {'sparse_n': 1}, {'sparse_n': 3})
PROPERTIES = (
    *('is_factorized', 'include_recurrent_mixing'),
    *('recursion_x', 'recursion_f', 'decay_x', 'decay_f'),
)
ODD = [
    *({'temporal_recursion': 'scalar_leak', 'decay': a} for a in (1, 1.0, -0.1, np.nan, True, 'a')),
    *({'temporal_recursion': 'scalar_leak', 'decay': a} for a in (0, np.float32(0.5), np.ones(()))),
    *({'trace_filter': 'kappa', 'kappa': a} for a in (1.0, True, 'a', (0.5, 0.5))),
    *({'recurrence_scope': 'sparse_n', 'sparse_n': n} for n in (0, True, 2.0, np.int64(2), 'a')),
    *({axis: value} for axis in VALUES for value in ('odd', 3, None, [], ('none',))),
    *({'trace_factorization': 'io_factorized', 'decay': a} for a in ((), (0.5,) * 3, True, 2)),
    *({'update_schedule': s, 'window_size': 4} for s in VALUES['update_schedule']),
    {'decay': 'a'},
    {'kappa': 0.5},
    {'window_size': 4},
]


def made(library, **fields):
    """The fields of a configuration and what it says of itself, or the error."""
    try:
        config = library.ETraceConfig(**fields)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    found = dataclasses.asdict(config) | {name: _get(config, name) for name in PROPERTIES}
    return found, config.describe()


def _get(config, name):
    try:
        return getattr(config, name)
    except AttributeError:
        return 'no such attribute'


def check(reference, **fields):
    """Whether there is such a configuration; it is the reference's, too."""
    (found, text), (expected, other) = made(btf, **fields), made(reference, **fields)
    assert found == expected, fields
    if isinstance(found, dict):
        assert text == other
        config = btf.ETraceConfig(**fields)
        assert config.replace(decay=config.decay) == config
        return True
    assert len(text) > 20
    return False


@pytest.mark.parametrize('factorization', VALUES['trace_factorization'])
def test_configurations_are_those_of_the_reference(reference, factorization):
    accepted = [
        check(
            reference,
            trace_factorization=factorization,
            temporal_recursion=recursion,
            recurrence_scope=scope,
            trace_filter=kind,
            decay=decay,
            **others,
        )
        for recursion, scope, kind, decay, others in itertools.product(
            RECURSIONS,
            VALUES['recurrence_scope'],
            VALUES['trace_filter'],
            DECAYS,
            COEFFICIENTS,
        )
    ]
    assert 0 < sum(accepted) < len(accepted) / 2


@pytest.mark.parametrize('signal', VALUES['learning_signal'])
@pytest.mark.parametrize('schedule', VALUES['update_schedule'])
def test_signals_and_schedules_are_those_of_the_reference(reference, signal, schedule):
    for window_size in (None, 4):
        fields = {'update_schedule': schedule, 'window_size': window_size}
        check(reference, learning_signal=signal, **fields)


@pytest.mark.parametrize('fields', ODD, ids=str)
def test_odd_values_are_refused_as_by_the_reference(reference, fields):
    check(reference, **fields)


def test_the_fields_are_in_the_order_of_the_reference(reference):
    ours, theirs = map(dataclasses.fields, (btf.ETraceConfig, reference.ETraceConfig))
    assert [(f.name, f.default) for f in ours] == [(f.name, f.default) for f in theirs]


def test_equal_rules_are_equal_configurations():
    leak = btf.ETraceConfig(temporal_recursion='scalar_leak', decay=0.5)
    none = btf.ETraceConfig(temporal_recursion='none')
    assert leak.replace(decay=0) == none
    assert len({none, leak.replace(decay=0.0), leak}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        leak.decay = 0.9
    with pytest.raises(TypeError, match='odd'):
        leak.replace(odd=1)
