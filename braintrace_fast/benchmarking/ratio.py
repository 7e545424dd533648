"""Ratios of times that were taken by turns."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ['Ratio']


class Ratio(NamedTuple):
    """How many times as long one program takes as another.

    Attributes
    ----------
    value : float
        The ratio of the medians.
    low, high : float
        The quartiles of the ratios of the single rounds.

    Examples
    --------
    >>> from braintrace_fast.benchmarking import Ratio
    >>> Ratio.of([2.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    Ratio(value=2.0, low=2.0, high=2.5)
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float], baseline: Sequence[float]) -> 'Ratio':
        """The ratio of two programs that ran one after the other in every round."""
        rounds = [own / base for own, base in zip(seconds, baseline, strict=True)]
        value = statistics.median(seconds) / statistics.median(baseline)
        if len(rounds) < 2:
            return cls(value, rounds[0], rounds[0])
        low, _, high = statistics.quantiles(rounds, n=4, method='inclusive')
        return cls(value, low, high)

    @property
    def spread(self) -> float:
        """The distance of the quartiles, relative to the ratio."""
        return (self.high - self.low) / self.value
