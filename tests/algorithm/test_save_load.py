"""A learner goes on from a file as if it had never stopped; a file that does not fit is refused."""

import copy
import functools
import json
import os
import pickle
import signal
import zipfile

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from tests.algorithm import old_files
from tests.algorithm.learning import add_trees, begin, check, learning
from tests.models import MODELS
from tests.oracles.recurrence import step_loss
from tests.programs import output_of, start
from tests.promotion import promoting

BATCH, N_IN, N = 2, 3, 4
XS = np.random.default_rng(0).normal(size=(6, BATCH, N_IN)).astype('float32')


class NoisyCell(brainstate.nn.Module):
    """Noise of brainstate's key, units, a counter, and a state that the step does not use."""

    def __init__(self, n_in=N_IN, n=N, unit=u.mV):
        super().__init__()
        self.n, self.unit = n, unit
        self.w = brainstate.ParamState(jnp.linspace(-1, 1, n_in * n).reshape(n_in, n) * unit)
        self.readout = brainstate.ParamState(jnp.ones(n))

    def init_state(self, batch_size=None, **_):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, self.n)) * self.unit)
        self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def update(self, x):
        noise = brainstate.random.normal(size=(1, self.n)) * self.unit
        self.count.value = self.count.value + 1
        self.v.value = 0.9 * self.v.value + btf.matmul(x, self.w.value) + 0.1 * noise
        return jnp.tanh(u.get_mantissa(self.v.value))


def new_learner(rule='d_rtrl', n_in=N_IN, n=N, unit=u.mV, batch=BATCH, **options):
    if rule == 'pp_prop':
        options = {'decay_or_rank': 0.9} | options
    cell = NoisyCell(n_in, n, unit)
    return btf.compile(cell, rule, jnp.ones((batch, n_in)), batch_size=batch, **options)


def train(learner, steps):
    """Gradient descent over sequences; returns the parameters and losses."""
    losses = []
    for _ in range(steps):
        grads, loss = learner.etrace_grad(
            XS, step_fn=lambda x: (learner(x) ** 2).mean(), return_value=True
        )
        for path, state in learner.param_states.items():
            step = jax.tree.map(lambda w, g: w - 0.1 * g, state.value, grads[path])
            state.value = step
        losses.append(np.asarray(loss))
    return losses


def everything(learner):
    model = {**learner.model.states(), **learner.graph_executor.states}
    values = [s.value for s in (*model.values(), *learner.own_states)]
    return [as_numpy(leaf) for leaf in jax.tree.leaves(values)]


def as_numpy(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


RULES = {
    'd_rtrl': {},
    'pp_prop': {},
    'bfloat16 traces': {'rule': 'd_rtrl', 'trace_dtype': jnp.bfloat16},
}


@pytest.mark.parametrize('options', [{'rule': k} | v for k, v in RULES.items()], ids=list(RULES))
def test_training_goes_on_bit_by_bit(options, tmp_path):
    first = new_learner(**options)
    train(first, 2)
    first.save(tmp_path / 'learner')
    expected_losses, expected = train(first, 2), everything(first)

    brainstate.random.seed(99)
    second = new_learner(**options)
    second.load(tmp_path / 'learner')
    assert_same(train(second, 2), expected_losses)
    assert_same(everything(second), expected)
    assert [p.name for p in tmp_path.iterdir()] == ['learner']


def test_a_mapped_learner_is_saved_and_loaded(tmp_path):
    def new():
        cell = btf.nn.GRUCell(N_IN, N)
        return btf.compile(cell, 'd_rtrl', jnp.ones((5, N_IN)), batch_size=5, vmap=True)

    first, x = new(), jnp.ones((5, N_IN))
    first(x)
    first.save(tmp_path / 'learner.npz')
    expected = first(x)
    second = new()
    second.load(tmp_path / 'learner.npz')
    np.testing.assert_array_equal(second(x), expected)
    assert_same(everything(second.module), everything(first.module))


@pytest.mark.parametrize('duplicate', [copy.deepcopy, pickle.dumps])
def test_a_deep_copy_and_a_pickle_are_refused(duplicate):
    learner = new_learner()
    mapped = btf.ETraceVmap(learner)
    for whole in (learner, mapped, {'learner': learner}):
        with pytest.raises(TypeError, match=r'learner\.save\(path\)'):
            duplicate(whole)


def test_a_learner_that_was_copied_as_a_part_is_refused_where_it_is_used():
    class Agent(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.learner = new_learner()

    agent = copy.deepcopy(Agent())  # by brainstate, which asks no part
    with pytest.raises(TypeError, match=r'learner\.save\(path\)'):
        agent.learner(jnp.asarray(XS[0]))


def test_a_shallow_copy_shares_all():
    learner = new_learner()
    other = copy.copy(learner)
    assert type(other) is type(learner) and vars(other) == vars(learner)


def test_more_states_are_kept_on_request(tmp_path):
    learner = new_learner()
    momentum = brainstate.ShortTermState({'w': jnp.arange(3.0), 'n': 7})
    others = {'momentum': momentum, 'readout': brainstate.nn.Linear(2, 3)}
    learner.save(tmp_path / 'a', others=others)
    before = jax.tree.map(np.asarray, others['readout'].weight.value)
    momentum.value = {'w': jnp.zeros(3), 'n': 0}
    others['readout'].weight.value = jax.tree.map(jnp.zeros_like, others['readout'].weight.value)
    learner.load(tmp_path / 'a', others=others)
    assert momentum.value['w'].tolist() == [0, 1, 2]
    assert momentum.value['n'] == 7 and isinstance(momentum.value['n'], int)
    assert_same(jax.tree.leaves(others['readout'].weight.value), jax.tree.leaves(before))
    with pytest.raises(btf.CheckpointError, match='momentum'):
        learner.load(tmp_path / 'a')
    with pytest.raises(TypeError, match='expected states'):
        learner.save(tmp_path / 'a', others={'wrong': {'a': 1.0}})


def test_an_optimiser_goes_on_bit_by_bit(tmp_path):
    def trained(calls, path=None):
        learner = new_learner(unit=1)
        optimiser = braintools.optim.Adam(0.1)
        optimiser.register_trainable_weights(learner.param_states)
        others = {'optimiser': optimiser}
        if path is not None:
            learner.load(path, others)
        for _ in range(calls):
            grads = learner.etrace_grad(XS, step_fn=lambda x: (learner(x) ** 2).mean())
            with promoting():  # optax does
                optimiser.update(grads)
        return learner, others

    learner, others = trained(2)
    learner.save(tmp_path / 'a', others)
    brainstate.random.seed(9)
    resumed, optimisers = trained(1, tmp_path / 'a')
    brainstate.random.seed(0)
    whole, expected = trained(3)
    assert_same(everything(resumed), everything(whole))
    found, true = (o['optimiser'].state_dict() for o in (optimisers, expected))
    for a, b in zip(found.values(), true.values(), strict=True):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)
            assert jax.typeof(x) == jax.typeof(y)  # weak types too


def test_the_budget_that_windows_were_planned_with_comes_back(tmp_path):
    learner = new_learner()
    learner.resolved_budget = 12345
    learner.save(tmp_path / 'a')
    found = new_learner()
    found.load(tmp_path / 'a')
    assert found.resolved_budget == 12345
    asked = new_learner(memory_budget='1MB')
    asked.load(tmp_path / 'a')
    assert asked.resolved_budget == 10**6


MISMATCHES = {
    'shape': ({'n': 5}, r'w.*shape is \[3, 4\], here \[3, 5\]'),
    'batch': ({'batch': 3}, r'v.*shape is \[2, 4\], here \[3, 4\]'),
    'unit': ({'unit': u.volt}, r'w.*unit is mV, here V'),
    'algorithm': ({'rule': 'pp_prop'}, 'algorithm is D_RTRL, here pp_prop'),
    'trace_dtype': ({'trace_dtype': jnp.bfloat16}, 'option trace_dtype is None, here bfloat16'),
    'vjp_method': ({'vjp_method': 'multi-step'}, "option vjp_method is 'single-step', here"),
}


@pytest.mark.parametrize('option', [{'stochastic_rounding': True}, {'trace_dtype': jnp.float64}])
@pytest.mark.parametrize('rule', ['eprop', 'd_rtrl'])
def test_how_traces_are_stored_must_be_the_same(option, rule, tmp_path):
    own = {'kappa_filter_decay': 0.5} if rule == 'eprop' else {}
    new_learner(rule, **own).save(tmp_path / 'a')
    refused(new_learner(rule, **own, **option), tmp_path / 'a', f'option {next(iter(option))} is')


@pytest.mark.parametrize('name', MISMATCHES)
def test_a_file_of_another_learner_is_refused(name, tmp_path):
    new_learner().save(tmp_path / 'a')
    options, message = MISMATCHES[name]
    refused(new_learner(**options), tmp_path / 'a', message)


def test_a_file_of_another_model_is_refused(tmp_path):
    new_learner().save(tmp_path / 'a')
    gru = btf.compile(btf.nn.GRUCell(N_IN, N), 'd_rtrl', jnp.ones((2, N_IN)), batch_size=2)
    refused(gru, tmp_path / 'a', r'model \["Wz", "weight"\] is missing[\s\S]*model \["w"\]')


def test_other_decays_are_refused_and_equal_ones_are_not(tmp_path):
    new_learner('pp_prop', decay_or_rank=19).save(tmp_path / 'a')
    refused(new_learner('pp_prop', decay_or_rank=0.8), tmp_path / 'a', r'decay is \(0.9, 0.9\)')
    new_learner('pp_prop', decay_or_rank=0.9).load(tmp_path / 'a')


def test_other_dtypes_are_refused(tmp_path):
    new_learner().save(tmp_path / 'a')
    with brainstate.environ.context(precision=64):
        learner = new_learner()
        refused(learner, tmp_path / 'a', 'dtype is float32, here float64')


def refused(learner, path, message):
    learner.etrace_evolve(jnp.ones((2, *learner_input(learner))))
    before = everything(learner)
    with pytest.raises(btf.CheckpointError, match=message):
        learner.load(path)
    assert_same(everything(learner), before)


def learner_input(learner):
    batch = next(iter(learner.hidden_states.values())).value.shape[0]
    return batch, N_IN


def rewritten(path, change):
    """The file with other metadata."""
    with np.load(path) as file:
        arrays = dict(file)
    meta = json.loads(arrays['meta'].tobytes())
    change(meta)
    arrays['meta'] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with open(path, 'wb') as file:
        np.savez(file, **arrays)


def test_a_newer_format_is_refused(tmp_path):
    learner = new_learner()
    learner.save(tmp_path / 'a')
    rewritten(tmp_path / 'a', lambda meta: meta.update(format_version=3))
    refused(learner, tmp_path / 'a', 'format version 3')


BAD = {
    'no format_version': lambda meta: meta.pop('format_version'),
    'no algorithm': lambda meta: meta.pop('algorithm'),
    'no options': lambda meta: meta.pop('options'),
    'no states': lambda meta: meta.pop('states'),
    'no memory_budget': lambda meta: meta.pop('memory_budget'),
    'format_version as text': lambda meta: meta.update(format_version='1'),
    'algorithm as number': lambda meta: meta.update(algorithm=1),
    'options as list': lambda meta: meta.update(options=[]),
    'states as list': lambda meta: meta.update(states=[]),
    'states without parts': lambda meta: meta.update(states=dict.fromkeys(meta['states'], 1)),
    'states without entries': lambda meta: [
        leaves.update(dict.fromkeys(leaves)) for leaves in meta['states'].values()
    ],
    'states without names of arrays': lambda meta: [
        leaf.update(array=[0]) for leaves in meta['states'].values() for leaf in leaves.values()
    ],
    'memory_budget as text': lambda meta: meta.update(memory_budget='much'),
    'memory_budget null': lambda meta: meta.update(memory_budget=None),
    'memory_budget negative': lambda meta: meta.update(memory_budget=-1),
}


def test_metadata_that_lacks_something_is_refused(tmp_path):
    learner, path = new_learner(), tmp_path / 'a'
    learner.save(path)
    content = path.read_bytes()
    learner(XS[0])
    before, budget = everything(learner), learner.resolved_budget
    for name, change in BAD.items():
        path.write_bytes(content)
        rewritten(path, change)
        with pytest.raises(btf.CheckpointError, match='is damaged') as raised:
            learner.load(path)
        assert any(word in str(raised.value) for word in name.split()), name
        assert_same(everything(learner), before)
        assert learner.resolved_budget == budget


def test_a_flipped_byte_anywhere_changes_nothing_or_is_noticed(tmp_path):
    cell = btf.nn.ValinaRNNCell(1, 2)
    learner, path = btf.compile(cell, 'd_rtrl', jnp.ones(1)), tmp_path / 'a'
    learner(jnp.ones(1))
    learner.save(path)
    content, saved = path.read_bytes(), everything(learner)
    learner(jnp.ones(1))
    before = everything(learner)
    start = [(state, state.value) for state in (*cell.states().values(), *learner.own_states)]
    refusals = 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= (255, 1, 8, 128)[place % 4]
        path.write_bytes(damaged)
        try:
            learner.load(path)
        except btf.CheckpointError:
            refusals += 1
            assert_same(everything(learner), before)
        else:
            assert_same(everything(learner), saved)
        for state, value in start:
            state.value = value
    assert refusals > len(content) / 2


@pytest.mark.parametrize(
    ('there', 'here'),
    [
        ({'trace_dtype': 'bfloat16'}, {'trace_dtype': jnp.bfloat16}),
        ({'trace_dtype': jnp.bfloat16}, {'trace_dtype': jnp.dtype('bfloat16')}),
        ({}, {'fast_solve': False}),
        ({'chunked_trace': False}, {}),
    ],
)
def test_options_that_mean_the_same_are_not_refused(there, here, tmp_path):
    learner = new_learner(**there)
    learner.save(tmp_path / 'a')
    new_learner(**here).load(tmp_path / 'a')


def test_arrays_that_are_not_as_described_are_refused(tmp_path):
    learner = new_learner()
    learner.save(tmp_path / 'a')

    def swap(meta):
        for leaves in meta['states'].values():
            for leaf in leaves.values():
                leaf['array'] = '0'

    rewritten(tmp_path / 'a', swap)
    refused(learner, tmp_path / 'a', 'damaged')


@pytest.mark.parametrize('share', [0.0, 0.01, 0.5, 0.99, 'last byte'])
def test_a_truncated_file_is_refused(share, tmp_path):
    learner, path = new_learner(), tmp_path / 'a'
    learner.save(path)
    content = path.read_bytes()
    end = len(content) - 1 if share == 'last byte' else int(len(content) * share)
    path.write_bytes(content[:end])
    refused(learner, path, 'truncated')


def test_a_flipped_bit_is_noticed(tmp_path):
    learner, path = new_learner(), tmp_path / 'a'
    learner.save(path)
    with zipfile.ZipFile(path) as file:
        largest = max(file.infolist()[1:], key=lambda info: info.file_size)
        place = largest.header_offset + largest.file_size + 20  # headers, then the array
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
    refused(learner, path, 'damaged')


FOREIGN = {
    'text': lambda path: path.write_text('hello'),
    'one array': lambda path: np.save(path.open('wb'), np.ones(3)),
    'other arrays': lambda path: np.savez(path.open('wb'), a=np.ones(3)),
    'other metadata': lambda path: np.savez(path.open('wb'), meta=np.frombuffer(b'[1]', np.uint8)),
    'objects': lambda path: np.savez(path.open('wb'), meta=np.array([{}], dtype=object)),
}


@pytest.mark.filterwarnings('ignore:unclosed file')
@pytest.mark.parametrize('kind', FOREIGN)
def test_a_foreign_file_is_refused(kind, tmp_path):
    FOREIGN[kind](tmp_path / 'a')
    refused(new_learner(), tmp_path / 'a', 'not written by')


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        new_learner().load(tmp_path / 'a')


def test_writing_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    learner, path = new_learner(), tmp_path / 'a'
    learner.save(path)
    content = path.read_bytes()

    def fail(_):
        raise OSError('the disk is full')

    monkeypatch.setattr(os, 'fsync', fail)
    train(learner, 1)
    with pytest.raises(OSError, match='full'):
        learner.save(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_saving_inside_jit_is_refused(tmp_path):
    learner = new_learner()
    with pytest.raises(ValueError, match='inside jit'):
        brainstate.transform.jit(lambda: learner.save(tmp_path / 'a'))()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_training_goes_on_after_a_kill(tmp_path):
    path, result, whole = (str(tmp_path / name) for name in ('a', 'b.npz', 'c.npz'))
    output_of(start('resumed_training', tmp_path / 'none', whole))
    killed = start('resumed_training', path, result, 'kill')
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL and not os.path.exists(result)
    assert output_of(start('resumed_training', path, result)).split() == ['18', '24']
    with np.load(result) as found, np.load(whole) as expected:
        assert_same([found[k] for k in found.files], [expected[k] for k in found.files])


@pytest.mark.parametrize('algorithm', ['d_rtrl', 'pp_prop'])
@pytest.mark.parametrize('name', [pytest.param('lstm', marks=pytest.mark.slow), 'lif_expon'])
def test_a_recording_in_pieces_with_files_between_gives_the_gradient_of_one_call(
    name, algorithm, tmp_path, x64
):
    learned = learning(MODELS[name], algorithm)
    learner = learned.learner
    step = functools.partial(step_loss(learned.model), learner)
    begin(learned)
    whole = learner.etrace_grad(learned.xs, step_fn=step, reduction='sum')
    end = everything(learner)
    begin(learned)
    found = []
    for piece in (slice(1), slice(1, 4), slice(4, None)):
        xs = jax.tree.map(lambda a, s=piece: a[s], learned.xs)
        found.append(learner.etrace_grad(xs, step_fn=step, reduction='sum'))
        learner.save(tmp_path / 'a')
        begin(learned)
        learner.load(tmp_path / 'a')
    check(add_trees(found), whole, rtol=1e-10)
    for a, b in zip(everything(learner), end, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('rule', old_files.RULES)
def test_files_of_format_version_1_are_read(rule, tmp_path):
    learner = old_files.begun(rule)
    learner.reset_state()
    shapes = {path: jnp.zeros_like(state.value) for path, state in learner.param_states.items()}
    expected = {path: brainstate.ShortTermState(zero) for path, zero in shapes.items()}
    by_name = {'/'.join(path): state for path, state in expected.items()}
    learner.load(old_files.FILES / f'{rule}_version_1.npz', {'expected': by_name})
    learner.save(tmp_path / 'new', {'expected': by_name})
    for file in (old_files.FILES / f'{rule}_version_1.npz', tmp_path / 'new'):
        learner.load(file, {'expected': by_name})
        for path, gradient in old_files.continued(learner).items():
            np.testing.assert_allclose(gradient, expected[path].value, rtol=1e-5, atol=1e-6)
            assert np.abs(gradient).max() > 0.1
