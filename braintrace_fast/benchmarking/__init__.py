"""Measuring gradients: compiled programs, their counted work and memory, ratios with a spread.

The pytest fixture ``etrace_benchmark`` stands on this; ``docs/benchmarking.md`` shows both.
"""

from .hlo import Work, count_work
from .program import Program, bptt, online, updating
from .ratio import Ratio

__all__ = ['Program', 'Ratio', 'Work', 'bptt', 'count_work', 'online', 'updating']
