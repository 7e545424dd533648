"""Reasons for tests of the learners."""

from .reason import Reason

__all__ = ['REASONS']

MODULES = 'Objects name the module that defines them, which is of another name here.'
THREE = 'braintrace/_algorithm/three_factor_test.py::'
NO_GRADIENT = (
    'A call that nobody differentiates learns nothing, and needs no modulator here. The error '
    'comes where a gradient is asked for; no other signal takes its place.'
)
EARLIER = 'The same error is raised earlier, where the modulator is set.'

REASONS: tuple[Reason, ...] = (
    Reason(
        'braintrace/_algorithm/base_test.py::*::test_module_attribute',
        MODULES,
        "'braintrace_fast.algorithm.base'",
    ),
    Reason(
        'braintrace/_algorithm/pp_prop_test.py::TestPpPropModule::*',
        MODULES,
        'AssertionError: assert ',
    ),
    Reason(
        'braintrace/_algorithm/pp_prop_test.py::TestGetEtraceOf::'
        'test_get_etrace_of_nonexistent_weight_raises',
        'The error is a ValueError that names the traced weights; the test looks for words that '
        'make no sentence.',
        'There is no trace of',
    ),
    Reason(
        'braintrace/_algorithm/io_dim_vjp_test.py::TestBiasCorrectionTimeIndex::'
        'test_running_index_counts_calls_not_trace_steps',
        'The test pins a flaw that the reference knows as F-30: its bias correction counts calls, '
        'so that a window of six steps counts as one. Here it counts steps.',
        'F-30 no longer holds',
    ),
    Reason(
        'braintrace/_algorithm/dni_test.py::TestALearnedSynthesiserHelps::'
        'test_training_the_synthesiser_beats_the_zero_estimate_held_out',
        "In the reference `train_synthetic_gradient(reset=True)` makes the model's states anew, "
        'which the learner does not see, so that they go on from epoch to epoch. Here they start '
        'anew, as documented. Without that the errors of all ten epochs are the same in both, and '
        'the test passes; its author calls the margin of 6 % sensitive to the configuration.',
        'a trained synthesiser must beat the zero estimate on held-out data',
    ),
    Reason(
        'braintrace/__init___test.py::test_weight_used_inside_scan_raises_not_implemented',
        'The error is raised, and says that the scan is not unrolled and why. The reference gives '
        'a warning of the same before it.',
        'DID NOT WARN',
    ),
    Reason(f'{THREE}*::test_a_missing_modulator_raises_*', NO_GRADIENT, 'DID NOT RAISE'),
    Reason(f'{THREE}*::test_an_exception_mid_update_*', NO_GRADIENT, 'DID NOT RAISE'),
    Reason(f'{THREE}*::test_a_successful_keyword_call_*', NO_GRADIENT, 'DID NOT RAISE'),
    Reason(f'{THREE}*::test_a_per_group_sequence_*', EARLIER, 'The modulator is a list'),
    Reason(f'{THREE}*::test_a_non_broadcastable_*', EARLIER, 'The modulator has shape (3, 7)'),
    Reason(
        f'{THREE}*::test_a_descended_model_validates_eagerly_too',
        'An op inside a long scan is refused for rules that replace the learning signal: there is '
        'none for the states inside the scan, and what came out would be wrong.',
        "'modulatory' is not followed",
    ),
    Reason(
        f'{THREE}*::test_every_plain_parameter_gets_an_exact_zero_which_is_f_33',
        'The test pins a flaw that the reference knows as F-33: parameters without a trace get no '
        'gradient. Here they get that of the step.',
        'AssertionError',
    ),
    Reason(
        f'{THREE}*::test_reassigning_the_attribute_does_not_retrace',
        'The test pins a flaw that the reference knows as F-38: a compiled step keeps the first '
        'modulator. Here it is kept in a state, and a new one counts.',
        'AssertionError',
    ),
)
