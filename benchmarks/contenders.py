"""Ways to get the gradient of a workload, and the truth that each is held against."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import brainstate
import jax
import numpy as np

import braintrace_fast
from braintrace_fast import benchmarking, testing
from braintrace_fast.benchmarking import Program

from .workloads import WORKLOADS, step_loss

__all__ = ['CONTENDERS', 'Contender', 'build', 'gradient_errors', 'learner']

DECAY, KAPPA = 0.9, 0.9
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    'd_rtrl': ('D_RTRL', {}),
    'pp_prop': ('pp_prop', {'decay_or_rank': DECAY}),
    'eprop': ('EProp', {'kappa_filter_decay': KAPPA}),
}
"""The class of each learning rule in either library, and its arguments."""


@dataclass(frozen=True)
class Contender:
    """One way to get a gradient.

    Attributes
    ----------
    rule : str
        ``'bptt'`` or a learning rule.
    library : str
        Where the learner comes from.
    options : dict
        Arguments of ``etrace_grad``.
    """

    rule: str
    library: str = 'braintrace_fast'
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether its gradient has to be right."""
        return self.library == 'braintrace_fast'


CONTENDERS: dict[str, Contender] = {
    'bptt': Contender('bptt'),
    'd_rtrl fresh': Contender('d_rtrl', options={'trace': 'fresh'}),
    'd_rtrl carry': Contender('d_rtrl'),
    'd_rtrl 256MB': Contender('d_rtrl', options={'memory_budget': '256MB'}),
    'pp_prop': Contender('pp_prop'),
    'eprop': Contender('eprop'),
    'braintrace D_RTRL': Contender('d_rtrl', 'braintrace'),
    'braintrace pp_prop': Contender('pp_prop', 'braintrace'),
    'braintrace EProp': Contender('eprop', 'braintrace'),
}


def library(name: str) -> Any:
    """The module of a library; of the reference, 0.2.6 on Python 3.11 and 0.2.8 on later ones."""
    if name == 'braintrace_fast':
        return braintrace_fast
    import braintrace

    return braintrace


def learner(contender: Contender, model: brainstate.nn.Module, x: jax.Array) -> Any:
    """A compiled learner of a model with initialised states."""
    name, arguments = RULES[contender.rule]
    made = getattr(library(contender.library), name)(model, **arguments)
    made.compile_graph(x)
    return made


def build(
    workload: str, contender: str, sizes: Mapping[str, Any], update: float = 0.0, **options: Any
) -> Program:
    """The gradient of a workload as a program; ``update`` is a rate for updates in every step."""
    work, who = WORKLOADS[workload], CONTENDERS[contender]
    model = work.make(library(who.library), sizes)
    brainstate.nn.init_all_states(model, batch_size=sizes['batch'])
    sequences = work.sequences(sizes)
    if who.rule == 'bptt':
        return benchmarking.bptt(model, *sequences, step_fn=step_loss, **options)
    made = learner(who, model, sequences[0][0])
    if update:
        return benchmarking.updating(made, *sequences, step_fn=step_loss, rate=update)
    options = {**who.options, **options}
    return benchmarking.online(made, *sequences, step_fn=step_loss, **options)


def gradient_errors(workload: str, contender: str, update: float = 0.0) -> dict[str, float]:
    """Relative errors against the oracle, on a small copy in float64.

    Returns
    -------
    dict
        ``'all'``: the largest of any parameter; ``'traced'``: of those that are traced, which are
        all but the readout's.

    Raises
    ------
    AssertionError
        If a contender of this library is wrong: its time is not worth reporting.
    """
    who, sizes = CONTENDERS[contender], WORKLOADS[workload].small_copy()
    with brainstate.environ.context(precision=64):
        if update:
            # Steps so small that the weights are as good as fixed add up to the gradient.
            before, after = (
                build(workload, contender, sizes, rate)()[1] for rate in (-update, update)
            )
            gradients = jax.tree.map(lambda a, b: (a - b) / (2 * update), before, after)
        else:
            # By memory, the small copy would be a single window.
            windows = {'trace_every': 5} if 'memory_budget' in who.options else {}
            gradients = build(workload, contender, sizes, reduction='sum', **windows)()
    comparison = testing.compare(gradients, truth(workload, who.rule))
    if who.ours:
        comparison.check(1e-5 if update else 1e-9)
    traced = [a.relative_error for p, a in comparison.agreements.items() if p[0] != 'readout']
    return {'all': comparison.worst, 'traced': max(traced)}


@functools.lru_cache(maxsize=64)
def truth(workload: str, rule: str) -> Any:
    """The gradient of the small copy by brute force."""
    model, sequences, loss = _small_copy(workload)
    if rule == 'bptt':
        return testing.bptt(model, *sequences, step_fn=loss)
    oracle = recurrence(workload)
    if rule == 'eprop':
        return filtered_gradient(oracle, KAPPA)
    return oracle.gradient((DECAY, DECAY) if rule == 'pp_prop' else None)


@functools.lru_cache(maxsize=4)  # the factors of a whole sequence each
def recurrence(workload: str) -> testing.Recurrence:
    model, sequences, loss = _small_copy(workload)
    return testing.Recurrence(model, *sequences, step_fn=loss)


def _small_copy(workload: str) -> tuple[Any, Any, Callable[..., Any]]:
    work = WORKLOADS[workload]
    sizes = work.small_copy()
    with brainstate.environ.context(precision=64):
        model = work.make(braintrace_fast, sizes)
        brainstate.nn.init_all_states(model, batch_size=sizes['batch'])
        return model, work.sequences(sizes), functools.partial(step_loss, model)


def filtered_gradient(oracle: testing.Recurrence, kappa: float) -> Any:
    """The gradient of e-prop, with ``ebar_t = kappa ebar_{t-1} + e_t``, by brute force.

    ``g_t = ell_t + L_t D_t e_{t-1} + (kappa L_t + R_t) ebar_{t-1}``
    """
    size = oracle.factors[0].step_gradient.size
    e = [np.zeros((*L.shape, size)) for L in oracle.factors[0].L]
    filtered, total = [np.zeros_like(trace) for trace in e], np.zeros(size)
    for F in oracle.factors:
        total += F.step_gradient
        for g, D in enumerate(F.D):
            past = np.einsum('sqp,qpw->spw', D, e[g])
            total += np.einsum('sp,spw->w', F.L[g], past)
            total += np.einsum('sp,spw->w', kappa * F.L[g] + F.R[g], filtered[g])
            e[g] = past
            for k, f in enumerate(F.f):
                columns = oracle.dense.columns[k][g]
                if columns is not None:
                    e[g] = e[g] + f[g][..., None] * F.J[k][columns]
            filtered[g] = kappa * filtered[g] + e[g]
    return oracle.by_path(total)
