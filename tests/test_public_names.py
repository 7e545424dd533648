"""Public names and their arguments are those of braintrace, where they exist so far."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_fast as btf

NAMES = [
    'CompilationError',
    'CompilationRecord',
    'CompilationReport',
    'ControlFlowPolicy',
    'DNI',
    'D_RTRL',
    'DiagnosticKind',
    'DiagnosticLevel',
    'EProp',
    'ES_D_RTRL',
    'ETPPrimitive',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceGraph',
    'ETraceGraphExecutor',
    'ETraceVjpAlgorithm',
    'ETraceVjpGraphExecutor',
    'ETraceVmap',
    'EligibilityTrace',
    'FixedRandomFeedback',
    'GradExpon',
    'HiddenGroup',
    'HiddenParamOpRelation',
    'HiddenPerturbation',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'ModuleInfo',
    'MultiStepData',
    'NotSupportedError',
    'OSTLFeedforward',
    'ParamDimVjpAlgorithm',
    'RandomProjectionVjpAlgorithm',
    'SequenceDriverMixin',
    'SingleStepData',
    'SyntheticGradient',
    'ThreeFactor',
    'UORO',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_module',
    'compile',
    'compile_etrace_graph',
    'conv',
    'einsum',
    'element_wise',
    'embedding',
    'extract_module_info',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
    'grouped_matmul',
    'lora_matmul',
    'matmul',
    'pp_prop',
    'register_primitive',
    'train_synthetic_gradient',
]
LATER = {
    'full_jacobian',
    'include_recurrent_mixing',
    'sparse_n',
    'snap_max_jacobian_elements',
    'descended_scan_eqn_ids',
    'descended_hidden_paths',
    'scan_descent',
    'fixpoint_iteration_limit',
}
"""Arguments of the compiler that are not there yet."""
NOT_NEEDED = {'include_output_bypass'}
"""Arguments since 0.2.7: what reaches an output past the states always counts here."""
OWN_SHAPE = {'ETraceVmap', 'HiddenGroup', 'HiddenParamOpRelation'}
"""Made by the library alone: what they hold besides the documented fields is their own."""


def parameters(function, later=LATER):
    function = function.__init__ if inspect.isclass(function) else function
    return [name for name in inspect.signature(function).parameters if name not in later]


@pytest.mark.parametrize('name', NAMES)
def test_a_name_is_there_with_the_arguments_of_the_reference(reference, name):
    ours, theirs = getattr(btf, name), getattr(reference, name)
    assert name in btf.__all__
    if name in OWN_SHAPE:
        return
    assert set(parameters(theirs)) - NOT_NEEDED <= set(parameters(ours))
    for method in ('etrace_grad', 'etrace_evolve', 'compile_graph', 'get_etrace_of'):
        if hasattr(theirs, method) and hasattr(ours, method):
            assert set(parameters(getattr(theirs, method))) <= set(
                parameters(getattr(ours, method))
            )


@pytest.mark.parametrize(
    'name',
    [
        *('ETraceConfig', 'ETraceVjpAlgorithm', 'ParamDimVjpAlgorithm', 'IODimVjpAlgorithm'),
        *('D_RTRL', 'pp_prop', 'EProp', 'ThreeFactor', 'OSTLFeedforward'),
        *('UORO', 'RandomProjectionVjpAlgorithm', 'OSTLRecurrent', 'SnAp'),
        *('DNI', 'SyntheticGradient', 'train_synthetic_gradient', 'compile', 'etrace_grad'),
    ],
)
def test_arguments_of_learners_are_in_the_order_of_the_reference(reference, name):
    ours, theirs = (
        parameters(getattr(lib if name != 'etrace_grad' else lib.D_RTRL, name), later=())
        for lib in (btf, reference)
    )
    assert ours[: len(theirs)] == theirs


def test_options_that_choose_a_way_to_compute_do_not_change_the_gradient():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), jnp.float32)

    def gradient(rule, **options):
        learner = btf.compile(btf.nn.GRUCell(3, 4), rule, xs[0], batch_size=2, seed=0, **options)
        weights = learner.param_states.values()
        for seed, state in enumerate(weights):
            rng = np.random.default_rng(seed)
            state.value = {
                k: jnp.asarray(rng.normal(size=v.shape), v.dtype) for k, v in state.value.items()
            }
        return learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))

    for rule, options in (
        ('d_rtrl', {'fast_solve': False, 'chunked_trace': False}),
        ('pp_prop', {'decay_or_rank': 0.9, 'fast_solve': False}),
    ):
        plain = {k: v for k, v in options.items() if k == 'decay_or_rank'}
        found, true = gradient(rule, **options), gradient(rule, **plain)
        for path in true:
            for leaf in true[path]:
                np.testing.assert_array_equal(found[path][leaf], true[path][leaf])


def test_a_mapped_learner_is_wrapped_and_has_the_attributes_of_a_learner():
    xs = jnp.ones((4, 2, 3))
    learner = btf.compile(btf.nn.GRUCell(3, 4), 'd_rtrl', xs[0], batch_size=2, vmap=True)
    assert isinstance(learner, btf.ETraceVmap)
    assert isinstance(learner.module, btf.D_RTRL)
    assert ('Wz', 'weight') in learner.param_states
    assert learner.param_states.keys() == learner.module.param_states.keys()
    assert learner.report.etrace_weights[0][0] == ('Wh', 'weight')
    grads = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x)))
    assert grads.keys() == learner.param_states.keys()
    assert learner(xs[0]).shape == (2, 4)
    with pytest.raises(AttributeError, match='no_such'):
        learner.no_such  # noqa: B018
