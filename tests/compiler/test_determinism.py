"""The same model gives the same graph in every process, whatever the hash seed."""

from tests.programs import output_of, start
from tests.programs.graph_text import canonical_text

NAMES = ['coba_ei', 'stop_gradient', 'drop_connect', 'pooled', 'switch']


def test_graphs_do_not_depend_on_the_hash_seed():
    # Only initialisers are run.
    fast = {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    processes = [start('graph_text', *NAMES, PYTHONHASHSEED=seed, **fast) for seed in ('1', '2')]
    one, other = map(output_of, processes)
    assert len(one) > 10_000
    assert one == other


def test_compiling_twice_gives_the_same_graph():
    assert canonical_text('switch') == canonical_text('switch')
