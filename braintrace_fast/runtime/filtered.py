"""A low-pass filter of the trace, as a transform of factors.

    ebar_t[s] = kappa ebar_{t-1}[s] + e_t[s]
    g_t       = c_t (x) x_t + L_t[s] D_t[s,q] e_{t-1}[q] + (kappa L_t[q] + R_t[q]) ebar_{t-1}[q]

The filtered planes are states like any others: with them, a group has ``2 S`` planes, of which the
loss reads the second half. So every kernel of the trace, and every window, serves the filter too.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from ..compiler import HiddenGroup
from ..kernels.planes import Plane
from .factors import Factors, GroupPlanes, per_example
from .links import group_plane

__all__ = ['Filter']


@dataclasses.dataclass(frozen=True, eq=False)
class Filter:
    """Gives every group its planes a second time, filtered.

    Parameters
    ----------
    kappa : float
        How much of the filtered trace is kept from step to step.
    groups : sequence of HiddenGroup
        The groups of the model.
    """

    kappa: float
    groups: Sequence[HiddenGroup]
    copies: int = dataclasses.field(default=2, init=False)

    def factors(self, factors: Factors, leading: tuple[int, ...] = ()) -> Factors:
        """``D = [[D, 0], [D, kappa]]`` and ``f = [f, f]``."""
        keep = [
            jnp.full((*leading, *plane.shape), self.kappa, plane.dtype)
            for plane in map(group_plane, self.groups)
        ]
        if factors.keep is not None:
            keep = [per_example(factors.keep, plane) * plane for plane in keep]
        return factors._replace(
            D=tuple(map(with_filter, factors.D, keep)), f=tuple((*f, *f) for f in factors.f)
        )

    def planes(self, signals: Sequence[Sequence[Plane]]) -> GroupPlanes:
        """Signals of the filter alone."""
        return second_half(signals)


def with_filter(D: Sequence[Sequence[Plane]], keep: Plane) -> tuple[tuple[Plane, ...], ...]:
    """``[[D, 0], [D, keep]]``."""
    places = range(len(D))
    return (
        *((*row, *(None for _ in places)) for row in D),
        *((*row, *(keep if q == s else None for q in places)) for s, row in enumerate(D)),
    )


def second_half(planes: Sequence[Sequence[Plane]]) -> GroupPlanes:
    """Per group, no signal for the trace, and these for its filter."""
    return tuple((*(None for _ in own), *own) for own in planes)
