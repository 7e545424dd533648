"""Groups, traced weights and ``D`` are those of braintrace, for models built with either."""

import itertools
import warnings
from types import ModuleType
from typing import Any

import brainpy.state as bp
import brainstate
import braintools
import numpy as np
import pytest
import saiunit as u

import braintrace_fast as btf
from tests.compiler.checks import assert_close, build, draw
from tests.models import N_IN, N, alif, lif
from tests.promotion import promoting

pytestmark = pytest.mark.usefixtures('x64')


def linear(library: ModuleType, n_in: int, n_out: int, unit: u.Unit) -> Any:
    weights = braintools.init.Normal(0.5 * unit, 1.0 * unit)
    return library.nn.Linear(n_in, n_out, weights, braintools.init.Constant(0.1 * unit))


class Delta(brainstate.nn.Module):
    def __init__(self, library: ModuleType):
        super().__init__()
        self.neu = lif(N)
        self.proj = bp.DeltaProj(comm=linear(library, N_IN + N, N, u.mV), post=self.neu)

    def update(self, x):
        self.proj(u.math.concatenate([x, self.neu.get_spike()], axis=-1))
        return self.neu(0.0 * u.mA)


class Synapse(brainstate.nn.Module):
    def __init__(self, library: ModuleType, neuron: Any = lif):
        super().__init__()
        self.neu = neuron(N)
        self.proj = bp.AlignPostProj(
            comm=linear(library, N_IN + N, N, u.mS),
            syn=bp.Expon(N, tau=0.5 * u.ms),
            out=bp.CUBA(),
            post=self.neu,
        )

    def update(self, x):
        self.proj(u.math.concatenate([x, self.neu.get_spike()], axis=-1))
        return self.neu(0.0 * u.mA)


class Stack(brainstate.nn.Module):
    def __init__(self, library: ModuleType):
        super().__init__()
        self.layers = [library.nn.GRUCell(N_IN, N), library.nn.LSTMCell(N, N)]

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    'vanilla': lambda library: library.nn.ValinaRNNCell(N_IN, N, activation='tanh'),
    'gru': lambda library: library.nn.GRUCell(N_IN, N),
    'lstm': lambda library: library.nn.LSTMCell(N_IN, N),
    'minimal_rnn': lambda library: library.nn.MinimalRNNCell(N_IN, N),
    'lif': Delta,
    'lif_expon': Synapse,
    'alif_expon': lambda library: Synapse(library, alif),
    'two_layers': Stack,
}


def compiled(library: ModuleType, name: str, batch: int | None) -> tuple[Any, Any]:
    """A graph, and the values of its step's variables."""
    x = draw(N_IN) if batch is None else draw(batch, N_IN)
    with promoting(library is not btf):
        graph = library.compile_etrace_graph(build(lambda: MODELS[name](library), batch), x)
        *_, temps = graph.module_info.jaxpr_call(x)
    return graph, temps


def membership(graph: Any) -> set[tuple[Any, frozenset]]:
    """Each traced parameter, and the states of a group that it reaches."""
    return {
        (path, frozenset(group.hidden_paths))
        for relation in graph.hidden_param_op_relations
        for path in relation.trainable_paths.values()
        for group in relation.hidden_groups
    }


def jacobians(graph: Any, temps: Any) -> dict[tuple[Any, Any], Any]:
    """``D`` by the paths of the new and the old state."""
    found = {}
    for group in graph.hidden_groups:
        D = group.diagonal_jacobian(
            [temps[v] for v in group.hidden_invars],
            [temps[v] for v in group.transition_jaxpr_constvars],
        )
        pairs = itertools.product(enumerate(group.hidden_paths), repeat=2)
        found |= {(new, old): D[..., s, q] for (s, new), (q, old) in pairs}
    return found


@pytest.mark.parametrize('name, batch', [*((name, 2) for name in MODELS), ('lstm', None)])
def test_groups_weights_and_D_are_the_same(reference, name, batch):
    ours, our_values = compiled(btf, name, batch)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)
        theirs, their_values = compiled(reference, name, batch)
    groups = [{frozenset(g.hidden_paths) for g in graph.hidden_groups} for graph in (ours, theirs)]
    assert groups[0] == groups[1]
    assert membership(ours) == membership(theirs)
    found, expected = jacobians(ours, our_values), jacobians(theirs, their_values)
    assert set(found) == set(expected)
    for pair, value in expected.items():
        assert_close(found[pair], value)
    if name != 'vanilla':
        assert any(np.any(value != 0) for value in expected.values())
