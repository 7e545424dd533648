"""How near two gradients are, and when a comparison proves nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._typing import Path

__all__ = ['Agreement', 'Comparison', 'VacuousComparison', 'compare', 'refuse_zero']


class VacuousComparison(ValueError):
    """The comparison would succeed whatever is compared."""


@dataclass(frozen=True)
class Agreement:
    """How near two gradients of one parameter are.

    Attributes
    ----------
    relative_error : float
        ``|found - true| / |true|``, in the Euclidean norm.
    cosine : float
        Of the angle between them.
    norm_ratio : float
        ``|found| / |true|``.
    """

    relative_error: float
    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Comparison:
    """Agreements by parameter; see :func:`compare`.

    Attributes
    ----------
    agreements : dict
        The :class:`Agreement` of every parameter, by path.
    """

    agreements: dict[Path, Agreement]

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max(a.relative_error for a in self.agreements.values())

    def check(self, rtol: float) -> None:
        """Raise an ``AssertionError`` with the whole table if any relative error is above."""
        if not self.worst <= rtol:
            raise AssertionError(f'A relative error is above {rtol:g}.\n{self}')

    def __str__(self) -> str:
        width = max(len(str(path)) for path in self.agreements)
        rows = [f'{"parameter":{width}}  relative error    cosine  norm ratio']
        for path, a in self.agreements.items():
            rows.append(
                f'{path!s:{width}}  {a.relative_error:14.3e}  {a.cosine:8.5f}  {a.norm_ratio:10.5f}'
            )
        return '\n'.join(rows)


def compare(found: Mapping[Path, Any], true: Mapping[Path, Any]) -> Comparison:
    """How near gradients are, parameter by parameter.

    Parameters
    ----------
    found, true : dict
        Gradients by path, of the same parameters; units are ignored.

    Returns
    -------
    Comparison
        Its ``str`` is a table; ``check(rtol)`` raises if an error is too large.

    Raises
    ------
    VacuousComparison
        If all of ``true`` is zero.

    Examples
    --------
    >>> import numpy as np
    >>> from braintrace_fast import testing
    >>> result = testing.compare({('w',): np.array([3.0, 3.0])}, {('w',): np.array([3.0, 4.0])})
    >>> result.agreements['w',].relative_error
    0.2
    >>> print(result)
    parameter  relative error    cosine  norm ratio
    ('w',)          2.000e-01   0.98995     0.84853
    """
    if set(found) != set(true):
        raise ValueError(
            f'The gradients are of {sorted(map(str, found))} and of {sorted(map(str, true))}; '
            'compare gradients of the same parameters.'
        )
    refuse_zero(true)
    return Comparison({path: _agreement(_ravel(found[path]), _ravel(true[path])) for path in true})


def _agreement(found: np.ndarray, true: np.ndarray) -> Agreement:
    if found.shape != true.shape:
        raise ValueError(f'The gradients have {found.size} and {true.size} elements.')
    norm, true_norm = np.linalg.norm(found), np.linalg.norm(true)
    if norm == 0 == true_norm:
        return Agreement(0.0, 1.0, 1.0)
    with np.errstate(divide='ignore', invalid='ignore'):
        error = np.linalg.norm(found - true) / true_norm
        cosine = found @ true / (norm * true_norm)
    return Agreement(float(error), float(cosine), float(norm / true_norm))


def _ravel(gradient: Any) -> np.ndarray:
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)]
    return np.concatenate(leaves)


def refuse_zero(gradients: Mapping[Path, Any]) -> None:
    """Raise an error if all gradients are zero."""
    if not any(np.any(_ravel(g) != 0) for g in gradients.values()):
        raise VacuousComparison(
            f'The gradients of all parameters ({list(gradients)}) are zero: whatever does '
            'nothing agrees with them. Does the loss depend on the output, and the output on the '
            'input? Start from another state, or use other inputs or more steps.'
        )
