"""The kernels of the trace on shards of batch and neurons: eight devices, interpreted."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from braintrace_fast.kernels.outer.operands import TraceOperands
from braintrace_fast.kernels.trace_carry import mosaic as carry_mosaic
from braintrace_fast.kernels.trace_carry import triton as carry_triton
from braintrace_fast.kernels.trace_step import mosaic as step_mosaic
from braintrace_fast.kernels.trace_step import triton as step_triton


def main():
    mesh = jax.make_mesh((2, 4), ('batch', 'neurons'), axis_types=(AxisType.Auto,) * 2)
    x, D, u, e, signal = (
        jax.random.normal(jax.random.key(k), shape)
        for k, shape in enumerate([(3, 4, 5), (4, 8), (3, 4, 8), (4, 5, 8), (4, 8)])
    )
    rules = SimpleNamespace(is_outer=True, groups=0, entries=None)

    def check(run, x, u, time):
        def shard(x, D, u, e, signal):
            operands = TraceOperands(rules, x, [[D]], [u], [{'weight': e}], [signal])
            (new,), read = run(operands, interpret=True)
            return new['weight'], jax.lax.psum(read['weight'], 'batch')

        row, rows = P('batch', 'neurons'), P(*time, 'batch', 'neurons')
        plane = P('batch', None, 'neurons')
        sharded = jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=(P(*time, 'batch', None), row, rows, plane, row),
            out_specs=(plane, P(None, 'neurons')),
            check_vma=False,
        )
        found = jax.jit(sharded)(x, D, u, e, signal)
        assert all(len(a.sharding.device_set) == 8 for a in found)
        fresh = np.einsum('...bi,...bo->...bio', x, u)
        wanted = (
            D[:, None] * e + (fresh.sum(0) if time else fresh),
            np.einsum('bo,bio->io', signal, e),
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)

    for kernel in (step_triton, step_mosaic):
        check(kernel.trace_step, x[0], u[0], ())
    for kernel in (carry_triton, carry_mosaic):
        check(kernel.trace_carry, x, u, (None,))
    print('same')


if __name__ == '__main__':
    main()
