"""``adjoint_scan`` on a TPU: the step of the reference, with ``nu`` and ``P`` in VMEM.

The layouts and the tile are those of :mod:`braintrace_fast.kernels.scan.mosaic`.
"""

import jax

from ..dispatch import tpu_kind
from ..scan import mosaic
from ..scan.window import window
from .operands import AdjointOperands
from .scanned import as_scan, entry_points

__all__ = ['adjoint_scan', 'redundant', 'supports']

KEPT = {
    'TPU v4': 90 * 2**20,
    'TPU v5 lite': 90 * 2**20,
    'TPU v5e': 90 * 2**20,
    'TPU v6 lite': 90 * 2**20,
    'TPU v6e': 90 * 2**20,
    'TPU7x': 30 * 2**20,
}
"""The bytes that XLA is known to keep on chip while a loop runs, by the kind of TPU.

Compiled for them, loops kept 125, 108, 93 and 31 MiB, and not 132, 120, 108 and 33. For a v5p, XLA
keeps the state, but not the results: it clears them first and so writes them twice.
"""

supports, adjoint_scan = entry_points(mosaic)


def redundant(operands: AdjointOperands) -> str | None:
    """Why plain JAX moves as few bytes as the kernel, or None.

    XLA computes the results of a step in one fusion and the new state in another, and reads twice
    what both need. That is ``L``, if ops read it ``within`` their step; not so for one state and
    several such ops, for which it first writes ``L + nu`` to VMEM. It often splits the state of
    more than two planes, or of one that does not depend on itself. More than two hundred patterns
    of planes, drawn at random and compiled for each kind, found no exception; where none was tried,
    or they did not agree, the kernel is taken.
    """
    D, L = operands.D, operands.L
    kind, reading = tpu_kind(), sum(operands.within or ())
    few = len(D) == 1 and reading != 1 or len(D) == 2 and reading == 0
    lasting = all(row[s] is not None for s, row in enumerate(D))
    if kind not in KEPT or not (few and lasting and jax.tree.leaves(L)):
        return None
    if mosaic.loop_bytes(window(as_scan(operands))) > KEPT[kind]:
        return None
    room = f'one or two states and up to {KEPT[kind] >> 20} MiB of results'
    return f'XLA moves as few bytes on a {kind} for {room}'
