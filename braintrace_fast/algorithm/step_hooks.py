"""Rules whose subclasses may change the trace and the gradient of every step."""

from typing import Any

import jax

from ..runtime.engine import Engine, Trace
from ..runtime.factors import Values
from ..runtime.gradient import GradientSum
from ..runtime.hooked import HookedEngine
from .reference_hooks import SERVED
from .vjp import ETraceVjpAlgorithm

__all__ = ['HookedAlgorithm']


class HookedAlgorithm(ETraceVjpAlgorithm):
    """A rule with braintrace's two hooks for subclasses.

    A class that overrides one of them learns sequences step by step, because windows, which do not
    compute the trace of every step, could not call it.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import braintrace_fast as braintrace
    >>> class Clipped(braintrace.D_RTRL):
    ...     def _update_etrace_data(self, *args):
    ...         traces = super()._update_etrace_data(*args)
    ...         return jax.tree.map(lambda e: jnp.clip(e, -1.0, 1.0), traces)
    >>> cell = braintrace.nn.ValinaRNNCell(2, 4, activation='tanh')
    >>> learner = braintrace.compile(cell, Clipped, jnp.ones(2))
    >>> learner(jnp.ones(2)).shape
    (4,)
    """

    served_hooks = SERVED

    @property
    def has_hooks(self) -> bool:
        """Whether the class overrides a hook."""
        return any(getattr(type(self), n) is not getattr(HookedAlgorithm, n) for n in SERVED)

    def _prepare(self) -> None:
        super()._prepare()
        if self.has_hooks:
            self.engine: Engine = HookedEngine(self.engine, self)

    def _update_etrace_data(
        self,
        running_index: jax.Array,
        hist_etrace_vals: Trace,
        hid2weight_jac: Any,
        hid2hid_jac: Any,
        weight_vals: Values,
        input_is_multi_step: bool = False,
    ) -> Trace:
        """The traces after a step: to be extended.

        Parameters
        ----------
        running_index : jax.Array
            The number of steps before this one.
        hist_etrace_vals : PyTree
            The traces before the step: for D-RTRL per op and group that it reaches, per state
            plane, by name of the weight; None for planes that are always zero.
        hid2weight_jac : pair
            The inputs of ops ``x``, and ``f``: the planes of ``d h / d y`` per op and group.
        hid2hid_jac : tuple
            ``D``: per group, the planes of ``d h(t) / d h(t-1)``, None where it is zero.
        weight_vals : dict
            The parameters by path.
        input_is_multi_step : bool
            False: the steps of a chunk are taken one by one.
        """
        return self._hooked().advanced(
            running_index, hist_etrace_vals, hid2weight_jac, hid2hid_jac, weight_vals
        )

    def _solve_weight_gradients(
        self,
        running_index: jax.Array,
        etrace_h2w_at_t: Trace,
        dl_to_hidden_groups: Any,
        weight_vals: Values,
        dl_to_nonetws_at_t: Values,
        dl_to_etws_at_t: Values,
    ) -> Values:
        """The gradients of a step by path of the parameter: to be extended.

        Parameters
        ----------
        running_index : jax.Array
            The number of steps before this one.
        etrace_h2w_at_t : PyTree
            The traces that the gradient is read off.
        dl_to_hidden_groups : PyTree
            What the loss says of the states.
        weight_vals : dict
            The parameters by path.
        dl_to_nonetws_at_t, dl_to_etws_at_t : dict
            Gradients that do not come from traces, of parameters that are not traced and of those
            that are, by path.
        """
        start = dl_to_nonetws_at_t | dl_to_etws_at_t
        total = GradientSum(self.graph, weight_vals, start)
        return self._hooked().solved(total, running_index, etrace_h2w_at_t, dl_to_hidden_groups)

    def _hooked(self) -> HookedEngine:
        if not isinstance(self.engine, HookedEngine):
            raise TypeError('Hooks are for subclasses to extend, and not to be called.')
        return self.engine
