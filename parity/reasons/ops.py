"""Reasons for tests of ops, layers and the rest."""

from .reason import Reason

__all__ = ['REASONS']

ANY_AXES = (
    'Ops take any number of leading axes, and fold them into the batch: inputs that braintrace '
    'refuses are learned exactly here.'
)
ONE_PRIMITIVE = (
    'One primitive serves inputs with and without a batch, so that nothing tells the two apart in '
    'a jaxpr.'
)
NO_WARNING = (
    'An op whose weights are mapped is replaced by plain JAX, as in braintrace. That is said when '
    'a model is compiled, with the line of the op, and not to those who map it for other reasons.'
)
OUTSIDE = (
    'Functions of a weight act on it outside of the op, and gradients are pulled back through '
    'them; they are no parameters of the equation.'
)
OWN_NAME = 'Objects say that they are of this library, and not of braintrace.'
FORMATS = (
    'The formats of sparse matrices are known by their indices, and need no method of the matrix: '
    'more of them are taken than in braintrace, but none of which only methods are known.'
)

REASONS: tuple[Reason, ...] = (
    Reason('*_op/dense_test.py::TestRankGuard::*', ANY_AXES, 'DID NOT RAISE'),
    Reason('*_op/lora_test.py::TestRankGuard::*', ANY_AXES, 'DID NOT RAISE'),
    Reason('*_op/einsum_test.py::*::test_matmul_rank_guard_points_to_einsum', ANY_AXES, 'DID NOT'),
    Reason('*_op/grouped_test.py::*::test_rejects_bad_ranks', ANY_AXES, 'ndim'),
    Reason('*_op/embedding_test.py::*::test_rejects_rank2_indices', ANY_AXES, 'DID NOT RAISE'),
    Reason(
        '*_op/embedding_test.py::*::test_rejects_non_matrix_table',
        'The rows of a table may have any shape.',
        'DID NOT RAISE',
    ),
    Reason('*_op/*_test.py::TestAutoDispatch::*', ONE_PRIMITIVE, 'etp_'),
    Reason('*_op/dense_test.py::TestAutoDispatch::*', ONE_PRIMITIVE, 'assert not'),
    Reason('*_op/lora_test.py::TestAutoDispatch::*', ONE_PRIMITIVE, 'assert not'),
    Reason('*_op/*_test.py::TestJAXRules::test_vmap_promotes_*', ONE_PRIMITIVE, 'etp_'),
    Reason('*nn/_linear_test.py::TestLoRA::test_lora_call_routes_*', ONE_PRIMITIVE, 'etp_lora_mv'),
    Reason('*nn/_linear_test.py::*::test_uses_etp_primitive', ONE_PRIMITIVE, 'etp_gmv'),
    Reason('*_op/_primitive_test.py::TestVmap::test_vmap_two_args', NO_WARNING, 'DID NOT WARN'),
    Reason(
        '*_op/_primitive_test.py::TestVmap::test_vmap_in_axes_zero',
        'An op with `batched=True` survives vmap over its input: there is nothing to warn of.',
        'DID NOT WARN',
    ),
    Reason('*_op/_primitive_test.py::*::test_batched_weight_falls_back_*', NO_WARNING, 'DID NOT'),
    Reason('*_op/elemwise_test.py::TestJAXRules::test_vmap', NO_WARNING, 'DID NOT WARN'),
    Reason('*_op/_primitive_test.py::*::test_promoted_params_*', OUTSIDE, "'weight_fn'"),
    Reason('*_op/elemwise_test.py::*::test_fn_carried_as_primitive_param', OUTSIDE, 'len('),
    Reason(
        '*_op/conv_test.py::*::test_strides_propagate',
        'The geometry of a convolution is one parameter of its equation, `geometry`.',
        "'strides'",
    ),
    Reason(
        '*_op/conv_test.py::TestGroupedConvDrtrlRejection::*',
        'Grouped convolutions are traced, exactly.',
        'DID NOT RAISE',
    ),
    Reason(
        '*_op/einsum_test.py::*::test_collapsing_hidden_state_fails_loudly',
        'The weight is left out of the trace, with a warning. A chunk is differentiated in full, '
        'so that its gradient is right.',
        'DID NOT RAISE',
    ),
    Reason('*_op/sparse_test.py::TestSparseMMBiasGradient::*', FORMATS, '_HashableStub'),
    Reason('*_op/sparse_test.py::TestAutoDispatch::*', FORMATS, '_HashableStub'),
    Reason('*_op/sparse_test.py::*::test_rejects_brainunit_sparse', FORMATS, 'DID NOT RAISE'),
    Reason('*_op/sparse_test.py::*::test_rejects_plain_array', FORMATS, 'dt2t_transposed'),
    Reason('*_misc_test.py::TestExceptions::*', OWN_NAME, "== 'braintrace'"),
    Reason(
        '*_testing/oracle_models_test.py::*::test_single_step_zeroes_every_plain_key',
        'A weight that is not traced has the gradient of its step here, and not zero.',
        '== 0.0',
    ),
    Reason(
        'braintrace/_typing_test.py::test_brainstate_aliases_are_reexported_*',
        'The test is of a private module of types.',
        'has no attribute',
    ),
    Reason(
        '*_testing/scenario_catalog_test.py::*::test_perturbed_jaxpr_detaches_while_inputs',
        'A `while` loop passes gradients where it acts position by position: its inputs are not '
        'detached.',
        'stop_gradient',
    ),
)
