"""The kernels of the hidden Jacobian on shards of batch and neurons: eight devices, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from braintrace_fast.kernels.hidden_jacobian import mosaic, reference, triton
from braintrace_fast.kernels.hidden_jacobian.operands import JacobianOperands


def main():
    class Transition:
        # A voltage that reads the new value of a current; a constant of each kind of shape.
        widths, reached, pattern = (0, 0), ((True,) * 3,) * 2, ((True,) * 3, (False, True, True))
        shared, forward_only = (False,), False

        @staticmethod
        def evaluate(row, constants, inputs):
            (one, by_neuron, by_example), (v, g, y) = constants, inputs
            g = by_neuron * g + y
            return g if row else one * v + by_example * jnp.tanh(g) - jax.nn.sigmoid(v)

    mesh = jax.make_mesh((2, 4), ('batch', 'neurons'), axis_types=(AxisType.Auto,) * 2)
    shapes = [(), (12,), (4, 1), (4, 12), (4, 12), (4, 12)]
    specs = [P(), P('neurons'), P('batch', None), *[P('batch', 'neurons')] * 3]
    operands = [jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate(shapes)]

    def jacobian(run, *operands):
        constants, inputs = operands[:3], operands[3:]
        return run(JacobianOperands(Transition(), [constants, constants], list(inputs)))

    wanted = jacobian(reference.hidden_jacobian, *operands)
    kernels = [partial(kernel.hidden_jacobian, interpret=True) for kernel in (triton, mosaic)]
    for run, checked in (
        (reference.hidden_jacobian, True),
        *((kernel, False) for kernel in kernels),
    ):
        shard = jax.shard_map(
            partial(jacobian, run),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=jax.tree.map(lambda a: P('batch', 'neurons'), wanted),
            check_vma=checked,
        )
        found = jax.jit(shard)(*operands)
        assert all(len(a.sharding.device_set) == 8 for a in jax.tree.leaves(found))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)
    print('same')


if __name__ == '__main__':
    main()
