"""Reasons for tests of learning rules and of whole gradients."""

from .reason import Reason

__all__ = ['REASONS']

SEQUENCE = 'braintrace/_algorithm/sequence_test.py::'
SNAP = 'braintrace/_algorithm/snap_n_test.py::'
DESCENT = 'braintrace/_algorithm/tests/scan_descent_support_test.py::'
WHILE = 'braintrace/_algorithm/tests/while_support_test.py::'
AXES = 'braintrace/_algorithm/tests/axis_acceptance_test.py::'
FULL = 'braintrace/_algorithm/vjp_graph_executor_test.py::TestFullJacobianFlag::'
STEPS = (
    'The test pins a counter that counts calls, so that a chunk of two steps counts once and '
    "pp_prop's correction of its bias lags behind. Here it counts steps."
)
CHUNKS = (
    'Chunks of a mapped learner are refused there, because the axis that is mapped would be that '
    'of time. Here the learner maps the model inside a step, so that chunks are right, and tested.'
)
LEARNED = (
    'An op without a declared place for its traces is refused there. Here each op has a trace per '
    'position, so that SnAp learns it.'
)
PATTERNS = (
    'The test pins that all positions count as neighbours of all others where braintrace has no '
    'rule for an op. Here the pattern of grouped and low-rank weights is known, and neighbourhoods '
    'are smaller where groups do not reach each other.'
)
NAMES = 'The test pins names of primitives, of which there is one here for each op.'
ROUNDING = (
    'The test asks for the same bits, or for less than a rounding error, of sums in another order: '
    'a window adds up all of its steps in one product.'
)

REASONS: tuple[Reason, ...] = (
    Reason(
        f'{SEQUENCE}TestEquivalenceToTheStatusQuo::test_sum_reduction_reproduces_*',
        ROUNDING,
        'Not equal to tolerance rtol=0, atol=0',
    ),
    Reason(
        f'{SEQUENCE}TestEquivalenceToTheStatusQuo::test_mean_reduction_is_sum_divided_*',
        ROUNDING,
        'Not equal to tolerance rtol=1e-06',
    ),
    Reason(
        f'{SEQUENCE}TestTheTwoDrivingModes::test_evolve_accepts_windows_on_a_single_step_*',
        STEPS,
        'running_index',
    ),
    Reason(
        f'{SEQUENCE}TestStateLifecycle::test_running_index_advances_once_per_window',
        STEPS,
        'running_index',
    ),
    Reason(
        f'{SEQUENCE}TestAlgorithmInteractions::test_window_mode_lags_the_io_factorized_*',
        STEPS,
        'running_index',
    ),
    Reason(
        f'{SEQUENCE}TestRobustness::test_evolve_without_a_step_fn_drives_the_learner_directly',
        STEPS,
        'running_index',
    ),
    Reason(
        f'{SEQUENCE}TestTheTwoDrivingModes::test_a_learner_without_a_vjp_method_is_refused_*',
        'The test is about private hooks of a base class, which it overrides in an object that is '
        'no learner.',
        '_check_compiled',
    ),
    Reason(f'{SEQUENCE}TestVmap::test_window_mode_is_refused_under_vmap*', CHUNKS, 'vmap'),
    Reason(f'{SNAP}TestAnchorRejection::test_embedding_is_rejected_*', LEARNED, 'DID NOT RAISE'),
    Reason(
        f'{SNAP}TestAnchorRejection::test_shared_axis_einsum_is_rejected_*',
        LEARNED,
        'DID NOT RAISE',
    ),
    Reason(f'{SNAP}TestAnchorRejection::test_snap_1_is_rejected_too_*', LEARNED, 'DID NOT RAISE'),
    Reason(f'{SNAP}TestSaturationEqualsBPTT::*_across_chunk_sizes', NAMES, 'etp_sp_mv'),
    Reason(
        f'{SNAP}TestConservativeFallbackEndToEnd::test_two_mixing_equations_report_conservative',
        'The test joins stacked layers in one group under SnAp. What a weight of the first layer '
        'does at once to the second is not at one position, so that a trace by position would '
        'leave it out; layers stay apart here. UORO, which needs no positions, joins them.',
        'SNAP_PATTERN_CONSERVATIVE',
    ),
    Reason(
        f'{SNAP}TestConservativeFallbackEndToEnd::test_unregistered_mixing_primitive_*',
        'Which positions lora_matmul connects cannot be told there. Here it can: all of them.',
        'SNAP_PATTERN_CONSERVATIVE',
    ),
    Reason(
        f'{DESCENT}TestSubstepFold::test_io_dim_algorithm_still_gated',
        'pp_prop refuses a long scan in a step there. Here it learns over its substeps.',
        'DID NOT RAISE',
    ),
    Reason(
        f'{DESCENT}TestSubstepFold::test_orphan_descended_group_runs_under_d_rtrl',
        'The warning of a model of which no weight is traced has words of its own here, and names '
        'the line.',
        'no ETP relation',
    ),
    Reason(
        f'{DESCENT}TestSubstepFold::test_orphan_descended_group_still_gated',
        'A long scan is refused there under pp_prop. Here pp_prop learns over its substeps.',
        'DID NOT RAISE',
    ),
    Reason(
        f'{DESCENT}TestStackedJacobians::*',
        'The test reads the internal form of a scan that was divided.',
        'descent',
    ),
    Reason(f'{SNAP}TestModelAgnostic::test_every_anchored_primitive_widens_*', NAMES, 'etp_gmv'),
    Reason(f'{SNAP}TestModelAgnostic::*', PATTERNS, 'assert '),
    Reason(
        f'{SNAP}TestDegeneracyPins::test_two_state_rnn_has_no_mixing_equation',
        'The test reads how the pattern of neighbours is kept, by axes of the states. Here it is '
        'kept by positions.',
        'axes',
    ),
    Reason(
        f'{SNAP}TestConservativeFallbackEndToEnd::test_a_relabelling_tail_*',
        'There, a step that moves positions makes SnAp wrong, and the test pins how this is said. '
        'Here it is right at the diameter, at the price of more backward passes.',
        'position-preserving',
    ),
    Reason(
        f'{AXES}TestCompileIntegration::test_the_engine_rejects_a_config_*',
        'The message names the class and the axis in words of our own, and what to call instead.',
        'per-parameter trace engine',
    ),
    Reason(
        f'{WHILE}test_etp_primitive_in_while_raises_under_default_policy',
        'It is refused here too, with what the loop would do to the gradient, in other words.',
        'could not flatten',
    ),
    Reason(
        f'{WHILE}test_multistep_vjp_on_while_model_raises_*',
        'The test expects the error of JAX in the first gradient. Here the model is refused when '
        'it is compiled, with what to use instead.',
        'multi-step',
    ),
    Reason(
        f'{WHILE}test_upstream_layer_gradient_is_zero_*',
        'The test pins that a layer in front of a `while` loop learns nothing. Here the loop '
        'passes its gradient where it acts position by position.',
        'assert False',
    ),
    Reason(
        'braintrace/_algorithm/vjp_base_test.py::TestAbstractProtocolMethods::*',
        'The test calls a private hook of the base class.',
        'has no attribute',
    ),
    Reason(
        'braintrace/_compile_test.py::test_compile_verbose_levels_print',
        'The text of a report is for people, and is in words of our own.',
        'The hidden groups are:',
    ),
    Reason(
        f'{DESCENT}TestDescentCorrectness::test_descended_equals_unrolled_gradients',
        'Gradients of about 100 in float32 are to differ by less than 3e-5. They differ by less '
        'than one in a million.',
        'maxabsdiff',
    ),
    Reason(
        f'{DESCENT}TestDescentCorrectness::test_single_step_ys_readout_drops_same_step_signal',
        'The test pins a gradient of zero, where the loss reads what a long scan stacks. Here it '
        'is the true one.',
        '(DESIRED)',
    ),
    Reason(
        f'{FULL}*',
        'The test is about a flag by which the executor builds the Jacobian of all states by all '
        'others. UORO never builds one here.',
        'full_jacobian',
    ),
    Reason(
        'braintrace/_algorithm/vjp_base_test.py::TestModuleAttribute::*',
        'The test pins the name of the package in which a class says it is.',
        "== 'braintrace'",
    ),
    Reason(
        'braintrace/_algorithm/vjp_base_test.py::TestComputeLearningSignalHook::*',
        'The test overrides a private hook. A class that does is refused here, with the name of '
        'the public method to override.',
        'overrides hooks',
    ),
    Reason(
        'braintrace/_algorithm/uoro_test.py::TestStructure::test_a_descended_scan_is_refused_*',
        'UORO refuses a long scan in a step there. Here it takes the whole step, scans included.',
        'DID NOT RAISE',
    ),
)
