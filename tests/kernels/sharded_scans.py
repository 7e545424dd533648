"""The kernels that walk a window, on shards of batch and neurons: eight devices, interpreted."""

from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from braintrace_fast.kernels.adjoint_scan import mosaic, reference, triton
from braintrace_fast.kernels.adjoint_scan.operands import AdjointOperands
from braintrace_fast.kernels.factored_trace import mosaic as mosaic_trace
from braintrace_fast.kernels.factored_trace import reference as trace
from braintrace_fast.kernels.factored_trace import triton as triton_trace
from braintrace_fast.kernels.factored_trace.operands import FactoredOperands


def main():
    mesh = jax.make_mesh((2, 4), ('batch', 'neurons'), axis_types=(AxisType.Auto,) * 2)
    D, f, L, x = jax.random.normal(jax.random.key(0), (4, 3, 4, 12))

    def spec(a):
        return P(*[None] * (a.ndim - 2), 'batch', 'neurons')

    def check(define, kernels, *operands):
        wanted = define(*operands)
        specs = jax.tree.map(spec, operands), jax.tree.map(spec, wanted)
        for run, checked in ((define, True), *((kernel, False) for kernel in kernels)):
            shard = jax.shard_map(
                run, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=checked
            )
            found = jax.jit(shard)(*operands)
            assert all(len(a.sharding.device_set) == 8 for a in jax.tree.leaves(found))
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)

    def adjoint(run, **options):
        return lambda D, f, L: run(AdjointOperands([[D]], [[f]], [L], carry=True), **options)

    def hat(run, **options):
        return lambda D, f, start: run(FactoredOperands([[D]], [[f]], [[start]], 0.9), **options)

    kernels = [adjoint(kernel.adjoint_scan, interpret=True) for kernel in (triton, mosaic)]
    check(adjoint(reference.adjoint_scan), kernels, D, f, L)
    kernels = [
        hat(kernel.factored_trace, interpret=True) for kernel in (triton_trace, mosaic_trace)
    ]
    check(hat(trace.factored_trace), kernels, D, f, x[0])
    print('same')


if __name__ == '__main__':
    main()
