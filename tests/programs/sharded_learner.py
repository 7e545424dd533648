"""Holds a learner on eight devices, by placement and in ``shard_map``, against one device."""

import sys

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import braintrace_fast as btf

PART, N = 2, 8
XS = np.random.default_rng(0).normal(size=(2, 4, 8 * PART, 3)).astype('float32')  # two calls


def compiled(rule, backend, batch=8 * PART):
    options = {'decay_or_rank': 0.9} if rule == 'pp_prop' else {}
    brainstate.random.seed(1)
    cell = btf.nn.GRUCell(3, N)
    learner = btf.compile(
        cell, rule, XS[0, 0, :batch], batch_size=batch, backend=backend, **options
    )

    def gradient(xs):
        return learner.etrace_grad(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2))

    return learner, gradient


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def on_one_device(rule):
    learner, gradient = compiled(rule, 'jax')
    run = brainstate.transform.jit(gradient)
    return [run(x) for x in XS], learner.trace.value


def placed(rule, mesh):
    # Also the neurons, if the mesh has an axis of them.
    neurons = 'neurons' if 'neurons' in mesh.axis_names else None

    def place(a, *axes):
        last = neurons if a.shape[-1] == N else None
        spec = P(*axes, *(None for _ in range(len(axes), a.ndim - 1)), last)
        return jax.device_put(a, NamedSharding(mesh, spec))

    learner, gradient = compiled(rule, 'jax')
    for state in (*learner.hidden_states.values(), learner.trace):
        state.value = jax.tree.map(lambda a: place(a, 'batch'), state.value)
    for state in learner.param_states.values():
        state.value = jax.tree.map(place, state.value)
    run = brainstate.transform.jit(gradient)
    return [run(place(x, None, 'batch')) for x in XS], learner.trace.value


def in_shard_map(rule, mesh, backend):
    learner, gradient = compiled(rule, backend, PART)
    pure = brainstate.transform.StatefulFunction(
        lambda xs: jax.lax.pmean(gradient(xs), 'batch'),
        axis_env=tuple(mesh.shape.items()),
        return_only_write=False,
    )
    states = pure.make_jaxpr(XS[0, :, :PART]).get_states(XS[0, :, :PART])
    split = {id(state) for state in (*learner.hidden_states.values(), learner.trace)}
    specs = tuple(P('batch') if id(state) in split else P() for state in states)
    run = jax.jit(
        jax.shard_map(
            pure.jaxpr_call,
            mesh=mesh,
            in_specs=(specs, P(None, 'batch')),
            out_specs=(specs, P()),
            check_vma=False,
        )
    )
    values = tuple(
        jax.tree.map(lambda a: jnp.concatenate([a] * 8), state.value) if spec else state.value
        for state, spec in zip(states, specs, strict=True)
    )
    grads = []
    for x in XS:
        values, found = run(values, x)
        grads.append(found)
    (trace,) = (v for v, state in zip(values, states, strict=True) if state is learner.trace)
    return grads, trace


def same(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
    assert len(a.sharding.device_set) == 8 and np.abs(b).max() > 0


def is_split(trace):
    return all(a.sharding.spec[:1] == ('batch',) for a in jax.tree.leaves(trace))


def main(rule):
    wanted = on_one_device(rule)
    by_batch = mesh_of(batch=8)
    for mesh in (by_batch, mesh_of(batch=2, neurons=4)):
        found = placed(rule, mesh)
        jax.tree.map(same, found, wanted)
        # A whole trace is carried one example after the other on CPUs, which gathers it.
        assert is_split(found[1]) == (rule == 'pp_prop')
    for backend in ('jax', 'interpret'):
        found = in_shard_map(rule, by_batch, backend)
        jax.tree.map(same, found, wanted)
        assert is_split(found[1])
    print('same')


if __name__ == '__main__':
    main(sys.argv[1])
