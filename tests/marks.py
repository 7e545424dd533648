"""Marks of tests that run on the table of models."""

from typing import Any

import pytest

__all__ = ['slow_if_one_of_many']

FAST = """
    vanilla gru lstm lif_expon alif_expon gif_expon two_layers masked_weight output_reads_y
    learned_leak hidden_group_state units while checkpoint cond drop_connect
""".split()


def slow_if_one_of_many(name: str) -> Any:
    """The mark of a model in a test that need not run on all of them every time."""
    return () if name in FAST else pytest.mark.slow
