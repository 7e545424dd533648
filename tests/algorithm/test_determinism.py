"""The order of groups, states and sums does not depend on Python's hash seed."""

import pytest

from tests.programs import output_of, start


@pytest.mark.slow
def test_two_processes_with_different_hash_seeds_give_the_same_bits():
    processes = [start('gradient_bits', PYTHONHASHSEED=seed) for seed in ('1', '2')]
    one, other = map(output_of, processes)
    assert one == other
    assert len(one.splitlines()) > 10
