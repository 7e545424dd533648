"""Split a loop into what must run in order and what can run for all steps at once.

A training loop computes, in every step, the next states and, beside them, a gradient that no later
step waits for. Here only the first part runs as a scan. The rest runs afterwards on all steps
together: small products become large ones, and element-wise work is fused over time. Products of
the inputs alone run before the scan, in the same way. Compilers call this loop fission.

The equations of the body fall into four parts:

- *invariant*: what depends only on constants and on carried values that never change. It is
  computed once; of a uniform array, only its one number is kept;
- *ahead*: products of what depends on no moving state with weights that do not change, mapped over
  the steps. The scan then need not read the weights in every step, which pays where the weights
  are larger than the results that are written and read instead. A product of inputs and states
  side by side, ``[x, h] @ w``, is taken apart for it: ``x @ w[:n] + h @ w[n:]``;
- *in order*: what the carried values depend on, and what JAX cannot map, such as a callback to the
  host. This is the scan;
- *at once*: everything else, mapped over the steps. It computes again what is cheap and reads the
  rest of what was computed in order from memory. It prefers to read states, each of which is kept
  once: as the new state of one step and as the old state of the next.

``body.py`` traces a step, ``products.py`` takes its products apart, ``stages.py`` divides it into
the four parts, ``sums.py`` sums terms over the steps, and ``run.py`` runs the result;
``stateful.py`` has the two entry points.
"""

from .stateful import StatefulLoop, loop

__all__ = ['StatefulLoop', 'loop']
