"""The hooks by which subclasses change braintrace's learning rules, and what to override here.

All but two of them (`SERVED`) are never called here. A class that overrides one would learn as if
it did not, so it is refused.
"""

from ..errors import NotSupportedError

__all__ = ['SERVED', 'refuse_reference_hooks']

SERVED = ('_update_etrace_data', '_solve_weight_gradients')
"""Those that rules with a trace of their factors call, see :class:`HookedAlgorithm`."""

ENGINE = 'make_engine, which returns an Engine: how a trace advances and what is read off it'
SIGNALS = 'learning_signals, and entry_signals for chunks that are differentiated in full'
EXIT = 'exit_signals, for parameters that are not traced'
UPDATE = 'update'
NONE = 'nothing, there is no such part'
REPLACEMENTS = {
    '_update_etrace_data': ENGINE,
    '_make_etrace_stepper': ENGINE,
    '_wrap_etrace_stepper': ENGINE,
    '_make_scan_fn': ENGINE,
    '_solve_weight_gradients': ENGINE,
    '_solve_previous_trace_gradients': ENGINE,
    '_substitutes_hidden_jacobians': ENGINE,
    '_substitute_hidden_jacobians': ENGINE,
    '_get_etrace_data': 'make_engine; the state `trace` holds what the engine carries',
    '_assign_etrace_data': 'make_engine; the state `trace` holds what the engine carries',
    '_compute_learning_signal': SIGNALS,
    '_inject_exit_cotangent': EXIT,
    '_exit_cotangent_grads': EXIT,
    '_get_update_aux': 'modulator_of, whose result learning_signals is given',
    '_update_impl': UPDATE,
    '_update_fn': UPDATE,
    '_update_fn_fwd': UPDATE,
    '_update_fn_bwd': UPDATE,
    '_etp_routed_paths': NONE,
    '_seq_call': UPDATE,
    '_seq_param_states': 'param_states',
    '_seq_vjp_method': NONE,
    '_seq_check_window': NONE,
}
"""By the name of a hook, what takes its place."""


def refuse_reference_hooks(cls: type) -> None:
    """Raise an error if a class of learners has a hook that nothing calls."""
    served = getattr(cls, 'served_hooks', ())
    found = [name for name in REPLACEMENTS if hasattr(cls, name) and name not in served]
    if found:
        lines = [f'  {name}; override here: {REPLACEMENTS[name]}' for name in found]
        raise NotSupportedError(
            f'{cls.__name__} overrides hooks of braintrace that are never called here, so that it '
            'would learn as if it did not:\n' + '\n'.join(lines)
        )
