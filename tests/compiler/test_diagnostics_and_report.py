"""What the compiler decided and why: as records for machines, as a report for people."""

import dataclasses
import io
import threading

import brainstate
import jax
import jax.numpy as jnp
import pytest
import saiunit as u

import braintrace_fast as btf
from braintrace_fast import (
    CompilationRecord,
    CompilationReport,
    ControlFlowPolicy,
    DiagnosticKind,
    DiagnosticLevel,
)
from braintrace_fast._compat import source_line
from braintrace_fast.compiler import diagnostic_context
from braintrace_fast.compiler.diagnostics import emit
from tests.compiler.checks import build, draw, param
from tests.models import (
    N_IN,
    CondOp,
    Counting,
    DropConnect,
    Lateral,
    Leaky,
    N,
    Normalised,
    PlainLeak,
    Pooled,
    ReadOnly,
    Relaxing,
    Substeps,
    hidden,
)

INFO, WARNING, ERROR = DiagnosticLevel.INFO, DiagnosticLevel.WARNING, DiagnosticLevel.ERROR


def compiled(make, **policy):
    model = build(make)
    return btf.compile_etrace_graph(
        model, draw(N_IN), control_flow=ControlFlowPolicy(**policy) if policy else None
    )


# Records


def test_levels_and_kinds_are_strings():
    assert [level.value for level in DiagnosticLevel] == ['info', 'warning', 'error']
    assert all(kind.value == kind.name.lower() for kind in DiagnosticKind)
    assert str(DiagnosticKind.RELATION_INCLUDED) == 'relation_included'


def test_a_record_has_the_fields_of_the_reference_and_does_not_change():
    names = [field.name for field in dataclasses.fields(CompilationRecord)]
    assert names == [
        'kind',
        'level',
        'message',
        'primitive',
        'weight_path',
        'hidden_paths',
        'context',
    ]
    record = CompilationRecord(DiagnosticKind.WEIGHT_NOT_USED, INFO, 'why')
    assert (record.primitive, record.weight_path, record.hidden_paths) == (None, None, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.message = 'other'


def note(message):
    emit(DiagnosticKind.WEIGHT_NOT_USED, INFO, message)


def test_the_records_of_a_block_can_be_had_as_braintrace_gives_them():
    with diagnostic_context() as reporter:
        note('one')
        assert reporter.records() == tuple(reporter) and len(reporter.records()) == 1


def test_an_operand_that_is_not_trained_is_named():
    graph = compiled(lambda: Second(lambda x, w: btf.matmul(x, w, jnp.ones(N))))
    (record,) = graph.explain(kind=DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE)
    assert record.context['key'] == 'bias'


def test_records_go_to_the_innermost_block_of_their_own_thread():
    note('to nobody')
    with diagnostic_context() as outer:
        note('first')
        with diagnostic_context() as inner:
            note('second')
            thread = threading.Thread(target=note, args=('elsewhere',))
            thread.start()
            thread.join()
        note('third')
    note('to nobody')
    assert [record.message for record in outer] == ['first', 'third']
    assert [record.message for record in inner] == ['second']


def test_a_block_is_closed_by_an_error():
    with diagnostic_context() as outer:
        with pytest.raises(RuntimeError):
            with diagnostic_context():
                raise RuntimeError
        note('after')
    assert [record.message for record in outer] == ['after']


class Second(Leaky):
    """A second op, on a second weight."""

    def __init__(self, second, shape=(N_IN, N)):
        super().__init__()
        self.U = param(*shape)
        self.second = second

    def drive(self, x):
        return super().drive(x) + self.second(x, self.U.value)


class Unused(Leaky):
    def __init__(self):
        super().__init__()
        self.U = param(N, N)


class Readout(Unused):
    def update(self, x):
        return btf.matmul(super().update(x), self.U.value)


class Both(Leaky):
    """Two states that drive each other."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.s = hidden(batch_size, N)

    def leak(self, h):
        self.s.value = 0.9 * self.s.value + 0.1 * h
        return 0.8 * h + self.s.value


class Coupled(brainstate.nn.Module):
    """Two layers in a list, the second of which reads the first position by position."""

    def __init__(self):
        super().__init__()
        self.layers = [Leaky(), Leaky()]

    def update(self, x):
        first, second = self.layers
        second.h.value = second.h.value + 0.1 * first(x)
        return second(x)


class Carried(Leaky):
    """What the state was a step ago comes back through a state that is not hidden."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.before = brainstate.ShortTermState(jnp.zeros(N))

    def leak(self, h):
        new = 0.8 * h + 0.1 * self.before.value
        self.before.value = h
        return new


class CarriedOutput(Readout):
    """A readout that is smoothed over time in a state that is not hidden."""

    def __init__(self, mark=btf.matmul):
        super().__init__()
        self.mark = mark

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.mean = brainstate.ShortTermState(jnp.zeros(N))

    def update(self, x):
        out = self.mark(Leaky.update(self, x), self.U.value)
        self.mean.value = 0.9 * self.mean.value + out
        return self.mean.value


class Narrower(Leaky):
    """States that read parts of what drives a wider one."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.e, self.i = hidden(batch_size, N - 2), hidden(batch_size, 2)

    def update(self, x):
        y = self.drive(x)
        self.h.value = 0.8 * self.h.value + y
        self.e.value = 0.9 * self.e.value + jnp.tanh(y[..., :-2])
        self.i.value = 0.9 * self.i.value + jnp.tanh(y[..., -2:])
        return self.e.value.sum() + self.i.value.sum()


class Inhibited(Leaky):
    """A state of the whole population, which all neurons drive and read."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.g = hidden(batch_size, 1)

    def leak(self, h):
        new = 0.8 * h - self.g.value
        self.g.value = 0.9 * self.g.value + 0.1 * h.mean(-1, keepdims=True)
        return new


class MixingLoop(Leaky):
    """A loop that mixes the neurons."""

    def leak(self, h):
        return jax.lax.fori_loop(0, 20, lambda _, c: c - 0.01 * c.mean(), h)


class LowRank(Leaky):
    """A weight with an update of low rank, itself made by an op."""

    def __init__(self):
        super().__init__()
        self.A, self.B = param(N_IN + N, 2), param(2, N)

    def drive(self, x):
        weight = self.W.value + btf.matmul(self.A.value, self.B.value)
        return btf.matmul(jnp.concatenate([x, self.h.value], axis=-1), weight)


class External(Leaky):
    """A counter that is no part of the module."""

    def __init__(self):
        super().__init__()
        counter = brainstate.ShortTermState(jnp.zeros(()))
        self.get_counter = lambda: counter

    def leak(self, h):
        self.get_counter().value += 1
        return 0.8 * h


@jax.custom_vjp
def with_own_rule(x, w):
    return btf.matmul(x, w)


with_own_rule.defvjp(
    lambda x, w: (with_own_rule(x, w), (x, w)),
    lambda kept, g: (g @ kept[1].T, jnp.outer(kept[0], g)),
)


def long_scan(x, w):
    return jax.lax.scan(lambda c, _: (c + btf.matmul(x, w), None), jnp.zeros(N), length=17)[0]


def long_scan_of_weights(x, w):
    return jax.lax.scan(lambda c, g: (c + btf.matmul(x, g * w), None), jnp.zeros(N), jnp.ones(17))[
        0
    ]


def long_readout(x, w):
    return jax.lax.scan(lambda c, _: (c, btf.matmul(x, w)), jnp.zeros(N), length=17)[1].sum(0)


def behind_cond(x, w):
    return jax.lax.cond(x[0] > 0, lambda: btf.matmul(x, w), lambda: jnp.zeros(N))


def partly_mixed(x, w):
    y = btf.matmul(x, w)
    return y + jnp.tanh(y) @ jnp.ones((N, N))


def varying_mix(x, w):
    """The weight is mixed by a matrix that varies in time."""
    return btf.matmul(x, jnp.outer(x, x) @ w)


EXCLUDE = {'etp_in_control_flow': 'exclude', 'scan_descent': 'off'}
U = ('U',)
# Per kind: a model, its policy, the level, the weight and the hidden states concerned.
EMITTED = {
    'RELATION_INCLUDED': (Leaky, {}, INFO, ('W',), (('h',),)),
    'RELATION_EXCLUDED_NO_PARAMSTATE': (
        lambda: Second(lambda x, w: btf.matmul(x, jnp.ones((N_IN, N)))),
        {},
        INFO,
        None,
        (),
    ),
    'RELATION_EXCLUDED_NON_TEMPORAL': (Readout, {}, INFO, U, ()),
    'RELATION_EXCLUDED_SHAPE_MISMATCH': (
        lambda: Second(lambda x, w: btf.matmul(x, w)[..., :N], (N_IN, N + 1)),
        {},
        WARNING,
        U,
        (('h',),),
    ),
    'RELATION_EXCLUDED_WEIGHT_TO_WEIGHT': (
        lambda: Second(lambda x, w: btf.matmul(btf.matmul(x, w), jnp.eye(N))),
        {},
        INFO,
        U,
        (('h',),),
    ),
    'RELATION_EXCLUDED_POSITION_MIXING': (Pooled, {}, WARNING, ('P',), (('h',),)),
    'RELATION_PARTIAL_PATH': (
        lambda: Second(partly_mixed),
        {},
        INFO,
        U,
        (('h',),),
    ),
    'TAIL_NOT_POSITION_WISE': (Normalised, {}, WARNING, ('W',), (('h',),)),
    'TRANSITION_NOT_POSITION_WISE': (Lateral, {}, WARNING, None, (('h',),)),
    'TRAINABLE_INVAR_NOT_PARAMSTATE': (
        lambda: Second(lambda x, w: btf.matmul(x, w, jnp.ones(N))),
        {},
        INFO,
        None,
        (),
    ),
    'WEIGHT_WITHOUT_ETP_OP': (PlainLeak, {}, WARNING, ('a',), ()),
    'WEIGHT_NOT_USED': (Unused, {}, INFO, U, ()),
    'WEIGHT_VARIES_IN_TIME': (DropConnect, {}, INFO, ('W',), (('h',),)),
    'COND_IF_CONVERTED': (CondOp, {}, INFO, None, ()),
    'COND_CONVERSION_SKIPPED': (
        lambda: Second(behind_cond),
        {'cond': 'opaque', **EXCLUDE},
        WARNING,
        None,
        (),
    ),
    'SCAN_UNROLLED': (Substeps, {}, INFO, None, ()),
    'SCAN_UNROLL_SKIPPED': (lambda: Second(long_scan), EXCLUDE, WARNING, None, ()),
    'SCAN_DESCENT_APPLIED': (lambda: Second(long_scan), {}, INFO, None, ()),
    'SCAN_DESCENT_SKIPPED': (lambda: Second(long_scan_of_weights), {}, INFO, None, ()),
    'SCAN_DESCENT_NO_RELATIONS': (lambda: Second(long_readout), {}, INFO, None, ()),
    'CONTROL_FLOW_OPAQUE_FWD': (Relaxing, {}, INFO, None, (('h',),)),
    'CONTROL_FLOW_RECURRENT_MIXING': (MixingLoop, {}, WARNING, None, (('h',),)),
    'PRIMITIVE_INSIDE_CONTROL_FLOW': (lambda: Second(long_scan), EXCLUDE, WARNING, U, ()),
    'PRIMITIVE_INSIDE_CUSTOM_RULE': (lambda: Second(with_own_rule), {}, WARNING, U, ()),
    'HIDDEN_GROUP_MERGED': (Both, {}, INFO, None, (('h',), ('s',))),
    'HIDDEN_COUPLING_NOT_TRACED': (
        Coupled,
        {},
        WARNING,
        None,
        (('layers', 0, 'h'), ('layers', 1, 'h')),
    ),
    'HIDDEN_STATE_READ_ONLY': (ReadOnly, {}, INFO, None, (('r',),)),
    'CARRIED_STATE_NOT_TRACED': (Carried, {}, WARNING, None, (('h',),)),
    'STATE_MISMATCH': (External, {}, INFO, None, ()),
}
# Kinds of the reference for which the compiler raises instead.
RAISED = {'WEIGHT_IN_WHILE'}
# Kinds of wider scopes, which are tested with the rules that have them.
OF_SCOPES = {'TRANSITION_PROBED', 'SNAP_PATTERN_CONSERVATIVE', 'SNAP_PATTERN_DEGENERATE'}
# Kinds of the reference that no record has, so that code which matches on them runs.
OF_REFERENCE = {
    'MULTI_OUTPUT_PRIMITIVE_DETECTED',
    'PRIMITIVE_INSIDE_NESTED_JIT',
    'PYTREE_WEIGHT_LEAF_AMBIGUOUS',
    'RELATION_EXCLUDED_SLICED_WEIGHT',
    'TRANSITION_TAIL_BOUNDED',
    'WEIGHT_IN_CONTROL_FLOW',
}


def test_every_kind_has_a_model_that_shows_it():
    assert set(EMITTED) | RAISED | OF_SCOPES | OF_REFERENCE == set(DiagnosticKind.__members__)


@pytest.mark.parametrize('kind', EMITTED)
def test_a_record_says_what_it_concerns(kind):
    make, policy, level, weight, states = EMITTED[kind]
    graph = compiled(make, **policy)
    record = graph.explain(kind=DiagnosticKind[kind])[0]
    assert record.level is level
    assert record.weight_path == weight
    assert record.hidden_paths == states
    for path in [weight] if weight else states:
        assert str(path) in record.message
    if record.primitive is not None:  # what an equation is about names its line
        assert record.message.startswith(record.context['source'])
        assert '.py:' in record.context['source']


def test_a_weight_mixed_by_what_varies_is_not_traced_and_says_so():
    graph = compiled(lambda: Second(varying_mix))
    (record,) = graph.explain(weight_path=U)
    assert (record.kind, record.level) == (DiagnosticKind.WEIGHT_VARIES_IN_TIME, WARNING)
    assert [relation.path for relation in graph.hidden_param_op_relations] == [('W',)]


def test_a_model_with_nothing_to_say_has_only_information():
    assert {record.level for record in compiled(Leaky).diagnostics} == {INFO}


def test_a_state_that_a_traced_weight_reaches_in_part_is_named():
    graph = compiled(Narrower)
    assert [r.path for r in graph.hidden_param_op_relations] == [('W',)]
    records = graph.explain(kind=DiagnosticKind.RELATION_PARTIAL_PATH, weight_path=('W',))
    assert [record.hidden_paths for record in records] == [(('e',),), (('i',),)]
    for record in records:
        assert record.level is WARNING
        assert f'shape ({N},)' in record.message and 'an op of its own' in record.message


def test_a_coupling_of_groups_that_mixes_positions_is_named():
    graph = compiled(Inhibited)
    records = graph.explain(kind=DiagnosticKind.HIDDEN_COUPLING_NOT_TRACED)
    pairs = [(('g',), ('h',)), (('h',), ('g',))]
    assert [record.hidden_paths for record in records] == pairs
    assert {record.level for record in records} == {WARNING}
    assert 'reduce_sum at ' in records[1].message and '.py:' in records[1].message


def test_a_coupling_of_groups_by_ops_is_information():
    class Two(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = btf.nn.GRUCell(N_IN, N), btf.nn.GRUCell(N, N)

        def update(self, x):
            return self.b(self.a(x))

    (record,) = compiled(Two).explain(kind=DiagnosticKind.HIDDEN_COUPLING_NOT_TRACED)
    assert (record.level, record.hidden_paths) == (INFO, (('a', 'h'), ('b', 'h')))


@pytest.mark.parametrize('mark', [btf.matmul, jnp.matmul])
def test_a_weight_that_lasts_in_a_state_that_is_not_hidden_is_not_said_to_need_no_trace(mark):
    records = compiled(lambda: CarriedOutput(mark)).explain(weight_path=U)
    assert [record.level for record in records] == [WARNING]
    assert "[('mean',)]" in records[0].message
    assert 'brainstate.HiddenState' in records[0].message
    assert 'needs no trace' not in records[0].message


def test_a_state_that_only_counts_is_not_said_to_carry_influence():
    class Spiking(Leaky):
        def init_state(self, batch_size=None, **_):
            super().init_state(batch_size)
            self.total = brainstate.ShortTermState(jnp.zeros(N))

        def update(self, x):
            out = super().update(x)
            self.total.value += out
            return out

    assert not compiled(Spiking).explain(kind=DiagnosticKind.CARRIED_STATE_NOT_TRACED)


def test_weights_of_a_low_rank_update_are_traced_and_nothing_else_is_said():
    graph = compiled(LowRank)
    (relation,) = graph.hidden_param_op_relations
    assert set(relation.weight_ways['weight'].paths) == {('W',), ('A',), ('B',)}
    assert {record.level for record in graph.diagnostics} == {INFO}
    assert not graph.explain(weight_path=('B',))
    assert CompilationReport(graph).excluded_weights == []


def test_a_weight_behind_a_stop_gradient_is_said_to_have_none():
    graph = compiled(lambda: Second(lambda x, w: x @ jax.lax.stop_gradient(w)))
    (record,) = graph.explain(weight_path=U)
    assert record.kind is DiagnosticKind.WEIGHT_NOT_USED
    assert 'stop_gradient' in record.message and 'gradient is zero' in record.message


def test_a_weight_of_a_vmapped_op_is_told_why_it_is_not_traced():
    each = jax.vmap(btf.matmul, in_axes=(None, 0))
    graph = compiled(lambda: Second(lambda x, w: each(x, w[:, :, None])[:, 0], (N, N_IN)))
    (record,) = graph.explain(weight_path=U)
    assert record.kind is DiagnosticKind.WEIGHT_WITHOUT_ETP_OP
    assert 'vmapped' in record.message
    assert 'test_diagnostics_and_report.py:' in record.context['source']


def test_a_weight_that_is_put_out_as_it_is_is_explained():
    class PutOut(Unused):
        def update(self, x):
            return super().update(x), self.U.value

    (record,) = compiled(PutOut).explain(weight_path=U)
    assert (record.kind, record.level) == (DiagnosticKind.WEIGHT_WITHOUT_ETP_OP, INFO)


def test_advice_is_about_the_control_flow_at_hand():
    (scan,) = compiled(lambda: Second(long_scan), **EXCLUDE).explain(weight_path=U)
    assert 'scan_unroll_limit' in scan.message and 'cond' not in scan.message
    (cond,) = compiled(lambda: Second(behind_cond), cond='opaque', **EXCLUDE).explain(weight_path=U)
    assert "cond='convert'" in cond.message and 'scan_' not in cond.message


def test_a_weight_of_size_one_is_told_to_be_a_number():
    def gain(x, w):
        return btf.element_wise(w) * jnp.ones(N)

    graph = compiled(lambda: Second(gain, (1,)))
    (record,) = graph.explain(weight_path=U)
    assert record.kind is DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH
    assert 'w.reshape(())' in record.message
    traced = compiled(lambda: Second(lambda x, w: gain(x, w.reshape(())), (1,)))
    assert U in [relation.path for relation in traced.hidden_param_op_relations]


# Lines of the user's code


def test_an_operation_of_jax_is_named_by_the_line_that_calls_it():
    class Rolled(Leaky):
        def leak(self, h):
            return 0.8 * h + jnp.roll(h, 1)

    (record,) = compiled(Rolled).explain(kind=DiagnosticKind.TRANSITION_NOT_POSITION_WISE)
    assert 'test_diagnostics_and_report.py:' in record.context['source']
    assert 'leak' in record.context['source']


def test_what_an_operation_is_taken_apart_into_has_its_line():
    class InPlace(Leaky):
        def leak(self, h):
            return h.at[1:3].set(0.5 * h[1:3])

        def drive(self, x):
            return jax.lax.cond(x[0] > 0, lambda: Leaky.drive(self, x), lambda: jnp.zeros(N))

    eqns = compiled(InPlace).module_info.jaxpr.eqns
    lines = {eqn.primitive.name: source_line(eqn) for eqn in eqns}
    assert 'scatter' not in lines and 'cond' not in lines
    assert lines['slice'].endswith('.drive)') and lines['select_n'].endswith('.drive)')
    assert not any(line.endswith('(compiled)') for line in lines.values())


def test_code_of_a_prompt_has_lines_too():
    names = {'Leaky': Leaky, 'jnp': jnp}
    code = 'class Rolled(Leaky):\n  def leak(self, h):\n    return 0.8 * h + jnp.roll(h, 1)\n'
    exec(compile(code, '<stdin>', 'exec'), names)
    (record,) = compiled(names['Rolled']).explain(kind=DiagnosticKind.TRANSITION_NOT_POSITION_WISE)
    assert record.context['source'].startswith('<stdin>:3 (')


def test_a_layer_of_another_library_is_named_by_the_line_that_calls_it():
    state = pytest.importorskip('brainpy.state')

    class Spiking(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.W = param(N_IN, N)
            self.neurons = state.LIF(N)

        def update(self, x):
            current = btf.matmul(x, self.W.value) * u.mA
            return self.neurons(current + 0.0 * u.math.roll(self.neurons.V.value, 1) / u.ohm)

    lines = {source_line(eqn) for eqn in compiled(Spiking).module_info.jaxpr.eqns}
    mine = {line for line in lines if 'test_diagnostics_and_report.py:' in line}
    assert len(mine) == 2
    # What the library differentiates on its own has lost the line of the call.
    assert all('brainpy' in line for line in lines - mine)


# The report


class Full(Counting):
    """A traced weight, one for each of three reasons not to be, and a counter."""

    def __init__(self):
        super().__init__()
        self.U, self.V, self.X = (param(N_IN, N) for _ in range(3))

    def drive(self, x):
        return super().drive(x) + x @ self.U.value

    def update(self, x):
        return super().update(x) + btf.matmul(x, self.V.value)


@pytest.fixture(scope='module')
def report():
    return CompilationReport(compiled(Full))


def test_a_report_lists_traced_weights_with_their_groups(report):
    assert report.etrace_weights == [(('W',), [0])]
    two = CompilationReport(compiled(Coupled))
    assert two.etrace_weights == [(('layers', 0, 'W'), [0, 1]), (('layers', 1, 'W'), [1])]


def test_a_report_lists_other_weights_with_the_reason(report):
    assert report.excluded_weights == [
        (('U',), 'weight_without_etp_op'),
        (('V',), 'relation_excluded_non_temporal'),
        (('X',), 'weight_not_used'),
    ]


def test_a_report_lists_groups_carried_states_and_records(report):
    assert report.hidden_groups == [(0, [('h',)])]
    assert report.dynamic_states == [('count',)]
    assert report.diagnostics == report.graph.diagnostics


def test_counts_are_those_of_the_lists(report):
    assert report.counts == {
        'hidden_groups': 1,
        'etrace_weights': 1,
        'excluded_weights': 3,
        'warnings': 1,
        'errors': 0,
    }
    assert 'hidden_groups=1' in repr(report) and 'warnings=1' in repr(report)


def test_the_first_level_names_every_group_state_and_weight(report):
    text = report.to_str(1)
    assert text == report.to_str()
    for needed in ("('W',) -> group 0", "('U',)", "('V',)", "('X',)", "('count',)", f'({N},)'):
        assert needed in text
    assert '[warning]' not in text


def test_the_second_level_adds_warnings_with_what_to_do(report):
    text = report.to_str(2)
    assert text.startswith(report.to_str(1))
    assert '[warning]' in text and 'pass it through an op of this library' in text


def test_a_report_has_two_levels(report):
    with pytest.raises(ValueError, match='levels 1 and 2, not 3'):
        report.to_str(3)


def test_show_prints_the_report(report, capsys):
    report.show()
    assert capsys.readouterr().out == report.to_str() + '\n'
    file = io.StringIO()
    report.show(2, file=file)
    assert file.getvalue() == report.to_str(2) + '\n'
    assert capsys.readouterr().out == ''
