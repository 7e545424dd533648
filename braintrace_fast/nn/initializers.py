"""The default initialisers of the layers.

For a given seed they draw the very numbers that the layers of braintrace 0.2.6 draw.
"""

from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn.init import Initializer, KaimingNormal, LecunUniform, XavierNormal, ZeroInit

__all__ = [
    'GROUPED_KAIMING_NORMAL',
    'KAIMING_NORMAL',
    'LECUN_UNIFORM',
    'ORTHOGONAL',
    'XAVIER_NORMAL',
    'ZERO',
    'Orthogonal',
]


class Orthogonal(Initializer):
    """A matrix with orthonormal columns or, if it is wide, rows; uniformly distributed.

    brainstate's own initialiser draws other numbers for square and wide shapes.
    """

    def __call__(self, shape: Sequence[int], **kwargs: Any) -> jax.Array:
        """Draw a matrix of this shape."""
        draws = brainstate.random.normal(size=tuple(shape))
        wide = draws.shape[0] < draws.shape[1]
        q, r = jnp.linalg.qr(draws.T if wide else draws)
        q = q * jnp.sign(jnp.diag(r))[None, :]
        return q.T if wide else q


KAIMING_NORMAL = KaimingNormal(distribution='normal')
GROUPED_KAIMING_NORMAL = KaimingNormal(distribution='normal', in_axis=-2, out_axis=-3)
LECUN_UNIFORM = LecunUniform()
XAVIER_NORMAL = XavierNormal(distribution='normal')
ORTHOGONAL = Orthogonal()
ZERO = ZeroInit()
