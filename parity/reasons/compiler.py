"""Reasons for tests of the compiler."""

from .reason import Reason

__all__ = ['REASONS']

_FILES = 'braintrace/_compiler/'
_BY_DESIGN = (
    'Warnings here are for what the user can change, one for a compilation. A diagonal trace '
    "leaves a GRU's reset gate out by design, which the report says; and its gradient is not zero "
    'here, but that of the step.'
)
_SAID_ONCE = (
    'Why a cond or a scan is kept is said by the error that follows from it, with the line and '
    'what to change, and not by a warning before it as well.'
)
_ONE_PRIMITIVE = (
    'The test looks for names of primitives. There is one here for products with and without a '
    'batch, `etp_mm`, in the transition as asked for.'
)
_LEARNED = (
    'braintrace refuses this model. Here it is learned, with the same gradient as if the scan were '
    'unrolled (`tests/algorithm/test_substeps.py`).'
)

REASONS: tuple[Reason, ...] = (
    Reason(f'{_FILES}diagnostics_test.py::*', _BY_DESIGN, 'DID NOT WARN'),
    Reason(f'{_FILES}canonicalize_test.py::*_keeps_existing_error', _SAID_ONCE, 'DID NOT WARN'),
    Reason(
        f'{_FILES}canonicalize_test.py::*::test_scan_model_compiles_without_scan_eqn',
        _ONE_PRIMITIVE,
        'assert 0 == (2 * 3)',
    ),
    Reason(
        f'{_FILES}tests/cell_relation_guardrail_test.py::test_every_public_rnn_cell_has_a_guardrail',
        'The test lists the names of a private module.',
        "['element_wise', 'nn']",
    ),
    Reason(
        f'{_FILES}report_test.py::test_report_to_str_levels_and_repr',
        'The text of a report is for people, and is in words of our own.',
        'The hidden groups are:',
    ),
    Reason(
        f'{_FILES}scan_descent_test.py::*::test_long_scan_compiles_with_descent',
        'The test reads the variables by which braintrace takes values out of a scan. Here the '
        'iterations of a scan share one op, of which `relation.substeps` tells the number.',
        "no attribute 'descent'",
    ),
    Reason(
        f'{_FILES}scan_descent_test.py::*::test_outer_relation_into_descended_group_raises',
        _LEARNED,
        'DID NOT RAISE NotImplementedError',
    ),
    Reason(
        f'{_FILES}scan_descent_test.py::*::test_pre_scan_hidden_transform_blocks_descent',
        _LEARNED,
        'DID NOT RAISE NotImplementedError',
    ),
    Reason(
        f'{_FILES}scan_descent_test.py::*::test_plain_op_weight_in_body_warns_and_excludes',
        'A scan without an op inside is like any other operation. What is said of its weight is '
        'what is said of any weight in plain JAX: a diagnostic, and by a learner an error, if it '
        'is the only one.',
        'DID NOT WARN',
    ),
    Reason(
        f'{_FILES}tests/cell_relation_guardrail_test.py::test_cell_relation_profile[URLSTMCell]',
        'The op of the bias is used once here, and twice in braintrace; the weights that are '
        'traced are the same.',
        'assert 5 == 6',
    ),
)
