"""Which implementation runs: by platform, by what is asked for, and with reasons."""

import contextlib
import functools
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf
from accelerators.cases import case_of
from braintrace_fast import config
from braintrace_fast.kernels import dispatch
from braintrace_fast.kernels.adjoint_scan import adjoint_scan
from braintrace_fast.kernels.dispatch import PLAIN, Backend, FallbackError
from braintrace_fast.kernels.factored_trace import mosaic, smooth
from braintrace_fast.kernels.specs import AdjointSpec, TraceSpec
from tests.kernel_checks import count_calls, lowered
from tests.models import MODELS

X, START = jnp.ones((4, 3)), jnp.zeros(3)


def run(backend, x=X, start=START):
    return smooth(x, start, 0.5, backend=backend)[1]


@pytest.mark.parametrize('name', ['jax', 'interpret', 'pallas'])
def test_every_backend_runs_here(name):
    np.testing.assert_allclose(run(Backend(name))[:, 0], [1, 1.5, 1.75, 1.875])


@pytest.mark.parametrize('platform', ['cuda', 'tpu'])
def test_one_program_lowers_for_each_platform(platform):
    by_kernel = lambda: run(Backend('pallas'))  # noqa: E731
    assert count_calls(lowered(by_kernel, platform=platform), platform) == 1
    on_cpu = jax.jit(by_kernel).trace().lower(lowering_platforms=('cpu',))
    assert count_calls(on_cpu.as_text(), platform) == 0
    options = {'xla_backend_optimization_level': 2, 'xla_disable_hlo_passes': ''}
    assert 'conditional(' not in on_cpu.compile(options).as_text()
    assert count_calls(lowered(lambda: run(PLAIN), platform=platform), platform) == 0


def test_choices_are_recorded_with_reasons_and_logged_once(x64, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, '_logged', set())
    with caplog.at_level(logging.DEBUG, 'braintrace_fast'), dispatch.recording() as choices:
        for _ in range(2):
            run(Backend('pallas'), X.astype(jnp.float64), START.astype(jnp.float64))
    assert [(c.platform, c.implementation) for c in choices] == [
        ('cuda', 'jax'),
        ('tpu', 'jax'),
        ('cpu', 'jax'),
    ]
    assert 'float64' in choices[0].reason and 'float64' in str(choices[1])
    assert len(caplog.records) == 3
    assert [r.levelno for r in caplog.records] == [logging.INFO, logging.INFO, logging.DEBUG]


@pytest.mark.parametrize('platform', ['cuda', 'tpu', 'cpu'])
def test_strict_refuses_to_fall_back(x64, platform):
    operands = X.astype(jnp.float64), START.astype(jnp.float64)
    with pytest.raises(FallbackError, match=rf'no kernel on {platform}.*backend='):
        run(Backend('pallas', frozenset({platform})), *operands)
    if platform != 'cpu':
        run(Backend('pallas', frozenset({platform})), X, START)


def test_strict_interpretation(x64):
    with pytest.raises(FallbackError, match='on interpret'):
        run(Backend('interpret', frozenset({'interpret'})), X.astype(jnp.float64), START)


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.setattr(config, '_of_platform', {})
    for name in ('BRAINTRACE_FAST_BACKEND', 'BRAINTRACE_FAST_STRICT'):
        monkeypatch.delenv(name, raising=False)


def test_who_decides(monkeypatch):
    assert config.resolve_backend('auto') == Backend('jax')
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert config.resolve_backend('auto') == Backend('pallas', auto=True)
    assert config.resolve_backend('pallas') == Backend('pallas')
    monkeypatch.undo()
    monkeypatch.setenv('BRAINTRACE_FAST_BACKEND', 'interpret')
    assert config.resolve_backend('auto').name == 'interpret'
    btf.set_backend('tpu', 'jax')
    assert config.resolve_backend('auto').name == 'interpret'
    btf.set_backend('cpu', 'pallas')
    assert config.resolve_backend('auto').name == 'pallas'
    with btf.use_backend('jax'):
        assert config.resolve_backend('auto').name == 'jax'
        assert config.resolve_backend('interpret').name == 'interpret'
        with btf.use_backend('auto'):
            assert config.resolve_backend('auto').name == 'pallas'
    assert config.resolve_backend('auto').name == 'pallas'
    btf.set_backend('cpu', 'auto')
    btf.set_backend('tpu', 'auto')


def test_who_is_strict(monkeypatch):
    assert config.resolve_backend('pallas', True).strict == {'cpu'}
    assert config.resolve_backend('pallas', ['cuda', 'tpu']).strict == {'cuda', 'tpu'}
    assert config.resolve_backend('interpret', True).strict == {'interpret'}
    with btf.use_backend('pallas', strict=['tpu']):
        assert config.resolve_backend('auto').strict == {'tpu'}
    for text, expected in (('1', {'cpu'}), ('cuda, tpu', {'cuda', 'tpu'}), ('0', set())):
        monkeypatch.setenv('BRAINTRACE_FAST_STRICT', text)
        assert config.resolve_backend('pallas').strict == expected


def test_unknown_names_list_the_known_ones(monkeypatch):
    with pytest.raises(ValueError, match=r"'metal'.*'auto', 'jax', 'pallas', 'interpret'"):
        btf.use_backend('metal').__enter__()
    with pytest.raises(ValueError, match=r"'cuda'.*'cpu', 'gpu' or 'tpu'"):
        btf.set_backend('cuda', 'jax')
    with pytest.raises(ValueError, match=r"strict.*'rocm'.*'cuda', 'tpu'"):
        config.resolve_backend('pallas', ['rocm'])
    monkeypatch.setenv('BRAINTRACE_FAST_BACKEND', 'fast')
    with pytest.raises(ValueError, match="'fast'"):
        config.resolve_backend('auto')


@pytest.mark.parametrize(
    ('backend', 'reason'),
    [
        (Backend('pallas'), 'asked for'),
        (Backend('pallas', auto=True), 'moves fewer bytes than XLA'),
        (Backend('pallas', frozenset({'cuda', 'tpu'}), auto=True), 'asked for by strict='),
    ],
)
def test_a_kernel_is_taken_for_a_reason(backend, reason):
    with dispatch.recording() as choices:
        run(backend)
    assert {c.reason for c in choices if c.implementation != 'jax'} == {reason}


@pytest.mark.parametrize('name', ['smooth', 'supports_smooth'])
def test_what_an_op_lacks_is_named(name, monkeypatch):
    monkeypatch.delattr(mosaic, name)
    with pytest.raises(NotImplementedError, match=rf'factored_trace/mosaic.py has no {name}'):
        run(Backend('pallas'))


def run_case(case, backend):
    """A function of the operands of a case."""
    return lambda *operands: dispatch.run(case.op, backend, case.pack(*operands))


def trace_choices(backend, planes, batch=64, signal=True):
    """What runs a step of a trace, by platform."""
    case = case_of(TraceSpec(planes, (batch, 3, 5), signal=signal))
    with dispatch.recording() as choices:
        jax.eval_shape(run_case(case, backend), *case.operands)
    return {choice.platform: choice.implementation for choice in choices}


@pytest.mark.parametrize(
    ('planes', 'options', 'cuda', 'tpu'),
    [
        (1, {}, 'jax', 'jax'),
        (1, {'batch': 8}, 'triton', 'jax'),
        (2, {}, 'triton', 'jax'),
        (2, {'signal': False}, 'jax', 'jax'),
        (4, {}, 'triton', 'mosaic'),
    ],
)
def test_auto_takes_plain_jax_where_it_moves_as_few_bytes(planes, options, cuda, tpu):
    auto = Backend('pallas', auto=True)
    assert trace_choices(auto, planes, **options) == {'cuda': cuda, 'tpu': tpu, 'cpu': 'jax'}
    asked = {'cuda': 'triton', 'tpu': 'mosaic', 'cpu': 'jax'}
    assert trace_choices(Backend('pallas'), planes, **options) == asked
    strict = auto._replace(strict=frozenset({'cuda', 'tpu'}))
    assert trace_choices(strict, planes, **options) == asked


def run_adjoint(backend, *sizes, within=0):
    """A function of the operands of a case, and those."""
    case = case_of(AdjointSpec(*sizes, ops=max(1, within), within=within > 0))
    return run_case(case, backend), case.operands


def adjoint_choice(backend, *args, **options):
    """What runs a case on TPUs, and why."""
    run, operands = run_adjoint(backend, *args, **options)
    with dispatch.recording() as choices:
        jax.eval_shape(run, *operands)
    return next((c.implementation, c.reason) for c in choices if c.platform == 'tpu')


AUTO = Backend('pallas', auto=True)
SMALL = (2, 7, (3, 37), 'float32')
AS_FEW = ['TPU v4', 'TPU v5 lite', 'TPU v5e', 'TPU v6 lite', 'TPU v6e', 'TPU7x']


@pytest.mark.parametrize('kind', AS_FEW)
def test_auto_goes_back_in_plain_jax_on_tpus_where_that_moves_as_few_bytes(kind):
    with dispatch.on_tpu(kind):
        implementation, reason = adjoint_choice(AUTO, *SMALL)
        assert implementation == 'jax'
        assert f'as few bytes on a {kind} for one or two states and up to' in reason
        for asked in (Backend('pallas'), AUTO._replace(strict=frozenset({'tpu'}))):
            assert adjoint_choice(asked, *SMALL)[0] == 'mosaic'


@pytest.mark.parametrize('kind', [None, 'TPU v5', 'TPU v5p', 'TPU v3', 'TPU of another time'])
def test_auto_goes_back_by_the_kernel_on_other_tpus_and_where_none_is_known(kind):
    with dispatch.on_tpu(kind) if kind else contextlib.nullcontext():
        found = adjoint_choice(AUTO, *SMALL)
    assert found == ('mosaic', 'moves fewer bytes than XLA')


@pytest.mark.parametrize(
    ('size', 'steps', 'shape', 'within', 'v4', 'v7'),
    [
        (1, 64, (8, 512), 0, 'jax', 'jax'),
        (3, 64, (8, 512), 0, 'mosaic', 'mosaic'),
        (1, 64, (8, 512), 1, 'mosaic', 'mosaic'),
        (1, 64, (8, 512), 2, 'jax', 'jax'),
        (2, 64, (8, 512), 2, 'mosaic', 'mosaic'),
        (1, 64, (256, 512), 0, 'jax', 'mosaic'),
        (2, 128, (256, 512), 0, 'mosaic', 'mosaic'),
        (1, 128, (33, 129), 0, 'jax', 'jax'),
        (1, 400, (33, 129), 0, 'jax', 'mosaic'),  # 13 MiB, and 32 with the padding
    ],
)
def test_how_much_a_tpu_holds_decides_and_who_reads_the_signal(size, steps, shape, within, v4, v7):
    for kind, expected in (('TPU v4', v4), ('TPU7x', v7), ('TPU v5', 'mosaic')):
        with dispatch.on_tpu(kind):
            found, _ = adjoint_choice(AUTO, size, steps, shape, 'float32', within=within)
        assert found == expected, kind


@pytest.mark.parametrize(
    ('own', 'signal', 'expected'),
    [(True, True, 'jax'), (False, True, 'mosaic'), (True, False, 'mosaic')],
)
def test_the_kernel_goes_back_without_a_signal_and_if_a_state_does_not_last(own, signal, expected):
    plane = jax.ShapeDtypeStruct((7, 3, 37), jnp.float32)
    D, vector = [[plane, plane], [None, plane if own else None]], [plane, plane]
    api = functools.partial(adjoint_scan, carry=True, backend=AUTO)
    with dispatch.on_tpu('TPU v4'), dispatch.recording() as choices:
        jax.eval_shape(api, D, [vector], vector if signal else None)
    assert {c.platform: c.implementation for c in choices}['tpu'] == expected


@pytest.mark.parametrize(('kind', 'calls'), [('TPU v4', 0), ('TPU v5', 1)])
def test_a_program_for_a_tpu_has_the_kernel_that_its_kind_needs(kind, calls):
    run, operands = run_adjoint(AUTO, *SMALL)
    with dispatch.on_tpu(kind):
        assert count_calls(lowered(run, *operands, platform='tpu'), 'tpu') == calls


def test_the_kind_is_that_of_the_first_tpu_or_as_stated(monkeypatch):
    assert dispatch.tpu_kind() is None  # on a CPU
    with dispatch.on_tpu('TPU v4'):
        with dispatch.on_tpu('TPU7x'):
            assert dispatch.tpu_kind() == 'TPU7x'
        assert dispatch.tpu_kind() == 'TPU v4'
    assert dispatch.tpu_kind() is None
    for platform, kind in (('tpu', 'TPU v6 lite'), ('gpu', None)):
        device = SimpleNamespace(platform=platform, device_kind='TPU v6 lite')
        monkeypatch.setattr(jax, 'devices', lambda device=device: [device])
        assert dispatch.tpu_kind() == kind


def test_the_report_names_the_kind_of_tpu(monkeypatch):
    model, inputs = MODELS['gru'].build(3)
    learner = btf.compile(model, 'd_rtrl', inputs(0, 1)[0], batch_size=3)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
    with dispatch.on_tpu('TPU v4'):
        report = str(learner.with_backend('auto').report())
    assert 'adjoint_scan on tpu: jax, XLA moves as few bytes on a TPU v4' in report


@pytest.mark.parametrize(
    ('name', 'on_tpu'),
    [('gru', 'jax'), ('alif_expon', 'jax'), ('lstm', 'mosaic'), ('stp', 'mosaic')],
)
def test_auto_differentiates_few_states_in_plain_jax_and_on_gpus_all(name, on_tpu, monkeypatch):
    model, inputs = MODELS[name].build(3)
    learner = btf.compile(model, 'd_rtrl', inputs(0, 1)[0], batch_size=3)
    assert learner.choices == []  # on a CPU
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    choices = {(c.op, c.platform): c for c in learner.with_backend('auto').choices}
    assert choices['hidden_jacobian', 'cuda'].implementation == 'jax'
    assert 'as few bytes' in choices['hidden_jacobian', 'cuda'].reason
    assert choices['hidden_jacobian', 'tpu'].implementation == on_tpu
    assert choices['adjoint_scan', 'cuda'].implementation == 'triton'
    assert choices['adjoint_scan', 'tpu'].implementation == 'mosaic'
