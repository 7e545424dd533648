r"""Oracles for online gradients, to point at a model of your own.

=============================== ====================================================================
oracle                          truth of
=============================== ====================================================================
:func:`bptt`                    the loss of the whole sequence
:func:`recurrence`              D-RTRL and pp-prop: their recurrence, by brute force
:func:`finite_differences`      the loss of the whole sequence, without any derivative
=============================== ====================================================================

All start from the present states of the model and leave them as they are, run in float64 whatever
the model's dtype, sum over the steps, and return gradients by the path of the ``ParamState``, as
``learner.etrace_grad(..., reduction='sum')`` does. Compare with :func:`compare`. An oracle that
would agree with anything raises :class:`VacuousComparison` instead: all gradients are zero, a
spiking layer is silent, or the only chunk of a multi-step learner is the whole sequence.

Examples
--------
>>> import brainstate, jax, jax.numpy as jnp
>>> import braintrace_fast as braintrace
>>> from braintrace_fast import testing
>>> model = braintrace.nn.GRUCell(2, 3)
>>> learner = braintrace.compile(model, 'd_rtrl', jnp.ones(2))
>>> xs = jax.random.normal(jax.random.key(0), (5, 2))
>>> true = testing.recurrence(model, xs, step_fn=lambda x: jnp.sum(model(x) ** 2))
>>> ours = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction='sum')
>>> testing.compare(ours, true).check(rtol=1e-5)
"""

from .comparison import Agreement, Comparison, VacuousComparison, compare
from .recurrences import Recurrence, recurrence
from .whole_sequence import bptt, finite_differences

__all__ = [
    'Agreement',
    'Comparison',
    'Recurrence',
    'VacuousComparison',
    'bptt',
    'compare',
    'finite_differences',
    'recurrence',
]
